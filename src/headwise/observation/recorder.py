"""What happens at each attention call while a model is observed.

The recorder knows which module is being run and in which forward pass of which stack (by hooks),
lays out the tokens of the call, measures its pieces, keeps the sums, and returns the output that
the model goes on with. The output of measured rows comes from the measuring pass itself.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor, nn

from headwise.attention.masks import Mask, Predicate, describe
from headwise.attention.statistics import Statistics, measure
from headwise.observation.assemble import assemble, plain
from headwise.observation.biases import of_heads, tiles
from headwise.observation.call import Call
from headwise.observation.passes import Stack, Stacks
from headwise.observation.pieces import Piece, cross_pieces, self_pieces
from headwise.observation.record import LayerAccumulator, Place
from headwise.observation.sites import AttentionModule
from headwise.observation.tokens import Layout

__all__ = ["ACTIVE", "Each", "Options", "Recorder"]

ACTIVE: ContextVar[Recorder | None] = ContextVar("headwise_recorder", default=None)


# What else is to be done with a measured piece: (path of the module, its call, the piece, what
# was found).
Each = Callable[[str, Call, Piece, Statistics], None]


@dataclass(frozen=True)
class Options:
    """What was asked of ``observe``."""

    rows: int | None = None
    layers: frozenset[int] | None = None
    heads: tuple[int, ...] | None = None
    sink_keys: int = 1
    keep_rows: bool = False
    workers: int | None = None
    each: Each | None = None


class Recorder:
    """The state of one observation. Everything that outlives it is in ``layers`` and in the
    streams of ``stacks``."""

    def __init__(self, modules: dict[int, AttentionModule], options: Options) -> None:
        self.modules = modules
        self.options = options
        self.stacks = Stacks()
        self.layers: dict[tuple[str, int], LayerAccumulator] = {}
        self.reads: dict[tuple[str, int], tuple[str, str]] = {}  # layer -> its streams
        self.called: set[str] = set()
        self.notes: dict[str, None] = {}
        self.non_finite: str | None = None
        self._running: dict[int, list[Any]] = {}  # module -> [run, calls so far, cross?]

    def here(self) -> bool:
        """Whether the code that runs is that of the observing block; calls of the model from other
        threads pass the same hooks."""
        return ACTIVE.get() is self

    def begin_module(self, module: nn.Module, inputs: dict[str, Any]) -> None:
        """An attention module starts; its calls of the interface follow."""
        info = self.modules[id(module)]
        stack = self.stacks.by_path.get(info.stack)
        run = 0
        if stack is not None and stack.current is not None:
            run = stack.current.runs[info.path]
            stack.current.runs[info.path] += 1
        given = any(inputs.get(name) is not None for name in _CROSS_INPUTS)
        self._running[id(module)] = [run, 0, given or info.named_cross]

    def knows(self, module: nn.Module) -> bool:
        """Whether an attention module is one of the observed model; of others it is said once."""
        known = id(module) in self.modules
        if not known:
            self.note(f"{type(module).__name__} was run outside the observed model")
        return known

    def is_cross(self, module: nn.Module) -> bool:
        """Whether the call that is coming is cross-attention."""
        running = self._running.get(id(module))
        return bool(running and running[2])

    def attention(self, call: Call) -> Tensor:
        """Measure one call and return its output, ``batch query head d_value``."""
        if not self.knows(call.module):
            return plain(call)
        info = self.modules[id(call.module)]
        self.called.add(info.path)
        run, ordinal, cross = self._running.get(id(call.module), [0, 0, info.named_cross])
        if id(call.module) in self._running:
            self._running[id(call.module)][1] += 1
        stack = self.stacks.by_path.get(info.stack)
        if stack is None or stack.current is None:
            self.note(
                "attention that was run outside a forward pass of its model (such as the repeated "
                "forward of gradient checkpointing) was not measured"
            )
            return plain(call)
        layout, name = self.stacks.layout(stack, info, ordinal, call, cross)
        if not cross and stack.cache_was_reordered(call, layout):
            self.note(
                "rows of the key-value cache changed places between calls (beam search): the "
                "statistics are right, but earlier tokens are named by row of the batch"
            )
        if any(reader.cut for reader in stack.readers.values()):
            self.note(
                "the key-value cache was shortened between calls (assisted decoding): rows of "
                "tokens that were proposed and rejected are in the statistics"
            )
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
            bias = None if bias is None else of_heads(bias, heads)
            sinks = None if sinks is None else sinks[here]
        mask, offset = call.part_mask(piece), piece.offset
        layer.pooled.fit(max(piece.position + piece.queries, piece.key_position + piece.length))
        pool = layer.pooled.width
        k, v, mask, ahead = _aligned(piece.key_position % pool, k, v, mask)
        shape = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
        sink_keys = max(0, self.options.sink_keys - piece.key_position)
        found = measure(
            q, k, v, mask=mask, scale=call.scale, softcap=call.softcap,
            bias=None if bias is None else tiles(bias, ahead, shape),
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
        if self.options.each is not None:
            measured = call if heads is None else call.of_heads(heads)
            self.options.each(layer.module, measured, piece, found)
        return found

    def _pieces(
        self, stack: Stack, layout: Layout, name: str, call: Call, cross: bool
    ) -> tuple[list[Piece], str]:
        """The pieces of a call, remembered for the layers that share its mask."""
        if not cross:
            memory = call.spec.memory
            if ("pieces", layout) not in memory:
                memory[("pieces", layout)] = self_pieces(call.spec, layout)
            return memory[("pieces", layout)], name
        source, source_name = self.stacks.source(stack, layout, call.spec)
        memory, key = call.spec.memory, ("cross", layout, source)
        if key not in memory:
            extents = [call.spec.extents(b) for b in range(call.spec.batch)]
            memory[key] = cross_pieces(call.spec, layout, source, extents)
        return memory[key], source_name

    def _layer(
        self, key: tuple[str, int], info: AttentionModule, call: Call, pieces: list[Piece],
        cross: bool,
    ) -> LayerAccumulator:  # fmt: skip
        if key not in self.layers:
            masks = [piece.mask for piece in pieces]
            words = describe(masks[0]) if masks else "no tokens"
            path, run = key
            self.layers[key] = LayerAccumulator(
                module=path if not run else f"{path} (run {run + 1})",
                role="cross" if cross else call.self_role(),
                number=run or info.number,
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

    def _key_visible(self, call: Call, piece: Piece) -> Tensor:
        if call.indices is None:
            return piece.key_visible()
        return piece.with_mask(call.part_mask(piece)).key_visible()

    def _not_finite(self, layer: LayerAccumulator, q: Tensor, k: Tensor, v: Tensor) -> str | None:
        """A sentence when queries, keys or values hold NaN or infinity; the first is named."""
        for name, x in (("queries", q), ("keys", k), ("values", v)):
            wide = torch.float32 if x.dtype.itemsize < 4 else x.dtype
            if bool(torch.isfinite(x.detach().sum(dtype=wide))):
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


def _there(output: Tensor | None) -> Tensor:
    assert output is not None
    return output


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
