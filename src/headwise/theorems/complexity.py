"""The table of complexity: what a block multiplies and keeps, counted and not assumed."""

from __future__ import annotations

from fractions import Fraction
from typing import Any, Final

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from headwise.attention.streaming import attend
from headwise.cost.config import parts_of
from headwise.cost.crossovers import Crossover, crossovers, shares
from headwise.cost.explicit import explicit
from headwise.cost.layer_table import layer_table
from headwise.cost.parts import Parts
from headwise.models.build import build
from headwise.models.presets import encoder_sizes
from headwise.observation.costed import add_cost
from headwise.results.validate import about
from headwise.theorems.measured import Measured, exact
from headwise.theorems.saved_bytes import attention_bytes, materialised
from headwise.theorems.statement import (
    Control,
    Curve,
    Effort,
    Evidence,
    Kind,
    NotApplicable,
    Plot,
    Textbook,
    Theorem,
)
from headwise.theorems.trained import Trained

__all__ = ["THEOREMS"]

_ROWS: Final = ("Q, K, V", "Q Kᵀ and A V", "output", "MLP")


def _counted(d: int, heads: int, n: int, d_ff: int) -> tuple[int, int, int, int]:
    """Multiply-adds of one block of a Headwise model over n tokens, by row, as torch counts them.

    The composed form of torch's attention is asked for, because the counter does not see inside the
    fused one.
    """
    sizes = encoder_sizes(vocab=7, d_model=d, layers=1, heads=heads, d_ff=d_ff, context=n)
    model: Any = build(sizes)
    ids = torch.zeros(1, n, dtype=torch.long)
    with (
        torch.no_grad(),
        sdpa_kernel(SDPBackend.MATH),
        FlopCounterMode(display=False) as counter,
    ):
        model.hidden(ids)
    found: dict[str, int] = {}
    for name, operations in counter.get_flop_counts().items():
        for operation, flops in operations.items():
            found[f"{name.rpartition('.')[2]} {operation}"] = flops // 2  # 2 per multiply-add
    maps = sum(found[f"{name} aten.addmm"] for name in ("query", "key", "value"))
    mlp = found["up aten.addmm"] + found["down aten.addmm"]
    return maps, found["Global aten.bmm"], found["output aten.addmm"], mlp


def _table(n: int, d: int, heads: int) -> tuple[int, int, int, int]:
    """The same rows as ``headwise.cost`` has them, for d_ff = 4d."""
    block = explicit(d_model=d, layers=1, heads=heads, vocab=7, causal=False).stacks[0]
    maps, scores, mix, out, mlp = (row.macs for row in layer_table(block, n))
    return maps, scores + mix, out, mlp


def _rows(counted: tuple[int, ...], table: tuple[int, ...], n: int, d: int) -> list[Measured]:
    """Counted less predicted: by the table of the planner, and by the textbook's formulas."""
    formulas = (3 * n * d * d, 2 * n * n * d, n * d * d, 8 * n * d * d)
    return [
        exact(f"{name}: counted − {by}", got - want, tolerance=0.0)
        for by, wanted in (("planner's table", table), ("formula", formulas))
        for name, got, want in zip(_ROWS, counted, wanted, strict=True)
    ]


def _complexity(effort: Effort) -> Evidence:
    sizes = effort.pick(((11, 21, 3), (37, 14, 2)), ((11, 21, 3), (37, 14, 2), (257, 95, 5)))
    measured = [
        each
        for n, d, heads in sizes
        for each in _rows(_counted(d, heads, n, 4 * d), _table(n, d, heads), n, d)
    ]
    n, d, heads = sizes[0]
    doubled = _rows(_counted(d, heads, n, 8 * d), _table(n, d, heads), n, d)
    counted = _counted(d, heads, n, 4 * d)
    return Evidence(
        measured=tuple(measured),
        controls=(
            Control(
                name="an MLP of twice the width",
                measured=tuple(each for each in doubled if each.name.startswith("MLP")),
            ),
        ),
        finding=(
            f"At n = {n}, d = {d} torch counts {counted[0]:,} + {counted[1]:,} + {counted[2]:,} +"
            f" {counted[3]:,} multiply-adds: 3nd² + 2n²d + nd² + 8nd², to the unit."
        ),
    )


def _complexity_model(model: Trained) -> Evidence:
    checks = _cost(model)["checks"]
    measured = tuple(exact(f"{what}: predicted − counted", a - b, tolerance=0.0)
                     for what, a, b in checks)  # fmt: skip
    off = [exact(f"{what}: predicted − counted", a - b + 1, tolerance=0.0) for what, a, b in checks]
    said = "; ".join(f"{what} {a:,}" for what, a, _ in checks)
    return Evidence(
        measured=measured,
        controls=(Control(name="one more than predicted", measured=tuple(off)),),
        finding=f"From its configuration alone, and as counted in memory, to the unit: {said}.",
    )


