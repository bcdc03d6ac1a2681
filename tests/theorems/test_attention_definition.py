"""Rows of A as distributions: the verdicts, on random weights and on models, and their failure."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from headwise.attention.definition import weights
from headwise.observation.run import opened
from headwise.theorems import attention_definition
from headwise.theorems.attention_definition import THEOREMS
from headwise.theorems.trained import Trained, TrainedHeads

(CONVEX,) = THEOREMS


@pytest.fixture(scope="module")
def embedded() -> Trained:
    return Trained(opened(None, None, None, False))


def cast(model: Trained, dtype: torch.dtype) -> Trained:
    """The same heads, said to be of a model in another precision."""

    class Other(Trained):
        @property
        def dtype(self) -> torch.dtype:
            return dtype

    other = Other(model.loaded)
    other.__dict__["heads"] = model.heads
    return other


@pytest.mark.parametrize("seed", range(5))
def test_it_holds(seed: int) -> None:
    assert CONVEX.check(seed=seed).verdict == "HOLDS"


@pytest.mark.parametrize(
    "broken",
    [
        lambda s, keep: torch.sigmoid(s) * keep,
        lambda s, keep: weights(s, keep, torch.zeros(s.shape[1])),
        lambda s, keep: weights(s, keep) * 1.001,
        lambda s, keep: 2 * weights(s, keep) - weights(s / 2, keep),
        lambda s, keep: weights(s, ~keep),
    ],
    ids=["sigmoid", "learned sink", "rows too large", "negative weights", "hidden keys"],
)
def test_weights_that_are_no_distribution_are_noticed(monkeypatch, broken) -> None:
    monkeypatch.setattr(attention_definition, "weights", broken)
    assert CONVEX.check().verdict == "FAILS"


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str
)
def test_a_trained_model_in_its_own_precision(embedded: Trained, dtype: torch.dtype) -> None:
    outcome = CONVEX.check_model(cast(embedded, dtype))
    own = outcome.evidence.measured[-1]
    assert outcome.verdict == "HOLDS"
    assert str(dtype).removeprefix("torch.") in own.name
    # The tolerance is of that precision: no wider than a hundredth in half precision.
    assert own.tolerance is not None
    assert own.tolerance < 0.01
    assert own.value > torch.finfo(dtype).eps / 64


def test_a_precision_below_the_stated_one_is_noticed(embedded: Trained, monkeypatch) -> None:
    softmax = torch.softmax

    def rough(s, dim):
        return softmax(s.bfloat16(), dim).to(s.dtype)

    monkeypatch.setattr(torch, "softmax", rough)
    outcome = CONVEX.check_model(cast(embedded, torch.float32))
    assert outcome.verdict == "FAILS"
    assert [each.failed for each in outcome.evidence.measured] == [False, False, False, True]


def test_rows_that_are_too_small_are_noticed(embedded: Trained, monkeypatch) -> None:
    def leak(self):
        return 0.99 * weights(self.logits[None], self.keep, self.sinks)[0]

    monkeypatch.setattr(TrainedHeads, "weights", leak)
    assert CONVEX.check_model(embedded).verdict == "FAILS"


def test_a_learned_sink_violates_the_assumption(embedded: Trained) -> None:
    model = Trained(embedded.loaded)
    model.__dict__["heads"] = tuple(
        replace(layer, sinks=torch.zeros(5, dtype=torch.float64)) for layer in embedded.heads
    )
    outcome = CONVEX.check_model(model)
    assert outcome.verdict == "ASSUMPTION-VIOLATED"
    assert "sink" in outcome.evidence.finding


@pytest.mark.real_model
@pytest.mark.parametrize("name", ["smollm2", "minilm"])
def test_the_real_models(name: str) -> None:
    folder = Path(os.environ["HEADWISE_MODELS"])
    path = next((folder / name).glob("*.gguf"), folder / name)
    outcome = CONVEX.check_model(Trained(opened(str(path), None, None, False)))
    assert outcome.verdict == "HOLDS"
    assert outcome.evidence.measured[-1].value < 1e-6
