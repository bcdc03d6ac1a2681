"""What autograd keeps from a forward pass: storages, each once."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

__all__ = ["Attention", "attention_bytes", "materialised", "saved_bytes"]

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def saved_bytes(run: Callable[[], Tensor]) -> int:
    """Bytes of the storages that ``run`` saves for its backward pass, each counted once.

    Two saved tensors that share a storage are one piece of memory; counting tensors instead of
    storages counts it twice.

    Example:
        >>> x = torch.ones(1000, requires_grad=True)
        >>> saved_bytes(lambda: x.exp())  # the result alone
        4000
    """
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept.setdefault(storage._cdata, storage)
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        result = run()  # alive until the end, so that no storage is used twice
    assert result.requires_grad
    return sum(storage.nbytes() for storage in kept.values())


def materialised(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention with its n × n matrix, written as few as possible: what it saves is A, q, k, v."""
    return torch.softmax(q @ k.mT * q.shape[-1] ** -0.5, -1) @ v


def attention_bytes(form: Attention, heads: int, n: int, d: int) -> int:
    """What a form of attention saves for n tokens of ``heads`` heads of width d, in float32."""
    q, k, v = (torch.ones(1, heads, n, d, requires_grad=True) for _ in range(3))
    return saved_bytes(lambda: form(q, k, v))
