"""From which length on attention outweighs the rest of its blocks, exactly.

In one block of width d with h heads, the two products of attention cost n² · 2a multiply-adds
(a = h · d_head) and the m matrices of the MLP n · m · d · f. They are equal at n* = m d f / (2a).
A causal mask halves the pairs to n (n + 1) / 2 and moves it to 2 n* − 1. Summed over blocks, n* is
one sum over another; windows make the products linear in n, so there may be no such length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fractions import Fraction
from typing import Final

from headwise.cost.blocks import hidden
from headwise.cost.pairs import visible_pairs
from headwise.cost.parts import Attention, Component, Layer, Matrix, Parts, Stack

__all__ = ["Crossover", "Shares", "crossovers", "shares"]

_MLP: Final = (Component.MLP, Component.ROUTER, Component.EXPERTS, Component.SHARED_EXPERTS)
_PROJECTIONS: Final = (
    Component.QUERY, Component.KEY, Component.VALUE, Component.LATENT, Component.OUTPUT,
)  # fmt: skip
_FARTHEST: Final = 2**60


@dataclass(frozen=True, slots=True)
class Crossover:
    """The length at which the products of attention equal something else.

    Attributes:
        stack: of which blocks.
        other: "MLP", "all linear layers", "projections" (of attention itself), or "MLP activation":
            there h · n² scores are held against the hidden vectors of the MLP, in numbers.
        pairs: "all" (n²), "causal" (n (n + 1) / 2) or "visible" (windows too).
        value: the solution; None: the products never get there.
        first: the first whole length at which they are at least as much; None likewise.
        formula: in symbols; ``numbers``: the same with the sizes of the model.
    """

    stack: str
    other: str
    pairs: str
    value: Fraction | None
    first: int | None
    formula: str
    numbers: str


def crossovers(parts: Parts) -> tuple[Crossover, ...]:
    """Every crossover of every stack: all pairs, causal, and visible where there are windows.

    Example:
        >>> from headwise.cost.explicit import explicit
        >>> found = crossovers(explicit(d_model=4096, layers=2, heads=32, vocab=32_000))
        >>> [(each.other, each.pairs, each.first) for each in found[:4]]
        [('MLP', 'all', 16384), ('MLP', 'causal', 32767), ('all linear layers', 'all', 24576), ('all linear layers', 'causal', 49151)]
    """  # noqa: E501
    return tuple(each for stack in parts.stacks if stack.layers for each in _of(stack))


def _of(stack: Stack) -> Iterable[Crossover]:
    products = sum(a.heads * (a.d_qk + a.d_value) for a in _attentions(stack))
    for other, components in (
        ("MLP", _MLP),
        ("all linear layers", (*_MLP, *_PROJECTIONS)),
        ("projections", _PROJECTIONS),
    ):
        yield from _kinds(stack, other, _per_token(stack, components), products)
    heads = sum(a.heads for a in _attentions(stack))
    widths = sum(_hidden(layer) for layer in stack.layers)
    value = Fraction(widths, heads)
    equal = len({(_hidden(layer), layer.attentions[0].heads) for layer in stack.layers}) == 1
    each = len(stack.layers) if equal else 1
    symbols = "f / h" if equal else "Σ f / Σ h"
    yield Crossover(
        stack.name, "MLP activation", "all", value, _ceiling(value),
        f"n* = {symbols}", f"{widths // each:,} / {heads // each:,}",
    )  # fmt: skip


def _kinds(stack: Stack, other: str, linear: int, products: int) -> Iterable[Crossover]:
    symbols, numbers = _formula(stack, other)
    value = Fraction(linear, products)
    yield Crossover(
        stack.name, other, "all", value, _ceiling(value),
        f"n* = {symbols.once()}", numbers.once(),
    )  # fmt: skip
    attentions = _attentions(stack)
    if not all(attention.causal for attention in attentions):
        return
    causal = 2 * value - 1
    yield Crossover(
        stack.name, other, "causal", causal, max(_ceiling(causal), 1),
        f"n* = {symbols.doubled()} − 1", f"{numbers.doubled()} − 1",
    )  # fmt: skip
    if any(attention.window is not None for attention in attentions):
        first = _first(lambda n: _visible(attentions, n) >= n * linear)
        yield Crossover(
            stack.name, other, "visible", None if first is None else Fraction(first), first,
            "the first n with Σ pairs · h (d_qk + d_value) ≥ n · Σ d_in · d_out", "",
        )  # fmt: skip


def _attentions(stack: Stack) -> list[Attention]:
    return [a for layer in stack.layers for a in layer.attentions if a.role == "self"]


def _matrices(layer: Layer, components: Iterable[Component]) -> list[Matrix]:
    wanted = set(components)
    return [m for m in layer.matrices if m.component in wanted and m.role == "self"]


def _per_token(stack: Stack, components: Iterable[Component]) -> int:
    chosen = tuple(components)
    return sum(m.macs_per_row for layer in stack.layers for m in _matrices(layer, chosen))


def _hidden(layer: Layer) -> int:
    return hidden(_matrices(layer, _MLP))


def _visible(attentions: Iterable[Attention], n: int) -> int:
    return sum(
        visible_pairs(n, n, causal=True, window=a.window) * a.heads * (a.d_qk + a.d_value)
        for a in attentions
    )


def _ceiling(value: Fraction) -> int:
    return -(-value.numerator // value.denominator)


def _first(reached: Callable[[int], bool]) -> int | None:
    """The smallest n from 1 on that has got there; the share of attention only grows with n."""
    if not reached(_FARTHEST):
        return None
    low, high = 0, _FARTHEST
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if reached(middle) else (middle, high)
    return high


@dataclass(frozen=True, slots=True)
class _Quotient:
    """above / below in words; ``half`` is half of what is below, where it has a factor 2."""

    above: str
    below: str
    half: str = ""

    def once(self) -> str:
        return f"{self.above} / {self.below}"

    def doubled(self) -> str:
        return f"{self.above} / {self.half}" if self.half else f"2 · {self.once()}"


def _formula(stack: Stack, other: str) -> tuple[_Quotient, _Quotient]:
    """In symbols and in numbers; of the whole stack where its blocks differ."""
    first = stack.layers[0]
    attention = next(a for a in first.attentions if a.role == "self")
    plain = (
        len({(layer.matrices, layer.attentions[0].heads) for layer in stack.layers}) == 1
        and attention.d_qk == attention.d_value
        and attention.latent is None
        and not _matrices(first, (Component.EXPERTS,))
    )
    if not plain:
        chosen = {"MLP": _MLP, "projections": _PROJECTIONS}.get(other, (*_MLP, *_PROJECTIONS))
        linear = _per_token(stack, chosen)
        products = sum(a.heads * (a.d_qk + a.d_value) for a in _attentions(stack))
        numbers = _Quotient(f"{linear:,}", f"{products:,}")
        return _Quotient("Σ d_in · d_out", "Σ h (d_qk + d_value)"), numbers
    d, a = stack.d_model, attention.heads * attention.d_qk
    kv, f = attention.kv_heads * attention.d_qk, _hidden(first)
    m = len(_matrices(first, (Component.MLP,)))
    above, sizes = {
        "MLP": ("m d f", f"{m} · {d:,} · {f:,}"),
        "projections": ("d (2a + 2k·d_head)", f"{d:,} · (2 · {a:,} + 2 · {kv:,})"),
    }.get(
        other,
        (
            "(d (2a + 2k·d_head) + m d f)",
            f"({d:,} · (2 · {a:,} + 2 · {kv:,}) + {m} · {d:,} · {f:,})",
        ),
    )
    return _Quotient(above, "(2a)", "a"), _Quotient(sizes, f"(2 · {a:,})", f"{a:,}")


@dataclass(frozen=True, slots=True)
class Shares:
    """How the parts of the blocks compare at one length, exact ratios.

    ``ratio_of_widths`` is n / d, the popular measure: it is n² d against n d², with all constants
    dropped. ``causal``: whether the stack has that mask.
    """

    length: int
    ratio_of_widths: Fraction
    over_mlp: Fraction
    over_mlp_causal: Fraction
    over_linear: Fraction
    over_linear_causal: Fraction
    causal: bool = True

    def sentence(self) -> str:
        """What these ratios say.

        Example:
            >>> from headwise.cost.explicit import explicit
            >>> parts = explicit(d_model=4096, layers=1, heads=32, vocab=32_000)
            >>> print(shares(parts.stacks[0], 128_000).sentence())
            At 128,000 tokens n / d is 31.25; the two products of attention are 7.8 times the MLP (3.9 with the causal mask) and 84 % (72 %) of the arithmetic of the blocks.
        """  # noqa: E501
        part, causal = (x / (1 + x) for x in (self.over_linear, self.over_linear_causal))
        halved = f" ({_short(self.over_mlp_causal)} with the causal mask)" if self.causal else ""
        halved_part = f" ({float(100 * causal):.0f} %)" if self.causal else ""
        return (
            f"At {self.length:,} tokens n / d is {float(self.ratio_of_widths):.4g}; the two"
            f" products of attention are {_short(self.over_mlp)} times the MLP{halved} and"
            f" {float(100 * part):.0f} %{halved_part} of the arithmetic of the blocks."
        )


def _short(value: Fraction) -> str:
    return f"{float(value):.1f}" if value >= 1 else f"{float(value):.2g}"


def shares(stack: Stack, length: int) -> Shares:
    """The products of attention against the rest of the blocks of a stack at one length."""
    products = sum(a.heads * (a.d_qk + a.d_value) for a in _attentions(stack))
    every, causal = length * products, Fraction(length + 1, 2) * products
    mlp = _per_token(stack, _MLP)
    linear = mlp + _per_token(stack, _PROJECTIONS)
    return Shares(
        length,
        Fraction(length, stack.d_model),
        every / Fraction(mlp),
        causal / mlp,
        every / Fraction(linear),
        causal / linear,
        all(attention.causal for attention in _attentions(stack)),
    )
