"""Fast tests first: those marked `processes` (real Ray, vLLM, gloo) run after all others."""

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.get_closest_marker("processes") is not None)