def _cost(model: Trained) -> dict[str, Any]:
    facts = about(add_cost(model.scanned, model.loaded))
    if "cost" not in facts:
        raise NotApplicable(f"its cost is not known: {facts['notes'][-1]}")
    cost: dict[str, Any] = facts["cost"]
    return cost


def _crossover(parts: Parts, other: str, pairs: str) -> Crossover:
    return next(each for each in crossovers(parts) if (each.other, each.pairs) == (other, pairs))


_LENGTHS: Final = (
    ("MLP", "all", 4, 0, "the MLP"),
    ("all linear layers", "all", 6, 0, "all linear layers"),
    ("projections", "all", 2, 0, "the projections"),
    ("MLP", "causal", 8, -1, "the MLP, causal"),
    ("all linear layers", "causal", 12, -1, "all linear layers, causal"),
)


def _solutions(parts: Parts, d: int) -> list[Measured]:
    out = []
    for other, pairs, factor, less, name in _LENGTHS:
        value = _crossover(parts, other, pairs).value
        assert value is not None
        found = float(value - (factor * d + less))
        sign = f" − {-less}" if less else ""
        out.append(exact(f"n* against {name} − ({factor}d{sign})", found, tolerance=0.0))
    return out


def _lengths(effort: Effort) -> Evidence:
    d = 4096
    parts = explicit(d_model=d, layers=1, heads=32, vocab=7)
    wide = explicit(d_model=d, layers=1, heads=32, vocab=7, d_ff=8 * d)
    small, heads = effort.pick((14, 2), (62, 2))
    counts = {n: _counted(small, heads, n, 4 * small) for n in (4 * small, 6 * small)}
    mlp = counts[4 * small][1] - counts[4 * small][3]
    rest = counts[6 * small]
    far = shares(parts.stacks[0], 128_000)
    measured = (
        *_solutions(parts, d),
        exact("counted at n = 4d: products − MLP", mlp, tolerance=0.0),
        exact("counted at n = 6d: products − linear", rest[1] - rest[0] - rest[2] - rest[3],
              tolerance=0.0),
        exact("n / d at 128,000 and d = 4096", float(far.ratio_of_widths), predicted=31.25,
              tolerance=0.0),
        exact("n / (4d) there", float(far.over_mlp), predicted=7.8125, tolerance=0.0),
    )  # fmt: skip
    doubled = [each for each in _solutions(wide, d) if "projections" not in each.name]
    return Evidence(
        measured=measured,
        controls=(Control(name="an MLP of twice the width", measured=tuple(doubled)),),
        finding=(
            "The two products of attention cost as much as the MLP at n = 4d, as all linear layers"
            " at 6d, as the projections at 2d; with the causal mask at 8d − 1 and 12d − 1. At n ="
            f" 128,000, d = 4096, n / d is {float(far.ratio_of_widths):g}, and they cost"
            f" {float(far.over_mlp):.2f} times the MLP ({float(far.over_linear):.2f} times all"
            " linear layers)."
        ),
        plots=(_shares_plot(parts, wide, d),),
    )


def _shares_plot(parts: Parts, wide: Parts, d: int) -> Plot:
    places = (2048, 4096, 16384, 24576, 65536, 128_000)
    over = [shares(parts.stacks[0], n) for n in places]
    other = [shares(wide.stacks[0], n) for n in places]
    return Plot(
        title="The products of attention against the rest, d = 4096",
        across="tokens n",
        up="ratio of multiply-adds",
        places=tuple(float(n) for n in places),
        curves=(
            Curve("over the MLP", tuple(float(s.over_mlp) for s in over)),
            Curve("n / (4d)", tuple(n / (4 * d) for n in places)),
            Curve("over all linear layers", tuple(float(s.over_linear) for s in over)),
            Curve("control: MLP twice as wide", tuple(float(s.over_mlp) for s in other)),
        ),
        log=(True, True),
    )


def _lengths_model(model: Trained) -> Evidence:
    parts = parts_of(_cost(model)["config"], model.name)
    chosen = _crossover(parts, "MLP", "all")
    stack = next(each for each in parts.stacks if each.name == chosen.stack)
    if chosen.value is None or chosen.first is None:
        raise NotApplicable("the products of its attention never cost as much as its MLP")
    first = chosen.first
    ratio = Fraction(first) / chosen.value
    at = shares(stack, first).over_mlp
    name = f"products / MLP at {first:,} tokens"
    return Evidence(
        measured=(exact(name, float(at - ratio), tolerance=0.0),),
        controls=(
            Control(
                name="one token more",
                measured=(exact(name, float(shares(stack, first + 1).over_mlp - ratio),
                                tolerance=0.0),),
            ),
        ),
        finding=(
            f"In the blocks of its {stack.name} the products of attention cost as much as the MLP"
            f" at {first:,} tokens ({float(chosen.value / stack.d_model):.3g} d); at the"
            f" {model.tokens:,} read here, {float(shares(stack, model.tokens).over_mlp):.2g} times."
        ),
    )  # fmt: skip


