"""Memory for what a scan keeps: taken from the system, apart from the heap.

A forward pass frees and takes again the same large blocks, layer after layer. Were the few small
arrays that a scan keeps laid between them, the blocks would no longer fit where they were, and the
process would grow by a block per layer, though almost nothing is kept.
"""

from __future__ import annotations

import math
import mmap
from typing import Final

import torch
from torch import Tensor

__all__ = ["lasting"]

_LEAST: Final = 1 << 15  # bytes; below, a page of its own would be waste


def lasting(*shape: int, dtype: torch.dtype, fill: float = 0) -> Tensor:
    """A tensor filled with ``fill``, on the CPU, in memory of its own.

    Example:
        >>> lasting(2, 3, dtype=torch.int64, fill=-1).tolist()
        [[-1, -1, -1], [-1, -1, -1]]
    """
    size = math.prod(shape) * dtype.itemsize
    if size < _LEAST:
        return torch.full(shape, fill, dtype=dtype)
    tensor = torch.frombuffer(mmap.mmap(-1, size), dtype=dtype).view(shape)
    return tensor.fill_(fill) if fill else tensor
