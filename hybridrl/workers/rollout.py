"""The hybrid engine: one rank's rollout engine beside the model it generates for, and the way of weights from one to the other.

Invariant: samples are drawn with the weights of the last update. The trainer's weight version is compared before every
generation, and a change is streamed in bounded buckets; where the engine can use the trainer's own tensors, nothing moves
at all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel

from hybridrl.parallel.gather import whole_parameters
from hybridrl.protocol.batch import Batch, from_values, lengths_of, ragged
from hybridrl.protocol.errors import ConfigError, at_least
from hybridrl.rollout.engine import Request, RolloutEngine, Sample, SamplingParams
from hybridrl.workers.base import RankContext
from hybridrl.workers.packed_model import ModelConfig, load_causal_lm


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutConfig:
    """How responses are drawn, by whichever engine."""

    max_new_tokens: int = 256
    """Response tokens at most."""
    temperature: float = 1.0
    """Softmax temperature while training; held-out evaluation is greedy."""
    top_p: float = 1.0
    """Nucleus: tokens that make up this much probability; 1 is all."""
    top_k: int = 0
    """The k most likely tokens; 0 is all."""
    max_length: int = 1024
    """Prompt and response tokens at most: the length of a row of the key-value cache."""
    max_batch: int = 256
    """Samples decoded at once."""
    precision: Literal["float32", "bfloat16"] = "bfloat16"
    """Of the engine's weights and cache."""

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise ConfigError(f"temperature must be over 0, not {self.temperature}: the policy's gradient needs its density")
        at_least(self, max_batch=1)
        if self.max_length <= self.max_new_tokens:
            raise ConfigError(
                f"max_length must be over max_new_tokens={self.max_new_tokens}, not {self.max_length}: the prompt counts too"
            )
        SamplingParams(self.max_new_tokens, self.temperature, self.top_p, self.top_k)


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeRollout(RolloutConfig):
    """The engine in torch, over the model that trains."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VLLMRollout(RolloutConfig):
    """vLLM in the rank's own process."""

    kv_cache_gib: float = 1.0
    """Size of the key-value cache."""
    enforce_eager: bool = True
    """Neither compile nor capture."""


class HybridEngine:
    """The rollout engine of one rank, for the trainer's `model`."""

    def __init__(self, config: RolloutConfig, model_config: ModelConfig, model: PreTrainedModel, context: RankContext) -> None:
        self._config, self._model, self._context = config, model, context
        self._stop = _stop_tokens(model_config.path, model)
        self._shared = False
        self._version = 0
        self._engine = self._make(config, model_config)

    def _make(self, config: RolloutConfig, model_config: ModelConfig) -> RolloutEngine:
        if isinstance(config, VLLMRollout):
            from hybridrl.rollout.vllm import VLLMConfig, VLLMEngine

            settings = VLLMConfig(
                config.max_length, config.max_batch, config.precision, config.kv_cache_gib, config.enforce_eager
            )
            return VLLMEngine(model_config.path, settings)
        from hybridrl.rollout.native import NativeConfig, NativeEngine

        dtype = getattr(torch, config.precision)
        self._shared = self._context.layout.world == 1 and self._model.dtype == dtype
        model = self._model
        if not self._shared:
            model = load_causal_lm(model_config)
            torch.nn.Module.to(model, device=self._context.device, dtype=dtype)
        return NativeEngine(model, NativeConfig(config.max_length, config.max_batch))

    def generate(self, prompts: Batch, version: int, temperature: float | None) -> dict[str, Tensor]:
        """Columns `tokens` (prompt + response), `response_mask` and `rollout_log_probs`, for rows of `prompts` and `seed`."""
        self._bring_up_to(version)
        requests = [
            Request(row, prompt.tolist(), self._sampling(int(seed), temperature))
            for row, (prompt, seed) in enumerate(zip(prompts["prompts"].unbind(), prompts["seed"], strict=True))
        ]
        samples = sorted(self._engine.generate(requests), key=lambda sample: sample.index)
        return _columns(prompts, samples)

    def _sampling(self, seed: int, temperature: float | None) -> SamplingParams:
        config = self._config
        if temperature == 0:
            return SamplingParams(config.max_new_tokens, 0.0, stop_token_ids=self._stop)
        heat = config.temperature if temperature is None else temperature
        return SamplingParams(config.max_new_tokens, heat, config.top_p, config.top_k, seed, self._stop)

    def _bring_up_to(self, version: int) -> None:
        if version != self._version and not self._shared:
            dtype = getattr(torch, self._config.precision)
            self._engine.load_weights(whole_parameters(self._model, dtype))
        self._version = version

    def close(self) -> None:
        self._engine.close()


def _columns(prompts: Batch, samples: list[Sample]) -> dict[str, Tensor]:
    prompt_lengths = lengths_of(prompts["prompts"]).tolist()
    tokens = [
        torch.cat([prompt, torch.tensor(sample.tokens, dtype=torch.int64)])
        for prompt, sample in zip(prompts["prompts"].unbind(), samples, strict=True)
    ]
    log_probs = [
        torch.cat([torch.zeros(length), torch.tensor(sample.log_probs)])
        for length, sample in zip(prompt_lengths, samples, strict=True)
    ]
    column = ragged(tokens, torch.int64)
    lengths = lengths_of(column)
    within = torch.arange(int(lengths.sum())) - torch.repeat_interleave(lengths.cumsum(0) - lengths, lengths)
    mask = within >= torch.repeat_interleave(torch.tensor(prompt_lengths, dtype=torch.int64), lengths)
    return {
        "tokens": column,
        "response_mask": from_values(mask, lengths),
        "rollout_log_probs": ragged(log_probs, torch.float32),
    }


def _stop_tokens(path: str, model: PreTrainedModel) -> tuple[int, ...]:
    """The tokens that end a response: the generation configuration's, or the tokenizer's end of text."""
    configured = model.generation_config.eos_token_id if model.generation_config is not None else None
    if configured is None:
        configured = AutoTokenizer.from_pretrained(path).eos_token_id
    if configured is None:
        raise ConfigError(f"the model at '{path}' names no end-of-text token; set eos_token_id in its generation_config.json")
    return tuple(configured) if isinstance(configured, list) else (configured,)
