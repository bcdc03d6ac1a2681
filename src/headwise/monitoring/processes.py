"""Sums of all processes as those of one: maxima by maximum, the rest by sum."""

from __future__ import annotations

from dataclasses import fields

import torch.distributed as dist

from headwise.monitoring.head_sums import HeadSums

__all__ = ["merged_over_processes"]

_MAXIMA = 2  # the first tensors of HeadSums


def merged_over_processes(found: dict[str, HeadSums]) -> dict[str, HeadSums]:
    """The same in every process; every process has seen the same modules."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return found
    merged = {}
    for path in sorted(found):
        tensors = [tensor.clone() for tensor in found[path].tensors()]
        for i, tensor in enumerate(tensors):
            dist.all_reduce(tensor, dist.ReduceOp.MAX if i < _MAXIMA else dist.ReduceOp.SUM)
        names = [field.name for field in fields(HeadSums)]
        merged[path] = HeadSums(**dict(zip(names, tensors, strict=True)))
    return merged
