"""What a statement is, and what a check of it finds.

A check measures; it does not judge. ``verdict`` decides from what was measured, and from a control:
the same measurement with a condition dropped, which must fail. A check whose control holds cannot
tell right from wrong, so its verdict is CHECK-BROKEN whatever else it found.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, TypeVar

from headwise.errors import HeadwiseError
from headwise.theorems.measured import Measured

if TYPE_CHECKING:
    from headwise.theorems.trained import Trained

T = TypeVar("T")

__all__ = [
    "Control",
    "Curve",
    "Effort",
    "Evidence",
    "Kind",
    "NotApplicable",
    "Outcome",
    "Plot",
    "Textbook",
    "Theorem",
]


class Kind(StrEnum):
    """What makes a statement true, and so how far a measurement may be from it."""

    IDENTITY = "identity"  # rounding alone
    EXPECTATION = "expectation"  # a standard error, from independent draws
    REGULARITY = "empirical regularity"  # an interval over draws, inside a stated range


class NotApplicable(Exception):
    """The check has nothing to say about this model; the text says why, in a sentence."""


@dataclass(frozen=True, slots=True)
class Curve:
    """A line of a plot; ``errors`` are standard errors of its values."""

    name: str
    values: tuple[float, ...]
    errors: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """Prediction and measurement over something that was varied, the control beside them."""

    title: str
    across: str
    up: str
    places: tuple[float, ...]
    curves: tuple[Curve, ...]
    log: tuple[bool, bool] = (False, False)  # across, up


@dataclass(frozen=True, slots=True, kw_only=True)
class Control:
    """A condition that was dropped, and what was measured then: every one of them must fail."""

    name: str
    measured: tuple[Measured, ...]

    @property
    def failed(self) -> bool:
        """Whether the check noticed, as it must."""
        return bool(self.measured) and all(each.failed for each in self.measured)


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What a check measured.

    Attributes:
        measured: all of them have to hold.
        controls: all of them have to fail; there is at least one.
        finding: what was found, in one sentence with its numbers.
        violated: a condition that is not met here, so that the statement says nothing; else "".
        inconclusive: why nothing can be said; else "".
    """

    measured: tuple[Measured, ...]
    controls: tuple[Control, ...]
    finding: str
    violated: str = ""
    inconclusive: str = ""
    plots: tuple[Plot, ...] = ()


@dataclass(frozen=True, slots=True)
class Effort:
    """How much to measure: ``full`` has more draws and larger sizes; ``seed`` fixes them all."""

    full: bool = False
    seed: int = 0

    def pick(self, quick: T, full: T) -> T:
        """One of the two."""
        return full if self.full else quick


@dataclass(frozen=True, slots=True)
class Textbook:
    """What is often written, and what is true."""

    wording: str
    truth: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a check found, with its verdict."""

    theorem: str
    where: str  # "random weights", or the name of a model
    verdict: str
    evidence: Evidence
    seconds: float

    @property
    def warnings(self) -> tuple[Measured, ...]:
        """Measurements between 3 and 4 standard errors from the prediction."""
        return tuple(each for each in self.evidence.measured if each.warns)


@dataclass(frozen=True, slots=True, kw_only=True)
class Theorem:
    """A statement that can be checked.

    Attributes:
        name: short, with hyphens; unique.
        statement, latex: in words and in symbols.
        conditions: under which it holds; each can be dropped.
        prediction, estimator: what is expected, and how it is measured, in words.
        textbook: imprecise wordings, corrected.
        exercise: its number among the exercises of the theory, if it is one.
        proof: where the written proof is, under ``proofs``; "" where there is none to give.
        random: measures on random weights. ``model``: on a trained model.
        reproduces: what of which paper it repeats; "" if it is not a reproduction.
        expected: the verdict on random weights that is no surprise: FAILS where a claim that is
            often made does not hold.
        on: what ``random`` measures on, in a word.
    """

    name: str
    title: str
    statement: str
    latex: str
    conditions: tuple[str, ...]
    source: str
    kind: Kind
    prediction: str
    estimator: str
    random: Callable[[Effort], Evidence] | None = None
    model: Callable[[Trained], Evidence] | None = None
    textbook: tuple[Textbook, ...] = ()
    exercise: int | None = None
    proof: str = ""
    reproduces: str = ""
    expected: str = "HOLDS"
    on: str = "random weights"

    def check(self, *, full: bool = False, seed: int = 0) -> Outcome:
        """Measure on random weights and judge.

        Args:
            full: more draws and larger sizes.
            seed: of all random numbers.

        Example:
            >>> import headwise as hw
            >>> by_name = {each.name: each for each in hw.theorems()}
            >>> by_name["convex-combination"].check().verdict
            'HOLDS'
        """
        run = self.random
        if run is None:
            reason = "it is a statement about trained models"
            return _nothing(self.name, self.on, reason)
        return _judged(self.name, self.on, lambda: run(Effort(full, seed)))

    def check_model(self, model: Trained) -> Outcome:
        """Measure on a trained model and judge; INCONCLUSIVE where it does not apply.

        So it is where the model cannot be measured: the error is the reason.
        """
        run = self.model
        if run is None:
            return _nothing(self.name, model.name, "it is a statement about random weights")
        try:
            return _judged(self.name, model.name, lambda: run(model))
        except HeadwiseError as error:
            return _nothing(self.name, model.name, str(error))


def _judged(name: str, where: str, run: Callable[[], Evidence]) -> Outcome:
    from headwise.theorems.verdict import verdict

    start = time.perf_counter()
    try:
        evidence = run()
    except NotApplicable as reason:
        return _nothing(name, where, str(reason))
    return Outcome(
        theorem=name,
        where=where,
        verdict=str(verdict(evidence)),
        evidence=evidence,
        seconds=time.perf_counter() - start,
    )


def _nothing(name: str, where: str, reason: str) -> Outcome:
    from headwise.theorems.verdict import Verdict

    evidence = Evidence(measured=(), controls=(), finding=reason, inconclusive=reason)
    said = str(Verdict.INCONCLUSIVE)
    return Outcome(theorem=name, where=where, verdict=said, evidence=evidence, seconds=0.0)
