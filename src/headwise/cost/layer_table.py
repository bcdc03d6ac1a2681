"""One block as the textbook's table has it: a row for each product, with its formula.

For h heads of width d / h, as many key-value heads and an MLP of four times the width, the rows are
3nd², n²d, n²d, nd² and 8nd² multiply-adds, and 3nd, hn², nd, nd and 4nd numbers that come out. Here
they are made from the sizes, so that they hold for grouped heads, gates, experts and windows too.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from headwise.cost.blocks import hidden
from headwise.cost.parts import Attention, Component, Layer, Matrix, Stack

__all__ = ["Row", "layer_table"]

_MIXTURE: Final = (Component.MLP, Component.EXPERTS, Component.SHARED_EXPERTS)


@dataclass(frozen=True, slots=True)
class Row:
    """One row: multiply-adds of one sequence, and the numbers that come out, each with a formula.

    ``macs`` counts all n² pairs. ``numbers`` are what stands in memory after the product; of the
    MLP, its hidden vectors.
    """

    name: str
    macs: int
    macs_formula: str
    numbers: int
    numbers_formula: str

    @property
    def flops(self) -> int:
        """2 · multiply-adds."""
        return 2 * self.macs


def layer_table(stack: Stack, length: int, layer: int = 0) -> tuple[Row, ...]:
    """The rows of one block at ``length`` tokens.

    Example:
        >>> from headwise.cost.explicit import explicit
        >>> block = explicit(d_model=64, layers=1, heads=4, vocab=257).stacks[0]
        >>> [(row.macs, row.numbers) for row in layer_table(block, 8)] == [
        ...     (3 * 8 * 64**2, 3 * 8 * 64), (8**2 * 64, 4 * 8**2), (8**2 * 64, 8 * 64),
        ...     (8 * 64**2, 8 * 64), (8 * 8 * 64**2, 4 * 8 * 64)]
        True
    """
    block, n = stack.layers[layer], length
    attention = next(each for each in block.attentions if each.role == "self")
    return (
        _projections(block, attention, n),
        *_products(attention, n),
        _sum("output projection", _chosen(block, (Component.OUTPUT,)), n, "n a d", "n d"),
        *_mlp(block, n),
    )


def _chosen(block: Layer, components: Iterable[Component]) -> list[Matrix]:
    wanted = set(components)
    return [m for m in block.matrices if m.component in wanted and m.role == "self"]


def _sum(name: str, matrices: list[Matrix], n: int, formula: str, out: str) -> Row:
    macs = n * sum(m.macs_per_row for m in matrices)
    return Row(name, macs, formula, n * sum(m.d_out * m.used for m in matrices), out)


def _projections(block: Layer, attention: Attention, n: int) -> Row:
    names = (Component.QUERY, Component.KEY, Component.VALUE, Component.LATENT)
    matrices = _chosen(block, names)
    if attention.latent is not None:
        formula = "n (d r_q + r_q h d_qk + d (r + d_rope) + r h (d_nope + d_v))"
        return _sum("Q, K, V through latents", matrices, n, formula, "n (all of these)")
    if attention.heads == attention.kv_heads:
        return _sum("Q, K, V projections", matrices, n, "3 n d a", "3 n a")
    grouped = ("n d (a + 2 k d_head)", "n (a + 2 k d_head)")
    return _sum("Q, K, V projections", matrices, n, *grouped)


def _products(attention: Attention, n: int) -> tuple[Row, Row]:
    heads, value = attention.heads, attention.heads * attention.d_value
    scores = Row("Q Kᵀ", n * n * heads * attention.d_qk, "n² a", heads * n * n, "h n²")
    return scores, Row("A V", n * n * value, "n² a", n * value, "n a")


def _mlp(block: Layer, n: int) -> Iterable[Row]:
    router = _chosen(block, (Component.ROUTER,))
    if router:
        yield _sum("router", router, n, "n d E", "n E")
    matrices = _chosen(block, _MIXTURE)
    ways = {m.component for m in matrices}
    each = len([m for m in matrices if m.component is matrices[0].component])
    experts = "K " if router else ""
    yield Row(
        "experts that are used" if router else "MLP",
        n * sum(m.macs_per_row for m in matrices),
        f"{each} {experts}n d f" + (" + shared" if len(ways) > 1 else ""),
        n * hidden(matrices),
        f"{experts}n f" + (" + shared" if len(ways) > 1 else ""),
    )
