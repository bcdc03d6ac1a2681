"""The tensors that the backward pass of one block needs, by the formula that keeps each.

    linear map     its input                    (for the gradient of W)
    LayerNorm      its input, mean, deviation
    RMSNorm        its input, the normalised vector, 1/√mean
    softmax        its result
    A V, Q Kᵀ      both operands; fused: Q, K, V, the output and L of every row
    f(x)           x, or f(x) if that says enough

A tensor that several formulas keep is one tensor. Measured: storages that
``torch.autograd.graph.saved_tensors_hooks`` sees, each once, parameters left out, on a CPU with
torch 2.13 and transformers 5.24.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from headwise.cost.activation_styles import ACTIVATIONS, Style
from headwise.cost.parts import Attention, Component, Layer, Matrix, Stack

__all__ = ["ARRAY_LIMIT", "Kept", "Pass", "block_tensors", "norm_tensors"]

_NETWORKS: Final = (Component.MLP, Component.EXPERTS, Component.SHARED_EXPERTS)
ARRAY_LIMIT: Final = 1 << 24  # entries up to which Headwise gives a mask to torch's kernel


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """One tensor: ``elements`` numbers of ``size`` bytes; ``square`` if it grows as n²."""

    stack: str
    layer: int | None
    name: str
    elements: int
    size: int
    square: bool = False

    @property
    def bytes(self) -> int:
        """What it takes."""
        return self.elements * self.size


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """How one stack is passed: ``size`` bytes of a number, ``tokens`` of each of ``batch``."""

    style: Style
    convention: str
    batch: int
    tokens: int
    source: int
    size: int
    materialised: bool
    dropout: bool
    streaming: bool

    @property
    def rows(self) -> int:
        """Vectors of the stream."""
        return self.batch * self.tokens

    @property
    def wide(self) -> int:
        """Bytes of a number where 16 bits are widened to 32."""
        return max(self.size, 4)


Tensors = Iterator[tuple[str, int, int, bool]]  # name, elements, bytes of one, whether n²


def block_tensors(layer: Layer, stack: Stack, how: Pass) -> tuple[Kept, ...]:
    """What one block keeps, in the order in which it is made."""
    return tuple(
        Kept(stack=stack.name, layer=layer.number, name=name, elements=count, size=size, square=n2)
        for name, count, size, n2 in _block(layer, stack.d_model, how)
        if count
    )


def _block(layer: Layer, d: int, how: Pass) -> Tensors:
    norms = [v for v in layer.vectors if v.component is Component.NORMS and "norm " in v.name]
    count = len(norms) or 2
    for number in range(count):
        shared = how.style.parallel and number > 0
        yield from norm_tensors(f"norm {number + 1}", how.rows, d, how, entered=not shared)
    for attention in layer.attentions:
        prefix = "cross-attention: " if attention.role == "cross" else ""
        for name, elements, size, square in _attention(layer, attention, d, how):
            yield prefix + name, elements, size, square
        if how.dropout and how.style.residual_dropout and how.style.output_dropout:
            yield f"{prefix}dropout of the output", how.rows * d, how.size, False
    yield from _feed_forward(layer, d, how, own_input=count > 1)  # one norm: both read it
    if how.dropout and how.style.residual_dropout:
        yield "dropout of the feed-forward", how.rows * d, how.size, False


def norm_tensors(name: str, rows: int, d: int, how: Pass, *, entered: bool = True) -> Tensors:
    """What a norm of ``rows`` vectors keeps; ``entered``: its input is not kept by another."""
    kind = how.style.norm
    if kind == "layer":
        if entered:
            yield f"input of {name}", rows * d, how.size, False
        yield f"mean and deviation of {name}", 2 * rows, how.size, False
        return
    if entered:
        yield f"input of {name}", rows * d, how.wide, False
    width = how.size if kind == "rms" else how.wide
    yield f"normalised by {name}", rows * d, width, False
    yield f"1/√mean of {name}", rows, how.wide, False
    if kind == "rms+1":
        yield f"gain of {name}", d, how.wide, False


def _attention(layer: Layer, of: Attention, d: int, how: Pass) -> Tensors:
    cross = of.role == "cross"
    keys = how.source if cross else how.tokens
    yield "input of W_Q" if cross else "input of W_Q, W_K, W_V", how.rows * d, how.size, False
    yield from _inner_norms(layer, of, how)
    if of.latent is not None:
        yield from _latent(layer, of, how)
    yield from _core(of, keys, how, own=how.convention == "headwise")


def _inner_norms(layer: Layer, of: Attention, how: Pass) -> Tensors:
    """Norms of queries and keys, of each head or of all heads at once."""
    sizes = {v.name: v.size for v in layer.vectors if v.role == of.role}
    for name, heads in (("query norm", of.heads), ("key norm", of.kv_heads)):
        if name in sizes and of.role == "self":
            alone = sizes[name] == of.d_qk * (1 + (how.style.norm == "layer"))
            rows, width = (heads, of.d_qk) if alone else (1, heads * of.d_qk)
            yield from norm_tensors(name, rows * how.rows, width, how)


def _latent(layer: Layer, of: Attention, how: Pass) -> Tensors:
    """MLA: the latents and their norms; keys and values of every head are made of them."""
    for matrix in layer.matrices:
        if matrix.name in ("W_UQ", "W_UK"):
            name = "query latent" if matrix.name == "W_UQ" else "latent"
            yield from norm_tensors(f"norm of the {name}", how.rows, matrix.d_in, how)
            yield f"{name}, normed", how.rows * matrix.d_in, how.size, False


def _core(of: Attention, keys: int, how: Pass, *, own: bool) -> Tensors:
    """From queries, keys and values to what W_O reads."""
    queries, output = how.rows * of.heads * of.d_qk, how.rows * of.heads * of.d_value
    pairs = how.batch * of.heads * how.tokens * keys
    rows, spread = how.rows * of.heads, how.batch * keys * of.heads
    hidden = of.window is not None and (keys > of.window if own else keys >= of.window)
    if how.materialised or (how.dropout and not how.streaming):
        yield from _with_weights(of, queries, spread, pairs, how)
        yield "heads, which W_O reads", output, how.size, False
        return
    apart = hidden and not own  # a mask: shared keys are repeated
    few = how.batch * keys * (of.heads if apart else of.kv_heads)
    yield "queries", queries, how.size, False
    yield "keys", few * of.d_qk, how.size, False
    if how.style.fused_values:
        yield _fused_values(of, how.batch * keys, how)
    else:
        yield "values", few * of.d_value, how.size, False
    array = how.batch * how.tokens * keys <= ARRAY_LIMIT
    if own and (how.streaming or (hidden and not array)):
        yield "output, in the arithmetic's type", output, how.wide, False
        yield "maximum and sum of every row", 2 * rows, how.wide, False
    else:
        yield "logsumexp of every row", rows, how.wide, False
        if how.style.copies_output:
            yield "output, as the kernel wrote it", output, how.size, False
        if hidden:
            yield "mask", (1 if own else how.batch) * how.tokens * keys, how.size, True
    yield "heads, which W_O reads", output, how.size, False


def _fused_values(of: Attention, rows: int, how: Pass) -> tuple[str, int, int, bool]:
    width = of.heads * of.d_qk + of.kv_heads * (of.d_qk + of.d_value)
    return "values, a view of queries, keys and values", rows * width, how.size, False


def _with_weights(of: Attention, queries: int, spread: int, pairs: int, how: Pass) -> Tensors:
    """The n × n weights, and what dropout adds: its mask, and the weights after it."""
    if not how.materialised:  # torch's own composed form, which a CPU takes with dropout: float32
        size, wide = how.wide, False
    else:
        size, wide = how.size, how.style.wide_softmax and how.size < how.wide
    yield "queries", queries, size, False
    repeated = "" if of.heads == of.kv_heads else ", repeated for every head"
    yield f"keys{repeated}", spread * of.d_qk, size, False
    uncopied = how.style.fused_values if how.materialised else how.style.one_product
    alone = how.batch == 1 and of.heads == of.kv_heads and size == how.size
    if uncopied and alone:  # a view serves as the operand
        yield _fused_values(of, spread // of.heads, how)
    else:
        yield f"values{repeated}", spread * of.d_value, size, False
    if how.style.softcap:
        yield "tanh of the scores", pairs, size, True
    yield "weights", pairs, how.wide if wide else size, True
    if how.dropout:
        yield "dropout of the weights", pairs, size, True
        yield "weights after dropout", pairs, size, True
    elif wide:
        yield "weights as they are used", pairs, size, True


def _feed_forward(layer: Layer, d: int, how: Pass, *, own_input: bool) -> Tensors:
    found: dict[Component, list[Matrix]] = {}
    for matrix in layer.matrices:
        if matrix.component in _NETWORKS and matrix.d_out > 1:  # no gate of the shared experts
            found.setdefault(matrix.component, []).append(matrix)
    if own_input:
        yield "input of the feed-forward", how.rows * d, how.size, False
    router = next((m for m in layer.matrices if m.component is Component.ROUTER), None)
    if router is not None:
        yield "router's weights", how.rows * router.d_out, 4, False
    for component, matrices in found.items():
        last = matrices[-1]
        rows, prefix = how.rows * last.used, "" if component is Component.MLP else f"{component}: "
        if component is Component.EXPERTS:
            yield f"{prefix}inputs, sorted", rows * d, how.size, False
            yield f"{prefix}outputs, before they are weighed", rows * d, how.size, False
        for name in ACTIVATIONS[how.style.activation]:
            yield f"{prefix}{name} of the activation", rows * last.d_in, how.size, False
        if len(matrices) == 3:
            yield f"{prefix}activation", rows * last.d_in, how.size, False
            yield f"{prefix}what W_up made", rows * last.d_in, how.size, False
        yield f"{prefix}input of {last.name}", rows * last.d_in, how.size, False
