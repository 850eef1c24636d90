"""vLLM itself, on a two-layer model in float32. One engine for the module; the ranks boot theirs in processes of their own."""

import importlib.util
import os
import random
import socket
import subprocess
import sys
import time

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from hybridrl.environment import rank_environment
from hybridrl.protocol.errors import ConfigError, HybridRLError, ModelError
from hybridrl.rollout.engine import Request, SamplingParams
from hybridrl.rollout.vllm import VLLMConfig, VLLMEngine

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]

VOCABULARY, EOS, MAX_LENGTH = 64, 1, 320
PROMPTS = [[5, 9, 13], [2], [40, 41, 42, 43, 44, 45, 46], [60, 3]]


def make_model(path):
    torch.manual_seed(0)
    shape = {"vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 512}
    # A wide initialisation, so that the distributions are far from uniform; a tied head, the harder case for new weights.
    config = Qwen2Config(**shape, **heads, initializer_range=0.25, tie_word_embeddings=True, eos_token_id=EOS, bos_token_id=0)
    Qwen2ForCausalLM(config).save_pretrained(path)


def load_model(path):
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("vllm") / "model"
    make_model(path)
    return path


@pytest.fixture(scope="module")
def model(path):
    return load_model(path)


@pytest.fixture(scope="module")
def engine(path):
    before = torch.random.get_rng_state(), random.getstate()
    engine = VLLMEngine(str(path), VLLMConfig(max_length=MAX_LENGTH, max_batch=16, dtype="float32", kv_cache_gib=0.1))
    assert torch.equal(torch.random.get_rng_state(), before[0]) and random.getstate() == before[1]
    yield engine
    engine.close()
    engine.close()
    assert not torch.distributed.is_initialized()


def requests(prompts=PROMPTS, **sampling):
    return [Request(i, prompt, SamplingParams(24, seed=i, **sampling)) for i, prompt in enumerate(prompts)]


def drawn(engine, requests):
    samples = {sample.index: sample for sample in engine.generate(requests)}
    assert len(samples) == len(requests)
    return [samples[request.index] for request in requests]


def scored(model, request, sample):
    """The log-probabilities (T,) that `model` gives to the sample's tokens."""
    tokens = torch.tensor([request.prompt + sample.tokens])
    with torch.no_grad():
        logits = model(tokens).logits[0, len(request.prompt) - 1 : -1]
    sampling = request.sampling
    if sampling.temperature:
        logits = logits / sampling.temperature
    if sampling.top_k:
        logits = logits.masked_fill(logits < logits.topk(sampling.top_k).values[:, -1:], -torch.inf)
    return logits.log_softmax(-1).gather(-1, torch.tensor(sample.tokens)[:, None]).squeeze(-1)


def gap(model, requests, samples):
    """The largest difference between an engine's log-probability and the model's."""
    gaps = [
        (scored(model, request, sample) - torch.tensor(sample.log_probs)).abs().max()
        for request, sample in zip(requests, samples, strict=True)
    ]
    return torch.stack(gaps).max().item()


def test_greedy_equals_transformers(engine, model):
    batch = requests(temperature=0.0)
    for request, sample in zip(batch, drawn(engine, batch), strict=True):
        tokens = torch.tensor([request.prompt])
        expected = model.generate(tokens, max_new_tokens=24, do_sample=False, eos_token_id=None, pad_token_id=0)
        assert sample.tokens == expected[0, len(request.prompt) :].tolist()


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.7}, {"top_k": 5, "temperature": 1.3}, {"temperature": 0.0}])
def test_log_probs_are_of_the_distribution_drawn_from(engine, model, sampling):
    batch = requests(**sampling)
    assert gap(model, batch, drawn(engine, batch)) < 1e-4


def test_each_request_of_a_batch_keeps_its_own_distribution(engine, model):
    kinds = [{"temperature": 0.0}, {"temperature": 0.5}, {"top_k": 3}, {"temperature": 2.0}]
    batch = [Request(i, PROMPTS[0], SamplingParams(24, seed=i, **kind)) for i, kind in enumerate(kinds)]
    assert gap(model, batch, drawn(engine, batch)) < 1e-4


def test_top_p_draws_from_the_nucleus(engine, model):
    batch = requests(top_p=0.5)
    for request, sample in zip(batch, drawn(engine, batch), strict=True):
        whole = scored(model, request, sample)
        assert (torch.tensor(sample.log_probs) > whole).all()  # renormalised over half of the mass or little more
        assert (torch.tensor(sample.log_probs) < whole - torch.log(torch.tensor(0.5)) + 1e-4).all()


def test_a_sample_depends_on_its_seed_alone(engine):
    batch = requests(PROMPTS * 10)  # more than max_batch
    samples = drawn(engine, batch)
    assert len({tuple(sample.tokens) for sample in samples}) == len(batch)
    assert [sample.tokens for sample in drawn(engine, batch[::-1])] == [sample.tokens for sample in samples[::-1]]
    assert drawn(engine, batch[7:8])[0].tokens == samples[7].tokens
    (other,) = drawn(engine, [Request(0, PROMPTS[0], SamplingParams(24, seed=-1))])
    assert drawn(engine, [Request(0, PROMPTS[0], SamplingParams(24, seed=-1))])[0].tokens == other.tokens != samples[0].tokens


def test_samples_come_as_they_finish(engine):
    batch = [Request(7 - i, PROMPTS[0], SamplingParams(length, seed=i)) for i, length in enumerate([30, 5, 20, 1])]
    samples = list(engine.generate(iter(batch)))
    assert [(sample.index, len(sample.tokens)) for sample in samples] == [(4, 1), (6, 5), (5, 20), (7, 30)]
    assert {sample.finish_reason for sample in samples} == {"length"}