def _memory(effort: Effort) -> Evidence:
    heads, d = 3, 7
    lengths = effort.pick((101, 199, 397), (101, 199, 397, 797, 1601))

    def square(form: Any, n: int) -> Measured:
        """What grows as n² in the saved bytes, by the second difference, less 4 h n² bytes."""
        found = attention_bytes(form, heads, n, d)
        twice, thrice = (attention_bytes(form, heads, i * n, d) for i in (2, 3))
        second = (thrice - 2 * twice + found) / 2
        return exact(f"quadratic part at n = {n} − 4hn² bytes", second - 4 * heads * n * n,
                     tolerance=0.0)  # fmt: skip

    measured = tuple(square(materialised, n) for n in lengths)
    tiled = tuple(square(attend, n) for n in lengths)
    return Evidence(
        measured=measured,
        controls=(Control(name="attention in tiles", measured=tiled),),
        finding=(
            f"The quadratic part of what the materialised form saves is h n² numbers to the byte:"
            f" {4 * heads * lengths[-1] ** 2:,} bytes at n = {lengths[-1]} and h = {heads}; that of"
            f" attention in tiles is 0."
        ),
    )


THEOREMS: Final = (
    Theorem(
        name="complexity-table",
        title="What a block multiplies",
        statement=(
            "One block over n tokens costs 3nd² multiply-adds for Q, K, V, n²d for Q Kᵀ, n²d for"
            " A V, nd² for the output and 8nd² for an MLP of width 4d: 12nd² + 2n²d."
        ),
        latex=r"3nd^2 + n^2 d + n^2 d + nd^2 + 8nd^2 = 12\,nd^2 + 2\,n^2 d",
        conditions=(
            "as many key-value heads as heads, of width d / h",
            "an MLP of two matrices of width 4d",
            "all n² pairs are computed, also those that a causal mask hides",
        ),
        source="Vaswani et al. 2017 (arXiv:1706.03762), table 1; the rows are derived here",
        kind=Kind.IDENTITY,
        prediction="integers that are equal",
        estimator="torch's FLOP counter over a block of a Headwise model, 2 FLOPs per multiply-add",
        random=_complexity,
        model=_complexity_model,
        textbook=(
            Textbook(
                "the table lists FLOPs", "it lists multiply-adds; a FLOP count has twice as many"
            ),
        ),
        exercise=6,
        proof="complexity",
    ),
    Theorem(
        name="crossover-lengths",
        title="From which length on attention dominates",
        statement=(
            "The two products of attention cost as much as the MLP at n = 4d, as the projections at"
            " 2d and as all linear layers at 6d; with only the causal pairs, at 8d − 1 and"
            " 12d − 1."
        ),
        latex=(
            r"2n^2 d = 8nd^2 \iff n = 4d, \qquad 2n^2 d = 12nd^2 \iff n = 6d, \qquad"
            r" n(n+1)\,d = 8nd^2 \iff n = 8d - 1"
        ),
        conditions=("an MLP of width 4d", "heads of width d / h, none shared"),
        source="derived from the table; Vaswani et al. 2017 (arXiv:1706.03762), table 1",
        kind=Kind.IDENTITY,
        prediction="4d, 6d, 2d, 8d − 1, 12d − 1; n/d = 31.25 and n/(4d) = 7.81 at 128,000",
        estimator="exact fractions of the planner, and counted products at n = 4d and 6d",
        random=_lengths,
        model=_lengths_model,
        textbook=(
            Textbook(
                "attention dominates from n of about d on, by a factor of 30 at 128,000 tokens",
                "from 4d (MLP) or 6d (all linear layers); there, 7.8 times the MLP. The length at"
                " which the times are equal is a property of the machine",
            ),
        ),
        exercise=6,
        proof="complexity",
    ),
    Theorem(
        name="score-memory",
        title="Materialised attention keeps h n² numbers",
        statement=(
            "Attention that builds its weights saves h n² numbers for the backward pass; attention"
            " in tiles saves nothing that grows as n²."
        ),
        latex=r"\mathrm{saved}(n) = h\,n^2 + O(n)",
        conditions=("the weights are built", "no dropout on A", "storages are counted once"),
        source="Dao et al. 2022 (arXiv:2205.14135), section 2.2",
        kind=Kind.IDENTITY,
        prediction="a quadratic part of 4hn² bytes in float32",
        estimator="second differences of the bytes of saved storages at n, 2n and 3n",
        random=_memory,
        textbook=(
            Textbook(
                "the memory of attention is hn²",
                "of each layer, of each copy that is kept: dropout adds a mask and a product",
            ),
        ),
    ),
)
