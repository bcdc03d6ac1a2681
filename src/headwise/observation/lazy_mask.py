"""A mask that travels through model code as a tensor but has no storage.

transformers asks a mask function for a ``batch 1 query key`` array before the first layer. The one
registered here answers with a ``LazyMask``: the right shape and dtype, no n×n memory, and the rule
itself (``MaskSpec``) for the attention function to read. Model code that slices it gets another
LazyMask; code that needs the numbers gets them, materialised and counted; code that would add it
to logits is stopped, because a boolean mask added to logits is silently wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import masking_utils

from headwise.errors import MeasurementError
from headwise.observation.rule import MaskFunction, MaskSpec
from headwise.observation.structure import read

__all__ = ["LazyMask", "lazy_mask", "materialised"]

_count = 0


def materialised() -> int:
    """How many masks had to be built as arrays since the process started."""
    return _count


class LazyMask(torch.Tensor):
    """A ``batch 1 query key`` boolean tensor without storage; ``spec`` is its rule."""

    spec: MaskSpec

    @staticmethod
    def __new__(cls, spec: MaskSpec) -> LazyMask:
        shape = (spec.batch, 1, spec.queries, spec.keys)
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bool, device=spec.device)

    def __init__(self, spec: MaskSpec) -> None:
        self.spec = spec

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"LazyMask({tuple(self.shape)})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in _ARITHMETIC:
            raise MeasurementError(
                f"the model's own code applies {func} to its attention mask, which is boolean here",
                allowed="masks that only reach the attention interface",
                to_do="this model cannot be measured",
            )
        implicit = _implicit(func, args, kwargs)
        if implicit is not None:
            return implicit
        return func(*_solid(args), **{name: _solid(x) for name, x in kwargs.items()})


def lazy_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: MaskFunction = masking_utils.causal_mask_function,
    attention_mask: Tensor | None = None,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **_: Any,
) -> LazyMask:
    """The mask function that is registered with transformers: never None, never an array."""
    padding = masking_utils.prepare_padding_mask(attention_mask, kv_length, int(kv_offset))
    if padding is not None:
        padding = padding.bool()
        if bool(padding.all()):
            padding = None
    return LazyMask(
        MaskSpec(
            batch=batch_size,
            queries=q_length,
            keys=kv_length,
            q_offset=int(q_offset),
            kv_offset=int(kv_offset),
            function=mask_function,
            padding=padding,
            read=read,
            vmap=use_vmap,
            device=torch.device(device),
        )
    )


_ATEN = torch.ops.aten
_ARITHMETIC = {
    _ATEN.add.Tensor, _ATEN.add_.Tensor, _ATEN.add.Scalar, _ATEN.sub.Tensor, _ATEN.sub_.Tensor,
    _ATEN.sub.Scalar, _ATEN.rsub.Scalar, _ATEN.rsub.Tensor, _ATEN.mul.Tensor, _ATEN.mul_.Tensor,
    _ATEN.mul.Scalar,
}  # fmt: skip
_COPIES = {_ATEN._to_copy.default, _ATEN.detach.default, _ATEN.alias.default, _ATEN.clone.default}


def _implicit(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result as another LazyMask, where the operation allows it. Always a new object."""
    mask = args[0] if args and isinstance(args[0], LazyMask) else None
    if mask is None:
        return None
    spec = mask.spec
    if func in _COPIES and kwargs.get("dtype") in (None, torch.bool):
        device = kwargs.get("device")
        moved = device is not None and torch.device(device) != spec.device
        return None if moved else LazyMask(spec)
    if func is _ATEN.slice.Tensor:
        axis = (args[1] if len(args) > 1 else 0) % 4
        start, stop, step = slice(
            *(args[2] if len(args) > 2 else None, args[3] if len(args) > 3 else None),
            args[4] if len(args) > 4 else 1,
        ).indices(mask.shape[axis])
        stop = max(stop, start)
        if step == 1 and axis >= 2:
            whole = start == 0 and stop == mask.shape[axis]
            return LazyMask(spec if whole else spec.cut(axis, start, stop))
        if step == 1 and start == 0 and stop == mask.shape[axis]:
            return LazyMask(spec)
    return None


def _solid(x: Any) -> Any:
    """Replace every LazyMask by its array, and count."""
    global _count
    if isinstance(x, LazyMask):
        _count += 1
        return x.spec.dense()
    if isinstance(x, list | tuple):
        return type(x)(_solid(part) for part in x)
    return x
