import pytest
import torch

from hybridrl.rollout.engine import SamplingParams
from hybridrl.rollout.sampling import SamplingTable, truncated, uniforms

MASK = 2**64 - 1


def splitmix64(state: int) -> int:
    z = (state + 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def table(params: list[SamplingParams]) -> SamplingTable:
    rows = SamplingTable(len(params), torch.device("cpu"))
    rows.put(torch.arange(len(params)), params)
    return rows


def test_uniforms_are_splitmix64():
    assert splitmix64(0) == 0xE220A8397B1DCDAF  # the published first output
    seeds = [0, 1, -1, 2**63, 2**64 - 1, 2**70 + 3, 12345]
    draws = torch.tensor([[0, 1, 2, 1000]]).expand(len(seeds), 4)
    expected = [
        [((splitmix64(splitmix64(s & MASK) + d * 0x9E3779B97F4A7C15) >> 16) + 0.5) * 2.0**-48 for d in (0, 1, 2, 1000)]
        for s in seeds
    ]
    assert uniforms(seeds, draws).tolist() == expected


def test_uniforms_are_uniform_and_not_correlated():
    u = uniforms(list(range(500)), torch.arange(200).expand(500, 200))
    assert u.min() > 0 and u.max() < 1
    counts = torch.histc(u.float(), 20, 0, 1)
    assert ((counts - 5000) ** 2 / 5000).sum() < 43.8  # chi-square, 19 degrees of freedom, p = 0.001
    for a, b in ((u[:-1], u[1:]), (u[:, :-1], u[:, 1:])):
        assert abs(torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1]) < 0.01


def reference(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Probabilities of one row, token by token."""
    probs = (logits / params.temperature).softmax(-1)
    order = sorted(range(len(logits)), key=lambda i: -float(logits[i]))
    kept = order[: params.top_k or len(order)]
    total, nucleus, mass = sum(float(probs[i]) for i in kept), [], 0.0
    for i in kept:
        if mass < params.top_p:
            nucleus.append(i)
        mass += float(probs[i]) / total
    out = torch.zeros_like(probs)
    out[nucleus] = probs[nucleus]
    return out / out.sum()


MIXED = [
    SamplingParams(1),
    SamplingParams(1, temperature=0.5),
    SamplingParams(1, temperature=2.0, top_k=3),
    SamplingParams(1, top_p=0.6),
    SamplingParams(1, temperature=1.5, top_k=8, top_p=0.8),
    SamplingParams(1, top_p=1e-6),
    SamplingParams(1, top_k=1),
]


def test_draws_have_the_stated_frequencies_and_log_probs():
    torch.manual_seed(0)
    logits = torch.randn(len(MIXED), 12, dtype=torch.float64) * 2
    rows = table(MIXED)
    n = 4000
    u = uniforms(list(range(len(MIXED))), torch.arange(n).expand(len(MIXED), n))
    draws = [rows.draw(logits, u[:, i]) for i in range(n)]
    tokens = torch.stack([token for token, _ in draws], 1)
    log_probs = torch.stack([log_prob for _, log_prob in draws], 1)
    for row, params in enumerate(MIXED):
        probs = reference(logits[row], params)
        torch.testing.assert_close(log_probs[row], probs[tokens[row]].log(), rtol=0, atol=1e-12)
        possible = probs > 0
        expected = probs[possible] * n
        counts = torch.bincount(tokens[row], minlength=12)
        assert counts[~possible].sum() == 0
        assert ((counts[possible] - expected) ** 2 / expected).sum() < 31.3  # 11 degrees of freedom, p = 0.001


def test_a_row_does_not_depend_on_the_rows_beside_it():
    torch.manual_seed(0)
    params = [*MIXED, SamplingParams(1, temperature=0)]
    logits, u = torch.randn(len(params), 200), torch.rand(len(params), dtype=torch.float64)
    together = table(params).draw(logits, u)
    for i, p in enumerate(params):
        alone = table([p]).draw(logits[i : i + 1], u[i : i + 1])
        assert [x.item() for x in alone] == [x[i].item() for x in together]


def test_greedy_rows_take_the_largest_and_report_the_models_own_log_prob():
    torch.manual_seed(0)
    logits = torch.randn(5, 30)
    token, log_prob = table([SamplingParams(1, temperature=0, top_k=2, top_p=0.3)] * 5).draw(
        logits, torch.full((5,), 0.99).double()
    )
    assert token.tolist() == logits.argmax(-1).tolist()
    torch.testing.assert_close(log_prob, logits.log_softmax(-1).amax(-1))


@pytest.mark.parametrize("uniform", [2.0**-49, 1 - 2.0**-49])
def test_a_token_of_probability_zero_is_never_drawn(uniform):
    logits = torch.full((2, 50), -torch.inf)
    logits[0, 20:23] = torch.tensor([0.1, 3.0, -1.0])
    logits[1, 25] = 7.0
    token, log_prob = table([SamplingParams(1)] * 2).draw(logits, torch.full((2,), uniform, dtype=torch.float64))
    assert token.tolist() == [20 if uniform < 0.5 else 22, 25]
    assert log_prob.isfinite().all()


def test_a_tiny_temperature_does_not_overflow():
    token, log_prob = table([SamplingParams(1, temperature=1e-30)]).draw(
        torch.tensor([[90.0, 100.0, -90.0]]), torch.tensor([0.5]).double()
    )
    assert (token.item(), log_prob.item()) == (1, 0.0)


def test_truncation_off_changes_no_bit_and_ties_are_kept():
    logits = torch.randn(1, 1000)
    assert torch.equal(truncated(logits, torch.tensor([0]), torch.tensor([1.0])), logits)
    tied = torch.tensor([[1.0, 2.0, 1.0, 0.0]])
    kept = truncated(tied, torch.tensor([2]), torch.tensor([1.0]))
    assert kept.tolist() == [[1.0, 2.0, 1.0, -torch.inf]]


def test_bfloat16_logits_are_drawn_from_in_float32():
    logits = torch.randn(3, 40).bfloat16()
    token, log_prob = table([SamplingParams(1)] * 3).draw(logits, torch.rand(3).double())
    assert log_prob.dtype == torch.float32
    torch.testing.assert_close(log_prob, logits.float().log_softmax(-1).gather(1, token[:, None])[:, 0])
