"""Compiled callers of an observed model run it as it is written, so that every call is seen."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Final

import torch
from torch import nn

from headwise.errors import ModelError

__all__ = ["refuse_compiled", "uncompiled"]

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


def refuse_compiled(model: nn.Module) -> None:
    """Say what to do where a training step is compiled: no call of it would be seen.

    Raises:
        ModelError: a part of the model is compiled, or compiled code is calling.

    Example:
        >>> refuse_compiled(nn.Linear(2, 3))
    """
    if torch.compiler.is_compiling() or _is_compiled(model):  # the first is true while it traces
        _refuse(type(model).__name__)


def _is_compiled(model: nn.Module) -> bool:
    return any(
        "_orig_mod" in getattr(part, "_modules", ())
        or getattr(part, "_compiled_call_impl", None) is not None
        for part in (model.modules() if isinstance(model, nn.Module) else ())
    )


@torch._disable_dynamo
def _refuse(name: str) -> None:
    raise ModelError(
        f"{name} is compiled: its attention calls cannot be seen",
        allowed="a model that runs as it is written",
        to_do="train without torch.compile while a monitor is attached, or close the monitor "
        "and look at the model between steps with hw.observe",
    )
