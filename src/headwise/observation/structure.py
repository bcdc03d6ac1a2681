"""What a transformers mask function means, as an implicit mask of this package.

transformers describes every attention pattern as a Python function of (batch, head, query, key)
and only then builds an array from it. The pattern is read off the function itself: each builder in
``transformers.masking_utils`` returns closures of one code object, so identity of the code object
says which pattern it is and the closure cells hold its parameters. What was read is then compared
with the function on sampled positions; anything unknown or different stays an opaque predicate,
evaluated tile by tile.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
from transformers import masking_utils

from headwise.attention.masks import Band, Causal, Chunked, Everything, Mask, Predicate

__all__ = ["MaskFunction", "Pattern", "evaluate", "opaque", "read"]

MaskFunction = Callable[[Any, Any, Any, Any], Any]

_UNBOUNDED: Final = 1 << 40  # a reach no sequence has
_ONE = torch.zeros(1, 1, dtype=torch.long)
_SLIDING = masking_utils.sliding_window_overlay(1).__code__
_TWO_SIDED = masking_utils.sliding_window_bidirectional_overlay(1).__code__
_CHUNKED = masking_utils.chunked_overlay(1, _ONE).__code__
_PACKED = masking_utils.packed_sequence_mask_function(_ONE).__code__
_REMAPPED = masking_utils.remap_positions_for_packed_sequence(
    masking_utils.causal_mask_function, _ONE
).__code__
_PADDING = masking_utils.padding_mask_function(_ONE.bool()).__code__
_AND = masking_utils.and_masks(masking_utils.causal_mask_function).__code__


@dataclass(frozen=True, eq=False)
class Pattern:
    """A conjunction of the patterns that are known, in absolute positions.

    ``before``/``after``: reach in keys (None: unbounded). ``chunk``: size of the chunks and where
    the first begins in each sequence. ``documents``: (batch, position) names of packed documents,
    ``positions`` what the inner patterns take as position there. ``padding``: (batch, key) bool.
    """

    before: int | None = None
    after: int | None = None
    chunk: tuple[int, Tensor] | None = None
    documents: Tensor | None = None
    positions: Tensor | None = None
    padding: Tensor | None = None

    def mask(self, batch: int, start: int = 0) -> Mask:
        """The pattern for one sequence whose position ``start`` is called 0.

        Documents and padding are left out: what asks for a mask has already cut them away.
        """
        shift = start
        if self.positions is not None:
            shift = int(self.positions[batch, start])
        result: Mask | None = None
        if self.before is not None:
            result = Band(self.before, _UNBOUNDED if self.after is None else self.after)
        elif self.after is not None:
            result = Causal(self.after)
        if self.chunk is not None:
            size, first = self.chunk
            chunks = Chunked(size, int(first[batch]) - shift)
            result = chunks if result is None else result & chunks
        return Everything() if result is None else result

    @property
    def looks_ahead(self) -> bool:
        """Whether a query may see later keys."""
        return self.after is None or self.after > 0


def read(function: MaskFunction) -> Pattern | None:
    """The pattern of a mask function, or None when any part of it is unknown."""
    parts = _parts(function)
    if parts is None:
        return None
    pattern = Pattern()
    for part in parts:
        joined = _join(pattern, part)
        if joined is None:
            return None
        pattern = joined
    return pattern


def evaluate(
    function: MaskFunction, batch: int | Tensor, query: Tensor, key: Tensor, *, vmap: bool = False
) -> Tensor:
    """The mask function itself on broadcasting index tensors of absolute positions.

    Functions given by users may only work on single numbers; those are mapped over (``vmap``), as
    transformers does.
    """
    query, key = torch.broadcast_tensors(query, key)
    where = torch.as_tensor(batch, device=query.device)
    head = torch.zeros((), dtype=torch.long, device=query.device)
    if not vmap:
        keep = function(where, head, query, key)
        return torch.as_tensor(keep, device=query.device).expand(query.shape)

    def one(b: Tensor, q: Tensor, k: Tensor) -> Any:
        return torch.as_tensor(function(b, head, q, k))

    where = where.expand(query.shape).reshape(-1)
    with TransformGetItemToIndex():
        keep = torch.vmap(one)(where, query.reshape(-1), key.reshape(-1))
    return keep.reshape(query.shape)


def opaque(function: MaskFunction, batch: int, start: int, *, vmap: bool) -> Mask:
    """Any mask function as an implicit mask of one sequence; key 0 stands at position ``start``."""

    def rule(_: int, query: Tensor, key: Tensor) -> Tensor:
        return evaluate(function, batch, query + start, key + start, vmap=vmap)

    return Predicate(rule)


def _parts(function: MaskFunction) -> list[Pattern] | None:
    """The members of a conjunction, each as a pattern of its own."""
    if function is masking_utils.causal_mask_function:
        return [Pattern(after=0)]
    if function is masking_utils.bidirectional_mask_function:
        return []
    code = getattr(function, "__code__", None)
    cells = _cells(function)
    if code is _SLIDING:
        return [Pattern(before=cells["sliding_window"] - 1)]
    if code is _TWO_SIDED:
        return [Pattern(before=cells["sliding_window"], after=cells["sliding_window"])]
    if code is _CHUNKED:
        return [Pattern(chunk=(cells["chunk_size"], cells["left_padding"]))]
    if code is _PACKED:
        return [Pattern(documents=cells["packed_sequence_mask"])]
    if code is _PADDING:
        return [Pattern(padding=cells["padding_mask"])]
    if code is _REMAPPED:
        inner = read(cells["mask_function"])
        return None if inner is None else [replace(inner, positions=cells["position_ids"])]
    if code is _AND:
        lists = [_parts(member) for member in cells["mask_functions"]]
        return None if None in lists else [part for parts in lists for part in parts or []]
    return None


def _join(a: Pattern, b: Pattern) -> Pattern | None:
    """Both patterns at once; None when they cannot be written as one."""

    def least(x: int | None, y: int | None) -> int | None:
        return y if x is None else x if y is None else min(x, y)

    for name in ("chunk", "documents", "positions", "padding"):
        if getattr(a, name) is not None and getattr(b, name) is not None:
            return None
    return Pattern(
        before=least(a.before, b.before),
        after=least(a.after, b.after),
        chunk=a.chunk or b.chunk,
        documents=b.documents if a.documents is None else a.documents,
        positions=b.positions if a.positions is None else a.positions,
        padding=b.padding if a.padding is None else a.padding,
    )


def _cells(function: MaskFunction) -> dict[str, Any]:
    code = getattr(function, "__code__", None)
    closure = getattr(function, "__closure__", None)
    if code is None or closure is None:
        return {}
    return dict(zip(code.co_freevars, (cell.cell_contents for cell in closure), strict=True))
