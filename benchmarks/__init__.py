"""Benchmarks: each measures one claim beside its baseline in one run. `python -m benchmarks.NAME --out FILE.json`."""
