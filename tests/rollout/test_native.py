import random

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

from hybridrl.parallel.attention import ATTENTION
from hybridrl.protocol.errors import ConfigError, DataError, ModelError
from hybridrl.rollout.engine import Request, Sample, SamplingParams
from hybridrl.rollout.native import NativeConfig, NativeEngine

SIZES = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
ARCHITECTURES = {"qwen3": Qwen3Config, "qwen2": Qwen2Config, "llama": LlamaConfig}


def make_model(name="qwen3", dtype=torch.float64, seed=0, attention=ATTENTION, **changes):
    torch.manual_seed(seed)
    sizes = {**SIZES, "max_position_embeddings": 512, "initializer_range": 0.3, **changes}
    return AutoModelForCausalLM.from_config(ARCHITECTURES[name](**sizes), dtype=dtype, attn_implementation=attention).eval()


def make_engine(max_batch=16, model=None, **changes):
    return NativeEngine(model or make_model(), NativeConfig(**{"max_length": 100, "max_batch": max_batch, **changes}))


def make_requests(n: int, **changes) -> list[Request]:
    """Requests of mixed lengths, parameters and stop tokens; every third prompt repeats the one before."""
    rng = random.Random(1)
    requests: list[Request] = []
    for i in range(n):
        prompt = requests[-1].prompt if i % 3 == 2 else [rng.randrange(50) for _ in range(rng.randint(1, 30))]
        params = {
            "max_new_tokens": rng.randint(1, 40),
            "temperature": rng.choice([0.0, 0.7, 1.0, 1.3]),
            "top_p": rng.choice([1.0, 0.8]),
            "top_k": rng.choice([0, 5]),
            "seed": 1000 + i,
            "stop_token_ids": tuple(rng.sample(range(50), rng.choice([0, 1, 3]))),
        }
        requests.append(Request(i, prompt, SamplingParams(**{**params, **changes})))
    return requests


def by_index(samples) -> dict[int, Sample]:
    return {sample.index: sample for sample in samples}


def distribution(logits: torch.Tensor, p: SamplingParams) -> torch.Tensor:
    """log-probabilities (T, V) that `p` draws from."""
    if p.temperature == 0:
        return logits.log_softmax(-1)
    scaled = logits / p.temperature
    if p.top_k:
        scaled = scaled.masked_fill(scaled < scaled.topk(p.top_k).values[:, -1:], -torch.inf)
    ordered, order = scaled.softmax(-1).sort(-1, descending=True)
    outside = torch.zeros_like(scaled, dtype=torch.bool).scatter(
        1, order, (ordered.cumsum(-1) - ordered >= p.top_p) & (p.top_p < 1)
    )
    return scaled.masked_fill(outside, -torch.inf).log_softmax(-1)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_greedy_equals_transformers_generate(name):
    model, plain = make_model(name), make_model(name, attention="sdpa")
    requests = make_requests(7, temperature=0.0, max_new_tokens=20, stop_token_ids=())
    samples = by_index(make_engine(4, model).generate(requests))
    for request in requests:
        prompt = torch.tensor([request.prompt])
        out = plain.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=20,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        assert samples[request.index].tokens == out[0, len(request.prompt) :].tolist()
        assert samples[request.index].finish_reason == "length"


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_log_probs_equal_a_full_forward(name, dtype, tolerance):
    requests = make_requests(24)
    plain = make_model(name, dtype, attention="sdpa")
    samples = by_index(make_engine(8, make_model(name, dtype)).generate(requests))
    assert sorted(samples) == list(range(24))
    for request in requests:
        sample, start = samples[request.index], len(request.prompt) - 1
        with torch.no_grad():
            logits = plain(torch.tensor([request.prompt + sample.tokens])).logits[0, start:-1]
        expected = distribution(logits, request.sampling).gather(1, torch.tensor(sample.tokens)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(sample.log_probs, dtype=dtype), expected, rtol=0, atol=tolerance)


def test_a_sample_does_not_depend_on_what_it_is_batched_with():
    requests, model = make_requests(40), make_model()
    whole = by_index(make_engine(64, model).generate(requests))
    shuffled = random.Random(0).sample(requests, len(requests))
    for engine in (make_engine(2, model), make_engine(7, model), make_engine(64, model, prefill_tokens=1)):
        other = by_index(engine.generate(shuffled))
        assert {i: s.tokens for i, s in other.items()} == {i: s.tokens for i, s in whole.items()}
        for i, sample in other.items():
            assert sample.log_probs == pytest.approx(whole[i].log_probs, abs=1e-10)
    engine = make_engine(64, model)
    for request in requests[:10]:
        (alone,) = engine.generate([request])
        assert alone.tokens == whole[request.index].tokens


