"""What the checks of statements found, in a terminal of 80 columns, subject by subject."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from headwise.report.theorem_facts import MEANING, by_subject, counts, sentences, verdict_of
from headwise.theorems.checked import Checked
from headwise.theorems.statement import Theorem
from headwise.theorems.verdict import Verdict

__all__ = ["listed", "theorem_summary"]

_STYLES: Final = {
    Verdict.HOLDS: "green",
    Verdict.FAILS: "bold red",
    Verdict.VIOLATED: "yellow",
    Verdict.INCONCLUSIVE: "dim",
    Verdict.BROKEN: "bold magenta",
}


def theorem_summary(found: Sequence[Checked], title: str, facts: Sequence[str]) -> RenderableType:
    """Name, verdict and finding of every statement; then what the verdicts mean."""
    names = max((len(each.theorem.name) for each in found), default=0)
    parts: list[RenderableType] = [Text(title, style="bold"), Text(" · ".join(facts), style="dim")]
    for subject, members in by_subject(found):
        parts += [Text(), Text(subject, style="bold")]
        for each in members:
            verdict = verdict_of(each)
            expected = verdict == Verdict.FAILS and each.as_expected
            name = Text(each.theorem.name.ljust(names + 2))
            parts.append(name.append(verdict, style="red" if expected else _STYLES[verdict]))
            told = Text(" ".join(sentences(each)), style="dim")
            parts.append(Padding(told, (0, 0, 0, 2)))
    parts += [Text(), Text(counts(found), style="bold")]
    for verdict in sorted({verdict_of(each) for each in found}, key=list(Verdict).index):
        parts.append(Text(f"{verdict}: {MEANING[verdict]}.", style="dim"))
    return Group(*parts)


def _table(width: int) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(min_width=width, no_wrap=True)
    table.add_column(ratio=1, overflow="fold")
    return table


def listed(
    statements: Sequence[tuple[str, Theorem]], reproductions: Sequence[Theorem]
) -> RenderableType:
    """The names that can be asked for, by subject."""
    groups: dict[str, list[Theorem]] = {}
    for subject, theorem in statements:
        groups.setdefault(subject, []).append(theorem)
    groups["Results of papers, for --reproduce"] = list(reproductions)
    width = max((len(each.name) for group in groups.values() for each in group), default=0)
    parts: list[RenderableType] = []
    for subject, members in groups.items():
        table = _table(width)
        for each in members:
            exercise = f" (exercise {each.exercise})" if each.exercise else ""
            table.add_row(Text(each.name), Text(f"{each.title}{exercise}"))
        if members:
            parts += [Text(subject, style="bold"), table, Text()]
    parts.append(
        Text("On trained models too: " + _names(each for _, each in statements), style="dim")
    )
    return Group(*parts)


def _names(statements: Iterable[Theorem]) -> str:
    return ", ".join(each.name for each in statements if each.model is not None)
