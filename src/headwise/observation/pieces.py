"""One attention call, cut into sequences that can be measured each on its own.

A padded row is cropped to its real tokens, a packed row is cut into its documents, so that a batch
gives exactly what single runs would give, and on the fast path: what is left is plain causal,
windowed, chunked or bidirectional attention of one document.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from headwise.attention.masks import Everything, Mask, Predicate
from headwise.observation.rule import MaskSpec, evaluate
from headwise.observation.tokens import Extent, Index, Layout, Span, Stream

__all__ = ["Piece", "cross_pieces", "leftover", "self_pieces"]

_ROWS = 256


@dataclass(frozen=True, eq=False)
class Piece:
    """Neighbouring batch rows whose queries and keys lie at the same places."""

    batch: tuple[int, int]  # first row, one after the last
    rows: Index
    keys: Index
    mask: Mask  # key 0 is the first of ``keys``
    offset: int  # key index at which the first query stands
    position: int  # of the first query, within its document
    key_position: int  # of the first key
    query_tokens: Tensor  # (B, rows)
    key_tokens: Tensor  # (B, keys)
    key_stream: Stream
    relative: bool = True
    memory: dict[Any, Any] = field(default_factory=dict)  # what layers share

    @property
    def queries(self) -> int:
        return self.query_tokens.shape[1]

    @property
    def length(self) -> int:
        return self.key_tokens.shape[1]

    def key_ids(self) -> Tensor:
        """The number of each key's token in the vocabulary, ``batch key``; -1: it has none."""
        ids = self.key_stream.ids.view()[self.key_tokens.clamp(min=0)]
        return ids.masked_fill(self.key_tokens < 0, -1)

    def key_visible(self) -> Tensor:
        """How many queries of the piece can see each key: ``batch key``."""
        if "key_visible" not in self.memory:
            counts = _seen(self.mask, self.offset, self.queries, self.length)
            self.memory["key_visible"] = counts.expand(self.query_tokens.shape[0], -1)
        return self.memory["key_visible"]

    def sinks_visible(self, rows: Tensor, sink_keys: int) -> Tensor:
        """How many of the first keys each of the rows can see: ``batch row``."""
        keys = torch.arange(min(sink_keys, self.length))[None]
        seen = self.mask.visible(0, rows[:, None] + self.offset, keys)
        count = seen.expand(rows.numel(), keys.numel()).sum(-1)
        return count.expand(self.query_tokens.shape[0], -1)

    def with_mask(self, mask: Mask) -> Piece:
        """The same piece under a stricter mask."""
        return replace(self, mask=mask, memory={})


def self_pieces(spec: MaskSpec, layout: Layout) -> list[Piece]:
    """The pieces of a self-attention call."""
    return _joined([_self_piece(spec, layout, span) for span in layout.spans])


