"""The mean loss is that of the model's own logits, and models without one are refused."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from headwise.errors import ModelError, TextError
from headwise.observation import loss as module
from headwise.observation.driver import Document
from headwise.observation.loading import wrap_model
from headwise.observation.loss import mean_loss
from tests.observation.own_models import own
from tests.observation.tiny_models import VOCABULARY, build, tokenizer

# A mean of losses of order ln V, each summed over V terms in float32: below 4·V·u·ln V.
TOLERANCE = 4 * VOCABULARY * 2.0**-24 * 6


def ids(length: int, seed: int) -> torch.Tensor:
    return torch.randint(4, 131, (length,), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma2", "own"])
def test_the_mean_over_all_documents_weighs_every_token_alike(kind, monkeypatch):
    monkeypatch.setattr(module, "LOGITS", 5 * VOCABULARY)  # runs of 5 tokens, ragged at the end
    model = own("grouped") if kind == "own" else build(kind)
    documents = [Document(ids(13, 0)), Document(ids(1, 1)), Document(ids(29, 2))]
    total, count = 0.0, 0
    for document in documents:
        with torch.no_grad():
            out = model(document.ids[None])
        logits = out if isinstance(out, torch.Tensor) else out.logits
        total += float(F.cross_entropy(logits[0, :-1].double(), document.ids[1:], reduction="sum"))
        count += len(document.ids) - 1
    assert mean_loss(wrap_model(model), documents) == pytest.approx(total / count, rel=TOLERANCE)


def test_training_mode_is_left_and_put_back():
    model = build("gpt2").train()  # with dropout
    loaded = wrap_model(model)
    first = mean_loss(loaded, [Document(ids(13, 0))])
    assert first == mean_loss(loaded, [Document(ids(13, 0))])
    assert model.training


def test_models_without_a_loss_and_texts_without_a_prediction_are_refused():
    document = Document(ids(13, 0))
    with pytest.raises(ModelError, match="has no language-model head"):
        mean_loss(wrap_model(build("llama", None)), [document])
    with pytest.raises(ModelError, match="needs a tokenizer with a mask"):
        mean_loss(wrap_model(build("bert", "masked")), [document])
    assert mean_loss(wrap_model(build("bert", "masked"), tokenizer()), [document]) > 0
    with pytest.raises(TextError, match="no token to predict"):
        mean_loss(wrap_model(build("llama")), [Document(ids(1, 0))])
