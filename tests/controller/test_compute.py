import pytest
import torch

from hybridrl.controller import LocalExecutor, Result, Role, computes
from hybridrl.protocol.batch import batch, ragged
from hybridrl.protocol.errors import WiringError
from hybridrl.workers.base import Worker


@computes(reads=("x",), optional=("bonus",), writes=("double",))
def doubled(data, plus=0):
    """Twice x."""
    columns = set(data.keys())
    assert columns <= {"x", "bonus"}
    return {"double": data["x"] * 2 + plus + (data["bonus"] if "bonus" in columns else 0)}


@computes(reads=("x",))
def mean(data):
    return {"mean": data["x"].float().mean().item()}


@computes(reads=("x",), writes=("y",))
def answers(data, made):
    return made


@computes(reads=(), optional=("bonus",))
def seen(data):
    return sorted(data.keys())


@pytest.fixture
def executor():
    with LocalExecutor() as executor:
        executor.start({"nobody": Role(Worker)})
        yield executor


def rows(executor, **more):
    return executor.rows(batch({"x": torch.arange(3), "unread": ragged([[1], [], [2]]), **more}))


def test_with_a_batch_it_is_the_plain_function():
    assert doubled(batch({"x": torch.tensor([1, 2])}), plus=1)["double"].tolist() == [3, 5]
    assert doubled.__name__ == "doubled" and doubled.__doc__ == "Twice x."


def test_with_a_reference_it_reads_just_its_columns_and_answers_for_the_same_rows(executor):
    reference = rows(executor)
    made = doubled(reference[[2, 0]], plus=1)
    assert made.columns == ("double",) and made.fetch()["double"].tolist() == [5, 1]
    merged = reference[[0, 2]] | made
    assert merged.fetch("double")["double"].tolist() == [1, 5]


def test_optional_columns(executor):
    assert doubled(rows(executor, bonus=torch.tensor([10, 20, 30]))).fetch()["double"].tolist() == [10, 22, 34]
    assert seen(rows(executor)).get() == []
    assert seen(rows(executor, bonus=torch.zeros(3))).get() == ["bonus"]


def test_what_writes_nothing_is_a_result(executor):
    result = mean(rows(executor))
    assert isinstance(result, Result) and result.get() == {"mean": 1.0}
    assert (result | mean(rows(executor)[1:])).get() == {"mean": 1.5}


def test_no_rows(executor):
    assert doubled(rows(executor)[:0]).fetch()["double"].shape == (0,)


def test_it_is_held_to_its_declaration(executor):
    with pytest.raises(WiringError, match=r"controller\.doubled reads column 'x', which nobody wrote"):
        doubled(rows(executor).select("unread"))
    with pytest.raises(WiringError, match=r"controller\.answers returned 2 rows of 'y' for 3 rows"):
        answers(rows(executor), made={"y": torch.zeros(2)})
    with pytest.raises(WiringError, match=r"writes \['y'\], but returned \['z'\]"):
        answers(rows(executor), made={"z": torch.zeros(3)})
    with pytest.raises(WiringError, match="must read one"):
        computes(reads=(), writes=("y",))
