"""A mask that travels through model code as a tensor but has no storage.

transformers asks a mask function for a ``batch 1 query key`` array before the first layer. The one
registered here answers with a ``LazyMask``: the right shape and dtype, no n×n memory, and the rule
itself (``MaskSpec``) for the attention function to read. Model code that slices it gets another
LazyMask; code that needs the numbers gets them, materialised and counted; code that would add it
to logits is stopped, because a boolean mask added to logits is silently wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from transformers import masking_utils

from headwise.attention.masks import Mask
from headwise.errors import MeasurementError
from headwise.observation.structure import MaskFunction, Pattern, evaluate, opaque, read
from headwise.observation.tokens import Extent

__all__ = ["LazyMask", "MaskSpec", "lazy_mask", "materialised"]

_SAMPLES = 12  # query positions at which a pattern that was read off is compared
_count = 0


def materialised() -> int:
    """How many masks had to be built as arrays since the process started."""
    return _count


@dataclass(frozen=True, eq=False)
class MaskSpec:
    """Who may attend to whom in one call, in absolute positions, as transformers describes it.

    Query row i stands at position ``q_offset + i``, key column j at ``kv_offset + j``. ``padding``
    (``batch position``, True = real) is separate from ``function``, as it is there.
    """

    batch: int
    queries: int
    keys: int
    q_offset: int
    kv_offset: int
    function: MaskFunction
    padding: Tensor | None
    vmap: bool
    device: torch.device
    memory: dict[Any, Any] = field(default_factory=dict, repr=False)  # what layers share

    @cached_property
    def pattern(self) -> Pattern | None:
        """What the function means; None when it is not known for sure."""
        pattern = read(self.function)
        if pattern is None or pattern.padding is not None:
            return None
        if (pattern.positions is None) != (pattern.documents is None):
            return None
        return pattern if self._agrees(pattern) else None

    def visible(self, batch: int, query: Tensor, key: Tensor) -> Tensor:
        """The definition: may the query at absolute position ``query`` see ``key``?"""
        keep = evaluate(self.function, batch, query, key, vmap=self.vmap)
        return keep if self.padding is None else keep & self.padding[batch][key]

    def mask(self, batch: int, start: int) -> Mask:
        """The rule for one sequence as an implicit mask; key 0 stands at position ``start``.

        Padding is left out, and packed documents where the pattern is known.
        """
        if self.pattern is not None:
            return self.pattern.mask(batch, start)
        return opaque(self.function, batch, start, vmap=self.vmap)

    @property
    def looks_ahead(self) -> bool:
        """Whether a query may see later keys, as far as is known."""
        return self.pattern is None or self.pattern.looks_ahead

    def extents(self, batch: int) -> list[Extent]:
        """The documents of one row of the batch, in absolute positions."""
        end = max(self.q_offset + self.queries, self.kv_offset + self.keys)
        pattern = self.pattern
        if pattern is not None and pattern.documents is not None:
            names = pattern.documents[batch].cpu()
            _, counts = torch.unique_consecutive(names, return_counts=True)
            stops = counts.cumsum(0).tolist()
            return [Extent(a, b) for a, b in zip([0, *stops[:-1]], stops, strict=True)]
        if self.padding is None:
            return [Extent(0, end)]
        real = self.padding[batch].nonzero()[:, 0].cpu()
        if not real.numel():
            return []
        start, stop = int(real[0]), int(real[-1]) + 1
        return [Extent(start, stop, None if stop - start == real.numel() else real)]

    def dense(self) -> Tensor:
        """The array itself: ``batch 1 query key``."""
        query = torch.arange(self.queries, device=self.device)[:, None] + self.q_offset
        key = torch.arange(self.keys, device=self.device)[None, :] + self.kv_offset
        return torch.stack([self.visible(b, query, key) for b in range(self.batch)])[:, None]

    def cut(self, axis: int, start: int, stop: int) -> MaskSpec:
        """The same rule for a run of queries (axis 2) or of keys (axis 3)."""
        if axis == 2:
            return replace(self, queries=stop - start, q_offset=self.q_offset + start, memory={})
        return replace(self, keys=stop - start, kv_offset=self.kv_offset + start, memory={})

    def _agrees(self, pattern: Pattern) -> bool:
        """Compare the pattern with the function on sampled positions around its edges."""
        if not self.queries or not self.keys:
            return True
        first, last = self.q_offset, self.q_offset + self.queries - 1
        low, high = self.kv_offset, self.kv_offset + self.keys - 1
        query = torch.linspace(first, last, min(_SAMPLES, self.queries)).long().unique()
        reach = [0, 1, -1]
        reach += [] if pattern.before is None else [-pattern.before, -pattern.before - 1]
        reach += [] if pattern.after is None else [pattern.after, pattern.after + 1]
        reach += [] if pattern.chunk is None else [-pattern.chunk[0], pattern.chunk[0]]
        key = torch.cat([query + step for step in reach] + [torch.tensor([low, high])])
        key = key[(key >= low) & (key <= high)].unique()
        query, key = query[:, None].to(self.device), key[None, :].to(self.device)
        for b in range(self.batch):
            seen = evaluate(self.function, b, query, key, vmap=self.vmap)
            if not torch.equal(seen, _by_pattern(pattern, b, query, key)):
                return False
        return True


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


def _by_pattern(pattern: Pattern, batch: int, query: Tensor, key: Tensor) -> Tensor:
    """The pattern evaluated from its definition, packed documents included."""
    keep = torch.ones_like(query + key, dtype=torch.bool)
    q, k = query, key
    if pattern.positions is not None and pattern.documents is not None:
        names = pattern.documents[batch]
        keep = keep & (names[query] == names[key])
        q, k = pattern.positions[batch][query], pattern.positions[batch][key]
    if pattern.before is not None:
        keep = keep & (k >= q - pattern.before)
    if pattern.after is not None:
        keep = keep & (k <= q + pattern.after)
    if pattern.chunk is not None:
        size, first = pattern.chunk
        start = first[batch]
        keep = keep & ((q - start) // size == (k - start) // size)
    return keep
