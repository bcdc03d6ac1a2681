"""What the tests look at while a model runs: every tensor made, and every call measured."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from headwise.observation.call import Call
from headwise.observation.lazy_mask import LazyMask
from headwise.observation.recorder import Recorder

__all__ = ["SquareTensors", "captured_calls"]


class SquareTensors(TorchDispatchMode):
    """Collects every tensor with storage whose last two axes are both at least ``size`` long."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size
        self.found: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        for x in made if isinstance(made, tuple | list) else (made,):
            if isinstance(x, Tensor) and not isinstance(x, LazyMask) and x.dim() >= 2:
                stored = x.untyped_storage().nbytes() >= self.size**2
                if min(x.shape[-2:]) >= self.size and stored:
                    self.found.append(f"{func} {tuple(x.shape)}")
        return made


@contextmanager
def captured_calls() -> Iterator[list[Call]]:
    """Every call that reaches the recorder, in order."""
    calls: list[Call] = []
    original = Recorder.attention

    def attention(self: Recorder, call: Call) -> Tensor:
        calls.append(call)
        return original(self, call)

    Recorder.attention = attention  # type: ignore[method-assign]
    try:
        yield calls
    finally:
        Recorder.attention = original  # type: ignore[method-assign]


def run(model: torch.nn.Module, given: dict[str, Tensor]) -> Any:
    """One forward pass without gradients."""
    with torch.no_grad():
        return model(**given)
