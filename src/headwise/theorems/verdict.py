"""The one place where evidence becomes a verdict."""

from __future__ import annotations

from enum import StrEnum

from headwise.theorems.statement import Evidence

__all__ = ["Verdict", "verdict"]


class Verdict(StrEnum):
    """What a check says."""

    HOLDS = "HOLDS"
    FAILS = "FAILS"
    VIOLATED = "ASSUMPTION-VIOLATED"
    INCONCLUSIVE = "INCONCLUSIVE"
    BROKEN = "CHECK-BROKEN"


def verdict(evidence: Evidence) -> Verdict:
    """Judge: a check without a control that failed is broken, whatever it measured.

    Example:
        >>> from headwise.theorems.measured import exact
        >>> from headwise.theorems.statement import Control
        >>> good, bad = exact("x", 0.0, tolerance=1e-9), exact("x", 1.0, tolerance=1e-9)
        >>> control = Control(name="x is wrong", measured=(bad,))
        >>> str(verdict(Evidence(measured=(good,), controls=(control,), finding="")))
        'HOLDS'
        >>> blind = Control(name="x is wrong", measured=(good,))
        >>> str(verdict(Evidence(measured=(good,), controls=(blind,), finding="")))
        'CHECK-BROKEN'
    """
    if evidence.inconclusive:
        return Verdict.INCONCLUSIVE
    if not evidence.controls or not all(control.failed for control in evidence.controls):
        return Verdict.BROKEN
    if evidence.violated:
        return Verdict.VIOLATED
    if any(each.failed for each in evidence.measured):
        return Verdict.FAILS
    if not evidence.measured or not all(each.holds for each in evidence.measured):
        return Verdict.INCONCLUSIVE
    return Verdict.HOLDS
