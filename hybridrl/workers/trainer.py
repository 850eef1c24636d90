"""Trainer: one model's optimizer and the loop over micro-batches that actor, critic and supervised workers share.

Invariant: a gradient is `sum_t w_t dl_t`, summed over micro-batches and ranks, with `w_t` known before the first of them;
FSDP averages gradients over ranks, so each rank scales its sum by their number. The same number of micro-batches runs on
every rank, because each gathers weights together with the others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import AutoTokenizer

from hybridrl.algorithms.aggregation import Aggregation, token_weights, totals
from hybridrl.parallel.parallelize import parallelize
from hybridrl.protocol.batch import Batch, lengths_of
from hybridrl.protocol.errors import ConfigError, ModelError
from hybridrl.workers.base import RankContext
from hybridrl.workers.packed_model import ModelConfig, PackedModel, compute_in
from hybridrl.workers.packing import MicroBatch, cut, filler, pack, scattered


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerConfig:
    """AdamW (Loshchilov and Hutter, 2019) and its schedule."""

    lr: float = 1e-5
    """Learning rate after warm-up."""
    weight_decay: float = 0.0
    """Decoupled weight decay."""
    beta2: float = 0.999
    """Decay of the second moment."""
    clip_norm: float = 1.0
    """Gradient norm over all ranks is clipped to this; 0 is off."""
    warmup_steps: int = 0
    """Optimizer steps of linear warm-up."""
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    """What the learning rate does after warm-up."""
    total_steps: int = 0
    """Optimizer steps at which cosine and linear schedules end."""

    def __post_init__(self) -> None:
        if not self.lr > 0:
            raise ConfigError(f"lr must be over 0, not {self.lr}")
        if self.clip_norm < 0:
            raise ConfigError(f"clip_norm must be 0 (off) or more, not {self.clip_norm}")
        if self.schedule != "constant" and self.total_steps <= self.warmup_steps:
            raise ConfigError(f"total_steps must be over warmup_steps={self.warmup_steps} for schedule '{self.schedule}'")

    def factor(self, step: int) -> float:
        """The learning rate at optimizer step `step`, over `lr`."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        if self.schedule == "constant":
            return 1.0
        done = min(1.0, (step - self.warmup_steps) / (self.total_steps - self.warmup_steps))
        return 1.0 - done if self.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * done))


Loss = Callable[[MicroBatch, Tensor], tuple[Tensor, Mapping[str, Tensor]]]
"""(micro-batch, weights (S,)) -> loss per masked token (S,), and metrics per masked token (S,)."""


