import copy
import pickle

import pytest

from hybridrl.protocol import errors
from hybridrl.protocol.errors import HybridRLError, UserError, WorkerError, nearest

PLAIN = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, HybridRLError) and kind is not WorkerError
]


@pytest.mark.parametrize("kind", PLAIN, ids=lambda kind: kind.__name__)
def test_errors_pickle(kind):
    back = pickle.loads(pickle.dumps(kind("what, where, how ü")))
    assert type(back) is kind and str(back) == "what, where, how ü"


@pytest.mark.parametrize("traceback", ["", "Traceback:\n  line 1"])
def test_worker_errors_pickle_with_their_fields(traceback):
    error = WorkerError("actor", 3, "update", "ValueError: no", traceback)
    for back in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert (back.role, back.rank, back.method, back.cause, back.remote_traceback) == (
            "actor", 3, "update", "ValueError: no", traceback,
        )  # fmt: skip
        assert str(back) == str(error)
    assert str(error).startswith("actor.update failed on rank 3: ValueError: no")
    assert str(error).endswith(traceback or "no")


def test_a_worker_error_is_not_the_users():
    assert not issubclass(WorkerError, UserError)


def test_nearest_names_one_that_resembles_or_none():
    assert nearest("tokns", ["tokens", "scores"]) == " (did you mean 'tokens'?)"
    assert nearest("zzz", ["tokens"]) == ""
    assert nearest("x", []) == ""
