"""One step of decoding without modules: what a decoder does to one new token per row.

A step of one token reads every weight once, and on a CPU the rest of the time is the calls between
the matrix products. ``lean_step`` takes the weights of an ordinary decoder and writes the same
operations in the same order, without ``nn.Module`` calls and with one rotation for all heads. The
tests tie it to ``Decoder.hidden``. Models that it does not cover, and whoever wants to see the
modules' calls (hooks, ``WATCHER``), take the ordinary path.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from headwise.attention.masks import Band, Causal
from headwise.models.architecture import Rotary
from headwise.models.attention import MultiHeadAttention
from headwise.models.block import Block, PreNorm
from headwise.models.cache import Cache, Slot
from headwise.models.context import Context
from headwise.models.decoder import Decoder
from headwise.models.feed_forward import MLP, Activation, GatedMLP
from headwise.models.fused import WATCHER
from headwise.models.joined import joined
from headwise.models.norms import LayerNorm, OffsetRMSNorm, RMSNorm
from headwise.positions import turn

__all__ = ["LeanStep", "covered", "lean_step"]

Norm = Callable[[Tensor], Tensor]
Linear = tuple[Tensor, Tensor | None]


def lean_step(model: Decoder, cache: Cache) -> LeanStep | None:
    """The step of a decoder over its cache; None where only the ordinary path will do.

    Covered: pre-norm blocks of attention (rotary positions or none of its own, causal or a window,
    any grouping and biases) and any feed-forward part, made of plain linear layers.

    Example:
        >>> from headwise.models import build, preset
        >>> model = build(preset("tiny")).eval()
        >>> cache = Cache.empty(model.architecture, batch=1, capacity=8)
        >>> ids = torch.tensor([[3, 1, 4]])
        >>> with torch.inference_mode():
        ...     want = model.hidden(ids)[:, -1]
        ...     _ = model.hidden(ids[:, :2], cache=cache)
        ...     got = lean_step(model, cache)(ids[:, 2:])
        >>> bool(torch.allclose(got, want, atol=1e-6))
        True
    """
    return LeanStep(model, cache) if covered(model) else None


def covered(model: nn.Module) -> bool:
    """Whether a decoder's step can be written out, and nobody watches its modules."""
    return (
        type(model) is Decoder
        and not model.training
        and WATCHER.get() is None
        and not nn.modules.module._has_any_global_hook()
        and model.decoder.bias is None
        and not any(_watched(module) for module in model.modules())
        and all(_plain(block) for block in model.decoder.blocks)
        and (model.decoder.norm is None or _norm(model.decoder.norm) is not None)
    )


class LeanStep:
    """Ids ``batch 1`` of the next position -> the stream after the last norm, ``batch d_model``."""

    def __init__(self, model: Decoder, cache: Cache) -> None:
        self._model, self._cache = model, cache
        self._layers = [
            _Layer(block, slot)
            for block, slot in zip(model.decoder.blocks, cache.slots, strict=True)
        ]
        last = model.decoder.norm
        self._norm = None if last is None else _norm(last)

    def __call__(self, ids: Tensor) -> Tensor:
        position, table = self._cache.next_place(), self._model.embedding.tokens.weight
        context = Context(len(ids), 1, position, ids.device, table.dtype)
        x = self._model.embedding(ids, context.positions())[:, 0]
        for layer in self._layers:
            x = layer.step(x, position, context)
        return x if self._norm is None else self._norm(x)


