"""Statements with what their checks found: run one after the other, and kept as JSON facts.

In JSON, NaN is null and an infinity "inf" or "-inf".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Final

from headwise.theorems.measured import Measured
from headwise.theorems.statement import (
    Control,
    Curve,
    Evidence,
    Kind,
    Outcome,
    Plot,
    Textbook,
    Theorem,
)
from headwise.theorems.trained import Trained
from headwise.theorems.verdict import Verdict

__all__ = ["Checked", "check_model", "check_random", "from_json", "to_json"]

# progress(done, total, what)
Progress = Callable[[int, int, str], None]

RANDOM: Final = "random weights"
_TOLD: Final = tuple(
    each.name for each in fields(Theorem) if each.name not in ("random", "model", "textbook")
)


@dataclass(frozen=True, slots=True)
class Checked:
    """A statement, the subject it belongs to, and what its check found."""

    subject: str
    theorem: Theorem
    outcome: Outcome

    @property
    def as_expected(self) -> bool:
        """Whether nothing here is a surprise.

        On random weights the verdict is that of the theory, or nothing could be said. A trained
        model may violate an assumption; there a surprise is a statement that fails.
        """
        verdict = self.outcome.verdict
        if verdict in (Verdict.INCONCLUSIVE, self.theorem.expected):
            return True
        return self.outcome.where != RANDOM and verdict == Verdict.VIOLATED


def check_random(
    chosen: Iterable[tuple[str, Theorem]],
    *,
    full: bool = False,
    seed: int = 0,
    progress: Progress | None = None,
) -> list[Checked]:
    """Check statements, each with its subject, on random weights.

    Example:
        >>> from headwise.theorems.registry import named, theorems
        >>> one = named("convex-combination", theorems())
        >>> [each.outcome.verdict for each in check_random([("Attention", one)])]
        ['HOLDS']
    """
    return _each(list(chosen), lambda theorem: theorem.check(full=full, seed=seed), progress)


def check_model(
    chosen: Iterable[tuple[str, Theorem]], model: Trained, *, progress: Progress | None = None
) -> list[Checked]:
    """Check statements, each with its subject, on a trained model."""
    return _each(list(chosen), lambda theorem: theorem.check_model(model), progress)


def _each(
    chosen: Sequence[tuple[str, Theorem]],
    check: Callable[[Theorem], Outcome],
    progress: Progress | None,
) -> list[Checked]:
    found = []
    for i, (subject, theorem) in enumerate(chosen):
        if progress is not None:
            progress(i, len(chosen), theorem.name)
        found.append(Checked(subject, theorem, check(theorem)))
    return found


def to_json(checked: Checked) -> dict[str, Any]:
    """Everything as JSON has it: the outcome, what follows from it, and the statement.

    NaN is None, an infinity ``"inf"`` or ``"-inf"``.
    """
    theorem, outcome = checked.theorem, checked.outcome
    found = asdict(outcome)
    evidence = found["evidence"]
    for told, each in zip(evidence["measured"], outcome.evidence.measured, strict=True):
        told |= _judged(each)
    for told, control in zip(evidence["controls"], outcome.evidence.controls, strict=True):
        told["failed"] = control.failed
        for inner, each in zip(told["measured"], control.measured, strict=True):
            inner |= _judged(each)
    found |= {
        "as_expected": checked.as_expected,
        "statement": {
            "subject": checked.subject,
            **{name: getattr(theorem, name) for name in _TOLD},
            "kind": str(theorem.kind),
            "textbook": [asdict(each) for each in theorem.textbook],
        },
    }
    finite: dict[str, Any] = _finite(found)
    return finite


def _judged(measured: Measured) -> dict[str, Any]:
    return {"z": measured.z, "holds": measured.holds, "warns": measured.warns}


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else str(value)
    return value


def from_json(found: Mapping[str, Any]) -> Checked:
    """What ``to_json`` gave; the statement can be read again, not run.

    Raises:
        KeyError, TypeError, ValueError: it is from another version.
    """
    told = found["statement"]
    theorem = Theorem(
        **{
            **{name: told[name] for name in _TOLD},
            "conditions": tuple(told["conditions"]),
            "kind": Kind(told["kind"]),
            "textbook": tuple(Textbook(**each) for each in told["textbook"]),
        }
    )
    evidence = found["evidence"]
    outcome = Outcome(
        theorem=found["theorem"],
        where=found["where"],
        verdict=str(Verdict(found["verdict"])),
        seconds=found["seconds"],
        evidence=Evidence(
            measured=tuple(_measured(each) for each in evidence["measured"]),
            controls=tuple(
                Control(name=each["name"], measured=tuple(map(_measured, each["measured"])))
                for each in evidence["controls"]
            ),
            finding=evidence["finding"],
            violated=evidence["violated"],
            inconclusive=evidence["inconclusive"],
            plots=tuple(_plot(each) for each in evidence["plots"]),
        ),
    )
    return Checked(told["subject"], theorem, outcome)


def _measured(told: Mapping[str, Any]) -> Measured:
    values = {each.name: told[each.name] for each in fields(Measured)}
    for name in ("interval", "allowed"):
        if values[name] is not None:
            values[name] = _numbers(values[name])
    for name in ("predicted", "tolerance", "error"):
        if values[name] is not None:
            values[name] = _number(values[name])
    return Measured(**{**values, "value": _number(values["value"])})


def _plot(told: Mapping[str, Any]) -> Plot:
    lines = tuple(
        Curve(each["name"], _numbers(each["values"]), _numbers(each["errors"]))
        for each in told["curves"]
    )
    return Plot(
        title=told["title"],
        across=told["across"],
        up=told["up"],
        places=_numbers(told["places"]),
        curves=lines,
        log=(bool(told["log"][0]), bool(told["log"][1])),
    )


def _numbers(told: Sequence[float | str | None]) -> tuple[float, ...]:
    return tuple(_number(each) for each in told)


def _number(told: float | str | None) -> float:
    return math.nan if told is None else float(told)
