import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridrl.protocol.batch import batch, from_values, lengths_of, ragged
from hybridrl.protocol.errors import DataError
from hybridrl.workers.packing import cut, filler, pack, scattered
from tests.workers.tiny import PROMPTS, RESPONSES, make_batch

lengths = st.lists(st.integers(1, 60), max_size=40).map(lambda values: np.array(values, dtype=np.int64))


@given(lengths, st.integers(1, 200))
@settings(deadline=None, max_examples=200)
def test_a_cut_holds_every_row_once_within_the_limit(lengths, limit):
    parts = cut(lengths, limit)
    assert sorted(row for part in parts for row in part) == list(range(len(lengths)))
    assert all(len(part) == 1 or lengths[part].sum() <= limit for part in parts)


@given(lengths, st.integers(1, 200))
@settings(deadline=None, max_examples=50)
def test_neighbours_are_alike_and_no_two_parts_would_fit_in_one(lengths, limit):
    parts = cut(lengths, limit)
    in_order = [lengths[row] for part in parts for row in part]
    assert in_order == sorted(in_order, reverse=True)
    assert all(lengths[a].sum() + lengths[b[0]] > limit for a, b in itertools.pairwise(parts))


def test_a_micro_batch_is_its_rows_end_to_end():
    data = make_batch()
    micro = pack(data, np.array([4, 2, 0]), "cpu")
    tokens, masks = data["tokens"].unbind(), data["response_mask"].unbind()
    assert torch.equal(micro.tokens_T, torch.cat([tokens[4], tokens[2], tokens[0]]))
    assert torch.equal(micro.index_S, torch.cat([masks[4], masks[2], masks[0]]).nonzero()[:, 0])
    assert micro.row_S.tolist() == [0] * 12 + [2] * 4  # row 2 has no response
    assert micro.num_rows == 3
    assert set(micro.columns) == {"old_log_probs", "ref_log_probs", "advantages", "values", "returns"}
    expected = torch.cat([data["advantages"].unbind()[4][masks[4]], data["advantages"].unbind()[0][masks[0]]])
    assert torch.equal(micro.columns["advantages"], expected)


def test_columns_of_rows_travel_whole():
    data = batch({**{k: make_batch()[k] for k in ("tokens", "response_mask")}, "scores": torch.arange(9.0)})
    assert pack(data, np.array([5, 1]), "cpu").columns["scores"].tolist() == [5.0, 1.0]


@given(st.permutations(range(9)), st.integers(1, 60))
@settings(deadline=None, max_examples=50)
def test_scattered_undoes_pack(order, limit):
    data = make_batch()
    data = batch({name: data[name] for name in ("tokens", "response_mask", "advantages")})
    cuts = [np.array(part) for part in np.array_split(np.array(order), max(1, 60 // limit))]
    cuts = [part for part in cuts if len(part)]
    column = scattered([pack(data, rows, "cpu").columns["advantages"] for rows in cuts], cuts, data)
    assert torch.equal(lengths_of(column), lengths_of(data["tokens"]))
    mask = data["response_mask"].values()
    assert torch.equal(column.values(), torch.where(mask, data["advantages"].values(), 0))


def test_scattered_of_no_rows_is_an_empty_column():
    column = scattered([], [], make_batch(prompts=(), responses=()))
    assert column.is_nested and column.size(0) == 0


@pytest.mark.parametrize("rows", [9, 0])
def test_a_filler_is_one_token_that_nobody_asks_about(rows):
    data = make_batch(prompts=PROMPTS[:rows], responses=RESPONSES[:rows])
    data["scores"] = torch.zeros(rows)
    micro = filler(data, "cpu")
    assert micro.tokens_T.shape == (1,) and micro.num_rows == 1
    assert micro.index_S.shape == micro.row_S.shape == (0,)
    assert all(column.shape == (0,) for name, column in micro.columns.items() if name != "scores")


def test_a_response_without_a_prompt_is_refused():
    data = batch(
        {
            "tokens": ragged([[3, 4, 5], [6, 7]], torch.int64),
            "response_mask": from_values(torch.tensor([False, True, True, True, True]), torch.tensor([3, 2])),
        }
    )
    pack(data, np.array([0]), "cpu")
    with pytest.raises(DataError, match="first token of a row"):
        pack(data, np.array([0, 1]), "cpu")
