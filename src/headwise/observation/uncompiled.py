"""Compiled callers of an observed model run it as it is written, so that every call is seen."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Final

import torch

__all__ = ["uncompiled"]

_LOCK: Final = threading.Lock()
_STANCE: Final = ExitStack()
_inside = 0  # blocks that are open, in all threads: what is set holds for all of them


@contextmanager
def uncompiled() -> Iterator[None]:
    """Inside, nothing is compiled, and what is compiled already runs as the Python it came from.

    Example:
        >>> double = torch.compile(lambda x: 2 * x, backend="eager")
        >>> with uncompiled():
        ...     double(torch.tensor(3.0))
        tensor(6.)
    """
    global _inside
    with _LOCK:
        if not _inside:
            _STANCE.enter_context(torch.compiler.set_stance("force_eager"))
        _inside += 1
    try:
        yield
    finally:
        with _LOCK:
            _inside -= 1
            if not _inside:
                _STANCE.close()
