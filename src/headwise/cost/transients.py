"""What is alive for a moment of a pass, and nowhere in its result: bytes, with the reason.

Each is what has to be there at once for one step of the usual modules: the operands and the result
that nothing else keeps; the stream beside them, a few times batch · n · d_model, is left out. They
come one after the other: one counts. In a forward pass each is a lower bound of its moment. In a
training step what is kept and the largest of them together are an upper bound: where the logits are
largest it is reached, in the backward pass of a block something that was kept is free already.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from headwise.cost.activation_styles import Style, style_of
from headwise.cost.formats import format_of
from headwise.cost.parts import Attention, Component, Layer, Matrix, Parts, Rows, Stack
from headwise.cost.saved_tensors import ARRAY_LIMIT
from headwise.cost.workload import Workload

__all__ = ["Transient", "transients"]

_CHUNK: Final = 1024  # tokens whose logits Headwise's loss makes at once
_COMPOSED: Final = {"gelu_new": 4, "quick_gelu": 3}  # tensors at once where f is not one kernel


@dataclass(frozen=True, slots=True)
class Transient:
    """Bytes that are alive for a moment, and why."""

    name: str
    bytes: int
    why: str


def transients(
    parts: Parts,
    workload: Workload,
    *,
    convention: str = "transformers",
    dtype: str = "bfloat16",
    training: bool = False,
    activation: str | None = None,
) -> tuple[Transient, ...]:
    """The largest of each kind over all layers, largest first.

    Example:
        >>> from headwise.cost.explicit import explicit
        >>> parts = explicit(d_model=64, layers=2, heads=4, vocab=257)
        >>> [each.name for each in transients(parts, Workload(length=8))]
        ['feed-forward', 'logits', 'queries, keys and values']
    """
    size = format_of(dtype).size
    style = style_of(parts, convention, activation)
    encoder = parts.stack("encoder")
    source = 0 if encoder is None else (encoder.tokens or workload.encoded)
    largest: dict[str, Transient] = {}
    for stack in parts.stacks:
        new = workload.batch * workload.queries(stack)
        found = [*_logits(stack, workload, size, convention, training)]
        for layer in stack.layers:
            found += _feed_forward(layer, new, size, style, training)
            for of in layer.attentions:
                found += _attention(of, stack, workload, source, size, style)
                if workload.attention == "materialised":
                    found.append(_scores(of, stack, workload, source, size, style, training))
        for each in found:
            known = largest.get(each.name)
            if each.bytes and (known is None or each.bytes > known.bytes):
                largest[each.name] = each
    if not largest:
        return (Transient("nothing", 0, "no tokens pass"),)
    return tuple(sorted(largest.values(), key=lambda each: -each.bytes))


def _logits(
    stack: Stack, workload: Workload, size: int, convention: str, training: bool
) -> Iterator[Transient]:
    wide = max(size, 4)
    for matrix in stack.matrices:
        if matrix.component is not Component.UNEMBEDDING or matrix.rows is not Rows.LOGITS:
            continue
        rows = workload.batch * workload.rows(matrix, stack, 0)
        if training and convention == "headwise":
            # Logits become their gradient in place, by chunks: in 16 bits, by way of float32.
            each = wide + (2 * size if size < wide else 0)
            yield Transient("logits", min(rows, _CHUNK) * matrix.d_out * each, "chunks of the loss")
        elif training:
            each = size + 2 * wide
            why = "logits, and the gradients of their logarithms and of themselves in float32"
            yield Transient("logits", rows * matrix.d_out * each, why)
        else:
            yield Transient("logits", rows * matrix.d_out * size, "the result of the pass")


def _feed_forward(
    layer: Layer, new: int, size: int, style: Style, training: bool
) -> Iterator[Transient]:
    groups: dict[Component, list[Matrix]] = {}
    for matrix in layer.matrices:
        if matrix.component in (Component.MLP, Component.EXPERTS, Component.SHARED_EXPERTS):
            groups.setdefault(matrix.component, []).append(matrix)
    for matrices in groups.values():
        down = next(m for m in matrices if m.name in ("W_down", "W_out"))
        gated = any(matrix.name == "W_gate" for matrix in matrices)
        times = 3 if gated else _COMPOSED.get(style.activation, 2)
        why = "f(gate), up and their product" if gated else "before and after the activation"
        if training:  # what the forward pass made is kept; the input of W_down is free by then
            times = 2 if gated or style.activation in _COMPOSED else 1
            why = "gradients on both sides of the activation"
        yield Transient("feed-forward", new * down.used * down.d_in * size * times, why)


def _seen(of: Attention, stack: Stack, workload: Workload, source: int) -> int:
    """Keys of each query."""
    if of.role == "cross":
        return source
    kept = workload.cached if stack.decodes else 0
    if of.window is not None:
        kept = min(kept, of.window - 1)
    return workload.queries(stack) + kept


def _attention(
    of: Attention, stack: Stack, workload: Workload, source: int, size: int, style: Style
) -> Iterator[Transient]:
    queries, keys = workload.queries(stack), _seen(of, stack, workload, source)
    if not queries:
        return
    new, materialised = workload.batch * queries, workload.attention == "materialised"
    if of.latent is not None and workload.absorbed:
        rank, rotary = of.latent
        yield _made(new * of.heads * (2 * rank + rotary) * size, "in the space of the latents")
    else:
        spread = of.heads if (materialised and style.repeats) or of.latent else of.kv_heads
        # Those of earlier tokens lie in the cache, unless every head gets its own.
        rows = workload.batch * keys if spread > of.kv_heads or of.latent else new
        if of.role == "cross":
            rows = workload.batch * source
        width = spread * (of.d_qk + of.d_value)
        why = "repeated for every query head" if spread > of.kv_heads else "of one layer"
        why = "made of the latents for every head" if of.latent else why
        yield _made((new * of.heads * of.d_qk + rows * width) * size, why)
    if workload.cached and of.role == "self" and style.repeats:
        # A cache that grows by joining holds a layer's keys, or its values, twice for a moment.
        longer = max(of.cached_key, of.cached_value)
        grown = workload.batch * (keys - queries) * longer * size
        yield Transient("cache of one layer", grown, "joined with the new tokens: a copy")
    hidden = of.window is not None and keys >= of.window and queries > 1
    pairs = queries * keys * (workload.batch if style.repeats else 1)
    if hidden and not materialised and (style.repeats or workload.batch * pairs <= ARRAY_LIMIT):
        yield Transient("mask", pairs * (1 + size), "a fused kernel reads a window as an array")


def _made(size: int, why: str) -> Transient:
    return Transient("queries, keys and values", size, why)


def _scores(
    of: Attention,
    stack: Stack,
    workload: Workload,
    source: int,
    size: int,
    style: Style,
    training: bool,
) -> Transient:
    pairs = workload.batch * workload.queries(stack) * _seen(of, stack, workload, source)
    widened = style.wide_softmax and size < 4  # scores are copied to float32 first
    each = of.heads * (size + 2 * 4 if widened else 2 * size)
    if training:
        return Transient("scores", pairs * each, "gradients of weights and scores of one layer")
    why = "scores and weights of one layer, and the mask that is added to them"
    return Transient("scores", pairs * (each + size), why)
