"""Statements that are made up: one for every verdict, and a catalogue that holds only them."""

from __future__ import annotations

import math
import sys
from types import SimpleNamespace

from headwise.errors import MeasurementError
from headwise.theorems import registry
from headwise.theorems.measured import estimate, exact, within
from headwise.theorems.statement import (
    Control,
    Curve,
    Evidence,
    Kind,
    NotApplicable,
    Plot,
    Textbook,
    Theorem,
)

GOOD = exact("x − x", 0.0, tolerance=1e-9)
BAD = exact("x − y", 0.53, tolerance=1e-9)
NEAR = estimate("mean", 1.035, predicted=1.0, error=0.01, draws=17)
RANGE = within("slope", -0.5, allowed=(-math.inf, -0.3), interval=(-0.61, -0.41), draws=11)
CONTROL = Control(name="a condition <dropped>", measured=(BAD,))
BLIND = Control(name="one that cannot see", measured=(GOOD,))
PLOT = Plot(
    title="Spread <of> it",
    across="width d_k",
    up="spread",
    places=(7.0, 31.0, 211.0),
    curves=(
        Curve("prediction", (1.0, 1.0, 1.0)),
        Curve("measured", (1.1, math.nan, 0.9), (0.1, 0.0, 0.2)),
        Curve("control", (1.5, 3.0, -9.0)),
    ),
)


def evidence(**changes):
    whole = {
        "measured": (GOOD, NEAR, RANGE), "controls": (CONTROL,),
        "finding": "it is 1.03 at d_k = 7", "plots": (PLOT,),
    }  # fmt: skip
    return Evidence(**{**whole, **changes})


def theorem(name, random=None, model=None, **more):
    return Theorem(
        name=name,
        title=f"What <{name}> says of d_k",
        statement=f"The statement {name} holds for W_QK.",
        latex=r"\mathbb{E}\, x_{ij} = \frac{a}{\sqrt{d_k}}, \qquad \arg\min_x f(x) = 0",
        conditions=("x is <small>", "y is not"),
        source="nobody 1906, section 3",
        kind=Kind.EXPECTATION,
        prediction="1",
        estimator="the mean of 17 draws",
        random=random,
        model=model,
        textbook=(Textbook("x is always 1", "x is 1 on average"),),
        exercise=3,
        **more,
    )


def not_for_it(model):
    raise NotApplicable("it has no heads")


def not_measurable(model):
    raise MeasurementError("layer 3 is NaN")


def effort(given):
    """What the check was told, as its numbers."""
    told = exact("seed", given.seed, tolerance=0.0, predicted=given.seed)
    return evidence(measured=(told,), finding=given.pick("few", "many"))


HOLDS = theorem("holds", effort, lambda model: evidence())
FAILS = theorem("fails", lambda effort: evidence(measured=(GOOD, BAD)))
OFTEN = theorem("often-claimed", lambda effort: evidence(measured=(BAD,)), expected="FAILS")
OPEN = theorem("open", lambda effort: evidence(inconclusive="too few"), not_for_it)
VIOLATED = theorem(
    "violated",
    lambda effort: evidence(violated="x is large"),
    lambda model: evidence(violated="x is large"),
)
BROKEN = theorem("broken", lambda effort: evidence(controls=(CONTROL, BLIND)))
TRAINED = theorem("trained", None, not_measurable)
REPEATED = theorem("nobody-1906", lambda effort: evidence(), reproduces="figure 7")


def catalogue(monkeypatch, *statements, others=()):
    """Let these be all statements there are; ``others`` under a second subject."""
    for name, group in (("made_up", statements), ("others", others)):
        module = SimpleNamespace(THEOREMS=tuple(group))
        monkeypatch.setitem(sys.modules, f"headwise.theorems.{name}", module)
    repeated = SimpleNamespace(THEOREMS=(REPEATED,))
    monkeypatch.setitem(sys.modules, "headwise.theorems.reproductions.papers", repeated)
    monkeypatch.setattr(registry, "_SUBJECTS", {"made_up": "Made up", "others": "Others: 1/√d_k"})
    monkeypatch.setattr(registry, "_REPRODUCTIONS", ("papers",))
