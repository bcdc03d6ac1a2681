"""What torch keeps for a backward pass: storages, each once, without parameters and buffers."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks


def saved_bytes(model: nn.Module, run: Callable[[nn.Module], torch.Tensor]) -> int:
    """Bytes of the storages that ``run`` saves; the result stays alive, so none is used twice."""
    own = [*model.parameters(), *model.buffers()]
    known = {each.untyped_storage()._cdata for each in own}
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in known:
            kept.setdefault(storage._cdata, storage)
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        result = run(model)
    assert result.requires_grad
    return sum(storage.nbytes() for storage in kept.values())
