import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridrl.algorithms.rewards import token_rewards


def reference(scores, masks, kls, coef):
    """Stiennon et al., 2020: the score at the end of the response, -coef * log(policy / reference) on the way."""
    rewards = []
    for score, mask, kl in zip(scores, masks, kls, strict=True):
        row = [-coef * k if m else 0.0 for k, m in zip(kl, mask, strict=True)]
        inside = [t for t, m in enumerate(mask) if m]
        if inside:
            row[inside[-1]] += score
        rewards.append(row)
    return rewards


def check(masks, seed, coef):
    mask = torch.tensor(masks, dtype=torch.bool)
    g = torch.Generator().manual_seed(seed)
    scores, kls = (torch.randn(shape, generator=g, dtype=torch.float64) for shape in (mask.shape[:1], mask.shape))
    got = token_rewards(scores, mask, kls, coef)
    expected = torch.tensor(reference(scores.tolist(), masks, kls.tolist(), coef), dtype=torch.float64)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize(
    "masks",
    [[[1, 1], [1, 1]], [[0, 1, 1, 0], [0, 0, 0, 1]], [[1, 0, 1, 0], [0, 1, 0, 0]], [[0, 0], [1, 0]], [[1]], [[0]]],
    ids=["full", "ragged", "holed", "an empty row", "one", "none"],
)
def test_rewards_are_the_papers(masks):
    check(masks, seed=0, coef=0.05)


@settings(max_examples=40, deadline=None)
@given(
    masks=st.integers(1, 6).flatmap(
        lambda n: st.lists(st.lists(st.integers(0, 1), min_size=n, max_size=n), min_size=1, max_size=5)
    ),
    seed=st.integers(0, 1000),
    coef=st.floats(0, 2),
)
def test_rewards_of_random_masks(masks, seed, coef):
    check(masks, seed, coef)


def test_nothing_is_read_outside_the_mask():
    mask = torch.tensor([[False, True, False], [False, False, False]])
    kls = torch.full((2, 3), torch.nan).masked_fill(mask, 2.0)
    assert token_rewards(torch.tensor([1.0, torch.nan]), mask, kls, 0.25).tolist() == [[0.0, 0.5, 0.0], [0.0, 0.0, 0.0]]


@pytest.mark.parametrize("shape", [(0, 3), (2, 0)])
def test_rewards_of_nothing(shape):
    empty = torch.zeros(shape)
    assert token_rewards(torch.zeros(shape[0]), empty.bool(), empty, 0.1).shape == shape
