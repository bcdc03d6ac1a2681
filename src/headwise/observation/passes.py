"""Which tokens a call reads: the stacks of a model, their passes and their streams.

A stack is a model within the model (a decoder, an encoder, a vision tower). Each of its forward
passes lays out its tokens once, at the first attention call; the layers after it share that layout.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from headwise.observation.call import Call
from headwise.observation.rule import MaskSpec
from headwise.observation.sites import AttentionModule
from headwise.observation.tokens import Extent, Layout, Reader, Stream

__all__ = ["Pass", "Stack", "Stacks"]


@dataclass
class Pass:
    """One forward pass of a stack: what it was given, and what has been laid out so far."""

    inputs: dict[str, Any]
    outer: tuple[dict[str, Any], ...]  # the inputs of the models around it
    looked_up: Tensor | None = None  # ids that an embedding was given just before
    runs: Counter[str] = field(default_factory=Counter)  # module -> times run in this pass
    layouts: dict[int, Layout] = field(default_factory=dict)  # call within a module -> layout
    sources: dict[tuple[int, int], Layout] = field(default_factory=dict)  # states nobody computed
    waiting: list[Callable[[Layout], None]] = field(default_factory=list)  # for the first layout

    def ids(self, shape: tuple[int, int]) -> Tensor | None:
        """Token ids of this shape, from the nearest model that was given some."""
        if _unit(self.inputs) != "token":
            return None
        for inputs in (self.inputs, *self.outer):
            for name in ("input_ids", "decoder_input_ids"):
                x = inputs.get(name)
                if isinstance(x, Tensor) and x.shape == shape:
                    return x
        x = self.looked_up
        return x if x is not None and x.shape == shape else None

    def padding(self, shape: tuple[int, int]) -> Tensor | None:
        """The 2-D mask of the stack's own tokens, earlier ones included."""
        for name in ("decoder_attention_mask", "attention_mask"):
            x = self.inputs.get(name)
            if isinstance(x, Tensor) and x.dim() == 2 and x.shape[0] == shape[0]:
                return x if x.shape[1] >= shape[1] else None
        return None


@dataclass
class Stack:
    """A model within the model that holds attention modules: a decoder, an encoder, a tower."""

    path: str
    stream: Stream
    readers: dict[tuple[str, int], Reader] = field(default_factory=dict)
    current: Pass | None = None
    latest: Layout | None = None
    tail: tuple[int, Tensor] | None = None  # latest position, and its first key of every row

    def cache_was_reordered(self, call: Call, layout: Layout) -> bool:
        """Whether rows of the key-value cache changed places since the call before (beam search).

        Asked at the first call of each pass; the latest key of every row is the witness.
        """
        if "tail" in layout.memory or layout is not self.latest:
            return False
        layout.memory["tail"] = True
        spec, before = call.spec, self.tail
        last = spec.q_offset + spec.queries - 1
        at = min(last - spec.kv_offset, call.k.shape[2] - 1)
        self.tail = (last, call.k[:, 0, at].detach().clone())
        if before is None or before[0] + 1 != spec.q_offset or layout.batch < 2:
            return False
        known, at = before[1], before[0] - spec.kv_offset
        return (
            at >= 0 and known.shape[0] == layout.batch and not torch.equal(known, call.k[:, 0, at])
        )


