"""What happens at each attention call while a model is observed.

The recorder knows which module is being run and in which forward pass of which stack (by hooks),
lays out the tokens of the call, measures its pieces, keeps the sums, and returns the output that
the model goes on with. The output of measured rows comes from the measuring pass itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch
from torch import Tensor, nn

from headwise.attention.bias import as_function
from headwise.attention.masks import Mask, Predicate, describe
from headwise.attention.statistics import Statistics, measure
from headwise.observation.call import Call
from headwise.observation.lazy_mask import MaskSpec
from headwise.observation.pieces import Piece, cross_pieces, leftover, self_pieces
from headwise.observation.record import LayerAccumulator, Place
from headwise.observation.survey import AttentionModule
from headwise.observation.tokens import Extent, Layout, Reader, Stream

__all__ = ["ACTIVE", "Options", "Recorder", "Stack"]

ACTIVE: ContextVar[Recorder | None] = ContextVar("headwise_recorder", default=None)


@dataclass(frozen=True)
class Options:
    """What was asked of ``observe``."""

    rows: int | None = None
    layers: frozenset[int] | None = None
    heads: tuple[int, ...] | None = None
    sink_keys: int = 1
    keep_rows: bool = False
    workers: int | None = None


@dataclass
class Pass:
    """One forward pass of a stack: what it was given, and what has been laid out so far."""

    inputs: dict[str, Any]
    outer: tuple[dict[str, Any], ...]  # the inputs of the models around it
    runs: Counter[str] = field(default_factory=Counter)  # module -> times run in this pass
    layouts: dict[int, Layout] = field(default_factory=dict)  # call within a module -> layout
    sources: dict[tuple[int, int], Layout] = field(default_factory=dict)  # states nobody computed

    def ids(self, shape: tuple[int, int]) -> Tensor | None:
        """Token ids of this shape, from the nearest model that was given some."""
        if _unit(self.inputs) != "token":
            return None
        for inputs in (self.inputs, *self.outer):
            for name in ("input_ids", "decoder_input_ids"):
                x = inputs.get(name)
                if isinstance(x, Tensor) and x.shape == shape:
                    return x
        return None

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


class Recorder:
    """The state of one observation. Everything that outlives it is in ``layers`` and ``streams``."""

    def __init__(self, modules: dict[int, AttentionModule], options: Options) -> None:
        self.modules = modules
        self.options = options
        self.stacks: dict[str, Stack] = {}
        self.streams: dict[str, Stream] = {}
        self.layers: dict[tuple[str, int], LayerAccumulator] = {}
        self.reads: dict[tuple[str, int], tuple[str, str]] = {}  # layer -> its streams
        self.called: set[str] = set()
        self.notes: dict[str, None] = {}
        self.non_finite: str | None = None
        self.order: list[str] = []  # stacks in the order of their latest pass
        self._running: dict[int, list[Any]] = {}  # module -> [run, calls so far, cross?]

    # ---- hooks -------------------------------------------------------------------------------

    def begin_pass(self, path: str, inputs: dict[str, Any], outer: list[dict[str, Any]]) -> None:
        """A stack starts a forward pass."""
        if path not in self.stacks:
            self.stacks[path] = Stack(path, self._stream(path, _unit(inputs)))
        self.stacks[path].current = Pass(inputs, tuple(outer))
        self.order = [*(p for p in self.order if p != path), path]

    def end_pass(self, path: str) -> None:
        """A stack has finished."""
        if path in self.stacks:
            self.stacks[path].current = None

    def begin_module(self, module: nn.Module, inputs: dict[str, Any]) -> None:
        """An attention module starts; its calls of the interface follow."""
        info = self.modules[id(module)]
        stack = self.stacks.get(info.stack)
        run = 0
        if stack is not None and stack.current is not None:
            run = stack.current.runs[info.path]
            stack.current.runs[info.path] += 1
        given = any(inputs.get(name) is not None for name in _CROSS_INPUTS)
        self._running[id(module)] = [run, 0, given or info.named_cross]

    def is_cross(self, module: nn.Module) -> bool:
        """Whether the call that is coming is cross-attention."""
        running = self._running.get(id(module))
        return bool(running and running[2])

    # ---- one call ----------------------------------------------------------------------------

    def attention(self, call: Call) -> Tensor:
        """Measure one call and return its output, ``batch query head d_value``."""
        info = self.modules.get(id(call.module))
        if info is None:
            self.note(f"{type(call.module).__name__} was run outside the observed model")
            return plain(call)
        self.called.add(info.path)
        run, ordinal, cross = self._running.get(id(call.module), [0, 0, info.named_cross])
        if id(call.module) in self._running:
            self._running[id(call.module)][1] += 1
        stack = self.stacks.get(info.stack)
        if stack is None or stack.current is None:
            self.note(
                "attention that was run outside a forward pass of its model (such as the repeated "
                "forward of gradient checkpointing) was not measured"
            )
            return plain(call)
        layout, name = self._layout(stack, info, ordinal, call, cross)
        pieces, key_name = self._pieces(stack, layout, name, call, cross)
        measured = self.options.layers is None or info.number in self.options.layers
        if not measured:
            return assemble(call, layout, pieces, call.output)
        key = (info.path, run)
        layer = self._layer(key, info, call, pieces, cross)
        self.reads.setdefault(key, (name, key_name))
        return assemble(call, layout, pieces, lambda piece: self._measure(layer, call, piece))

    def _measure(self, layer: LayerAccumulator, call: Call, piece: Piece) -> Tensor:
        """Statistics into the layer; the output from the same pass where that is possible."""
        q, k, v = call.part(piece)
        why = self._not_finite(layer, q, k, v)
        if why is not None:
            layer.mark(why)
            return call.output(piece)
        options = self.options
        heads = None
        if options.heads is not None:
            heads = torch.tensor([h for h in options.heads if h < q.shape[1]], dtype=torch.long)
        alone = call.differentiable or heads is not None or options.rows is not None
        output = call.output(piece) if alone else None
        if heads is not None and not heads.numel():
            return call.output(piece) if output is None else output
        with torch.no_grad():
            found = self._statistics(call, piece, layer, (q, k, None if alone else v), heads)
        return output if output is not None else _there(found.output)

    def _statistics(
        self,
        call: Call,
        piece: Piece,
        layer: LayerAccumulator,
        qkv: tuple[Tensor, Tensor, Tensor | None],
        heads: Tensor | None,
    ) -> Statistics:
        """Run ``measure`` on a piece and absorb what it found."""
        q, k, v = qkv
        bias, sinks = call.part_bias(piece), call.sinks
        if heads is not None:
            group = q.shape[1] // k.shape[1]
            here = heads.to(q.device)
            q, k = q[:, here], k[:, here // group]
            bias = bias[:, here] if bias is not None and bias.shape[1] > 1 else bias
            sinks = None if sinks is None else sinks[here]
        mask, offset = call.part_mask(piece), piece.offset
        layer.pooled.fit(max(piece.position + piece.queries, piece.key_position + piece.length))
        pool = layer.pooled.width
        k, v, mask, ahead = _aligned(piece.key_position % pool, k, v, mask)
        if bias is not None:
            if ahead and bias.shape[3] > 1:
                bias = torch.nn.functional.pad(bias, (ahead, 0))
            shape = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
            function = as_function(bias.detach(), *shape)
        sink_keys = max(0, self.options.sink_keys - piece.key_position)
        found = measure(
            q, k, v, mask=mask, scale=call.scale, softcap=call.softcap,
            bias=None if bias is None else function,
            sinks=None if sinks is None else sinks.detach(), offset=offset + ahead,
            rows=self.options.rows, sink_keys=sink_keys + (ahead if sink_keys else 0), pool=pool,
            relative=piece.relative, workers=self.options.workers,
        )  # fmt: skip
        found = _without_first(found, ahead)
        rows = found.rows.cpu()
        place = Place(
            query_tokens=piece.query_tokens[:, rows],
            key_tokens=piece.key_tokens,
            query_position=rows + piece.position,
            key_position=piece.key_position - ahead,
            key_visible=self._key_visible(call, piece),
            rows_total=piece.query_tokens.numel(),
            sink_keys=sink_keys,
            sinks_visible=piece.sinks_visible(rows, sink_keys),
        )
        layer.absorb(found, place, heads)
        return found

    # ---- what a call is ----------------------------------------------------------------------

    def _layout(
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
            reader = Reader(self._stream(name, stack.stream.unit))
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

    def _pieces(
        self, stack: Stack, layout: Layout, name: str, call: Call, cross: bool
    ) -> tuple[list[Piece], str]:
        """The pieces of a call, remembered for the layers that share its mask."""
        if not cross:
            memory = call.spec.memory
            if ("pieces", layout) not in memory:
                memory[("pieces", layout)] = self_pieces(call.spec, layout)
            return memory[("pieces", layout)], name
        source, source_name = self._source(stack, layout, call.spec)
        memory = layout.memory
        key = ("cross", source, call.spec.padding is None, call.spec.keys)
        if key not in memory or call.spec.padding is not None:
            extents = [call.spec.extents(b) for b in range(call.spec.batch)]
            memory[key] = cross_pieces(call.spec, layout, source, extents)
        return memory[key], source_name

    def _source(self, stack: Stack, layout: Layout, spec: MaskSpec) -> tuple[Layout, str]:
        """The tokens that cross-attention reads: those of the stack that was run last and fits."""
        for path in reversed(self.order):
            other = self.stacks[path].latest
            if path == stack.path or other is None or other.queries != spec.keys:
                continue
            if layout.batch % other.batch == 0:
                return other, path
        name, shape = f"{stack.path}.source", (spec.batch, spec.keys)
        assert stack.current is not None
        sources = stack.current.sources
        if shape not in sources:
            reader = stack.readers.setdefault((name, 0), Reader(self._stream(name, "state")))
            known = reader.layout
            fits = known is not None and (known.batch, known.queries) == shape
            if known is None or not fits or not _continues(layout):
                extents = [spec.extents(b) for b in range(spec.batch)]
                known = reader.read(extents, spec.keys, 0, None)
            sources[shape] = known
        return sources[shape], name

    def _layer(
        self, key: tuple[str, int], info: AttentionModule, call: Call, pieces: list[Piece],
        cross: bool,
    ) -> LayerAccumulator:  # fmt: skip
        if key not in self.layers:
            masks = [piece.mask for piece in pieces]
            role = "cross" if cross else "encoder"
            if not cross and (
                (masks and not masks[0].looks_ahead())
                or (call.spec.pattern is None and getattr(call.module, "is_causal", True))
            ):
                role = "decoder"
            words = describe(masks[0]) if masks else "no tokens"
            path, run = key
            self.layers[key] = LayerAccumulator(
                module=path if not run else f"{path} (run {run + 1})",
                role=role,
                number=info.number if not run else run,
                heads=call.q.shape[1],
                kv_heads=call.k.shape[1],
                mask=words if call.indices is None else f"{words} and chosen keys",
                scale=call.scale,
                window=_window(call),
                keep_rows=self.options.keep_rows,
            )
        return self.layers[key]

    def note(self, sentence: str) -> None:
        """Say something about the run, once."""
        self.notes[sentence] = None

    def _stream(self, name: str, unit: str) -> Stream:
        return self.streams.setdefault(name, Stream(unit))

    def _key_visible(self, call: Call, piece: Piece) -> Tensor:
        if call.indices is None:
            return piece.key_visible()
        return piece.with_mask(call.part_mask(piece)).key_visible()

    def _not_finite(self, layer: LayerAccumulator, q: Tensor, k: Tensor, v: Tensor) -> str | None:
        """A sentence when queries, keys or values hold NaN or infinity; the first is named."""
        for name, x in (("queries", q), ("keys", k), ("values", v)):
            if bool(torch.isfinite(x.detach().sum(dtype=torch.float64))):
                continue
            bad = ~torch.isfinite(x.detach())
            if not bool(bad.any()):
                continue
            row = int(bad.any(-1).flatten(0, 1).any(0).nonzero()[0])
            kind = "NaN" if bool(x.isnan().any()) else "infinity"
            if self.non_finite is None:
                self.non_finite = layer.module
                return (
                    f"layer {layer.number} ({layer.module}): its {name} hold {kind}, first at "
                    f"position {row}; it is the first module where this was seen"
                )
            return f"its {name} hold {kind}; the first module with such values is {self.non_finite}"
        return None


_CROSS_INPUTS: Final = ("key_value_states", "encoder_hidden_states", "cross_attention_states")


def plain(call: Call) -> Tensor:
    """The output of a call that nobody measures: ``batch query head d_value``."""
    reader = Reader(Stream(""))
    spec = call.spec
    if spec.queries == spec.keys or spec.pattern is None or spec.looks_ahead is False:
        extents = [spec.extents(b) for b in range(spec.batch)]
        layout = reader.read(extents, spec.queries, spec.q_offset, None)
        return assemble(call, layout, self_pieces(spec, layout), call.output)
    layout = reader.read([[]] * spec.batch, spec.queries, 0, None)
    return assemble(call, layout, [], call.output)


def assemble(
    call: Call, layout: Layout, pieces: list[Piece], compute: Callable[[Piece], Tensor]
) -> Tensor:
    """Put the outputs of pieces and of left-over rows together, ``batch query head d_value``."""
    batch, heads, queries = call.q.shape[:3]
    if len(pieces) == 1 and pieces[0].queries == queries and pieces[0].batch == (0, batch):
        return compute(pieces[0]).transpose(1, 2).contiguous()
    out = call.q.new_zeros(batch, queries, heads, call.v.shape[-1])
    for piece in pieces:
        out[slice(*piece.batch), piece.rows] = compute(piece).transpose(1, 2).to(out.dtype)
    for b, rows in leftover(layout, pieces):
        out[b, rows] = call.output_of_rows(b, rows)[0].transpose(0, 1).to(out.dtype)
    return out


def _there(output: Tensor | None) -> Tensor:
    assert output is not None
    return output


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
    extents = []
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


def _window(call: Call) -> int | None:
    """The window in keys, the query's own included; for two-sided ones, the reach to one side."""
    pattern = call.spec.pattern
    return None if pattern is None or pattern.before is None else pattern.before + 1


def _aligned(
    ahead: int, k: Tensor, v: Tensor | None, mask: Mask
) -> tuple[Tensor, Tensor | None, Mask, int]:
    """Put hidden keys in front so that blocks of the pooled map begin where they always do."""
    if not ahead:
        return k, v, mask, 0

    def rule(batch: int, query: Tensor, key: Tensor) -> Tensor:
        return (key >= ahead) & mask.visible(batch, query - ahead, (key - ahead).clamp(min=0))

    k = torch.nn.functional.pad(k, (0, 0, ahead, 0))
    v = None if v is None else torch.nn.functional.pad(v, (0, 0, ahead, 0))
    return k, v, Predicate(rule), ahead


def _without_first(found: Statistics, ahead: int) -> Statistics:
    """Take the keys that were put in front out again."""
    if not ahead:
        return found
    top = torch.where(found.top_key >= 0, found.top_key - ahead, found.top_key)
    return replace(found, received=found.received[..., ahead:], top_key=top)
