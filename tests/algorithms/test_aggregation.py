import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridrl.algorithms.aggregation import AGGREGATIONS, token_weights, totals
from hybridrl.algorithms.policy_loss import PPOClip
from hybridrl.protocol.errors import ConfigError

MAX_TOKENS = 8


def pack(masks):
    """Masks of rows laid end to end, and the row of each token."""
    mask_T = torch.tensor([m for row in masks for m in row], dtype=torch.bool)
    row_T = torch.tensor([b for b, row in enumerate(masks) for _ in row], dtype=torch.int64)
    return mask_T, row_T


def weights_of(masks, mode, tokens=None, rows=None, dtype=torch.float64):
    """Weights of one pack; of a pack that is the whole mini-batch, if no totals are given."""
    mask_T, row_T = pack(masks)
    if tokens is None:
        tokens, rows = totals(mask_T, row_T, len(masks))
    return token_weights(mask_T, row_T, len(masks), mode, tokens, rows, MAX_TOKENS, dtype)


def reference_loss(losses, masks, mode):
    """The mode in the words of its name, by loops; `losses` is a list of rows."""
    rows = [[x for x, m in zip(row, mask, strict=True) if m] for row, mask in zip(losses, masks, strict=True)]
    rows = [row for row in rows if row]
    if not rows:
        return 0.0
    if mode == "token-mean":
        return sum(sum(row) for row in rows) / sum(len(row) for row in rows)
    per_row = {
        "seq-mean-token-sum": lambda row: sum(row),
        "seq-mean-token-mean": lambda row: sum(row) / len(row),
        "seq-mean-token-sum-norm": lambda row: sum(row) / MAX_TOKENS,
    }[mode]
    return sum(per_row(row) for row in rows) / len(rows)


MASKS = {
    "full": [[1, 1, 1], [1, 1, 1]],
    "ragged": [[0, 1, 1, 1], [0, 1], [0, 0, 1, 1, 1, 1]],
    "holed": [[1, 0, 0, 1, 1], [0, 1, 0, 1]],
    "singletons": [[1], [1], [0]],
    "an empty row": [[0, 1, 1], [0, 0, 0, 0], [1]],
    "a row of no tokens": [[1, 1], [], [1]],
    "all empty": [[0, 0], [0]],
}


@pytest.mark.parametrize("mode", AGGREGATIONS)
@pytest.mark.parametrize("masks", MASKS.values(), ids=MASKS.keys())
def test_weighted_sum_is_the_named_mean(masks, mode):
    losses = [
        torch.randn(len(row), generator=torch.Generator().manual_seed(b), dtype=torch.float64) for b, row in enumerate(masks)
    ]
    loss = (weights_of(masks, mode) * torch.cat(losses)).sum()
    expected = reference_loss([row.tolist() for row in losses], masks, mode)
    assert loss.item() == pytest.approx(expected, rel=1e-12, abs=1e-15)


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_weight_is_zero_outside_the_mask_and_float32_by_default(mode):
    mask_T, row_T = pack(MASKS["holed"])
    weights = token_weights(mask_T, row_T, 2, mode, 5, 2, MAX_TOKENS)
    assert weights.dtype == torch.float32
    assert ((weights != 0) == mask_T).all()


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_a_rank_without_rows_has_weights_of_zero(mode):
    """Its own made-up row, in a mini-batch whose rows are elsewhere."""
    assert torch.equal(weights_of([[0]], mode, tokens=40, rows=4), torch.zeros(1, dtype=torch.float64))


def test_totals_count_masked_tokens_and_rows_that_have_some():
    assert totals(*pack(MASKS["an empty row"]), 3) == (3, 2)
    assert totals(*pack(MASKS["all empty"]), 2) == (0, 0)
    assert totals(*pack([]), 0) == (0, 0)


@st.composite
def cut_minibatches(draw):
    """Masks of the rows of a mini-batch, and the rows put into packs in some order."""
    masks = draw(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=6), min_size=1, max_size=7))
    order = draw(st.permutations(range(len(masks))))
    cuts = sorted(draw(st.sets(st.integers(1, len(masks)), max_size=len(masks))) | {len(masks)})
    packs = [order[a:b] for a, b in zip([0, *cuts[:-1]], cuts, strict=True)]
    return masks, packs, draw(st.integers(0, 10_000))


@pytest.mark.parametrize("mode", AGGREGATIONS)
@settings(max_examples=40, deadline=None)
@given(case=cut_minibatches())
def test_loss_and_gradient_do_not_depend_on_the_cut(mode, case):
    """A PPO loss of a small shared parameter: over the whole mini-batch, and accumulated over packs in any order."""
    masks, packs, seed = case
    g = torch.Generator().manual_seed(seed)
    features = [torch.randn(len(row), 3, generator=g, dtype=torch.float64) for row in masks]
    columns = [{name: torch.randn(len(row), generator=g, dtype=torch.float64) / 2 for name in PPOClip.reads} for row in masks]
    tokens, rows = (sum(c) for c in zip(*[totals(*pack([masks[b] for b in p]), len(p)) for p in packs], strict=True))
    loss_fn = PPOClip()

    def accumulate(packs):
        parameter = torch.tensor([0.1, -0.2, 0.3], dtype=torch.float64, requires_grad=True)
        value = 0.0
        for p in packs:
            weights = weights_of([masks[b] for b in p], mode, tokens, rows)
            packed = {name: torch.cat([columns[b][name] for b in p]) for name in PPOClip.reads}
            loss_T, _ = loss_fn(torch.cat([features[b] for b in p]) @ parameter, packed)
            loss = (weights * loss_T).sum()
            loss.backward()
            value += loss.item()
        return value, parameter.grad

    whole, whole_grad = accumulate([list(range(len(masks)))])
    split, split_grad = accumulate(packs)
    assert split == pytest.approx(whole, rel=1e-12, abs=1e-12)
    torch.testing.assert_close(split_grad, whole_grad, rtol=1e-12, atol=1e-12)


def test_refuses_an_unknown_mode_and_a_missing_length():
    mask_T, row_T = pack([[1]])
    with pytest.raises(ConfigError, match="did you mean 'token-mean'"):
        token_weights(mask_T, row_T, 1, "token_mean", 1, 1)
    with pytest.raises(ConfigError, match=r"^max_tokens "):
        token_weights(mask_T, row_T, 1, "seq-mean-token-sum-norm", 1, 1)
