"""Large blocks of memory straight from the system, for a process that is ours alone.

A forward pass takes and frees the same large blocks in every layer. glibc learns to keep such
blocks in its heap; cut up by what lies between, the heap then grows by hundreds of MiB that nobody
uses. A fixed threshold keeps large blocks out of it, for a few page faults each.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Final

__all__ = ["keep_blocks_for_reuse", "keep_large_blocks_out_of_the_heap"]

_M_MMAP_THRESHOLD: Final = -3  # malloc.h
_M_TRIM_THRESHOLD: Final = -1
_LARGE: Final = 2**20


def keep_large_blocks_out_of_the_heap() -> bool:
    """Fix glibc's M_MMAP_THRESHOLD at 1 MiB; False where the C library has no such setting."""
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and mallopt(_M_MMAP_THRESHOLD, _LARGE) == 1


def keep_blocks_for_reuse() -> bool:
    """Blocks up to 32 MiB from the heap, which stays: for training, whose every step is alike.

    Fresh pages cost a training step more than its sums do. False where there is no such setting.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return mallopt(_M_MMAP_THRESHOLD, 2**25) == 1 and mallopt(_M_TRIM_THRESHOLD, 2**30) == 1
