import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridrl.algorithms.advantages import gae, whiten
from hybridrl.protocol.errors import ConfigError


def reference_gae(rewards, values, mask, gamma, lam):
    """Schulman et al., 2016, eq. 16, by its definition: for every state of a row, the whole discounted sum of residuals."""
    advantages = [[0.0] * len(row) for row in mask]
    for b, row in enumerate(mask):
        states = [t for t, inside in enumerate(row) if inside]
        for i, t in enumerate(states):
            for k, s in enumerate(states[i:]):
                following = i + k + 1
                next_value = values[b][states[following]] if following < len(states) else 0.0
                delta = rewards[b][s] + gamma * next_value - values[b][s]
                advantages[b][t] += (gamma * lam) ** k * delta
    return advantages


def random_case(rows, width, seed, density=0.7):
    g = torch.Generator().manual_seed(seed)
    rewards, values = torch.randn(2, rows, width, generator=g, dtype=torch.float64)
    return rewards, values, torch.rand(rows, width, generator=g) < density


def check(rewards, values, mask, gamma, lam):
    advantages, returns = gae(rewards, values, mask, gamma, lam)
    expected = torch.tensor(reference_gae(rewards.tolist(), values.tolist(), mask.tolist(), gamma, lam), dtype=torch.float64)
    expected = expected.reshape(mask.shape)
    torch.testing.assert_close(advantages, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(returns, torch.where(mask, expected + values, 0), rtol=1e-12, atol=1e-12)


SHAPES = {
    "full": [[1, 1, 1, 1], [1, 1, 1, 1]],
    "ragged after a prompt": [[0, 1, 1, 1], [0, 0, 1, 0], [1, 1, 0, 0]],
    "holes": [[0, 1, 0, 0, 1, 1], [1, 0, 1, 0, 1, 0]],
    "one token": [[0, 1, 0]],
    "an empty row": [[1, 1], [0, 0]],
    "all empty": [[0, 0]],
    "one column": [[1], [0]],
}


@pytest.mark.parametrize("mask", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.99, 0.95), (0.9, 0.0), (0.0, 0.5)])
def test_gae_is_the_papers_sum(mask, gamma, lam):
    mask = torch.tensor(mask, dtype=torch.bool)
    rewards, values, _ = random_case(*mask.shape, seed=1)
    check(rewards, values, mask, gamma, lam)


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 4),
    width=st.integers(1, 12),
    seed=st.integers(0, 10_000),
    density=st.sampled_from([0.1, 0.5, 1.0]),
    gamma=st.floats(0, 1),
    lam=st.floats(0, 1),
)
def test_gae_of_random_masks(rows, width, seed, density, gamma, lam):
    check(*random_case(rows, width, seed, density), gamma, lam)


@pytest.mark.parametrize("width", [127, 128, 129, 300])
def test_gae_across_blocks(width):
    check(*random_case(2, width, seed=2), 0.999, 0.97)


def test_gae_known_by_hand():
    """gamma = lam = 1: the advantage is the reward still to come minus the value."""
    rewards, values = torch.tensor([[0.0, 0.0, 1.0]]), torch.tensor([[0.5, 0.25, 0.125]])
    advantages, returns = gae(rewards, values, torch.ones(1, 3, dtype=torch.bool), 1.0, 1.0)
    assert advantages.tolist() == [[0.5, 0.75, 0.875]]
    assert returns.tolist() == [[1.0, 1.0, 1.0]]


def test_gae_reads_nothing_outside_the_mask():
    rewards, values, mask = random_case(3, 8, seed=3)
    clean = gae(rewards, values, mask, 0.9, 0.9)
    dirty = gae(rewards.masked_fill(~mask, torch.nan), values.masked_fill(~mask, torch.inf), mask, 0.9, 0.9)
    for a, b in zip(clean, dirty, strict=True):
        assert torch.equal(a, b)
        assert (a[~mask] == 0).all()


def test_gae_of_a_row_is_that_rows_alone():
    rewards, values, mask = (x.float() if x.is_floating_point() else x for x in random_case(7, 200, seed=4))
    together, _ = gae(rewards, values, mask, 0.99, 0.95)
    alone = torch.cat([gae(rewards[b : b + 1], values[b : b + 1], mask[b : b + 1], 0.99, 0.95)[0] for b in range(7)])
    assert together.dtype == torch.float32
    torch.testing.assert_close(together, alone, rtol=2e-7, atol=1e-7)


@pytest.mark.parametrize("shape", [(0, 3), (2, 0)])
def test_gae_of_nothing(shape):
    empty = torch.zeros(shape)
    advantages, returns = gae(empty, empty, empty.bool(), 0.9, 0.9)
    assert advantages.shape == returns.shape == shape


@pytest.mark.parametrize(("gamma", "lam", "name"), [(1.5, 0.9, "gamma"), (0.9, -0.1, "lam"), (float("nan"), 0.9, "gamma")])
def test_gae_refuses_discounts_out_of_range(gamma, lam, name):
    with pytest.raises(ConfigError, match=rf"^{name} "):
        gae(torch.zeros(1, 1), torch.zeros(1, 1), torch.ones(1, 1, dtype=torch.bool), gamma, lam)


def test_whiten_has_mean_0_and_deviation_1():
    values, _, mask = random_case(5, 9, seed=5)
    inside = [v for v, m in zip(values.flatten().tolist(), mask.flatten().tolist(), strict=True) if m]
    mean = sum(inside) / len(inside)
    deviation = (sum((v - mean) ** 2 for v in inside) / len(inside) + 1e-8) ** 0.5
    whitened = whiten(values, mask)
    torch.testing.assert_close(whitened[mask], (values[mask] - mean) / deviation, rtol=1e-12, atol=1e-12)
    assert abs(whitened[mask].mean()) < 1e-12
    assert abs(whitened[mask].std(correction=0) - 1) < 1e-7
    assert (whitened[~mask] == 0).all()


@pytest.mark.parametrize("mask", [[[0, 0, 0]], [[0, 1, 0]]], ids=["none", "one"])
def test_whiten_of_none_or_one_is_zero(mask):
    assert torch.equal(whiten(torch.tensor([[3.0, 5.0, torch.nan]]), torch.tensor(mask).bool()), torch.zeros(1, 3))


def test_whiten_of_equal_values_is_no_amplified_rounding():
    assert whiten(torch.full((3, 7), 0.1), torch.ones(3, 7, dtype=torch.bool)).abs().max() < 1e-6