class Trainer:
    """A packed model on the data ranks of `context`, with an optimizer unless `optimizer` is None."""

    def __init__(
        self, root: PackedModel, model: ModelConfig, context: RankContext, optimizer: OptimizerConfig | None = None
    ) -> None:
        self.config, self.context, self.optimizer_config = model, context, optimizer
        self.root = parallelize(root, root.model, context.layout, context.device, model.activation_checkpointing)
        self.model = root.model
        self.dtype = torch.float64 if model.precision == "float64" else torch.float32
        self.root.eval()
        if optimizer is None:
            self.root.requires_grad_(False)
            return
        self.optimizer = torch.optim.AdamW(
            self.root.parameters(), optimizer.lr, (0.9, optimizer.beta2), weight_decay=optimizer.weight_decay, fused=True
        )
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, optimizer.factor)

    def micro_batches(self, data: Batch) -> tuple[list[np.ndarray], int]:
        """(the cut of this rank's rows, the number of micro-batches that every rank runs)."""
        cuts = cut(lengths_of(data["tokens"]).numpy(), self.config.micro_batch_tokens)
        return cuts, int(self.context.all_reduce(torch.tensor(len(cuts)), "max"))

    def infer(self, data: Batch, run: Callable[[MicroBatch], Tensor]) -> Tensor:
        """The ragged column of `run(micro_batch) -> (S,)` over all rows, without gradients."""
        cuts, count = self.micro_batches(data)
        parts = []
        with torch.no_grad(), compute_in(self.config.precision, self.context.device):
            for k in range(count):
                if k < len(cuts):
                    parts.append(run(pack(data, cuts[k], self.context.device)))
                else:
                    run(filler(data, self.context.device))
        if isinstance(self.root, FSDPModule):
            self.root.reshard()  # a forward pass leaves the root's weights whole for a backward pass, and none comes
        return scattered(parts, cuts, data)

    def update(self, data: Batch, loss: Loss, aggregation: Aggregation, max_tokens: int | None = None) -> dict[str, float]:
        """One optimizer step on these rows, with those of the other ranks. Returns metrics, equal on every rank.

        Metrics are means over tokens, whatever the aggregation of the loss; names that end in "_max" are maxima.
        """
        self.root.train()
        mask, row = _mask_and_row(data)
        tokens, rows = self.context.all_reduce(torch.tensor(totals(mask, row, data.batch_size[0]))).tolist()
        cuts, count = self.micro_batches(data)
        sums = _Sums()
        for k in range(count):
            micro = pack(data, cuts[k], self.context.device) if k < len(cuts) else filler(data, self.context.device)
            everywhere = torch.ones_like(micro.row_S, dtype=torch.bool)
            weights_S = token_weights(
                everywhere, micro.row_S, micro.num_rows, aggregation, tokens, rows, max_tokens, self.dtype
            )
            with compute_in(self.config.precision, self.context.device):
                loss_S, metrics = loss(micro, weights_S)
            total = (loss_S * weights_S).sum()
            (total * self.context.data_ranks).backward()
            sums.add({"loss": loss_S.detach()}, weights_S)
            sums.add(metrics, torch.full_like(weights_S, 1 / max(tokens, 1)))
        self.root.eval()  # an engine may generate with this very model
        return sums.over_ranks(self.context) | self._step()

    def _step(self) -> dict[str, float]:
        assert self.optimizer_config is not None
        limit = self.optimizer_config.clip_norm or math.inf
        norm = torch.nn.utils.clip_grad_norm_(self.root.parameters(), limit)
        whole = norm.full_tensor() if isinstance(norm, DTensor) else norm
        lr = float(self.schedule.get_last_lr()[0])
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad(set_to_none=True)
        return {"grad_norm": float(whole), "lr": lr}

    def export(self, folder: Path) -> None:
        """Write the model in Hugging Face form, with its tokenizer. A collective: rank 0 writes."""
        state = get_model_state_dict(self.model, options=_FULL)
        if self.context.rank == 0:
            self.model.save_pretrained(folder, state_dict=state)
            if (Path(self.config.path) / "tokenizer_config.json").is_file():
                AutoTokenizer.from_pretrained(self.config.path).save_pretrained(folder)

    def save(self, folder: Path) -> None:
        """`export`, and the state of optimizer, schedule and random numbers beside it."""
        self.export(folder)
        state: dict[str, Any] = {"schedule": self.schedule.state_dict(), "random": torch.get_rng_state()}
        if (
            self.optimizer.state
        ):  # asked for the state before the first step, torch takes a step with gradients of 0 to make one
            state["optimizer"] = get_optimizer_state_dict(self.model, self.optimizer, options=_FULL)
        if self.context.rank == 0:
            torch.save(state, folder / "trainer.pt")
        self.context.barrier()

    def load(self, folder: Path) -> None:
        """Take back what `save` wrote, under this layout or another."""
        loader: Any = type(self.model)
        loaded, report = loader.from_pretrained(folder, dtype=self.dtype, output_loading_info=True)
        if report["missing_keys"]:
            raise ModelError(f"the checkpoint at '{folder}' lacks weights, '{min(report['missing_keys'])}' among them")
        set_model_state_dict(self.model, loaded.state_dict(), options=_FULL)
        state = torch.load(folder / "trainer.pt", map_location="cpu", weights_only=True)
        self.optimizer.state.clear()
        if "optimizer" in state:
            set_optimizer_state_dict(self.model, self.optimizer, state["optimizer"], options=_FULL)
        self.schedule.load_state_dict(state["schedule"])
        for group, lr in zip(self.optimizer.param_groups, self.schedule.get_last_lr(), strict=True):
            group["lr"] = lr
        torch.set_rng_state(state["random"])


_FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)


def _mask_and_row(data: Batch) -> tuple[Tensor, Tensor]:
    lengths = lengths_of(data["response_mask"])
    return data["response_mask"].values().cpu(), torch.repeat_interleave(torch.arange(len(lengths)), lengths)


class _Sums:
    """Weighted sums and maxima of per-token metrics over micro-batches."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}

    def add(self, metrics: Mapping[str, Tensor], weights_S: Tensor) -> None:
        for name, values_S in metrics.items():
            if name.endswith("_max"):
                self._sums[name] = max(self._sums.get(name, 0.0), float(values_S.max()) if len(values_S) else 0.0)
            else:
                self._sums[name] = self._sums.get(name, 0.0) + float((values_S.double() * weights_S).sum())

    def over_ranks(self, context: RankContext) -> dict[str, float]:
        for op in ("sum", "max"):
            names = sorted(name for name in self._sums if name.endswith("_max") == (op == "max"))
            reduced = context.all_reduce(torch.tensor([self._sums[n] for n in names], dtype=torch.float64), op)
            self._sums.update(zip(names, reduced.tolist(), strict=True))
        return self._sums
