"""Parallelism applied to an unpatched transformers model from outside, in one fixed order."""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import PreTrainedModel

from hybridrl.protocol.errors import ConfigError
from hybridrl.protocol.layout import Layout


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The blocks that the architecture itself says are not to be split."""
    names = set(model._no_split_modules or ())
    return [module for module in model.modules() if type(module).__name__ in names]


def parallelize(
    root: nn.Module, model: PreTrainedModel, layout: Layout, device: str, activation_checkpointing: bool
) -> nn.Module:
    """Prepare `root`, which calls into `model`, for training on the ranks of `layout`; returns it.

    Order: activation checkpointing, then FSDP2 over the data axis (each block a unit, what is left with the root).
    Checkpointing has to come first, so that a block's recomputation runs inside its unit, while its weights are gathered.
    """
    if layout.pp > 1 or layout.tp > 1:
        raise ConfigError(f"layout {layout}: only the data axis is supported; use dp={layout.world}")
    root.to(device)
    if activation_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if layout.dp > 1:
        mesh = init_device_mesh(device, (layout.dp,), mesh_dim_names=("dp",))
        for block in decoder_layers(model):
            fully_shard(block, mesh=mesh)
        fully_shard(root, mesh=mesh)
    return root
