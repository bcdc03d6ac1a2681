"""The products of one pass: FLOPs, bytes and shape of each, as exact integers.

Each product is taken to run by itself: it reads its two operands and writes its result once.
Biases, norms, activation functions and residual sums are taken to ride along: of vectors, the
numbers are read; of the stream, nothing is moved for them. Weights are read once per pass, of
experts those that are touched. Attention "fused" moves queries, keys, values and outputs;
"materialised" moves the n × n matrix as well: the scores are written and read by the softmax, the
weights written and read by A V.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction

from headwise.cost.hardware import Shape
from headwise.cost.parts import Attention, Component, Matrix, Parts, Rows, Stack
from headwise.cost.workload import Workload

__all__ = ["Product", "Widths", "experts_touched", "pass_products"]


@dataclass(frozen=True, slots=True)
class Product:
    """One product of one layer; ``shape`` is None where bytes are moved without arithmetic."""

    component: Component
    flops: int
    moved_bytes: int
    shape: Shape | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Widths:
    """Bits of a stored weight, of a cached key or value, and of everything else that is moved."""

    weight: Fraction
    cache: Fraction
    activation: Fraction

    def weights(self, numbers: int) -> int:
        """Bytes of so many weights, the last one whole."""
        return math.ceil(numbers * self.weight / 8)

    def cached(self, numbers: int) -> int:
        """Bytes of so many cached numbers."""
        return math.ceil(numbers * self.cache / 8)

    def activations(self, numbers: int) -> int:
        """Bytes of so many activations."""
        return math.ceil(numbers * self.activation / 8)


def experts_touched(experts: int, used: int, tokens: int) -> int:
    """How many experts at least one of the tokens goes to: expected, rounded to a whole number.

    E (1 − (1 − k/E)^t): each token picks k of E experts at random, independently of the others.
    Real routers are less even, so that fewer are touched; min(E, t k) is the most that can be.

    Example:
        >>> experts_touched(8, 2, 1), experts_touched(8, 2, 4), experts_touched(8, 2, 1000)
        (2, 5, 8)
    """
    if used == experts:
        return experts
    expected = experts * -math.expm1(tokens * math.log1p(-used / experts))
    return min(experts, tokens * used, max(used, round(expected)))


def pass_products(
    parts: Parts, workload: Workload, widths: Widths, *, training: bool = False
) -> Iterator[Product]:
    """Every product of a forward pass; with ``training``, of the backward pass as well.

    The backward pass multiplies twice for each product of the forward pass, and once more for what
    ``workload.recompute`` names. Optimizer steps are not part of it.
    """
    encoder = parts.stack("encoder")
    source = 0 if encoder is None else (encoder.tokens or workload.encoded)
    for stack, layer, matrix in parts.matrices():
        rows = workload.batch * workload.rows(matrix, stack, source)
        if matrix.rows is Rows.NONE:
            yield from _table(matrix, workload.batch * workload.queries(stack), widths, training)
        elif rows:
            again = workload.recompute == "full" and layer is not None
            yield from _matrix(matrix, rows, widths, training, again)
    for stack, _, vector in parts.vectors():
        if workload.queries(stack):
            yield Product(vector.component, 0, widths.weights(vector.size) * (1 + training))
    for stack, _, attention in parts.attentions():
        if workload.queries(stack):
            yield from _attention(attention, stack, workload, source, widths, training)


def _table(matrix: Matrix, tokens: int, widths: Widths, training: bool) -> Iterator[Product]:
    """Rows are picked: each at most once; those of positions ride along with the embedding's."""
    if not tokens:
        return
    read = widths.weights(min(matrix.d_in, tokens) * matrix.d_out)
    out = matrix.component is Component.EMBEDDING
    written = widths.activations(tokens * matrix.d_out) if out else 0
    yield Product(matrix.component, 0, read + written)
    if training and matrix.learned:
        yield Product(matrix.component, 0, written + read)  # the stream's gradient, and the rows'


