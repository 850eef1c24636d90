import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridrl.algorithms.value_loss import ValueClip
from hybridrl.protocol.errors import ConfigError


def reference(value, old, target, clip):
    """Half the larger squared error, whether a clip decided, and the derivative by the value."""
    held = old + min(max(value - old, -clip), clip)
    plain, clipped = (value - target) ** 2, (held - target) ** 2
    if clip and clipped > plain:
        return clipped / 2, 1.0, 0.0
    return plain / 2, 0.0, value - target


def columns(old, returns):
    return {"values": old, "returns": returns}


number = st.integers(-24, 24).map(lambda n: n / 8)


@settings(max_examples=150, deadline=None)
@given(tokens=st.lists(st.tuples(number, number, number), min_size=1, max_size=6), clip=st.sampled_from([0.0, 0.3, 1.1]))
def test_loss_gradient_and_metrics(tokens, clip):
    values, old, returns = (torch.tensor(x, dtype=torch.float64) for x in zip(*tokens, strict=True))
    values.requires_grad_()
    loss, metrics = ValueClip(clip)(values, columns(old, returns))
    loss.sum().backward()
    expected = [reference(*token, clip) for token in tokens]
    assert loss.tolist() == pytest.approx([e[0] for e in expected], rel=1e-12, abs=1e-15)
    assert metrics["clip_fraction"].tolist() == [e[1] for e in expected]
    assert values.grad.tolist() == pytest.approx([e[2] for e in expected], rel=1e-12, abs=1e-15)
    assert metrics["squared_error"].tolist() == [(v - r) ** 2 for v, _, r in tokens]
    assert not any(m.requires_grad for m in metrics.values())


def test_gradient_by_finite_differences():
    values, old, returns = torch.randn(3, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: ValueClip()(x, columns(old, returns))[0], values.clone().requires_grad_())


def test_a_value_inside_the_clip_counts_as_unclipped_whatever_rounding_says():
    g = torch.Generator().manual_seed(1)
    old, returns = torch.randn(2, 500, generator=g)
    values = old + 0.1 * torch.rand(500, generator=g)
    _, metrics = ValueClip(0.2)(values, columns(old, returns))
    assert metrics["clip_fraction"].sum() == 0


def test_refuses_a_negative_clip():
    with pytest.raises(ConfigError, match=r"^clip "):
        ValueClip(-0.1)