def cross_pieces(
    spec: MaskSpec, layout: Layout, source: Layout, extents: Sequence[list[Extent]]
) -> list[Piece]:
    """The pieces of a cross-attention call: queries of one stream, keys of another."""
    ratio = layout.batch // source.batch
    pieces = []
    for span in layout.spans:
        for extent in extents[span.batch]:
            keys, before, count = extent.clip(0, spec.keys)
            if not count:
                continue
            start = keys.start if isinstance(keys, slice) else 0
            mask = spec.mask(span.batch, start)
            if not isinstance(mask, Everything):
                mask = _moved(spec, span, keys)
            pieces.append(
                Piece(
                    batch=(span.batch, span.batch + 1),
                    rows=span.rows,
                    keys=keys,
                    mask=mask,
                    offset=span.position,
                    position=span.position,
                    key_position=before,
                    query_tokens=layout.stream.tokens(span.document, span.position, span.count)[
                        None
                    ],
                    key_tokens=source.tokens(span.batch // ratio)[keys][None],
                    key_stream=source.stream,
                    relative=False,
                )
            )
    return _joined(pieces)


def leftover(layout: Layout, pieces: Sequence[Piece]) -> list[tuple[int, Tensor]]:
    """Rows of the call that no piece holds, for each sequence that has some."""
    free = torch.ones(layout.batch, layout.queries, dtype=torch.bool)
    for piece in pieces:
        free[slice(*piece.batch), piece.rows] = False
    return [(b, free[b].nonzero()[:, 0]) for b in free.any(1).nonzero()[:, 0].tolist()]


def _self_piece(spec: MaskSpec, layout: Layout, span: Span) -> Piece:
    """One document: its queries in this call, and the keys that are there for them."""
    extent, b = span.extent, span.batch
    end = spec.kv_offset + spec.keys
    if isinstance(span.rows, Tensor):
        last = int(span.rows[-1]) + layout.offset
    else:
        last = span.rows.stop - 1 + layout.offset
    known = layout.stream.documents[span.document].length
    if extent.real is None:
        end = min(end, extent.start + known)
    if not spec.looks_ahead:
        end = min(end, last + 1)
    keys, before, count = extent.clip(spec.kv_offset, end)
    if extent.real is None:
        mask = spec.mask(b, max(extent.start, spec.kv_offset))
    else:
        mask = _compressed(spec, b, extent.real[before:])
    return Piece(
        batch=(b, b + 1),
        rows=span.rows,
        keys=keys,
        mask=mask,
        offset=span.position - before,
        position=span.position,
        key_position=before,
        query_tokens=layout.stream.tokens(span.document, span.position, span.count)[None],
        key_tokens=layout.stream.tokens(span.document, before, count)[None],
        key_stream=layout.stream,
    )


def _compressed(spec: MaskSpec, batch: int, real: Tensor) -> Mask:
    """The mask between the real tokens of a row with padding in between.

    Order is kept, so causal and full attention keep their form; anything else is evaluated at the
    positions the tokens come from.
    """
    pattern = spec.pattern
    if pattern is not None and pattern.before is None and pattern.chunk is None:
        return pattern.mask(batch)

    def rule(_: int, query: Tensor, key: Tensor) -> Tensor:
        at = real.to(query.device)
        return evaluate(spec.function, batch, at[query], at[key], vmap=spec.vmap)

    return Predicate(rule)


def _moved(spec: MaskSpec, span: Span, keys: Index) -> Mask:
    """The mask of a cross-attention call, asked with positions within the document."""
    rows = _indices(span.rows)
    columns = _indices(keys)

    def rule(_: int, query: Tensor, key: Tensor) -> Tensor:
        q = rows.to(query.device)[query - span.position] + spec.q_offset
        k = columns.to(key.device)[key] + spec.kv_offset
        return evaluate(spec.function, span.batch, q, k, vmap=spec.vmap)

    return Predicate(rule)


def _indices(index: Index) -> Tensor:
    return index if isinstance(index, Tensor) else torch.arange(index.start, index.stop)


def _joined(pieces: list[Piece]) -> list[Piece]:
    """Join neighbouring batch rows with the same geometry into one piece."""
    out: list[Piece] = []
    for piece in pieces:
        if out and _alike(out[-1], piece):
            before = out[-1]
            out[-1] = replace(
                before,
                batch=(before.batch[0], piece.batch[1]),
                query_tokens=torch.cat((before.query_tokens, piece.query_tokens)),
                key_tokens=torch.cat((before.key_tokens, piece.key_tokens)),
                memory={},
            )
        else:
            out.append(piece)
    return out


def _alike(a: Piece, b: Piece) -> bool:
    if a.batch[1] != b.batch[0]:
        return False
    if isinstance(a.rows, Tensor) or isinstance(a.keys, Tensor):
        return False
    names = ("rows", "keys", "mask", "offset", "position", "key_position")
    return all(getattr(a, name) == getattr(b, name) for name in names)


def _seen(mask: Mask, offset: int, queries: int, keys: int) -> Tensor:
    """Column sums of a mask, a strip of rows at a time."""
    counts = torch.zeros(keys, dtype=torch.int64)
    steps = torch.zeros(keys + 1, dtype=torch.int64)
    for start in range(0, queries, _ROWS):
        stop = min(queries, start + _ROWS)
        for run in mask.segments(0, start + offset, stop - 1 + offset, keys):
            if run.full:
                steps[run.start] += stop - start
                steps[run.stop] -= stop - start
                continue
            rows = torch.arange(start, stop)[:, None] + offset
            block = mask.visible(0, rows, torch.arange(run.start, run.stop)[None])
            counts[run.start : run.stop] += block.expand(stop - start, -1).sum(0)
    return counts + steps.cumsum(0)[:keys]
