"""Which tokens the rows and columns of an attention call are.

A ``Stream`` holds the tokens one stack of the model has read, document after document. A
``Layout`` says, for one call, which query rows are which tokens: padded positions belong to none,
packed rows are cut into documents, and a call that continues a key-value cache continues the
documents of the call before.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from headwise.observation.growing import Growing

__all__ = ["Extent", "Layout", "Reader", "Span", "Stream", "take"]

Index = slice | Tensor


@dataclass(frozen=True, eq=False)
class Extent:
    """One document inside one row of a batch, in absolute positions ``[start, stop)``.

    ``real`` lists its positions when there is padding in between.
    """

    start: int
    stop: int
    real: Tensor | None = None

    def clip(self, low: int, high: int) -> tuple[Index, int, int]:
        """Its positions inside ``[low, high)``: an index relative to ``low``; how many of the
        document's tokens come before; how many are inside."""
        if self.real is not None:
            before = int((self.real < low).sum())
            inside = self.real[(self.real >= low) & (self.real < high)] - low
            return inside, before, inside.numel()
        first, last = max(self.start, low), max(min(self.stop, high), max(self.start, low))
        return slice(first - low, last - low), first - self.start, last - first


@dataclass(frozen=True, eq=False)
class Span:
    """The query rows of one call that belong to one document."""

    batch: int
    rows: Index
    extent: Extent
    document: int
    position: int  # of the first of these rows, within the document
    count: int


@dataclass(frozen=True, eq=False)
class Layout:
    """What the rows of one call are."""

    stream: Stream
    batch: int
    queries: int
    offset: int  # absolute position of row 0
    spans: tuple[Span, ...]
    real: Tensor  # (batch, queries) bool: rows that are tokens
    first: Tensor  # (batch, queries) bool: rows that are the first token of a document
    memory: dict[Any, Any] = field(default_factory=dict)  # what calls of one shape share

    def part(self, offset: int, queries: int) -> Layout:
        """The layout of a run of these rows."""
        spans = []
        for span in self.spans:
            rows, before, count = span.extent.clip(offset, offset + queries)
            if count:
                spans.append(Span(span.batch, rows, span.extent, span.document, before, count))
        run = slice(offset - self.offset, offset - self.offset + queries)
        real, first = self.real[:, run], self.first[:, run]
        return Layout(self.stream, self.batch, queries, offset, tuple(spans), real, first)

    def tokens(self, batch: int) -> Tensor:
        """The token of each row of one sequence; -1 for padding."""
        index = torch.full((self.queries,), -1)
        for span in self.spans:
            if span.batch == batch:
                index[span.rows] = self.stream.tokens(span.document, span.position, span.count)
        return index


class Stream:
    """The tokens one stack reads, in order of arrival."""

    def __init__(self, unit: str) -> None:
        self.unit = unit  # what a token without an id is called
        self.ids = Growing((), torch.long, fill=-1)
        self.document = Growing((), torch.long)
        self.position = Growing((), torch.long)
        self.documents: list[Growing] = []  # token indices of each document, by position

    def begin(self) -> int:
        """A new document; its number."""
        self.documents.append(Growing((), torch.long, fill=-1))
        return len(self.documents) - 1

    def append(self, document: int, count: int, ids: Tensor | None = None) -> None:
        """``count`` more tokens at the end of a document."""
        tokens, start = self.documents[document], self.ids.length
        position = torch.arange(tokens.length, tokens.length + count)
        self.ids.append(torch.full((count,), -1) if ids is None else ids.detach().cpu().long())
        self.document.append(torch.full((count,), document))
        self.position.append(position)
        tokens.append(torch.arange(start, start + count))

    def tokens(self, document: int, start: int, count: int) -> Tensor:
        """Indices of a document's tokens; -1 where there are none."""
        known = self.documents[document].view()[start : start + count]
        return torch.cat((known, known.new_full((count - known.numel(),), -1)))

    def order(self) -> Tensor:
        """The permutation that puts documents one after the other, each by position."""
        key = self.document.view() * (1 << 40) + self.position.view()
        return torch.argsort(key, stable=True)

    def absorb(self, other: Stream) -> None:
        """Append everything another stream holds, as further documents."""
        base, shift = len(self.documents), self.ids.length
        for tokens in other.documents:
            self.documents.append(Growing((), torch.long, fill=-1))
            self.documents[-1].append(tokens.view() + shift)
        self.ids.append(other.ids.view())
        self.document.append(other.document.view() + base)
        self.position.append(other.position.view())


@dataclass
class Reader:
    """The state of one stack between calls: which documents its batch rows are in."""

    stream: Stream
    rows: dict[int, int] = field(default_factory=dict)  # batch row -> document
    layout: Layout | None = None
    cut: bool = False  # a cache was shortened: some tokens were read and thrown away

    def read(
        self,
        extents: list[list[Extent]],
        queries: int,
        offset: int,
        ids: Tensor | None,
    ) -> Layout:
        """Lay out a call of ``queries`` rows from absolute position ``offset``.

        A document whose start lies before the call is the one this batch row was in; tokens of it
        that nobody saw arrive without ids.
        """
        spans = []
        real = torch.zeros(len(extents), queries, dtype=torch.bool)
        first = torch.zeros_like(real)
        for b, row in enumerate(extents):
            for extent in row:
                rows, before, count = extent.clip(offset, offset + queries)
                if not count:
                    continue
                document = self._document(b, before)
                here = None if ids is None else ids[b][rows]
                self.stream.append(document, count, here)
                spans.append(Span(b, rows, extent, document, before, count))
                real[b, rows] = True
                if before == 0:
                    first[b, int(rows[0]) if isinstance(rows, Tensor) else rows.start] = True
        self.layout = Layout(self.stream, len(extents), queries, offset, tuple(spans), real, first)
        return self.layout

    def _document(self, b: int, before: int) -> int:
        """The document that row ``b`` goes on with after ``before`` of its tokens."""
        document = self.rows.get(b)
        if before == 0 or document is None:
            document = self.rows[b] = self.stream.begin()
        tokens = self.stream.documents[document]
        if tokens.length > before:
            tokens.resize(before)
            self.cut = True
        elif tokens.length < before:
            self.stream.append(document, before - tokens.length)
        return document


def take(x: Tensor, axis: int, index: Index) -> Tensor:
    """A view for a slice, a copy for an index tensor."""
    if isinstance(index, Tensor):
        return x.index_select(axis, index.to(x.device))
    return x.narrow(axis, index.start, index.stop - index.start)
