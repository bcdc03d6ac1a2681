"""A module whose forward is another function for a while."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

__all__ = ["replaced_forward"]


@contextmanager
def replaced_forward(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Inside, the module's forward is another function; what the instance had is put back.

    Example:
        >>> module = nn.Identity()
        >>> with replaced_forward(module, lambda x: 2 * x):
        ...     module(3)
        6
        >>> module(3)
        3
    """
    own = module.__dict__.get("forward")
    module.forward = forward
    try:
        yield
    finally:
        if own is None:
            del module.__dict__["forward"]
        else:
            module.forward = own
