"""Unpatched transformers models over packed rows: what a head says of the tokens asked about.

What concerns token t is computed from the hidden state before it, t - 1 of the same row; no other module shifts anything.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForTokenClassification, PreTrainedModel

from hybridrl.algorithms.entropy import log_probs_and_entropy
from hybridrl.parallel.attention import ATTENTION, PackedRows
from hybridrl.protocol.errors import ConfigError, ModelError

Precision = Literal["float32", "bfloat16", "float64"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A Hugging Face model and how it is computed."""

    path: str
    """Folder of a Hugging Face model."""
    precision: Precision = "float32"
    """float32; bfloat16: mixed precision, float32 weights; float64: for exactness checks."""
    activation_checkpointing: bool = False
    """Recompute activations in the backward pass."""
    micro_batch_tokens: int = 8192
    """Tokens per micro-batch. Changes memory and speed, never the result."""

    def __post_init__(self) -> None:
        if self.micro_batch_tokens < 1:
            raise ConfigError(f"micro_batch_tokens must be at least 1, not {self.micro_batch_tokens}")


def load_causal_lm(config: ModelConfig) -> PreTrainedModel:
    return _load(AutoModelForCausalLM, config)


def load_value_model(config: ModelConfig) -> PreTrainedModel:
    """The backbone with a one-number head on every token, dropout off: an untrained head if the folder holds none."""
    return _load(AutoModelForTokenClassification, config, num_labels=1, classifier_dropout=0.0)


def check_model(path: str) -> None:
    """ModelError, with the fix, if no model can be read from this folder. Reads its configuration only."""
    folder = Path(path)
    if not (folder / "config.json").is_file():
        what = "does not exist" if not folder.exists() else "holds no config.json"
        raise ModelError(f"no Hugging Face model at '{path}': it {what}; give the folder that save_pretrained wrote")
    if not [*folder.glob("*.safetensors"), *folder.glob("*.safetensors.index.json"), *folder.glob("pytorch_model*.bin")]:
        raise ModelError(f"no Hugging Face model at '{path}': it has a config.json but no weights; save the model there again")


def _load(loader: Any, config: ModelConfig, **settings: Any) -> PreTrainedModel:
    check_model(config.path)
    dtype = torch.float64 if config.precision == "float64" else torch.float32
    try:
        settings_of_model = AutoConfig.from_pretrained(config.path, **settings)
        model = loader.from_pretrained(config.path, config=settings_of_model, dtype=dtype, attn_implementation=ATTENTION)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"the model at '{config.path}' cannot be loaded: {error}") from error
    model.config.use_cache = False
    return model


def compute_in(precision: Precision, device: str) -> AbstractContextManager[Any]:
    """The context in which forward passes of this precision run."""
    return torch.autocast(device, dtype=torch.bfloat16) if precision == "bfloat16" else nullcontext()


class PackedModel(nn.Module):
    """A model's backbone over packed rows; subclasses put a head on it."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def hidden(self, tokens_T: Tensor, rows: PackedRows) -> Tensor:
        """(T, hidden) last hidden states."""
        output = self.model.base_model(tokens_T[None], position_ids=rows.positions_T[None], view=rows, use_cache=False)
        return output.last_hidden_state[0]


_HEAD_TOKENS = 2048


class PackedCausalLM(PackedModel):
    """Log-probabilities and entropies; at most `_HEAD_TOKENS` x V logits exist at any time, in the backward pass too."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        _check_head(self)

    def forward(self, tokens_T: Tensor, rows: PackedRows, index_S: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
        """(S,) log-probabilities of the tokens at `index_S` at this temperature, and (S,) entropies in nats."""
        before_SH = self.hidden(tokens_T, rows)[index_S - 1]
        targets_S = tokens_T[index_S]
        parts = [
            self._head(hidden, targets, temperature)
            for hidden, targets in zip(before_SH.split(_HEAD_TOKENS), targets_S.split(_HEAD_TOKENS), strict=True)
        ]
        return torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])

    def _head(self, hidden_SH: Tensor, targets_S: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        def head(hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
            return log_probs_and_entropy(self.model.get_output_embeddings()(hidden), targets, temperature)

        if torch.is_grad_enabled():
            return checkpoint(head, hidden_SH, targets_S, use_reentrant=False)
        return head(hidden_SH, targets_S)


def _check_head(packed: PackedCausalLM) -> None:
    """Refuse an architecture that does more than its output embeddings between hidden states and logits: they would be wrong here."""
    device = next(packed.parameters()).device
    tokens, rows = torch.arange(2, device=device), PackedRows.of([2], device)
    with torch.no_grad():
        theirs = packed.model(tokens[None], position_ids=rows.positions_T[None], view=rows, use_cache=False).logits[0]
        ours = packed.model.get_output_embeddings()(packed.hidden(tokens, rows))
    if not torch.allclose(theirs, ours, rtol=1e-3, atol=1e-3):
        raise ModelError(
            f"{type(packed.model).__name__} changes its logits after the output embeddings (soft-capping or scaling), "
            "which is not supported; use an architecture without it (Llama, Qwen2, Qwen3, Mistral, ...)"
        )


class PackedValueModel(PackedModel):
    """One number per token asked about: the value of the state in which it is chosen."""

    def forward(self, tokens_T: Tensor, rows: PackedRows, index_S: Tensor) -> Tensor:
        """(S,) values."""
        return self.model.score(self.hidden(tokens_T, rows)[index_S - 1]).squeeze(-1).float()