def test_rows_that_move_between_blocks_stay_themselves():
    requests, model = make_requests(130), make_model(dtype=torch.float64)
    many, few = (by_index(make_engine(n, model).generate(requests)) for n in (70, 9))
    assert {i: s.tokens for i, s in many.items()} == {i: s.tokens for i, s in few.items()}


def test_seeds_make_the_difference():
    params = [SamplingParams(12, seed=seed) for seed in (5, 5, 6)]
    samples = by_index(make_engine().generate(Request(i, [1, 2, 3], p) for i, p in enumerate(params)))
    assert samples[0].tokens == samples[1].tokens != samples[2].tokens


def test_stop_tokens_end_a_sample_and_are_part_of_it():
    free = make_requests(12, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=12, stop_token_ids=())
    stopping = make_requests(12, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=12, stop_token_ids=(3,))
    engine = make_engine()
    long, short = by_index(engine.generate(free)), by_index(engine.generate(stopping))
    for i, sample in long.items():
        assert (len(sample.tokens), sample.finish_reason) == (12, "length")
        cut = next((t + 1 for t, token in enumerate(sample.tokens) if token == 3), None)
        assert short[i].tokens == sample.tokens[:cut]
        assert short[i].finish_reason == ("length" if cut is None else "stop")
        assert len(short[i].log_probs) == len(short[i].tokens)
    assert {sample.finish_reason for sample in short.values()} == {"stop", "length"}


def test_samples_come_out_as_they_finish_and_requests_go_in_as_slots_free():
    taken: list[int] = []

    def source():
        for i, length in enumerate([50, 3, 20, 9, 5, 1]):
            taken.append(i)
            yield Request(i, [i + 1, 2], SamplingParams(length))

    samples = make_engine(3).generate(source())
    assert next(samples).index == 1
    assert taken == [0, 1, 2]
    assert [sample.index for sample in samples] == [3, 4, 5, 2, 0]


def test_no_requests_no_samples():
    assert list(make_engine().generate([])) == []


def test_two_generations_at_once_do_not_disturb_each_other():
    engine, requests = make_engine(4), make_requests(8)
    expected = by_index(make_engine(4).generate(requests))
    one, two = engine.generate(requests), engine.generate(reversed(requests))
    pairs = list(zip(one, two, strict=True))
    assert by_index(a for a, _ in pairs) == expected
    assert {i: s.tokens for i, s in by_index(b for _, b in pairs).items()} == {i: s.tokens for i, s in expected.items()}


def test_autograd_is_as_it_was_between_samples():
    samples = make_engine().generate(make_requests(3))
    next(samples)
    assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled()


@pytest.mark.parametrize(
    ("prompt", "most", "message"),
    [([], 4, "prompt is empty"), ([1] * 90, 11, "max_length 100"), ([1, 50], 4, r"0\.\.49"), ([-1], 4, r"0\.\.49")],
)
def test_a_request_that_cannot_be_held_is_refused(prompt, most, message):
    good = Request(0, [1], SamplingParams(2))
    with pytest.raises(DataError, match=f"request 7.*{message}"):
        list(make_engine().generate([good, Request(7, prompt, SamplingParams(most))]))


def test_a_request_that_just_fits_is_drawn():
    (sample,) = make_engine().generate([Request(0, [1] * 90, SamplingParams(10))])
    assert len(sample.tokens) == 10


@pytest.mark.parametrize("tied", [True, False])
def test_loaded_weights_are_those_generated_with(tied):
    new = make_model(seed=1, dtype=torch.float32, tie_word_embeddings=tied)
    old = make_model(seed=0, dtype=torch.float64, tie_word_embeddings=tied)
    engine, requests = make_engine(model=old), make_requests(6)
    before = by_index(engine.generate(requests))
    for weights in (new.state_dict().items(), new.named_parameters()):  # with the tied head, and without
        engine.load_weights(weights)
        after = by_index(engine.generate(requests))
        assert after == by_index(make_engine(model=new.double()).generate(requests))
        assert after != before


