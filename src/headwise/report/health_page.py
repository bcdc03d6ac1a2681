"""One monitored run, or several side by side, as one self-contained page without a script."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from headwise.files import whole
from headwise.monitoring.alarms import Alarm
from headwise.monitoring.record import Run
from headwise.report.health_facts import Health, health_of, verdict
from headwise.report.health_heads import head_plots
from headwise.report.health_plots import (
    all_zero,
    figure_plots,
    loss_plot,
    map_plots,
    timeline_plot,
)
from headwise.report.line_plot import Plot
from headwise.report.numbers import counted
from headwise.report.shell import small_page

__all__ = ["health_page", "write_health_page"]

_MARKS: Final = {"bad": "act", "watch": "watch", "note": "note"}
_SHOWN: Final = 8  # alarms in the list, the others folded away
_MOST: Final = 60  # alarms on the page


@dataclass(frozen=True, slots=True)
class _Part:
    """What the page says of one run."""

    name: str
    verdict: str
    facts: tuple[str, ...]
    notes: tuple[str, ...]
    alarms: tuple[Alarm, ...]
    more: str
    timeline: Plot | None


def health_page(*runs: Run) -> str:
    """The HTML text: verdict, loss with alarms, alarms, figures over steps, maps of layers.

    Several runs (three at most have colours of their own) stand side by side.
    """
    found = _named([health_of(each) for each in runs])
    names = ", ".join(each.name for each in found)
    few = [each for each in found if len(each.steps) < 2]
    notes = [f"{each.name} has one record: curves need two." for each in few]
    return small_page(
        "health.html",
        title=f"Training health: {names}",
        parts=[_part(each) for each in found],
        marks=_MARKS,
        shown=_SHOWN,
        notes=notes,
        loss=loss_plot(found),
        nothing=all_zero(found),
        figures=figure_plots(found),
        heads=head_plots(found),
        maps=map_plots(found),
    )


def write_health_page(path: str | Path, *runs: Run) -> Path:
    """Write the page, whole or not at all, and return its path.

    Args:
        path: of the page, a name that ends in .html.
        runs: one, or several to be put side by side.

    Raises:
        FileError: the page cannot be written.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from headwise.monitoring.record import Run, StepRecord
        >>> from headwise.report.health_page import write_health_page
        >>> record = StepRecord(step=1, time=0.0, layers=(), stream={}, weights={},
        ...                     non_finite="", values={"loss": 5.5})
        >>> made = write_health_page(Path(tempfile.mkdtemp()) / "health.html",
        ...                          Run(Path("first"), {}, (record,)))
        >>> made.name
        'health.html'
    """
    with whole(path) as temporary:
        temporary.write_text(health_page(*runs), encoding="utf-8")
    return Path(path)


def _part(health: Health) -> _Part:
    hidden = len(health.alarms) - _MOST
    return _Part(
        name=health.name,
        verdict=verdict(health),
        facts=health.facts,
        notes=health.notes,
        alarms=health.alarms[:_MOST],
        more=f"and {counted(hidden, 'later alarm')}; --json has all" if hidden > 0 else "",
        timeline=timeline_plot(health),
    )


def _named(runs: Sequence[Health]) -> list[Health]:
    """Two runs whose folders have one name are told apart by the whole path."""
    if len({each.name for each in runs}) == len(runs):
        return list(runs)
    paths = [str(each.run.folder) for each in runs]
    if len(set(paths)) < len(paths):
        paths = [f"{path} ({i + 1})" for i, path in enumerate(paths)]
    return [replace(each, name=path) for each, path in zip(runs, paths, strict=True)]
