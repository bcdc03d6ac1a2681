"""The table of alarms, read from ``alarms.toml`` and checked."""

from __future__ import annotations

import functools
import tomllib
from dataclasses import dataclass, field
from importlib import resources
from typing import Final, Literal

__all__ = ["SEVERITIES", "AlarmRule", "Severity", "alarm_rules"]

Severity = Literal["bad", "watch", "note"]
SEVERITIES: Final[tuple[Severity, ...]] = ("bad", "watch", "note")  # worst first


@dataclass(frozen=True, kw_only=True, slots=True)
class AlarmRule:
    """One row of the table; its fields are explained at the top of ``alarms.toml``."""

    kind: str
    title: str
    quantity: str
    threshold: float
    levels: dict[Severity, float]
    sentence: str
    source: str
    meaning: str
    remedy: str
    lasting: int = 1
    after: int = 0
    again: bool = False
    options: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert self.levels, self.kind
        assert set(self.levels) <= set(SEVERITIES), self.kind
        order = [SEVERITIES.index(name) for name in self.levels]
        assert order == sorted(order, reverse=True), self.kind
        assert list(self.levels.values()) == sorted(self.levels.values()), self.kind
        assert self.lasting >= 1, self.kind

    def severity(self, value: float) -> Severity:
        """The last level that the value reaches; the first where it reaches none.

        Example:
            >>> rule = next(r for r in alarm_rules() if r.kind == "gradient_spike")
            >>> rule.severity(12.0), rule.severity(120.0)
            ('watch', 'bad')
        """
        found = next(iter(self.levels))
        for name, level in self.levels.items():
            if value >= level:
                found = name
        return found


@functools.cache
def alarm_rules() -> tuple[AlarmRule, ...]:
    """Every rule, in the order of the table.

    Example:
        >>> alarm_rules()[0].kind
        'non_finite'
    """
    table = resources.files("headwise.monitoring").joinpath("alarms.toml")
    return tuple(
        AlarmRule(**row) for row in tomllib.loads(table.read_text(encoding="utf-8"))["alarm"]
    )
