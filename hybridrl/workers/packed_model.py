"""Unpatched transformers models over packed rows: what a head says of the tokens asked about.

What concerns token t is computed from the hidden state before it, t - 1 of the same row; no other module shifts anything.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForTokenClassification, PreTrainedModel

from hybridrl.algorithms.entropy import log_probs_and_entropy
from hybridrl.parallel.attention import ATTENTION, PackedRows
from hybridrl.protocol.errors import ModelError, at_least
from hybridrl.workers.model_checks import attention_window, check_backbone, check_head

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
        at_least(self, micro_batch_tokens=1)


def load_causal_lm(config: ModelConfig) -> PreTrainedModel:
    return _load(AutoModelForCausalLM, config)


def load_value_model(config: ModelConfig) -> PreTrainedModel:
    """The backbone with a one-number head on every token, dropout off: an untrained head if the folder holds none."""
    model = _load(AutoModelForTokenClassification, config, ("score.",), num_labels=1, classifier_dropout=0.0)
    if not hasattr(model, "score"):
        raise ModelError(f"{type(model).__name__} keeps its head elsewhere than in `score`; use another architecture")
    return model


def check_model(path: str) -> None:
    """ModelError, with the fix, if no model can be read from this folder. Reads its configuration only."""
    folder = Path(path)
    if not (folder / "config.json").is_file():
        what = "does not exist" if not folder.exists() else "holds no config.json"
        raise ModelError(f"no Hugging Face model at '{path}': it {what}; give the folder that save_pretrained wrote")
    if not [*folder.glob("*.safetensors"), *folder.glob("*.safetensors.index.json"), *folder.glob("pytorch_model*.bin")]:
        raise ModelError(f"no Hugging Face model at '{path}': it has a config.json but no weights; save the model there again")


def _load(loader: Any, config: ModelConfig, untrained: tuple[str, ...] = (), **settings: Any) -> PreTrainedModel:
    """All weights have to be in the folder, except those whose names start with one of `untrained`."""
    check_model(config.path)
    dtype = torch.float64 if config.precision == "float64" else torch.float32
    try:
        model, report = loader.from_pretrained(
            config.path,
            config=AutoConfig.from_pretrained(config.path, **settings),
            dtype=dtype,
            attn_implementation=ATTENTION,
            output_loading_info=True,
        )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise ModelError(f"the model at '{config.path}' cannot be loaded: {error}") from error
    missing = sorted(name for name in report["missing_keys"] if not name.startswith(untrained))
    if missing:
        raise ModelError(
            f"the weights at '{config.path}' lack {len(missing)} of {type(model).__name__}'s, '{missing[0]}' among them; "
            "give the folder of a complete model"
        )
    check_backbone(model)
    return model


def compute_in(precision: Precision, device: str) -> AbstractContextManager[Any]:
    """The context in which forward passes of this precision run."""
    return torch.autocast(device, dtype=torch.bfloat16) if precision == "bfloat16" else nullcontext()


class PackedModel(nn.Module):
    """A model's backbone over packed rows; subclasses put a head on it."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        self._window = attention_window(model)

    def hidden(self, tokens_T: Tensor, rows: PackedRows) -> Tensor:
        """(T, hidden) last hidden states."""
        if self._window is not None and rows.longest > self._window:
            raise ModelError(
                f"a row of {rows.longest} tokens is longer than the {self._window} that {type(self.model).__name__} attends to "
                "at once, which is not supported; use shorter prompts and responses"
            )
        output = self.model.base_model(tokens_T[None], position_ids=rows.positions_T[None], view=rows, use_cache=False)
        return output.last_hidden_state[0]


_HEAD_TOKENS = 2048


class PackedCausalLM(PackedModel):
    """Log-probabilities and entropies; at most `_HEAD_TOKENS` x V logits exist at any time, in the backward pass too."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        check_head(model)

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


class PackedValueModel(PackedModel):
    """One number per token asked about: the value of the state in which it is chosen."""

    def forward(self, tokens_T: Tensor, rows: PackedRows, index_S: Tensor) -> Tensor:
        """(S,) values."""
        hidden_SH = self.hidden(tokens_T, rows)[index_S - 1]
        values_S = self.model.get_submodule("score")(hidden_SH).squeeze(-1)
        # A copy, and not a view: FSDP hooks the backward pass on what the root returns.
        return values_S.to(torch.promote_types(values_S.dtype, torch.float32), copy=True)
