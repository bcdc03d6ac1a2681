"""What the checks of statements found, as rows of words: the same in the page and the terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final

from headwise.report.numbers import counted, three
from headwise.theorems.checked import Checked
from headwise.theorems.measured import Measured
from headwise.theorems.verdict import Verdict

__all__ = ["COLUMNS", "MEANING", "by_subject", "counts", "measured_row", "sentences", "verdict_of"]

MEANING: Final = {
    Verdict.HOLDS: "measured as predicted, and every control failed as it must",
    Verdict.FAILS: "measured otherwise than predicted",
    Verdict.VIOLATED: "a condition is not met here, so the statement says nothing",
    Verdict.INCONCLUSIVE: "nothing can be said: it does not apply here, or too little was measured",
    Verdict.BROKEN: "a control did not fail, so the check cannot tell right from wrong",
}
# (name, whether numbers stand in it)
COLUMNS: Final = (
    ("", False),
    ("measured", True),
    ("predicted", True),
    ("tolerance or error", True),
    ("z", True),
    ("draws", True),
    ("", False),
)


def verdict_of(checked: Checked) -> Verdict:
    """The verdict as a member of its enumeration."""
    return Verdict(checked.outcome.verdict)


def by_subject(found: Iterable[Checked]) -> list[tuple[str, list[Checked]]]:
    """Statements under their subjects, in order."""
    groups: dict[str, list[Checked]] = {}
    for each in found:
        groups.setdefault(each.subject, []).append(each)
    return list(groups.items())


def counts(found: Sequence[Checked]) -> str:
    """How many of each verdict, and how many of them are not what the theory says.

    Example:
        >>> counts([])
        '0 statements.'
    """
    verdicts = Counter(verdict_of(each) for each in found)
    parts = [f"{verdicts[each]} {each}" for each in Verdict if verdicts[each]]
    said = counted(len(found), "statement")
    told = f"{said}: {', '.join(parts)}." if parts else f"{said}."
    surprises = [each.theorem.name for each in found if not each.as_expected]
    if surprises:
        return f"{told} Not as expected: {', '.join(surprises)}."
    return f"{told} All as expected." if found else told


def sentences(checked: Checked) -> list[str]:
    """The finding, and what has to be known beside it."""
    evidence, verdict = checked.outcome.evidence, verdict_of(checked)
    found = [_sentence(evidence.finding)]
    if verdict == Verdict.VIOLATED:
        found.append(_sentence(f"Condition that is not met: {evidence.violated}"))
    if evidence.inconclusive and evidence.inconclusive != evidence.finding:
        found.append(_sentence(f"Nothing can be said: {evidence.inconclusive}"))
    if verdict == Verdict.BROKEN:
        blind = [each.name for each in evidence.controls if not each.failed]
        found.append(f"A control that must fail did not: {', '.join(blind) or 'there is none'}.")
    for each in checked.outcome.warnings:
        found.append(f"{each.name} is {three(each.z)} standard errors from its prediction.")
    if verdict == Verdict.FAILS and checked.as_expected:
        found.append("That it fails is the result: the claim is often made.")
    return found


def _sentence(text: str) -> str:
    text = text[:1].upper() + text[1:]
    return text if not text or text[-1] in ".!?" else f"{text}."


def measured_row(measured: Measured) -> tuple[str, ...]:
    """A row for ``COLUMNS``: what is measured, and what was to be expected of it."""
    unit = f" {measured.unit}" if measured.unit else ""
    value, predicted, beside = f"{three(measured.value)}{unit}", three(measured.predicted), ""
    if measured.allowed is not None:
        low, high = measured.allowed
        predicted = f"{three(low)} to {three(high)}"
        if measured.interval is not None:
            value += f" ({three(measured.interval[0])} to {three(measured.interval[1])})"
    elif measured.tolerance is not None:
        beside = three(measured.tolerance)
    elif measured.error is not None:
        beside = f"4 × {three(measured.error)}"
    return (
        measured.name,
        value,
        predicted,
        beside,
        "" if measured.z is None else three(measured.z),
        f"{measured.draws:,}" if measured.draws > 1 else "",
        "as predicted" if measured.holds else "not as predicted" if measured.failed else "open",
    )
