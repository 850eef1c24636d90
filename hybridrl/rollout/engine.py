"""The engine protocol: what a rollout engine is asked for, and what it answers.

An engine turns prompts into responses and hands each one out as it finishes. It holds weights of its own (or shares the
trainer's), and takes new ones by Hugging Face parameter name. One engine serves one generation replica.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from hybridrl.protocol.errors import ConfigError


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one sample is drawn. `temperature` 0 is greedy; `top_k` 0 and `top_p` 1 leave the distribution whole.

    `seed` fixes the sample: equal prompt, weights and seed give equal tokens, whatever it is batched with.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ConfigError(f"max_new_tokens must be at least 1, not {self.max_new_tokens}")
        if self.temperature < 0:
            raise ConfigError(f"temperature must be 0 (greedy) or more, not {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p must be over 0 and at most 1, not {self.top_p}")
        if self.top_k < 0:
            raise ConfigError(f"top_k must be 0 (off) or more, not {self.top_k}")


@dataclass(frozen=True, slots=True)
class Request:
    """One sample to draw. `index` is the caller's and comes back with the sample."""

    index: int
    prompt: list[int]
    sampling: SamplingParams


@dataclass(frozen=True, slots=True)
class Sample:
    """A finished response. `tokens` includes the stop token, if one was drawn.

    `log_probs[i]` is the log-probability of `tokens[i]` under the distribution it was drawn from (after temperature, top-k and
    top-p); for a greedy sample, under the model's own distribution.
    """

    index: int
    tokens: list[int]
    log_probs: list[float]
    finish_reason: Literal["stop", "length"]


class RolloutEngine(Protocol):
    """What `native` and `vllm` both are."""

    def generate(self, requests: Iterable[Request]) -> Iterator[Sample]:
        """Draw every request; yield each sample as it finishes, in any order."""

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Take new weights, named as in the model's Hugging Face state dict, whole tensors in any order.

        The iterable is consumed one tensor at a time and no tensor is kept: the caller frees it when the next is asked for.
        """

    def close(self) -> None:
        """Free what the engine holds."""
