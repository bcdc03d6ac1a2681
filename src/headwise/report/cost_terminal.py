"""What a model costs, in a terminal: one model in full, or several side by side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

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
    si,
    time_rows,
    title,
    utilisation_rows,
    within,
)
from headwise.report.numbers import memory

if TYPE_CHECKING:
    from headwise.observation.counted import Verified

__all__ = ["compared", "cost_summary", "used", "verified"]

_NUMBER: Final = "right"
_GAP: Final = 2  # between columns


def cost_summary(cost: Cost) -> RenderableType:
    """One model: parameters, arithmetic, memory, crossovers, and what others would count."""
    name, facts = title(cost)
    parts: list[RenderableType] = [
        Text(name, style="bold"),
        Text(" · ".join(facts), style="dim"),
        Text(" · ".join(in_words(cost)), style="dim"),
        Text(),
        _components(cost),
        Text(f"{cost.forward.macs:,} multiply-adds = {cost.flops:,} FLOPs forward", style="dim"),
        Text(CONVENTION, style="dim"),
        Text(),
        _passes(cost),
        Text(),
        _memory(cost),
    ]
    if cache_rows(cost):
        parts += [Text(), _three("Keys and values", cache_rows(cost))]
    if cost.time is not None:
        parts += [Text(), _time(cost)]
    if cost.fits:
        parts += [Text(), _pairs("What fits", fit_rows(cost))]
    parts += [Text(), _crossovers(cost), Text(cost.shares.sentence())]
    if cost.others:
        parts += [Text(), _others(cost)]
    told = notes(cost)
    if told:
        parts += [Text(), *(Text(f"Note: {note}.", style="dim") for note in told)]
    return Group(*parts)


def _table(head: str, *columns: tuple[str, str]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    table.add_column(Text(head), style="none", header_style="bold", overflow="fold")
    for name, justify in columns:
        table.add_column(Text(name), justify=justify, overflow="fold")  # type: ignore[arg-type]
    return table


def _components(cost: Cost) -> Table:
    table = _table(
        "Component", ("parameters", _NUMBER), ("share", _NUMBER), ("multiply-adds", _NUMBER),
        ("FLOPs", _NUMBER), ("share", _NUMBER),
    )  # fmt: skip
    whole, macs = cost.parameters, cost.forward.macs
    for name, stored, forward, _ in component_rows(cost.forward):
        table.add_row(
            name, f"{stored:,}" if stored else "", percent_of(stored, whole) if stored else "",
            si(forward) if forward else "", si(2 * forward) if forward else "",
            percent_of(forward, macs) if forward else "",
        )  # fmt: skip
    table.add_row("total", f"{whole:,}", "", si(macs), si(2 * macs), "", style="bold")
    for name, number in within(cost):
        table.add_row(f"  {name}", f"{number:,}", percent_of(number, whole), "", "", "")
    return table


def _passes(cost: Cost) -> Table:
    table = _table("Pass", ("FLOPs", _NUMBER), ("", "left"))
    for name, flops, words in pass_rows(cost):
        table.add_row(name, si(flops), Text(words, style="dim"))
    return table


def _memory(cost: Cost) -> Table:
    columns = [("forward", _NUMBER)]
    if cost.training is not None:
        columns.append(("training step", _NUMBER))
    table = _table("Memory", *columns)
    for name, forward, training in memory_rows(cost):
        cells = [name, memory(forward) if forward else ""]
        if training is not None:
            cells.append(memory(training) if training else "")
        table.add_row(*cells, style="bold" if name == "total" else None)
    return table


def _three(head: str, rows: Sequence[tuple[str, int, str]]) -> Table:
    table = _table(head, ("bytes", _NUMBER), ("", "left"))
    for name, size, words in rows:
        table.add_row(name, memory(size), Text(words, style="dim"))
    return table


def _pairs(head: str, rows: Sequence[tuple[str, str]]) -> Table:
    table = _table(head, ("", _NUMBER))
    for row in rows:
        table.add_row(*row)
    return table


def _time(cost: Cost) -> Table:
    assert cost.time is not None
    head = f"At the least on {cost.time.hardware.title}, {cost.time.dtype}"
    table = _table(
        head, ("time", _NUMBER), ("tokens", _NUMBER), ("held back by", "left"),
        ("FLOPs per byte", _NUMBER),
    )  # fmt: skip
    for row in time_rows(cost):
        table.add_row(*row)
    return table


def _crossovers(cost: Cost) -> Table:
    table = _table("Attention outweighs", ("pairs", "left"), ("from n", _NUMBER), ("", "left"))
    for name, pairs, first, formula, _ in crossover_rows(cost.crossovers):
        table.add_row(name, pairs, first, Text(formula, style="dim"))
    return table


def _others(cost: Cost) -> Table:
    table = _table("Other counters", ("quantity", "left"), ("of it", _NUMBER), ("why", "left"))
    for tool, what, ratio, why in other_rows(cost):
        table.add_row(tool, what, ratio, Text(why, style="dim"))
    for column, most in zip(table.columns, (23, 16), strict=False):
        column.max_width = most  # leaves whole words of the reasons on 80 columns
    return table


def compared(costs: Sequence[Cost]) -> RenderableType:
    """Several models or lengths side by side: a column each, as many as the terminal holds."""
    names, rows = compared_rows(costs)
    return Group(Text(CONVENTION, style="dim"), _SideBySide(names, rows))


class _SideBySide:
    """Columns of one comparison, in tables below each other where they do not fit."""

    def __init__(self, names: Sequence[str], rows: Sequence[tuple[str, Sequence[str]]]) -> None:
        self.names = names
        self.rows = rows

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        label = max(len(name) for name, _ in self.rows) + _GAP
        widths = [
            max(len(name), *(len(cells[i]) for _, cells in self.rows)) + _GAP
            for i, name in enumerate(self.names)
        ]
        start = 0
        while start < len(widths):
            room, end = options.max_width - label - widths[start], start + 1
            while end < len(widths) and widths[end] <= room:
                room, end = room - widths[end], end + 1
            table = _table("", *((name, _NUMBER) for name in self.names[start:end]))
            for name, cells in self.rows:
                table.add_row(name, *cells[start:end])
            yield Text()
            yield table
            start = end


def used(cost: Cost, tokens_per_second: float, devices: int) -> RenderableType:
    """What share of the peak a measured number of tokens per second makes, in three conventions."""
    table = _table(
        f"Utilisation at {tokens_per_second:,g} tokens/s", ("FLOPs a token", _NUMBER),
        ("of the peak", _NUMBER), ("", "left"),
    )  # fmt: skip
    for name, flops, share, words in utilisation_rows(cost, tokens_per_second, devices):
        table.add_row(name, flops, share, Text(words, style="dim"))
    return Group(Text(), table)


def verified(check: Verified) -> RenderableType:
    """Predicted beside counted."""
    head = f"Counted on the meta device: {check.model_class}, {check.batch:,} × {check.length:,}"
    table = _table(head, ("predicted", _NUMBER), ("counted", _NUMBER), ("", "left"))
    for name, predicted, counted in (
        ("parameters", check.parameters, check.counted_parameters),
        ("FLOPs forward", check.forward, check.counted_forward),
        ("FLOPs forward and backward", check.training, check.counted_training),
    ):
        told = "equal" if predicted == counted else f"differs by {counted - predicted:+,}"
        table.add_row(name, f"{predicted:,}", f"{counted:,}", told)
    return Group(Text(), table)