class _Layer:
    """The weights of one block, and its place in the cache."""

    def __init__(self, block: Any, slot: Slot) -> None:
        attention: MultiHeadAttention = block.attention.branch
        self.slot = slot
        self.before, self.between = block.attention.norm.forward, block.feed_forward.norm.forward
        self.read = _Reads([attention.query, attention.key, attention.value])
        self.output = _weights(attention.output)
        self.heads, self.kv_heads = attention.heads, attention.kv_heads
        self.d_head, self.scale = attention.d_head, attention.scale
        self.rotary: Rotary | None = attention.rotary
        self.window = attention.mask.before + 1 if isinstance(attention.mask, Band) else None
        network = block.feed_forward.branch
        self.activation: Activation = network.activation
        self.gated = isinstance(network, GatedMLP)
        self.widen = _Reads([network.gate, network.up] if self.gated else [network.up])
        self.down = _weights(network.down)

    def step(self, x: Tensor, position: int, context: Context) -> Tensor:
        """The block for one position: attention, then feed-forward, each added to the stream."""
        x = x + functional.linear(self.attend(self.before(x), position, context), *self.output)
        first, *rest = self.widen(self.between(x))
        hidden = self.activation(first)
        if self.gated:
            hidden = hidden * rest[0]
        return x + functional.linear(hidden, *self.down)

    def attend(self, x: Tensor, position: int, context: Context) -> Tensor:
        """Concatenated heads ``batch (head d_value)``; key and value go into the cache."""
        batch, slot = len(x), self.slot
        q, k, v = self.read(x)
        if self.rotary is not None:
            both = torch.cat((q, k), -1).view(batch, -1, 1, self.d_head)
            both = turn(both, context.turns(self.rotary))
            q, k = both[:, : self.heads], both[:, self.heads :]
        shape = (batch, self.kv_heads, self.d_head)
        slot.keys.select(2, position).copy_(k.reshape(shape))
        slot.values.select(2, position).copy_(v.reshape(shape))
        slot.length = length = position + 1
        first = 0 if self.window is None else max(0, length - self.window)
        out = functional.scaled_dot_product_attention(
            q.reshape(batch, self.kv_heads, -1, self.d_head),
            slot.keys.narrow(2, first, length - first),
            slot.values.narrow(2, first, length - first),
            scale=self.scale,
        )
        return out.reshape(batch, -1)


class _Reads:
    """Several projections of one vector: by one product where their weights lie side by side."""

    def __init__(self, projections: list[Any]) -> None:
        self.each = [_weights(projection) for projection in projections]
        self.widths = [len(weight) for weight, _ in self.each]
        biases = [bias for _, bias in self.each]
        self.weight = joined([weight for weight, _ in self.each])
        self.bias = joined(biases)
        if any(bias is not None for bias in biases) and self.bias is None:
            self.weight = None

    def __call__(self, x: Tensor) -> Sequence[Tensor]:
        if self.weight is None:
            return [functional.linear(x, *weights) for weights in self.each]
        return functional.linear(x, self.weight, self.bias).split(self.widths, -1)


def _weights(projection: Any) -> Linear:
    return projection.weight, projection.bias


def _plain(block: nn.Module) -> bool:
    """Whether a block is of the kind that ``_Layer`` writes out."""
    if type(block) is not Block or block.cross is not None:
        return False
    parts = block.attention, block.feed_forward
    if not all(type(part) is PreNorm and _norm(part.norm) is not None for part in parts):
        return False
    attention: Any = block.attention.branch
    network: Any = block.feed_forward.branch
    if type(attention) is not MultiHeadAttention or type(network) not in (MLP, GatedMLP):
        return False
    narrow = isinstance(attention.mask, Causal) or (
        isinstance(attention.mask, Band) and attention.mask.after == 0
    )
    extra = (attention.query_norm, attention.key_norm, attention.softcap, attention.sinks)
    linear = [attention.query, attention.key, attention.value, attention.output]
    linear += network.children()
    return (
        narrow
        and not attention.cross
        and all(each is None for each in extra)
        and attention.d_head == attention.d_value
        and all(type(each) is nn.Linear for each in linear)
    )


def _watched(module: nn.Module) -> bool:
    """Whether somebody waits for a module's calls, or has put another forward in its place."""
    return bool(module._forward_hooks or module._forward_pre_hooks or "forward" in module.__dict__)


def _norm(module: Any) -> Norm | None:
    """A norm as a function of its input; None for a kind that is not known here."""
    return module.forward if type(module) in (RMSNorm, OffsetRMSNorm, LayerNorm) else None
