"""Statements, predictions and measurements as one self-contained page without a script."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from markupsafe import Markup

from headwise.report.formula import formula
from headwise.report.line_plot import Plot
from headwise.report.shell import small_page
from headwise.report.theorem_facts import (
    COLUMNS,
    MEANING,
    by_subject,
    counts,
    measured_row,
    sentences,
    verdict_of,
)
from headwise.report.theorem_plots import drawing
from headwise.theorems.checked import Checked
from headwise.theorems.statement import Textbook
from headwise.theorems.verdict import Verdict

__all__ = ["StatementView", "theorem_page", "views"]

_MARKS: Final = {
    Verdict.HOLDS: "holds",
    Verdict.FAILS: "fails",
    Verdict.VIOLATED: "violated",
    Verdict.INCONCLUSIVE: "inconclusive",
    Verdict.BROKEN: "broken",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StatementView:
    """One statement as the page shows it; ``groups``: a title and rows of a table."""

    name: str
    title: str
    verdict: str
    mark: str
    statement: str
    formula: tuple[Markup, ...]
    conditions: tuple[str, ...]
    kind: str
    prediction: str
    estimator: str
    sentences: tuple[str, ...]
    groups: tuple[tuple[str, tuple[tuple[str, ...], ...]], ...]
    plots: tuple[Plot, ...]
    textbook: tuple[Textbook, ...]
    source: str
    reproduces: str
    exercise: int | None

    @property
    def columns(self) -> tuple[tuple[str, bool], ...]:
        """Of its table: a name, and whether numbers stand below it."""
        return COLUMNS


def theorem_page(found: Sequence[Checked], title: str, facts: Sequence[str]) -> str:
    """The HTML text: what was found at the top, then every statement with its measurement."""
    seen = {verdict_of(each) for each in found}
    return small_page(
        "theorems.html",
        title=title,
        facts=facts,
        counts=counts(found),
        meaning=[(v, _MARKS[v], MEANING[v]) for v in Verdict if v in seen],
        subjects=views(found),
    )


def views(found: Sequence[Checked]) -> list[tuple[str, list[StatementView]]]:
    """Every statement under its subject."""
    return [(subject, [_view(each) for each in members]) for subject, members in by_subject(found)]


def _view(checked: Checked) -> StatementView:
    theorem, verdict = checked.theorem, verdict_of(checked)
    return StatementView(
        name=theorem.name,
        title=theorem.title,
        verdict=str(verdict),
        mark=_mark(checked),
        statement=theorem.statement,
        formula=formula(theorem.latex),
        conditions=theorem.conditions,
        kind=str(theorem.kind),
        prediction=theorem.prediction,
        estimator=theorem.estimator,
        sentences=tuple(sentences(checked)),
        groups=_groups(checked),
        plots=tuple(
            Plot(plot.title, drawn)
            for plot in checked.outcome.evidence.plots
            if (drawn := drawing(plot))
        ),
        textbook=theorem.textbook,
        source=theorem.source,
        reproduces=theorem.reproduces,
        exercise=theorem.exercise,
    )


def _mark(checked: Checked) -> str:
    """The loudest are for surprises."""
    verdict = verdict_of(checked)
    quiet = verdict == Verdict.FAILS and checked.as_expected
    return _MARKS[Verdict.VIOLATED if quiet else verdict]


def _groups(checked: Checked) -> tuple[tuple[str, tuple[tuple[str, ...], ...]], ...]:
    evidence = checked.outcome.evidence
    groups = []
    if evidence.measured:
        groups.append(("Measured", tuple(map(measured_row, evidence.measured))))
    for each in evidence.controls:
        told = "fails, as it must" if each.failed else "does not fail: the check is broken"
        title = f"Control, {each.name}: {told}"
        groups.append((title, tuple(map(measured_row, each.measured))))
    return tuple(groups)