def test_only_the_stop_tokens_stop_and_they_are_kept(engine):
    free = drawn(engine, requests(PROMPTS * 8))
    assert all(len(sample.tokens) == 24 for sample in free) and any(EOS in sample.tokens for sample in free)
    stops = (17, free[0].tokens[10])
    for sample, whole in zip(drawn(engine, requests(PROMPTS * 8, stop_token_ids=stops)), free, strict=True):
        end = next((t + 1 for t, token in enumerate(whole.tokens) if token in stops), None)
        assert sample.tokens == whole.tokens[:end] and len(sample.log_probs) == len(sample.tokens)
        assert sample.finish_reason == ("length" if end is None else "stop")


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request(3, [2] * 300, SamplingParams(21)), "request 3 may take 321 tokens .* max_length is 320"),
        (Request(3, [], SamplingParams(1)), "empty prompt"),
        (Request(3, [2], SamplingParams(1, temperature=0.001)), "temperature 0.01 or more, not 0.001"),
    ],
)
def test_what_cannot_be_drawn_as_asked_is_refused(engine, request_, message):
    with pytest.raises(ConfigError, match=message):
        engine.generate([*requests(), request_])
    assert len(drawn(engine, [Request(0, [2] * 300, SamplingParams(20))])[0].tokens) == 20


def test_what_cannot_boot_is_refused(path, tmp_path):
    with pytest.raises(ConfigError, match=r"(?s)vLLM refuses VLLMConfig\(max_length=4096.*max_position_embeddings"):
        VLLMEngine(str(path), VLLMConfig(max_length=4096))
    with pytest.raises(ModelError, match=f"{tmp_path} holds no causal language model"):
        VLLMEngine(str(tmp_path), VLLMConfig(max_length=64))


def test_an_iterator_left_early_aborts_its_requests(engine, model):
    samples = engine.generate([Request(i, PROMPTS[0], SamplingParams(5 + 20 * i)) for i in range(3)])
    assert next(samples).index == 0
    for call in (lambda: engine.generate(requests()), lambda: engine.load_weights([])):
        with pytest.raises(HybridRLError, match="close the last iterator"):
            call()
    samples.close()
    assert gap(model, requests(), drawn(engine, requests())) < 1e-4


def perturbed(path):
    model = load_model(path)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def through_one_buffer(model):
    """The weights, each in the same buffer, as a caller with a bounded bucket gives them."""
    buffer = torch.empty(max(parameter.numel() for parameter in model.parameters()))
    for name, parameter in model.named_parameters():
        yield name, buffer[: parameter.numel()].view_as(parameter).copy_(parameter.detach())


def test_new_weights_replace_the_old_ones(engine, model, path):
    other = perturbed(path)
    batch = requests([*PROMPTS, [(7 * i) % VOCABULARY for i in range(260)]])  # the last is long enough for the prefix cache
    drawn(engine, batch)
    engine.load_weights(through_one_buffer(other))
    samples = drawn(engine, batch)
    assert gap(other, batch, samples) < 1e-4
    assert gap(model, batch, samples) > 0.1
    engine.load_weights(model.state_dict().items())  # with the tied head's name beside the embedding's
    assert gap(model, batch, drawn(engine, batch)) < 1e-4


def test_weights_that_do_not_fit_are_refused(engine, model):
    named = dict(model.named_parameters())
    with pytest.raises(ModelError, match=r"not given 2 parameters \(model.layers.0.self_attn.k_proj.weight, ...\)"):
        engine.load_weights((name, tensor) for name, tensor in named.items() if "0.self_attn.k_proj" not in name)
    with pytest.raises(ModelError, match=r"'model.norm.wight', which .* \(did you mean 'model.norm.weight'\?\)"):
        engine.load_weights([("model.norm.wight", named["model.norm.weight"])])
    engine.load_weights(named.items())
    assert gap(model, requests(), drawn(engine, requests())) < 1e-4


RANK_PROGRAM = """
import sys, torch, torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from tests_vllm import *

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, path = dist.get_rank(), sys.argv[1]
model = perturbed(path)
trained = fully_shard(perturbed(path))
config = VLLMConfig(max_length=64, max_batch=8, dtype="float32", kv_cache_gib=0.05)

engine = VLLMEngine(path, config)
batch = requests(PROMPTS[: 2 + rank])  # the ranks draw different amounts
assert gap(load_model(path), batch, drawn(engine, batch)) < 1e-4
engine.load_weights((name, parameter.full_tensor()) for name, parameter in trained.named_parameters())
assert gap(model, batch, drawn(engine, batch)) < 1e-4
engine.close()

total = torch.ones(1)
dist.all_reduce(total)  # the group outlives the engine
assert total.item() == 2
loss = trained(torch.tensor([PROMPTS[0]])).logits.sum()
loss.backward()

again = VLLMEngine(path, config)
assert len(drawn(again, batch)) == len(batch)
dist.destroy_process_group()  # with an engine that nobody closed
"""


def gone(group):
    """Whether all processes of a process group end within 5 s."""
    for _ in range(50):
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.1)
    return False


@pytest.mark.timeout(150)
def test_each_rank_of_a_process_group_boots_an_engine_beside_its_shards(path, tmp_path):
    (tmp_path / "tests_vllm.py").symlink_to(__file__)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK_PROGRAM, str(path)],
            env=os.environ
            | rank_environment(rank, 2, rank, "127.0.0.1", port, 1)
            | {"PYTHONPATH": f"{tmp_path}:{os.getcwd()}"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=120)[0] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    for process, output in zip(ranks, outputs, strict=True):
        assert process.returncode == 0, output
        assert "rror" not in output and "Traceback" not in output, output
        assert gone(process.pid)
