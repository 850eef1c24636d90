import math

import pytest
import torch

from hybridrl.algorithms import entropy
from hybridrl.algorithms.entropy import log_probs_and_entropy
from hybridrl.protocol.errors import ConfigError


def case(tokens=5, vocabulary=7, scale=3.0, dtype=torch.float64):
    g = torch.Generator().manual_seed(0)
    logits = (torch.randn(tokens, vocabulary, generator=g, dtype=torch.float64) * scale).to(dtype)
    return logits, torch.randint(vocabulary, (tokens,), generator=g)


def reference(logits, targets, temperature):
    """log p(y) = z_y - log sum exp z and H = -sum p log p, by loops."""
    log_probs, entropies = [], []
    for row, target in zip(logits, targets, strict=True):
        normaliser = math.log(math.fsum(math.exp(z / temperature) for z in row))
        logs = [z / temperature - normaliser for z in row]
        log_probs.append(logs[target])
        entropies.append(-math.fsum(math.exp(x) * x for x in logs))
    return log_probs, entropies


@pytest.mark.parametrize("chunk", [1, 15, 1 << 24])
@pytest.mark.parametrize("temperature", [1.0, 0.7, 2.0])
def test_values_are_the_definitions(temperature, chunk, monkeypatch):
    monkeypatch.setattr(entropy, "_CHUNK_ELEMENTS", chunk)
    logits, targets = case()
    before = logits.clone()
    log_probs, entropies = log_probs_and_entropy(logits, targets, temperature)
    expected = reference(logits.tolist(), targets.tolist(), temperature)
    assert log_probs.tolist() == pytest.approx(expected[0], rel=1e-12)
    assert entropies.tolist() == pytest.approx(expected[1], rel=1e-12)
    assert torch.equal(logits, before)


@pytest.mark.parametrize("chunk", [1, 15, 1 << 24])
def test_gradients_by_finite_differences(chunk, monkeypatch):
    monkeypatch.setattr(entropy, "_CHUNK_ELEMENTS", chunk)
    logits, targets = case()
    logits.requires_grad_()
    assert torch.autograd.gradcheck(lambda z: log_probs_and_entropy(z, targets, 0.8), logits)


@pytest.mark.parametrize("used", [0, 1])
def test_gradient_where_only_one_output_is_used(used):
    logits, targets = case()
    logits.requires_grad_()
    (got,) = torch.autograd.grad(log_probs_and_entropy(logits, targets)[used].sum(), logits)
    logs = logits.log_softmax(-1)
    plain = (logs.gather(-1, targets[:, None]).sum(), -(logs.exp() * logs).sum())[used]
    (expected,) = torch.autograd.grad(plain, logits)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_precision_logits_are_worked_on_in_float32(dtype):
    logits, targets = case(tokens=16, vocabulary=300, dtype=dtype)
    logits.requires_grad_()
    log_probs, entropies = log_probs_and_entropy(logits, targets)
    expected = reference(logits.tolist(), targets.tolist(), 1.0)
    assert log_probs.dtype == entropies.dtype == torch.float32
    assert log_probs.tolist() == pytest.approx(expected[0], abs=5e-6)
    assert entropies.tolist() == pytest.approx(expected[1], abs=5e-6)
    log_probs.sum().backward()
    assert logits.grad.dtype == dtype
    onehot = torch.nn.functional.one_hot(targets, 300)
    torch.testing.assert_close(logits.grad, (onehot - logits.detach().float().softmax(-1)).to(dtype), rtol=1e-2, atol=1e-6)


def test_large_logits_lose_no_entropy():
    logits, targets = case(dtype=torch.float32)
    shifted = log_probs_and_entropy((logits * 4).round() / 4 + 1024, targets)
    plain = log_probs_and_entropy((logits * 4).round() / 4, targets)
    for a, b in zip(shifted, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def test_the_backward_pass_keeps_the_logits_and_little_else():
    logits, targets = case(tokens=8, vocabulary=1000, dtype=torch.bfloat16)
    logits.requires_grad_()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        log_probs_and_entropy(logits, targets)
    extra = [t for t in kept if t.data_ptr() != logits.data_ptr()]
    assert sum(t.numel() for t in extra) <= 2 * len(targets)


def test_no_tokens():
    logits, targets = torch.zeros(0, 5, requires_grad=True), torch.zeros(0, dtype=torch.int64)
    log_probs, entropies = log_probs_and_entropy(logits, targets)
    assert log_probs.shape == entropies.shape == (0,)
    (log_probs.sum() + entropies.sum()).backward()
    assert logits.grad.shape == (0, 5)


def test_refuses_a_temperature_of_zero():
    with pytest.raises(ConfigError, match=r"^temperature "):
        log_probs_and_entropy(torch.zeros(1, 2), torch.zeros(1, dtype=torch.int64), 0.0)
