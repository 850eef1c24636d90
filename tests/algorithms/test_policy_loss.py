import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridrl.algorithms.policy_loss import PolicyLoss, PPOClip
from hybridrl.protocol.errors import ConfigError


def reference(log_prob, old, advantage, low, high, dual):
    """-L of Schulman et al., 2017, eq. 7, inside the max of Ye et al., 2020; and its derivative by the log-prob."""
    ratio = math.exp(log_prob - old)
    surrogate, slope = ratio * advantage, ratio * advantage
    held = min(max(ratio, 1 - low), 1 + high) * advantage
    if held < surrogate:
        surrogate, slope = held, 0.0
    if dual and advantage < 0 and dual * advantage > surrogate:
        surrogate, slope = dual * advantage, 0.0
    return -surrogate, -slope


def columns(old, advantages):
    return {"old_log_probs": old, "advantages": advantages}


number = st.floats(-3, 3, allow_subnormal=False)


@settings(max_examples=150, deadline=None)
@given(
    tokens=st.lists(st.tuples(number, number, number), min_size=1, max_size=6),
    low=st.sampled_from([0.2, 0.05, 1.0]),
    high=st.sampled_from([0.2, 0.28, 10.0]),
    dual=st.sampled_from([0.0, 1.5, 3.0]),
)
def test_loss_gradient_and_clip_fraction_are_the_papers(tokens, low, high, dual):
    log_probs, old, advantages = (torch.tensor(x, dtype=torch.float64) for x in zip(*tokens, strict=True))
    log_probs.requires_grad_()
    loss, metrics = PPOClip(low, high, dual)(log_probs, columns(old, advantages))
    loss.sum().backward()
    expected = [reference(*token, low, high, dual) for token in tokens]
    assert loss.tolist() == pytest.approx([value for value, _ in expected], rel=1e-12, abs=1e-300)
    assert log_probs.grad.tolist() == pytest.approx([slope for _, slope in expected], rel=1e-12, abs=1e-300)
    decided = [float(value != -math.exp(p - o) * a) for (p, o, a), (value, _) in zip(tokens, expected, strict=True)]
    far = [abs(math.exp(p - o) - edge) > 1e-9 for p, o, _ in tokens for edge in (1 - low, 1 + high)]
    if all(far):
        clipped = [float(slope == 0 and a != 0) for (_, slope), (_, _, a) in zip(expected, tokens, strict=True)]
        assert metrics["clip_fraction"].tolist() == clipped == decided


def test_gradient_by_finite_differences():
    g = torch.Generator().manual_seed(0)
    log_probs, old, advantages = torch.randn(3, 12, generator=g, dtype=torch.float64)
    for loss_fn in (PPOClip(), PPOClip(0.1, 0.3, dual_clip=2.0)):
        assert torch.autograd.gradcheck(
            lambda x, f=loss_fn: f(x, columns(old, advantages))[0], log_probs.clone().requires_grad_()
        )


def test_metrics_are_per_token_and_detached():
    log_probs = torch.tensor([-1.0, -2.0, -0.5], dtype=torch.float64, requires_grad=True)
    old, advantages = torch.tensor([-1.0, -1.0, -1.5], dtype=torch.float64), torch.tensor([1.0, -1.0, 1.0], dtype=torch.float64)
    _, metrics = PPOClip()(log_probs, columns(old, advantages))
    differences = [0.0, -1.0, 1.0]
    assert metrics["ratio"].tolist() == pytest.approx([math.exp(d) for d in differences], rel=1e-12)
    assert metrics["approx_kl"].tolist() == pytest.approx([math.exp(d) - 1 - d for d in differences], rel=1e-12)
    assert metrics["clip_fraction"].tolist() == [0.0, 1.0, 1.0]
    assert not any(m.requires_grad for m in metrics.values())
    assert all(m.shape == (3,) for m in metrics.values())


def test_at_the_old_policy_the_gradient_is_the_policy_gradient():
    old, advantages = torch.tensor([-1.0, -2.0]), torch.tensor([0.5, -3.0])
    for loss_fn in (PPOClip(), PPOClip(clip_low=0.0, clip_high=0.0), PPOClip(dual_clip=2.0)):
        log_probs = old.clone().requires_grad_()
        loss_fn(log_probs, columns(old, advantages))[0].sum().backward()
        assert torch.equal(log_probs.grad, -advantages)


@pytest.mark.parametrize("advantage", [-1.0, 0.0, 1.0])
@pytest.mark.parametrize("difference", [-1000.0, 1000.0])
def test_a_wild_ratio_stays_finite(difference, advantage):
    log_probs = torch.tensor([difference], requires_grad=True)
    loss, metrics = PPOClip()(log_probs, columns(torch.zeros(1), torch.tensor([advantage])))
    loss.sum().backward()
    assert torch.stack([loss.detach(), log_probs.grad, *metrics.values()]).isfinite().all()


@pytest.mark.parametrize("field", [{"clip_low": -0.1}, {"clip_low": 1.5}, {"clip_high": -1.0}, {"dual_clip": 0.5}])
def test_refuses_bounds_that_make_no_sense(field):
    with pytest.raises(ConfigError, match=rf"^{next(iter(field))} "):
        PPOClip(**field)


def test_ppo_is_a_policy_loss():
    loss: PolicyLoss = PPOClip()
    assert loss.reads == PPOClip.reads == ("old_log_probs", "advantages")