def _matrix(
    matrix: Matrix, rows: int, widths: Widths, training: bool, again: bool
) -> Iterator[Product]:
    copies = 1
    if matrix.copies > 1:
        copies = experts_touched(matrix.copies, matrix.used, rows)
    flops = 2 * rows * matrix.macs_per_row
    weights = copies * matrix.d_in * matrix.d_out
    stored = widths.weights(weights + copies * matrix.bias)
    into = widths.activations(rows * matrix.used * matrix.d_in)
    out = widths.activations(rows * matrix.used * matrix.d_out)
    each, d_in, d_out = math.ceil(rows * matrix.used / copies), matrix.d_in, matrix.d_out
    forward = Product(
        matrix.component, flops, stored + into + out, Shape(copies, each, d_in, d_out)
    )
    yield forward
    if not training:
        return
    if again:
        yield forward
    if matrix.input_gradient:
        shape = Shape(copies, each, d_out, d_in)
        yield Product(matrix.component, flops, out + stored + into, shape)
    gradient = widths.activations(weights + copies * matrix.bias)
    yield Product(matrix.component, flops, into + out + gradient, Shape(copies, d_in, each, d_out))


@dataclass(frozen=True, slots=True)
class _Moved:
    """Bytes that one attention moves: its operands, its result, and one n × n matrix of all heads.

    ``squares`` is that matrix where it is materialised, else 0.
    """

    query: int
    key: int
    value: int
    out: int
    squares: int


def _attention(
    attention: Attention,
    stack: Stack,
    workload: Workload,
    source: int,
    widths: Widths,
    training: bool,
) -> Iterator[Product]:
    """Q Kᵀ and A V, forward and backward."""
    dense = replace(workload, pairs="all").pair_count(attention, stack, source)
    pairs = workload.pair_count(attention, stack, source)
    if not dense:
        return
    queries, batch, heads = workload.queries(stack), workload.batch, attention.heads
    keys = dense // queries
    d_qk, d_value, key_numbers, value_numbers = _sizes(attention, workload)
    squares = widths.activations(batch * heads * dense) * (workload.attention == "materialised")
    moved = _Moved(
        widths.activations(batch * queries * heads * d_qk),
        widths.cached(batch * keys * key_numbers),
        widths.cached(batch * keys * value_numbers),
        widths.activations(batch * queries * heads * d_value),
        squares,
    )
    scores, mix = (2 * batch * heads * pairs * width for width in (d_qk, d_value))
    shapes = (
        Shape(batch * heads, queries, d_qk, keys),
        Shape(batch * heads, queries, keys, d_value),
    )
    forward = (
        Product(Component.SCORES, scores, moved.query + moved.key + 2 * squares, shapes[0]),
        Product(Component.MIX, mix, moved.value + moved.out + 2 * squares, shapes[1]),
    )
    yield from forward
    if training:
        if workload.recompute != "none":
            yield from forward
        yield from _attention_backward(moved, scores, mix, shapes, squares > 0)


def _attention_backward(
    moved: _Moved, scores: int, mix: int, shapes: tuple[Shape, Shape], materialised: bool
) -> Iterator[Product]:
    """dV = Aᵀ dO, dA = dO Vᵀ, dQ = dS K, dK = dSᵀ Q; fused, the scores are computed once more.

    Each operand is read and each gradient written once. Materialised, A is read and dA written by
    the first two; A and dA are read and dS written by the softmax, and dS read by the last two.
    """
    yield Product(
        Component.SCORES,
        scores * (2 if materialised else 3),
        2 * (moved.query + moved.key) + 5 * moved.squares,
        shapes[0],
    )
    yield Product(
        Component.MIX, 2 * mix, 2 * (moved.value + moved.out) + 2 * moved.squares, shapes[1]
    )


def _sizes(attention: Attention, workload: Workload) -> tuple[int, int, int, int]:
    """Widths of a query and of a value of one head, and numbers read of one key and one value."""
    d_qk, d_value = attention.d_qk, attention.d_value
    if attention.latent is not None and workload.absorbed:
        rank, rotary = attention.latent
        # One latent serves as key and value of every head; a fused kernel reads it once.
        again = rank if workload.attention == "materialised" else 0
        return rank + rotary, rank, rank + rotary, again
    return d_qk, d_value, attention.kv_heads * d_qk, attention.kv_heads * d_value
