"""Alarms of a training run: what went wrong first, where, what it means, and what people do.

The table is ``alarms.toml``; a rule that passes its threshold long enough gives one alarm for each
place, at the step at which it did. Trends and comparisons with what was before stand above fixed
numbers, and the first steps of a run raise none that only their being first explains.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

from headwise.monitoring.alarm_rules import SEVERITIES, AlarmRule, Severity, alarm_rules
from headwise.monitoring.history import History
from headwise.monitoring.record import Run, StepRecord
from headwise.monitoring.signs import QUANTITIES, Sign

__all__ = ["Alarm", "Watch", "alarms"]

_SHARES: Final = ("entropy_collapse", "dead_rows")


@dataclass(frozen=True, slots=True, kw_only=True)
class Alarm:
    """One thing that went wrong, at the step and place where it was first seen.

    Attributes:
        kind: the row of ``alarms.toml``; ``title`` says it in words.
        severity: "bad", "watch" or "note".
        step: the first record with the sign, or, where it became worse, the one that told so.
        module: of an attention module, block, weight or tensor; "" for the whole model. ``head``
            is None where it is no matter of one head.
        value: compared with ``threshold``; its meaning is that of the sentence.
        count: how many places passed the threshold there at that step.
        forecast: the step at which a trend crosses the threshold.
        meaning, remedy: what it means, and what people do about it.
    """

    kind: str
    title: str
    severity: Severity
    step: int
    module: str
    head: int | None
    value: float
    threshold: float
    count: int
    forecast: int | None
    sentence: str
    source: str
    meaning: str
    remedy: str

    def to_json(self) -> dict[str, Any]:
        """The fields, by name."""
        return asdict(self)


class Watch:
    """Looks at one record after another: the same alarms as ``alarms``, while the run goes on.

    Attributes:
        history: the last records. ``lasting``: (kind, place) → the first step with its sign,
            and how many records in a row have it.
        raised: (kind, place) → the worst severity that was told.

    Example:
        >>> from headwise.monitoring.record import LayerRecord
        >>> def record(step, logit):
        ...     layer = LayerRecord(module="a", number=0, role="self",
        ...                         figures={"max_logit": [3.0, logit]})
        ...     return StepRecord(step=step, time=0.0, layers=(layer,), stream={}, weights={},
        ...                       non_finite="", values={})
        >>> watch = Watch()
        >>> watch.look(record(1, 9.0))
        []
        >>> [found] = watch.look(record(2, 120.0))
        >>> found.kind, found.step, found.module, found.head
        ('max_logit_100', 2, 'a', 1)
        >>> watch.look(record(3, 130.0))
        []
    """

    def __init__(self, sizes: Mapping[str, int] | None = None) -> None:
        self.history = History(sizes=sizes)
        self.lasting: dict[tuple[str, str], tuple[int, int]] = {}
        self.raised: dict[tuple[str, str], Severity] = {}

    def look(self, record: StepRecord) -> list[Alarm]:
        """Take in one record, and tell what is new in it, the worst first."""
        self.history.add(record)
        found = [alarm for rule in alarm_rules() for alarm in self._of(rule, record.step)]
        return sorted(found, key=lambda alarm: SEVERITIES.index(alarm.severity))

    def _of(self, rule: AlarmRule, step: int) -> list[Alarm]:
        signs = {}
        if self.history.count > rule.after:
            signs = {sign.key: sign for sign in QUANTITIES[rule.quantity](rule, self.history)}
        for kind, key in [at for at in self.lasting if at[0] == rule.kind]:
            if key not in signs:
                del self.lasting[kind, key]
                if rule.again:
                    self.raised.pop((kind, key), None)
        new = []
        for key, sign in signs.items():
            at = rule.kind, key
            first, count = self.lasting.get(at, (step, 0))
            self.lasting[at] = first, count + 1
            told = at in self.raised
            if count + 1 >= rule.lasting and self._worse(at, rule.severity(sign.value)):
                new.append(_alarm(rule, sign, step if told else first))
        return new

    def _worse(self, at: tuple[str, str], severity: Severity) -> bool:
        told = self.raised.get(at)
        if told is not None and SEVERITIES.index(severity) >= SEVERITIES.index(told):
            return False
        self.raised[at] = severity
        return True


def alarms(
    run: Run | Iterable[StepRecord], *, sizes: Mapping[str, int] | None = None
) -> tuple[Alarm, ...]:
    """Every alarm of a run, in the order of its steps and then the worst first.

    Args:
        run: from ``read_run``, or records in the order of their steps.
        sizes: entries of each weight by name, without which gradients are not compared with Adam's
            eps; those of a ``Run`` are in its facts.

    Example:
        >>> record = StepRecord(step=7, time=0.0, layers=(), stream={}, weights={}, values={},
        ...                     non_finite="the keys of a")
        >>> [(alarm.severity, alarm.sentence) for alarm in alarms([record])]
        [('bad', 'NaN or infinity: first in the keys of a.')]
    """
    if isinstance(run, Run):
        told = run.about.get("sizes")
        sizes = told if sizes is None and isinstance(told, dict) else sizes
        run = run.records
    watch = Watch(sizes)
    found = [alarm for record in run for alarm in watch.look(record)]
    return tuple(sorted(found, key=_order))


def _order(alarm: Alarm) -> tuple[int, int]:
    return alarm.step, SEVERITIES.index(alarm.severity)


def _alarm(rule: AlarmRule, sign: Sign, step: int) -> Alarm:
    share = rule.quantity in _SHARES
    place = sign.module if sign.head is None else f"{sign.module} head {sign.head}"
    return Alarm(
        kind=rule.kind,
        title=rule.title,
        severity=rule.severity(sign.value),
        step=step,
        module=sign.module,
        head=sign.head,
        value=sign.value,
        threshold=rule.threshold,
        count=sign.count,
        forecast=sign.forecast,
        sentence=rule.sentence.format(
            value=f"{sign.value:.0%}".replace("%", " %") if share else _number(sign.value),
            threshold=_number(rule.threshold),
            place=place,
            count=sign.count,
            forecast="" if sign.forecast is None else f"{sign.forecast:,}",
        ),
        source=rule.source,
        meaning=rule.meaning,
        remedy=rule.remedy,
    )


def _number(value: float) -> str:
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e7 else f"{value:.3g}"
