"""The pages' code runs as it stands there."""

import re
from pathlib import Path

import pytest

from hybridrl.data.tiny_model import make_tiny_model

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def python_blocks(page):
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), flags=re.DOTALL)


def test_your_own_algorithm_runs_and_its_worker_method_fits(tmp_path, capsys):
    make_tiny_model(tmp_path / "tiny", hidden=64, layers=1)
    first, _, method = python_blocks("docs/your_own_algorithm.md")
    names = {}
    exec(first.replace("/tmp/tiny", str(tmp_path / "tiny")), names)
    assert "controller.centred" in capsys.readouterr().out
    assert names["update"].get()["actor/grad_norm"] >= 0
    exec(method, names)
    roles = {"actor": names["Role"](names["MyActor"], names["roles"]["actor"].config)}
    with names["LocalExecutor"]() as executor:
        m = executor.start(roles)
        batch = executor.rows(names["batch"](names["rows"]))
        batch |= m.actor.generate(batch)
        assert (m.actor.entropies(batch).fetch()["entropies"].values() >= 0).all()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        assert target.startswith("http") or (page.parent / target).exists(), target
