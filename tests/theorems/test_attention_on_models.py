"""The second half of the theory on trained models."""

from __future__ import annotations

from functools import cache

import pytest

from headwise.observation.run import opened
from headwise.theorems import (  # fmt: skip
    complexity,
    entropy_bound,
    flash,
    induction,
    kernel_smoother,
    linear_attention,
    rank_collapse,
)
from headwise.theorems.trained import Trained
from tests.theorems.models import loaded_model

SUBJECTS = (kernel_smoother, linear_attention, complexity, flash, rank_collapse, entropy_bound,
            induction)  # fmt: skip
BY_NAME = {each.name: each for subject in SUBJECTS for each in subject.THEOREMS}
HOLD = ("gaussian-smoother", "complexity-table", "crossover-lengths", "streaming-is-exact",
        "cubic-contraction", "entropy-bound", "induction-needs-two-layers")  # fmt: skip


def expected(name: str, kind: str) -> str:
    if name == "token-kernel-symmetry":
        return "ASSUMPTION-VIOLATED"
    if name == "induction-needs-two-layers" and kind != "decoder":
        return "INCONCLUSIVE"
    return "HOLDS" if name in HOLD else "INCONCLUSIVE"


@cache
def embedded() -> Trained:
    return Trained(opened(None, None, None, False))


@pytest.mark.parametrize("name", BY_NAME)
def test_the_embedded_model(name):
    outcome = BY_NAME[name].check_model(embedded())
    assert outcome.verdict == expected(name, "decoder"), outcome.evidence.finding


@pytest.mark.real_model
@pytest.mark.parametrize("name", BY_NAME)
@pytest.mark.parametrize(("model", "kind"), [("smollm2", "decoder"), ("minilm", "encoder")])
def test_the_real_models(name, model, kind):
    outcome = BY_NAME[name].check_model(loaded_model(model))
    assert outcome.verdict == expected(name, kind), outcome.evidence.finding
