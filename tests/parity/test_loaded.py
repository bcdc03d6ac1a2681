"""Loaded models give the logits that transformers gives, on every check of every family."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from headwise.models.checkpoints import llama
from headwise.models.checkpoints.settings import Settings
from tests.parity.loaded_models import CASES, Case, errors
from tests.parity.loaded_real import smollm2

BOUND = 1e-5  # of the largest logit, in float32


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_logits_are_those_of_transformers(case: Case) -> None:
    found = dict(errors(case))
    assert set(found) == set(case.checks)
    assert {name: error for name, error in found.items() if error > BOUND} == {}


def test_a_forgotten_window_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama, "_windows", lambda settings, kind, layers: (None,))
    case = next(case for case in CASES if case.name == "mistral")
    monkeypatch.setattr(Settings, "finish", lambda self: None)  # its key is not asked for any more
    assert all(error > 100 * BOUND for error in dict(errors(case)).values())


def test_keys_and_values_in_each_others_place_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    original = llama.linear

    def swapped(ours: str, stored: str, *, bias: bool) -> object:
        words = {"key": "value", "value": "key"}
        head, _, last = ours.rpartition(".")
        return original(f"{head}.{words.get(last, last)}", stored, bias=bias)

    monkeypatch.setattr(llama, "linear", swapped)
    case = next(case for case in CASES if case.name == "llama")
    assert all(error > 100 * BOUND for error in dict(errors(case)).values())


def test_names_are_told_apart() -> None:
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names)


@pytest.mark.real_model
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_real_decoder() -> None:
    found = smollm2(Path(os.environ["HEADWISE_MODELS"]) / "smollm2")
    assert set(found) == {"logits", "cache", "text"}
    assert max(found.values()) <= BOUND
