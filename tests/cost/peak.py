"""The most bytes of tensors that were alive at once, parameters and gradients left out."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Peak(TorchDispatchMode):
    """Watches every storage that an operation makes, until it goes."""

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()
        self.known = {each.untyped_storage()._cdata: each.untyped_storage() for each in known}
        self.live: dict[int, int] = {}
        self.bytes = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for each in tree_leaves(out):
            if isinstance(each, torch.Tensor):
                self._see(each.untyped_storage())
        self.peak = max(self.peak, self.bytes)
        return out

    def _see(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self.live and key not in self.known:
            self.live[key] = storage.nbytes()
            self.bytes += storage.nbytes()
            weakref.finalize(storage, self._gone, key)

    def _gone(self, key: int) -> None:
        self.bytes -= self.live.pop(key)