class Stacks:
    """All stacks of a model that have run, and the token streams they read."""

    def __init__(self) -> None:
        self.by_path: dict[str, Stack] = {}
        self.streams: dict[str, Stream] = {}
        self.order: list[str] = []  # in the order of their latest pass
        self.looked_up: Tensor | None = None  # ids of an embedding, for the stack that is next

    def begin_pass(self, path: str, inputs: dict[str, Any], outer: list[dict[str, Any]]) -> None:
        """A stack starts a forward pass."""
        if path not in self.by_path:
            self.by_path[path] = Stack(path, self.stream(path, _unit(inputs)))
        self.by_path[path].current = Pass(inputs, tuple(outer), self.looked_up)
        self.looked_up = None
        self.order = [*(p for p in self.order if p != path), path]

    def end_pass(self, path: str) -> None:
        """A stack has finished."""
        if path in self.by_path:
            self.by_path[path].current = None

    def stream(self, name: str, unit: str) -> Stream:
        """The stream of that name, which is made when it is new."""
        return self.streams.setdefault(name, Stream(unit))

    def layout(
        self, stack: Stack, info: AttentionModule, ordinal: int, call: Call, cross: bool
    ) -> tuple[Layout, str]:
        """What the query rows are. The first call of a pass decides; later ones agree or differ."""
        spec, current = call.spec, stack.current
        assert current is not None
        known = current.layouts.get(ordinal)
        if known is not None and known.batch == spec.batch:
            if known.queries == spec.queries:
                return known, stack.path
            inside = spec.q_offset - known.offset
            if not cross and inside >= 0 and inside + spec.queries <= known.queries:
                return known.part(spec.q_offset, spec.queries), stack.path
        name = stack.path if known is None else info.path
        reader = stack.readers.get((name, ordinal))
        if reader is None:
            reader = Reader(self.stream(name, stack.stream.unit))
            stack.readers[(name, ordinal)] = reader
        shape = (spec.batch, spec.queries)
        extents = [spec.extents(b) for b in range(spec.batch)]
        offset = spec.q_offset
        if cross:
            extents, offset = _query_extents(current, shape)
        ids = current.ids(shape)
        layout = reader.read(extents, spec.queries, offset, ids)
        if known is None:
            current.layouts[ordinal] = layout
            if ordinal == 0:
                stack.latest = layout
        return layout, name

    def source(self, stack: Stack, layout: Layout, spec: MaskSpec) -> tuple[Layout, str]:
        """The tokens that cross-attention reads: those of the stack that was run last and fits."""
        for path in reversed(self.order):
            other = self.by_path[path].latest
            if path == stack.path or other is None or other.queries != spec.keys:
                continue
            if layout.batch % other.batch == 0:
                return other, path
        name, shape = f"{stack.path}.source", (spec.batch, spec.keys)
        assert stack.current is not None
        sources = stack.current.sources
        if shape not in sources:
            reader = stack.readers.setdefault((name, 0), Reader(self.stream(name, "state")))
            known = reader.layout
            fits = known is not None and (known.batch, known.queries) == shape
            if known is None or not fits or not _continues(layout):
                extents = [spec.extents(b) for b in range(spec.batch)]
                known = reader.read(extents, spec.keys, 0, None)
            sources[shape] = known
        return sources[shape], name


def _unit(inputs: dict[str, Any]) -> str:
    """What the tokens of a stack are called when they have no ids."""
    for name, unit in (("pixel", "patch"), ("input_features", "frame"), ("input_values", "frame")):
        if any(key.startswith(name) and x is not None for key, x in inputs.items()):
            return unit
    return "token"


def _query_extents(current: Pass, shape: tuple[int, int]) -> tuple[list[list[Extent]], int]:
    """Documents of query rows when no self-attention has told them: from the 2-D mask."""
    batch, queries = shape
    mask = current.padding(shape)
    if mask is None:
        return [[Extent(0, queries)] for _ in range(batch)], 0
    offset = mask.shape[1] - queries
    extents: list[list[Extent]] = []
    for row in mask.bool().cpu():
        real = row.nonzero()[:, 0]
        if not real.numel():
            extents.append([])
            continue
        start, stop = int(real[0]), int(real[-1]) + 1
        extents.append([Extent(start, stop, None if stop - start == real.numel() else real)])
    return extents, offset


def _continues(layout: Layout) -> bool:
    """Whether a layout goes on with documents that began in an earlier call."""
    return bool(layout.spans) and all(span.position > 0 for span in layout.spans)
