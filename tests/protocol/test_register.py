import pytest

from hybridrl.protocol.errors import WiringError
from hybridrl.protocol.register import Contract, contract_of, register, registered
from hybridrl.protocol.transfer import ONE_TO_ALL, THREE_D


class Scorer:
    @register(THREE_D, reads=("tokens", "response_mask"), writes=("scores",), optional=("ages",), rowwise=True)
    def score(self, batch):
        """Doc."""
        return batch

    @register(ONE_TO_ALL, updates_weights=True)
    def reset(self):
        return None

    def private(self):
        return None


class Child(Scorer):
    @register(ONE_TO_ALL)
    def more(self):
        return None


class Choosy(Scorer):
    @staticmethod
    def also_reads(config, method):
        return ("tokens", config) if method == "score" else ()


def test_register_declares_and_leaves_the_method_as_it_is():
    assert contract_of(Scorer, "score") == Contract(
        THREE_D, ("tokens", "response_mask"), ("scores",), ("ages",), rowwise=True, updates_weights=False, balance=""
    )
    assert contract_of(Scorer, "reset").updates_weights
    assert Scorer.score.__name__ == "score" and Scorer.score.__doc__ == "Doc."
    assert Scorer().score("x") == "x"


def test_registered_names_are_inherited():
    assert registered(Scorer) == ["reset", "score"]
    assert registered(Child) == ["more", "reset", "score"]
    assert contract_of(Child, "score") == contract_of(Scorer, "score")


def test_a_configuration_may_ask_for_columns_more():
    assert contract_of(Choosy, "score", "ref_log_probs").reads == ("tokens", "response_mask", "ref_log_probs")
    assert contract_of(Choosy, "reset", "ref_log_probs").reads == ()


@pytest.mark.parametrize("method", ["scroe", "private", "__init__", "nothing_like_it"])
def test_a_method_without_a_contract_is_refused_with_what_there_is(method):
    with pytest.raises(WiringError, match=f"Scorer has no registered method '{method}'.*it has reset, score") as caught:
        contract_of(Scorer, method)
    assert ("did you mean 'score'?" in str(caught.value)) == (method == "scroe")


@pytest.mark.parametrize(
    ("contract", "message"),
    [
        ({"rowwise": True, "reads": ("x",)}, "rowwise method must write"),
        ({"writes": ("y",)}, "must read one"),
        ({"reads": ("x",), "balance": "tokens"}, r"balanced by 'tokens' must read it; it reads \('x',\)"),
        ({"reads": "tokens"}, r"reads='tokens' is one text: give a tuple of columns, \('tokens',\)"),
        ({"reads": ("x",), "writes": "scores"}, "writes='scores' is one text"),
    ],
)
def test_contracts_that_cannot_hold_are_refused_where_they_are_written(contract, message):
    with pytest.raises(WiringError, match=message):
        register(THREE_D, **contract)
