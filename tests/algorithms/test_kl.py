import math
from typing import get_args

import pytest
import torch

from hybridrl.algorithms.kl import AdaptiveKL, Estimator, FixedKL, KLConfig, kl_estimate
from hybridrl.protocol.errors import ConfigError

# Schulman, 2020: r = q/p for samples of p, here reference/policy; and the derivative of each by the policy's log-prob.
VALUE = {
    "k1": lambda r: -math.log(r),
    "k2": lambda r: math.log(r) ** 2 / 2,
    "k3": lambda r: (r - 1) - math.log(r),
    "abs": lambda r: abs(math.log(r)),
}
SLOPE = {
    "k1": lambda r: 1.0,
    "k2": lambda r: -math.log(r),
    "k3": lambda r: 1 - r,
    "abs": lambda r: -math.copysign(1.0, math.log(r)),
}


@pytest.mark.parametrize("kind", get_args(Estimator))
def test_estimators_and_their_gradients(kind):
    log_probs, ref = torch.randn(2, 20, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    log_probs.requires_grad_()
    estimate = kl_estimate(log_probs, ref, kind)
    estimate.sum().backward()
    ratios = [math.exp(q - p) for p, q in zip(log_probs.tolist(), ref.tolist(), strict=True)]
    assert estimate.tolist() == pytest.approx([VALUE[kind](r) for r in ratios], rel=1e-12, abs=1e-14)
    assert log_probs.grad.tolist() == pytest.approx([SLOPE[kind](r) for r in ratios], rel=1e-12, abs=1e-14)
    assert torch.autograd.gradcheck(lambda x: kl_estimate(x, ref, kind), log_probs)


def exact_case():
    logits = torch.randn(6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    ref = torch.randn(6, generator=torch.Generator().manual_seed(2), dtype=torch.float64).log_softmax(0)
    return logits.requires_grad_(), ref


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_k1_and_k3_are_unbiased(kind):
    """Their expectation under the policy, summed exactly over the vocabulary."""
    logits, ref = exact_case()
    log_p = logits.log_softmax(0)
    exact = sum(p * (math.log(p) - q) for p, q in zip(log_p.exp().tolist(), ref.tolist(), strict=True))
    assert (log_p.exp() * kl_estimate(log_p, ref, kind)).sum().item() == pytest.approx(exact, rel=1e-12)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_expected_gradients_are_those_documented(kind):
    """With samples held fixed, as in a loss: of k1 zero, of k2 the divergence's own, of k3 that of KL(reference || policy)."""
    logits, ref = exact_case()
    log_p = logits.log_softmax(0)
    (got,) = torch.autograd.grad((log_p.detach().exp() * kl_estimate(log_p, ref, kind)).sum(), logits, retain_graph=True)
    truth = {
        "k1": 0 * logits.sum(),
        "k2": (log_p.exp() * (log_p - ref)).sum(),
        "k3": (ref.exp() * (ref - log_p)).sum(),
    }[kind]
    (expected,) = torch.autograd.grad(truth, logits)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


def test_k3_of_far_log_probs_is_finite():
    log_probs = torch.tensor([-500.0, 0.0], requires_grad=True)
    estimate = kl_estimate(log_probs, torch.tensor([0.0, -500.0]), "k3")
    estimate.sum().backward()
    assert estimate.isfinite().all()
    assert log_probs.grad.isfinite().all()


def test_k3_of_near_log_probs_keeps_its_precision():
    """The tempting `exp(d) - 1 - d` is rounding alone here, and can be negative."""
    estimate = kl_estimate(torch.zeros(1), torch.tensor([1e-3]), "k3")
    assert estimate.item() == pytest.approx(math.expm1(1e-3) - 1e-3, rel=1e-3)


def test_fixed_stays():
    controller = FixedKL(0.1)
    assert controller.update(100.0, 64) is controller


@pytest.mark.parametrize(
    ("kl", "error"),
    [(6.0, 0.0), (6.6, 0.1), (5.4, -0.1), (60.0, 0.2), (0.0, -0.2)],
    ids=["on", "over", "under", "top", "bottom"],
)
def test_adaptive_follows_the_paper(kl, error):
    """e = clip((KL - target) / target, -0.2, 0.2); coef *= 1 + e n / horizon."""
    before = AdaptiveKL(coef=0.05, target=6.0, horizon=10_000)
    after = before.update(kl, 512)
    assert after.coef == pytest.approx(0.05 * (1 + error * 512 / 10_000), rel=1e-12)
    assert before.coef == 0.05
    assert (after.target, after.horizon) == (6.0, 10_000)


def test_adaptive_refuses_steps_that_could_turn_the_coefficient():
    with pytest.raises(ConfigError, match=r"^horizon "):
        AdaptiveKL(0.05, 6.0, 100).update(6.0, 500)


def test_config_begins_the_controller_it_names():
    assert KLConfig(coef=0.1).first() == FixedKL(0.1)
    assert KLConfig(controller="adaptive", coef=0.2, target=1.0, horizon=50.0).first() == AdaptiveKL(0.2, 1.0, 50.0)


@pytest.mark.parametrize(
    "fields",
    [
        {"placement": "rewards"},
        {"estimator": "k4"},
        {"controller": "adaptative"},
        {"coef": -1.0},
        {"coef": float("nan")},
        {"target": 0.0},
        {"horizon": 0.0},
        {"estimator": "k1", "placement": "loss"},
    ],
    ids=str,
)
def test_config_refuses_with_the_name_of_the_field(fields):
    with pytest.raises(ConfigError, match=rf"^{next(iter(fields))} "):
        KLConfig(**fields)


def test_unknown_estimator_is_named():
    with pytest.raises(ConfigError, match=r"^estimator must be one of k1, k2, k3, abs"):
        kl_estimate(torch.zeros(1), torch.zeros(1), "k5")
