"""Loaded BERT, Marian and T5 give the streams and logits of transformers, on every check."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BertModel

from headwise.models import Architecture, Encoder, Relative, skeleton
from headwise.models.checkpoints import family, load
from headwise.positions import Layout
from tests.parity.loaded_checks import relative_error
from tests.parity.loaded_encoders import ENCODER_CASES, encoder_pairs
from tests.parity.loaded_models import Case, errors

BOUND = 1e-5  # of the largest entry of each tensor, in float32


@pytest.mark.parametrize("case", ENCODER_CASES, ids=lambda case: case.name)
def test_streams_and_logits_are_those_of_transformers(case: Case) -> None:
    found = dict(errors(case))
    assert set(found) == set(case.checks)
    assert {name: error for name, error in found.items() if error > BOUND} == {}


def _case(name: str) -> Case:
    return next(case for case in ENCODER_CASES if case.name == name)


@pytest.mark.parametrize(
    ("name", "place", "word", "wrong"),
    [
        ("bert", "encoder", "norm_eps", 1e-2),
        ("bert", "encoder", "activation", "gelu_tanh"),
        ("bert, bare, tanh gelu", "encoder", "activation", "gelu"),
        ("marian", "embedding", "scale", 1.0),
        ("marian", "embedding", "layout", Layout.INTERLEAVED),
        ("marian", "decoder", "norm_eps", 1e-3),
        ("t5", "encoder", "scales", (None,)),
        ("t5", "decoder", "scales", (None,)),
        ("t5", "decoder", "relative", Relative(buckets=8, max_distance=13)),
        ("t5", "unembedding", "scale", 1.0),
        ("t5, second form", "encoder", "activation", "gelu"),
        ("t5, second form", "unembedding", "scale", 23**-0.5),
    ],
)
def test_a_wrong_word_of_the_architecture_is_noticed(
    name: str, place: str, word: str, wrong: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def mistaken(architecture: Architecture) -> Any:
        record = getattr(architecture, place)
        assert getattr(record, word) != wrong
        changed = record.model_copy(update={word: wrong})
        return skeleton(architecture.model_copy(update={place: changed}))

    monkeypatch.setattr(family, "skeleton", mistaken)
    case = _case(name)
    found = dict(errors(Case(case.name, case.make, {"plain": case.checks["plain"]})))
    assert found["plain"] > 10 * BOUND


@pytest.mark.real_model
def test_minilm() -> None:
    folder = Path(os.environ["HEADWISE_MODELS"]) / "minilm"
    theirs, loaded = BertModel.from_pretrained(folder).eval(), load(folder)
    ours = loaded.model
    assert isinstance(ours, Encoder)
    assert loaded.tokenizer is not None
    texts = ["A head is what it reads and what it moves.", "Attention is all you need?"]
    encoded = [loaded.tokenizer.encode(text) for text in texts]
    ids, keep, segments = (
        torch.tensor([getattr(each, part) for each in encoded])
        for part in ("ids", "attention_mask", "type_ids")
    )
    keep = keep.bool()
    assert not keep.all()  # the tokenizer pads
    with torch.no_grad():
        want = theirs(ids, attention_mask=keep.long(), token_type_ids=segments)
        hidden = ours.hidden(ids, mask=keep, segment_ids=segments)
        pooled, random = ours.pooled(hidden), list(encoder_pairs(theirs, ours))
    assert relative_error(hidden[keep], want.last_hidden_state[keep]) <= BOUND
    assert relative_error(pooled, want.pooler_output) <= BOUND
    assert len(random) == 7
    assert all(relative_error(mine, other) <= BOUND for mine, other in random)
