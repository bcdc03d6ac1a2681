"""What all processes of a run have seen as if one had: maxima by maximum, the rest by sum."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from headwise.monitoring.head_sums import HeadSums

__all__ = ["of_all_processes", "processes", "speaks"]


def processes() -> int:
    """How many there are."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def speaks() -> bool:
    """Whether this process is the one that writes."""
    return processes() == 1 or dist.get_rank() == 0


def of_all_processes(
    heads: dict[str, HeadSums], sums: Sequence[float], said: str
) -> tuple[dict[str, HeadSums], list[float], str]:
    """The same in every process: heads merged, sums added, and what the first one said.

    A module that only some processes have called (dropped layers) is merged over those.
    """
    if processes() == 1:
        return heads, list(sums), said
    told: list[Any] = [None] * processes()
    mine = ({path: part.maxima.shape[1] for path, part in heads.items()}, said)
    dist.all_gather_object(told, mine)
    sizes = {path: size for each, _ in told for path, size in each.items()}
    parts = [heads.get(path) or HeadSums.empty(sizes[path]) for path in sorted(sizes)]
    maxima = _joined([part.maxima for part in parts])
    # What NaN does to a maximum differs between backends: it is counted instead.
    lost = maxima.isnan()
    added = [torch.tensor(sums, dtype=torch.float64), lost.double()]
    added += [x.flatten() for part in parts for x in (part.sums, part.counts)]
    largest = _reduced(maxima.masked_fill(lost, -math.inf), dist.ReduceOp.MAX)
    total, bad, rest = _reduced(_joined(added), dist.ReduceOp.SUM).split(
        (len(sums), lost.numel(), sum(2 * part.sums.numel() for part in parts))
    )
    largest = largest.masked_fill(bad > 0, math.nan)
    merged = {}
    for path, part in zip(sorted(sizes), parts, strict=True):
        m, n = part.maxima.numel(), part.sums.numel()
        merged[path] = HeadSums(
            largest[:m].view_as(part.maxima),
            rest[:n].view_as(part.sums),
            rest[n : 2 * n].view_as(part.counts),
        )
        largest, rest = largest[m:], rest[2 * n :]
    return merged, total.tolist(), next((words for _, words in told if words), "")


def _joined(parts: list[Tensor]) -> Tensor:
    empty = torch.empty(0, dtype=torch.float64)
    return torch.cat([empty, *(part.flatten() for part in parts)])


def _reduced(values: Tensor, how: Any) -> Tensor:
    """All-reduced, by way of the device that the backend works on."""
    device = torch.device("cuda", torch.cuda.current_device()) if _on_cuda() else values.device
    moved = values.to(device)
    dist.all_reduce(moved, how)
    return moved.cpu()


def _on_cuda() -> bool:
    return dist.get_backend() == "nccl"