def test_weights_that_do_not_fit_are_refused():
    engine = make_engine()
    weights = {name: tensor.clone() for name, tensor in make_model().state_dict().items()}
    with pytest.raises(ModelError, match=r"no weight 'model.norm.wieght' \(did you mean 'model.norm.weight'"):
        engine.load_weights([("model.norm.wieght", weights["model.norm.weight"])])
    with pytest.raises(ModelError, match=r"shape \(1,\), the rollout model's \(32,\)"):
        engine.load_weights([("model.norm.weight", torch.zeros(1))])
    del weights["model.norm.weight"]
    with pytest.raises(ModelError, match=r"1 of the rollout model's weights did not come, 'model.norm.weight'"):
        engine.load_weights(weights.items())


def test_nan_weights_are_an_error_and_leave_the_engine_usable():
    engine, good = make_engine(), make_model().state_dict()
    expected = by_index(engine.generate(make_requests(4)))
    engine.load_weights((name, tensor * torch.nan) for name, tensor in good.items())
    with pytest.raises(ModelError, match="logits are NaN"):
        list(engine.generate(make_requests(4)))
    engine.load_weights(good.items())
    assert by_index(engine.generate(make_requests(4))) == expected


def test_the_cache_is_sized_by_need_kept_and_released():
    engine = make_engine(64, max_length=400)
    cell = 2 * 2 * 2 * 8 * 8  # layers, keys and values, heads, size, bytes
    assert engine.cache_bytes == 0
    list(engine.generate([Request(i, [1, 2], SamplingParams(10)) for i in range(5)]))
    assert engine.cache_bytes == 5 * 32 * cell
    list(engine.generate([Request(i, [1, 2], SamplingParams(10)) for i in range(2)]))
    assert engine.cache_bytes == 5 * 32 * cell
    list(engine.generate([Request(0, [1, 2], SamplingParams(63))]))
    assert engine.cache_bytes == 5 * 96 * cell
    engine.release()
    assert engine.cache_bytes == 0
    list(engine.generate([Request(0, [1, 2], SamplingParams(10))]))
    engine.close()
    assert engine.cache_bytes == 0


def test_a_cache_that_grows_keeps_the_rows_in_flight():
    model = make_model()
    requests = [Request(i, [1 + i, 2, 3], SamplingParams(n, seed=i)) for i, n in enumerate([25, 3, 90, 60])]
    together = by_index(make_engine(2, model).generate(requests))
    one_by_one = {r.index: next(make_engine(1, model).generate([r])).tokens for r in requests}
    assert {i: s.tokens for i, s in together.items()} == one_by_one


def test_bfloat16_generates_and_reports_what_it_drew():
    requests = make_requests(20, temperature=1.0, top_k=0, top_p=1.0)
    model = make_model(dtype=torch.bfloat16, initializer_range=0.1)
    samples = by_index(make_engine(8, model).generate(requests))
    plain = make_model(dtype=torch.bfloat16, initializer_range=0.1, attention="sdpa")
    for request in requests:
        sample, start = samples[request.index], len(request.prompt) - 1
        with torch.no_grad():
            logits = plain(torch.tensor([request.prompt + sample.tokens])).logits[0, start:-1]
        expected = logits.float().log_softmax(-1).gather(1, torch.tensor(sample.tokens)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(sample.log_probs), expected, rtol=0, atol=0.1)


def test_models_that_the_engine_cannot_run_are_refused():
    with pytest.raises(ModelError, match="attn_implementation='hybridrl', not 'sdpa'"):
        make_engine(model=make_model(attention="sdpa"))
    with pytest.raises(ModelError, match="sliding window of 64 tokens"):
        make_engine(model=make_model(use_sliding_window=True, sliding_window=64, max_window_layers=0))
    with pytest.raises(ConfigError, match="exceeds the 512 positions"):
        make_engine(max_length=513)
    with pytest.raises(ConfigError, match="max_batch must be at least 1"):
        NativeConfig(max_length=8, max_batch=0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_samples_are_those_of_the_cpu():
    requests = make_requests(20)
    expected = by_index(make_engine(8).generate(requests))
    samples = by_index(make_engine(8, make_model().cuda()).generate(requests))
    for i, sample in samples.items():
        assert sample.tokens == expected[i].tokens
        assert sample.log_probs == pytest.approx(expected[i].log_probs, abs=1e-9)
