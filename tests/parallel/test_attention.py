import pytest
import torch
from transformers import AttentionInterface

from hybridrl.parallel.attention import ATTENTION, PackedRows
from hybridrl.protocol.errors import ModelError

LENGTHS = [3, 1, 7, 2]
T = sum(LENGTHS)


def qkv(heads=4, shared=2, size=8, requires_grad=False):
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(1, h, T, size, generator=generator, dtype=torch.float64).requires_grad_(requires_grad)
        for h in (heads, shared, shared)
    ]


def alone(query, key, value, scaling):
    """Each row by itself, written out: softmax(q k' * scaling) v over the tokens up to one's own."""
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    parts, start = [], 0
    for length in LENGTHS:
        q, k, v = (x[0, :, start : start + length] for x in (query, key, value))
        scores = (q @ k.transpose(1, 2) * scaling).masked_fill(torch.ones(length, length).triu(1).bool(), -torch.inf)
        parts.append(scores.softmax(-1) @ v)
        start += length
    return torch.cat(parts, 1)[None]


@pytest.mark.parametrize("shared", [4, 2, 1])
def test_a_token_sees_its_own_row_up_to_itself(shared):
    query, key, value = qkv(shared=shared, requires_grad=True)
    attended = PackedRows.of(LENGTHS).attend(0, query, key, value, 0.3)
    expected = alone(query, key, value, 0.3)
    torch.testing.assert_close(attended, expected, rtol=0, atol=1e-14)
    weights = torch.randn(attended.shape, dtype=torch.float64)
    ours = torch.autograd.grad((attended * weights).sum(), (query, key, value))
    theirs = torch.autograd.grad((expected * weights).sum(), (query, key, value))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-13)


def test_nothing_leaks_from_row_to_row_or_back_in_time():
    query, key, value = qkv()
    rows = PackedRows.of(LENGTHS)
    before = rows.attend(0, query, key, value, 0.3)
    changed = [x.clone() for x in (query, key, value)]
    for x in changed:
        x[:, :, 6] = 100.0  # token 2 of row 2, whose tokens are 4 to 10
    after = rows.attend(0, *changed, 0.3)
    differs = (before != after).any(-1).any(1)[0]
    assert differs.nonzero()[:, 0].tolist() == [6, 7, 8, 9, 10]


def test_positions_start_anew_in_each_row():
    rows = PackedRows.of(LENGTHS)
    assert rows.positions_T.tolist() == [0, 1, 2, 0, 0, 1, 2, 3, 4, 5, 6, 0, 1]
    assert (rows.num_rows, rows.longest) == (4, 7)


@pytest.mark.parametrize(
    "asked", [{"softcap": 50.0}, {"s_aux": torch.zeros(4)}, {"position_bias": torch.zeros(1)}, {"is_causal": False}]
)
def test_what_would_be_left_out_is_refused(asked):
    module = torch.nn.Module()
    module.layer_idx = 0
    attention, view = AttentionInterface()[ATTENTION], PackedRows.of(LENGTHS)
    plain, _ = attention(module, *qkv(), None, scaling=0.3, view=view, dropout=0.0, sliding_window=None, softcap=None)
    assert plain.shape == (1, T, 4, 8)
    with pytest.raises(ModelError, match=next(iter(asked))):
        attention(module, *qkv(), None, scaling=0.3, view=view, **asked)
