"""Who may attend to whom in one call, as a rule: read once, asked by everything after it.

transformers and Headwise's own models describe attention patterns in different ways. Both become a
``MaskSpec`` here: a function of (batch, query, key) in absolute positions, which is the definition,
and the ``Pattern`` it was read to be, which is what makes it fast. What was read is compared with
the function on sampled positions; anything unknown or different stays an opaque predicate,
evaluated tile by tile.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Final

import torch
from torch import Tensor

from headwise.attention.masks import Band, Causal, Chunked, Everything, Mask, Predicate
from headwise.observation.tokens import Extent

__all__ = ["MaskFunction", "MaskSpec", "Pattern", "evaluate", "opaque"]

# (batch, head, query, key) -> may attend, on broadcasting index tensors of absolute positions.
MaskFunction = Callable[[Any, Any, Any, Any], Any]

_UNBOUNDED: Final = 1 << 40  # a reach no sequence has
_SAMPLES: Final = 12  # query positions at which a pattern that was read off is compared


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

    def joined(self, other: Pattern) -> Pattern | None:
        """Both patterns at once; None when they cannot be written as one."""

        def least(x: int | None, y: int | None) -> int | None:
            return y if x is None else x if y is None else min(x, y)

        for name in ("chunk", "documents", "positions", "padding"):
            if getattr(self, name) is not None and getattr(other, name) is not None:
                return None
        return Pattern(
            before=least(self.before, other.before),
            after=least(self.after, other.after),
            chunk=self.chunk or other.chunk,
            documents=other.documents if self.documents is None else self.documents,
            positions=other.positions if self.positions is None else self.positions,
            padding=other.padding if self.padding is None else self.padding,
        )

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

    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

    where = where.expand(query.shape).reshape(-1)
    with TransformGetItemToIndex():
        keep = torch.vmap(one)(where, query.reshape(-1), key.reshape(-1))
    return keep.reshape(query.shape)


def opaque(function: MaskFunction, batch: int, start: int, *, vmap: bool) -> Mask:
    """Any mask function as an implicit mask of one sequence; key 0 stands at position ``start``."""

    def rule(_: int, query: Tensor, key: Tensor) -> Tensor:
        return evaluate(function, batch, query + start, key + start, vmap=vmap)

    return Predicate(rule)


@dataclass(frozen=True, eq=False)
class MaskSpec:
    """Who may attend to whom in one call, in absolute positions.

    Query row i stands at position ``q_offset + i``, key column j at ``kv_offset + j``. ``padding``
    (``batch position``, True = real) is separate from ``function``. ``read`` says what the function
    means, or None when that is not known.
    """

    batch: int
    queries: int
    keys: int
    q_offset: int
    kv_offset: int
    function: MaskFunction
    padding: Tensor | None
    read: Callable[[MaskFunction], Pattern | None]
    vmap: bool
    device: torch.device
    memory: dict[Any, Any] = field(default_factory=dict, repr=False)  # what layers share

    @cached_property
    def pattern(self) -> Pattern | None:
        """What the function means; None when it is not known for sure."""
        pattern = self.read(self.function)
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
            runs = [Extent(a, b) for a, b in zip([0, *stops[:-1]], stops, strict=True)]
        else:
            runs = [Extent(0, end)]
        if self.padding is None:
            return runs
        real = self.padding[batch].cpu()
        return [within for run in runs for within in _without_padding(run, real)]

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


def _without_padding(run: Extent, real: Tensor) -> list[Extent]:
    """A run of positions without its padding; nothing when no position is real."""
    kept = real[run.start : run.stop].nonzero()[:, 0] + run.start
    if not kept.numel():
        return []
    start, stop = int(kept[0]), int(kept[-1]) + 1
    return [Extent(start, stop, None if stop - start == kept.numel() else kept)]


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
