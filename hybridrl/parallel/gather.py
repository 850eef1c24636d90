"""Whole parameters from sharded ones, in buckets of bounded size.

Invariant: at no time does a rank hold more than one bucket of whole parameters that are not its own (or one parameter, if
that is larger than a bucket). Gathering a full state dict first is the tempting way and needs a second copy of the model on
every rank.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

BUCKET_BYTES = 256 << 20


def whole_parameters(
    model: nn.Module, dtype: torch.dtype | None = None, bucket_bytes: int = BUCKET_BYTES
) -> Iterator[tuple[str, Tensor]]:
    """(name, whole tensor) of every parameter and persistent buffer, converted to `dtype` (floating point ones) before they
    travel.

    Names are the state dict's; of names that share a tensor (a tied head) the first alone comes. A collective when
    parameters are sharded: every rank must consume it to the end. Tensors are valid until the next is asked for.
    """
    bucket: list[tuple[str, DTensor]] = []
    size, seen = 0, set[int]()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) in seen:
            continue
        seen.add(id(tensor))
        if not isinstance(tensor, DTensor):
            yield name, _converted(tensor.detach(), dtype)
            continue
        nbytes = _share(tensor) * tensor.device_mesh.size() * _travels_as(tensor, dtype).itemsize
        if bucket and (size + nbytes > bucket_bytes or _travels_as(bucket[0][1], dtype) != _travels_as(tensor, dtype)):
            yield from _gathered(bucket, dtype)
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += nbytes
    if bucket:
        yield from _gathered(bucket, dtype)


def _travels_as(tensor: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    return dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype


def _converted(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    return tensor.to(_travels_as(tensor, dtype))


def _share(tensor: DTensor) -> int:
    """Elements of the largest rank's rows: what every rank sends."""
    return -(-tensor.shape[0] // tensor.device_mesh.size()) * (tensor.numel() // tensor.shape[0])


def _gathered(bucket: list[tuple[str, DTensor]], dtype: torch.dtype | None) -> Iterator[tuple[str, Tensor]]:
    """One all-gather for the bucket: each rank sends its rows of every parameter, padded to the largest rank's share."""
    mesh = bucket[0][1].device_mesh
    shares = [_share(tensor) for _, tensor in bucket]
    mine = _converted(bucket[0][1].to_local().detach(), dtype).new_zeros(sum(shares))
    at = 0
    for (_, tensor), share in zip(bucket, shares, strict=True):
        local = tensor.to_local().detach().flatten()
        mine[at : at + len(local)] = local
        at += share
    everyone = mine.new_empty(mesh.size() * len(mine))
    dist.all_gather_into_tensor(everyone, mine, group=mesh.get_group())
    by_rank, at = everyone.view(mesh.size(), -1), 0
    for (name, tensor), share in zip(bucket, shares, strict=True):
        yield name, by_rank[:, at : at + share].reshape(-1)[: tensor.numel()].view(tensor.shape)
        at += share
