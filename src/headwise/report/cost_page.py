"""What models cost as one self-contained page without a script: sentences, plots, tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from headwise.cost.planner import Cost
from headwise.report.cost_facts import (
    CONVENTION,
    cache_rows,
    compared_rows,
    component_rows,
    crossover_rows,
    fit_rows,
    in_words,
    memory_rows,
    notes,
    other_rows,
    pass_rows,
    percent_of,
    short_name,
    si,
    time_rows,
    title,
    within,
)
from headwise.report.cost_plots import plots, roofline_plot
from headwise.report.line_plot import Plot
from headwise.report.numbers import memory
from headwise.report.shell import small_page

__all__ = [
    "CostSection",
    "CostTable",
    "components",
    "cost_page",
    "cost_sections",
    "crossover_table",
    "memory_tables",
    "passes",
]


@dataclass(frozen=True, slots=True)
class CostTable:
    """Columns (name, whether numbers stand in it) and rows of text."""

    columns: tuple[tuple[str, bool], ...]
    rows: list[tuple[str, ...]]
    caption: str = ""


@dataclass(frozen=True, slots=True)
class CostSection:
    """A heading with sentences, plots and tables below it."""

    title: str
    sentences: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    plots: list[Plot] = field(default_factory=list)
    tables: list[CostTable] = field(default_factory=list)


def cost_page(costs: Sequence[Cost]) -> str:
    """The HTML text: one model in full, or several side by side and then each in full."""
    several = len(costs) > 1
    models = [
        {
            "name": f"{short_name(c)}, {in_words(c)[0]}",
            "facts": [title(c)[0], *title(c)[1], *in_words(c)],
            "sections": cost_sections(c),
        }
        for c in costs
    ]
    first, facts = title(costs[0])
    comparison = None
    if several:
        names, rows = compared_rows(costs)
        comparison = CostTable(
            (("", False), *((name, True) for name in names)),
            [(name, *cells) for name, cells in rows],
        )
    return small_page(
        "cost.html",
        title=f"The cost of {f'{len(costs)} plans' if several else short_name(costs[0])}",
        facts=[] if several else [first, *facts, *in_words(costs[0])],
        comparison=comparison,
        models=models,
    )


def cost_sections(cost: Cost) -> list[CostSection]:
    """The parts of the page of one model."""
    drawn = plots(cost)
    sections = [
        CostSection(
            "Arithmetic",
            [cost.shares.sentence(), CONVENTION],
            plots=drawn[:1],
            tables=[components(cost), passes(cost)],
        ),
        CostSection("When attention outweighs the rest", tables=[crossover_table(cost)]),
        *_blocks(cost),
        CostSection("Memory", plots=drawn[1:], tables=[*memory_tables(cost)]),
    ]
    if cost.time is not None:
        roof = roofline_plot(cost)
        sections.append(
            CostSection(
                "Time",
                notes=list(cost.time.notes),
                plots=[] if roof is None else [roof],
                tables=[_time(cost)],
            )
        )
    if cost.fits:
        rows: list[tuple[str, ...]] = [*fit_rows(cost)]
        sections.append(
            CostSection("What fits", tables=[CostTable((("", False), ("", True)), rows)])
        )
    if cost.others:
        sections.append(CostSection("What other counters would say", tables=[_others(cost)]))
    told = [note for note in notes(cost) if cost.time is None or note not in cost.time.notes]
    sections.append(CostSection("What is in these figures", notes=told))
    return sections


def _columns(*names: str, numbers: Iterable[int]) -> tuple[tuple[str, bool], ...]:
    chosen = set(numbers)
    return tuple((name, i in chosen) for i, name in enumerate(names))


def components(cost: Cost) -> CostTable:
    """Parameters and arithmetic of every component."""
    whole, macs = cost.parameters, cost.forward.macs
    rows: list[tuple[str, ...]] = [
        (
            name,
            f"{stored:,}" if stored else "",
            percent_of(stored, whole) if stored else "",
            f"{forward:,}" if forward else "",
            f"{2 * forward:,}" if forward else "",
            percent_of(forward, macs) if forward else "",
            f"{2 * trained:,}" if trained else "",
        )
        for name, stored, forward, trained in component_rows(cost.forward)
    ]
    total = cost.training_flops
    rows.append(("total", f"{whole:,}", "", f"{macs:,}", f"{2 * macs:,}", "", f"{total:,}"))
    rows += [(name, f"{n:,}", percent_of(n, whole), "", "", "", "") for name, n in within(cost)]
    columns = _columns(
        "component", "parameters", "share", "multiply-adds", "FLOPs forward", "share",
        "FLOPs of a training step", numbers=range(1, 7),
    )  # fmt: skip
    return CostTable(columns, rows)


def passes(cost: Cost) -> CostTable:
    """FLOPs of a forward pass, of one more token, of a training step."""
    rows: list[tuple[str, ...]] = [
        (name.strip(), f"{flops:,}", si(flops), words) for name, flops, words in pass_rows(cost)
    ]
    return CostTable(_columns("pass", "FLOPs", "", "", numbers=(1, 2)), rows)


def crossover_table(cost: Cost) -> CostTable:
    """From which length on the products of attention outweigh the rest."""
    rows: list[tuple[str, ...]] = [*crossover_rows(cost.crossovers)]
    columns = _columns(
        "against", "pairs", "from n tokens on", "formula", "in numbers", numbers=(2,)
    )
    caption = (
        "Q Kᵀ and A V of all blocks against the rest; a = heads · d_head, f = d_ff, m matrices"
    )
    return CostTable(columns, rows, caption)


def _blocks(cost: Cost) -> list[CostSection]:
    tables = []
    for name, rows in cost.table.items():
        lines: list[tuple[str, ...]] = [
            (
                row.name, row.macs_formula, f"{row.macs:,}", f"{row.flops:,}",
                row.numbers_formula, f"{row.numbers:,}",
            )
            for row in rows
        ]  # fmt: skip
        columns = _columns(
            "part", "multiply-adds", "", "FLOPs", "numbers that come out", "", numbers=(2, 3, 5)
        )
        tables.append(CostTable(columns, lines, f"The last block of the {name}, one sequence"))
    return [CostSection("One block", tables=tables)] if tables else []


def memory_tables(cost: Cost) -> Iterable[CostTable]:
    """Memory by part, keys and values, and what a file stores."""
    trains = cost.training is not None
    rows: list[tuple[str, ...]] = []
    for name, forward, training in memory_rows(cost):
        cells = [name, *_size(forward)]
        if trains:
            cells += _size(training or 0)
        rows.append(tuple(cells))
    names = ["part", "forward, bytes", ""]
    names += ["training step, bytes", ""] if trains else []
    yield CostTable(_columns(*names, numbers=range(1, 5)), rows)
    cached: list[tuple[str, ...]] = [
        (name, f"{size:,}", memory(size), words) for name, size, words in cache_rows(cost)
    ]
    if cached:
        yield CostTable(_columns("keys and values", "bytes", "", "", numbers=(1, 2)), cached)
    if cost.stored is not None:
        stored: list[tuple[str, ...]] = [
            (name, f"{part.numbers:,}", f"{part.bytes:,}", f"{part.bits_per_weight:.3f}")
            for name, part in (*cost.stored.by_type.items(), ("total", cost.stored.whole))
        ]
        columns = _columns("in the file", "numbers", "bytes", "bits each", numbers=(1, 2, 3))
        yield CostTable(columns, stored)


def _size(size: int) -> tuple[str, str]:
    return (f"{size:,}", memory(size)) if size else ("", "")


def _time(cost: Cost) -> CostTable:
    rows: list[tuple[str, ...]] = [*time_rows(cost)]
    columns = _columns(
        "pass", "least time", "tokens", "held back by", "FLOPs per byte", numbers=(1, 2, 4)
    )
    return CostTable(columns, rows)


def _others(cost: Cost) -> CostTable:
    rows: list[tuple[str, ...]] = [*other_rows(cost)]
    return CostTable(_columns("counter", "quantity", "of it", "why", numbers=(2,)), rows)
