"""A monitored run in a terminal: what went wrong, then figures over steps and by layer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table as Grid
from rich.text import Text

from headwise.monitoring.alarms import Alarm
from headwise.monitoring.record import Run
from headwise.report.health_facts import Health, Numbers, Table, health_of, verdict
from headwise.report.numbers import three
from headwise.report.terminal import bars

__all__ = ["first_signs", "health_summary"]

_MARKS: Final = {
    "bad": ("act", "bold white on red"),
    "watch": ("watch", "bold yellow"),
    "note": ("note", "dim"),
}
_SHOWN: Final = 8  # alarms
_SHOWN_LIVE: Final = 3
_WIDEST: Final = 36  # bars; the words and numbers beside them take the rest of 80 columns
_BESIDE: Final = 44


def health_summary(health: Health, *, live: bool = False) -> RenderableType:
    """Facts, verdict, alarms, and figures as bars: over steps, and by layer at the last record.

    ``live``: a few of the last alarms instead of the first ones, for a run that goes on.

    Example:
        >>> from pathlib import Path
        >>> from headwise.monitoring.record import StepRecord
        >>> record = StepRecord(step=1, time=0.0, layers=(), stream={}, weights={},
        ...                     non_finite="", values={"loss": 5.5})
        >>> found = health_of(Run(Path("first"), {}, (record,)))
        >>> Console(width=80).print(health_summary(found))  # doctest: +NORMALIZE_WHITESPACE
        first
        1 record · step 1
        <BLANKLINE>
        No alarm.
        <BLANKLINE>
        over steps       the worst layer                         first     last
        loss             ▁                                        5.50     5.50 nats
    """
    most = _SHOWN_LIVE if live else _SHOWN
    parts: list[RenderableType] = [
        Text(health.name, style="bold"),
        Text(" · ".join(health.facts), style="dim"),
        *(Text(note, style="yellow") for note in health.notes),
        Text(),
        Text(verdict(health), style="bold"),
    ]
    if health.alarms:
        parts += [Text(), _alarms(health.alarms[-most:] if live else health.alarms[:most])]
    hidden = len(health.alarms) - most
    if hidden > 0:
        parts.append(Text(f"      and {hidden} {'earlier' if live else 'later'}", style="dim"))
    return Group(*parts, Text(), _Bars(health))


def first_signs(*runs: Run) -> str:
    """What the pages of some runs say first: a line for each.

    Example:
        >>> from pathlib import Path
        >>> from headwise.monitoring.record import StepRecord
        >>> record = StepRecord(step=1, time=0.0, layers=(), stream={}, weights={},
        ...                     non_finite="", values={"loss": 5.5})
        >>> print(first_signs(Run(Path("first"), {}, (record,))))
        first: loss 5.50 to 5.50 at step 1. No alarm.
    """
    lines = []
    for run in runs:
        found = health_of(run)
        known = found.loss[np.isfinite(found.loss)]
        loss = f"loss {three(float(known[0]))} to {three(float(known[-1]))}" if known.size else ""
        lines.append(f"{found.name}: {loss} at step {found.steps[-1]:,}. {verdict(found)}")
        worse = [alarm for alarm in found.alarms if alarm.severity != "note"]
        lines += [f"    step {alarm.step:,}: {alarm.sentence}" for alarm in worse[:3]]
    return "\n".join(lines)


def _alarms(found: tuple[Alarm, ...]) -> Grid:
    table = Grid.grid(padding=(0, 1, 0, 0))
    table.add_column(width=5, no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column()
    for alarm in found:
        mark, style = _MARKS[alarm.severity]
        step = Text(f"step {alarm.step:,}", style="dim")
        table.add_row(Text(f"{mark:^5}", style=style), step, Text(alarm.sentence))
    return table


@dataclass(frozen=True, eq=False)
class _Bars:
    """The two tables of bars, as wide as the terminal allows."""

    health: Health

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        widest = max(4, min(_WIDEST, options.max_width - _BESIDE))
        last = self.health.steps[-1]
        yield _table("over steps", ("first", "last"), self._over_steps(), widest)
        rows = list(self._by_layer())
        if rows:
            yield Text()
            yield _table(f"at step {last:,}", ("least", "most"), rows, widest)

    def _over_steps(self) -> Iterator[tuple[str, Numbers, bool, str, str, str]]:
        loss = self.health.loss
        yield ("loss", loss, False, *_two(loss), "nats")
        for table in self.health.tables.values():
            values = _over_layers(table)
            yield (table.figure.label, values, table.figure.log, *_two(values), table.figure.unit)

    def _by_layer(self) -> Iterator[tuple[str, Numbers, bool, str, str, str]]:
        for table in self.health.tables.values():
            values = table.values[-1]
            known = values[np.isfinite(values)]
            if known.size > 0:
                least, most = three(float(known.min())), three(float(known.max()))
                yield (table.figure.label, values, table.figure.log, least, most,
                       table.figure.unit)  # fmt: skip


def _over_layers(table: Table) -> Numbers:
    """The worst layer of every record."""
    found = np.full(len(table.values), np.nan)
    for i, row in enumerate(table.values):
        known = row[~np.isnan(row)]
        if known.size:
            found[i] = known.max() if table.figure.worst == "most" else known.min()
    return found


def _two(values: Numbers) -> tuple[str, str]:
    """The first that is known, and the last, known or not."""
    known = values[~np.isnan(values)]
    if not known.size:
        return "", ""
    last = float(values[-1])
    return three(float(known[0])), "NaN" if np.isnan(last) else three(last)


def _table(
    heading: str,
    ends: tuple[str, str],
    rows: Iterator[tuple[str, Numbers, bool, str, str, str]]
    | list[tuple[str, Numbers, bool, str, str, str]],
    widest: int,
) -> Grid:
    table = Grid.grid(padding=(0, 1, 0, 0))
    table.add_column(width=16, no_wrap=True)
    table.add_column(width=widest, no_wrap=True)
    for _ in range(2):
        table.add_column(width=8, justify="right", no_wrap=True)
    table.add_column(width=8, no_wrap=True)
    words = "the worst layer" if heading == "over steps" else "first layer to last"
    heads = (Text(each, style="dim") for each in ends)
    table.add_row(Text(heading, style="bold"), Text(words, style="dim"), *heads, Text())
    for label, values, log, first, second, unit in rows:
        if np.isfinite(values).any():
            drawn = Text(bars(values, log, widest), style="cyan")
            table.add_row(Text(label), drawn, Text(first), Text(second), Text(unit, style="dim"))
    return table
