"""Refuses, as it is loaded, a model that would be computed wrongly here: silence would cost a run.

Packed rows run through an architecture's own layers but our attention and our use of its head. Instead of a list of known
architectures, a few tokens go through both ways.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hybridrl.parallel.attention import ATTENTION, PackedRows
from hybridrl.protocol.errors import ModelError

_TOLERANCE = 1e-3
"""Of the largest hidden state. Rounding in float32 is far below it, a token that sees others than it should far above."""
_ROWS, _LENGTH = 2, 3


def check_backbone(model: PreTrainedModel) -> None:
    """ModelError unless packed rows give the hidden states that each row has alone under transformers' own attention, in
    training mode too. Attention windows, longer than these rows, are `attention_window`'s."""
    name, tokens_BT = type(model).__name__, _tokens(model)
    try:
        packed = _hidden(model, tokens_BT)
    except (TypeError, AttributeError, ValueError) as error:
        raise ModelError(
            f"{name} does not take its attention from transformers' AttentionInterface ({error}); "
            "use an architecture that does (Llama, Qwen2, Qwen3, Mistral, ...)"
        ) from error
    model.set_attn_implementation("eager")
    with torch.no_grad():
        apart = model.base_model(tokens_BT, use_cache=False).last_hidden_state.flatten(0, 1)
    model.set_attn_implementation(ATTENTION)
    if not _close(packed, apart):
        raise ModelError(
            f"{name} attends otherwise than causally within its row (to later tokens, by distance, or by a mask of its own), "
            "which is not supported; use an architecture that does (Llama, Qwen2, Qwen3, Mistral, ...)"
        )
    model.train()
    training = _hidden(model, tokens_BT)
    model.eval()
    if not _close(training, packed):
        raise ModelError(
            f"{name} computes at random while it trains, so that policy ratios are not those of the policy: "
            "set the dropout settings in its config.json to 0"
        )


def check_head(model: PreTrainedModel) -> None:
    """ModelError if more than the output embeddings stands between hidden states and logits (scaling, soft-capping)."""
    seen: list[Tensor] = []

    def swap(_: torch.nn.Module, inputs: tuple[Tensor], output: Tensor) -> Tensor:
        # Soft-capping hardly changes the small logits of an untrained model: these are of a size at which it shows.
        seen.extend([inputs[0], torch.linspace(-100, 100, output.numel()).view_as(output).to(output)])
        return seen[1]

    tokens_BT = _tokens(model)
    rows = PackedRows.of([_LENGTH] * _ROWS, tokens_BT.device)
    with torch.no_grad(), model.get_output_embeddings().register_forward_hook(swap):
        logits = model(tokens_BT.view(1, -1), position_ids=rows.positions_T[None], view=rows, use_cache=False).logits
    if not (_close(seen[0][0], _hidden(model, tokens_BT)) and _close(logits, seen[1])):
        raise ModelError(
            f"{type(model).__name__} changes its logits after the output embeddings (soft-capping or scaling), "
            "which is not supported; use an architecture without it (Llama, Qwen2, Qwen3, Mistral, ...)"
        )


def attention_window(model: PreTrainedModel) -> int | None:
    """How many tokens, itself among them, a token of this model sees at most in some layer; None without such a limit."""
    text = model.config.get_text_config()
    sizes = (getattr(text, name, None) for name in ("sliding_window", "attention_chunk_size"))
    return min((size for size in sizes if size is not None), default=None)


def _tokens(model: PreTrainedModel) -> Tensor:
    vocabulary = model.config.get_text_config().vocab_size
    return (torch.arange(_ROWS * _LENGTH, device=model.device) % vocabulary).view(_ROWS, _LENGTH)


@torch.no_grad()
def _hidden(model: PreTrainedModel, tokens_BT: Tensor) -> Tensor:
    rows = PackedRows.of([_LENGTH] * _ROWS, tokens_BT.device)
    output = model.base_model(tokens_BT.view(1, -1), position_ids=rows.positions_T[None], view=rows, use_cache=False)
    return output.last_hidden_state[0]


def _close(a: Tensor, b: Tensor) -> bool:
    return bool((a - b).abs().max() <= _TOLERANCE * b.abs().max())
