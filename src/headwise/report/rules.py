"""The table of thresholds, read from ``rules.toml`` and checked."""

from __future__ import annotations

import functools
import tomllib
from dataclasses import dataclass
from importlib import resources
from typing import Any, Final, Literal

from headwise.report.quantities import QUANTITIES
from headwise.results.thresholds import THRESHOLDS

__all__ = ["SEVERITIES", "Rule", "Severity", "rules"]

Severity = Literal["bad", "watch", "note", "healthy"]
SEVERITIES: Final[tuple[Severity, ...]] = ("bad", "watch", "note", "healthy")  # worst first


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """One row of the table; its fields are explained at the top of ``rules.toml``."""

    kind: str
    title: str
    quantity: str
    evidence: str
    beyond: Literal["above", "below"]
    threshold: float
    by: Literal["share", "value"]
    levels: dict[Severity, float]
    unit: str
    sentence: str
    source: str
    meaning: str
    remedy: str
    healthy: str = ""
    reading: str = ""

    def __post_init__(self) -> None:
        assert self.quantity in QUANTITIES, self.quantity
        assert self.beyond in ("above", "below"), self.kind
        assert self.by in ("share", "value"), self.kind
        assert self.levels, self.kind
        assert set(self.levels) < set(SEVERITIES), self.kind
        order = [SEVERITIES.index(name) for name in self.levels]
        assert order == sorted(order, reverse=True), self.kind
        assert list(self.levels.values()) == sorted(self.levels.values()), self.kind

    def severity(self, extent: float) -> Severity:
        """The last level that the extent exceeds; ``healthy`` when it exceeds none.

        Example:
            >>> next(r for r in rules() if r.kind == "exploding_logits").severity(1200.0)
            'bad'
        """
        found: Severity = "healthy"
        for name, level in self.levels.items():
            if extent > level:
                found = name
        return found


@functools.cache
def rules() -> tuple[Rule, ...]:
    """Every rule, in the order of the table.

    Example:
        >>> rules()[0].kind
        'non_finite'
    """
    text = resources.files("headwise.report").joinpath("rules.toml").read_text(encoding="utf-8")
    return tuple(_rule(row) for row in tomllib.loads(text)["rule"])


def _rule(row: dict[str, Any]) -> Rule:
    """A row; its threshold is in one of two tables, never in both."""
    shared: dict[str, Any] = {}
    if row["kind"] in THRESHOLDS:
        shared["threshold"] = THRESHOLDS[row["kind"]]
    return Rule(**row, **shared)
