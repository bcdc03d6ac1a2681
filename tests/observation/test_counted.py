"""The planner against a count of the model on the meta device, for one model of each kind."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from headwise.errors import ModelError
from headwise.observation import counted
from headwise.observation.counted import Verified, verify
from tests.cost.as_files import TINY, config

LENGTH, BATCH, SOURCE = 17, 3, 19
PAIRS = ("t5", "bart")  # whose encoder reads as many tokens as it is given


@pytest.mark.parametrize("kind", TINY)
def test_every_kind_is_equal(kind):
    source = SOURCE if kind in PAIRS else None
    found = verify(config(kind), length=LENGTH, batch=BATCH, source=source)
    assert found.equal
    assert (found.length, found.batch) == (LENGTH, BATCH)
    assert 0 < found.forward == found.counted_forward < found.counted_training
    assert found.counted_parameters > 0


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("llama", "LlamaModel"),
        ("llama", "LlamaForSequenceClassification"),
        ("bert", "BertForMaskedLM"),
        ("vit", "ViTModel"),
        ("clip", "CLIPForImageClassification"),
        ("clip", "CLIPTextModelWithProjection"),
        ("clip", "CLIPVisionModel"),
        ("whisper", "WhisperModel"),
    ],
)
def test_the_class_that_the_configuration_names(kind, name):
    found = verify(config(kind, architectures=[name]), length=LENGTH, batch=BATCH)
    assert found.model_class == name
    assert found.equal


def test_the_configuration_is_left_as_it_was():
    given = config("mixtral")
    before = repr(given)
    verify(given, length=5)
    assert repr(given) == before


@pytest.mark.parametrize("which", ["parameters", "forward", "training"])
def test_one_unit_too_many_is_not_equal(which):
    right = Verified("Model", 5, 1, 7, 7, 11, 11, 33, 33)
    assert right.equal
    assert not replace(right, **{which: getattr(right, which) + 1}).equal


def test_a_model_that_differs_is_noticed(monkeypatch):
    build = counted._on_meta

    def wider(configuration, name):
        return build({**configuration, "intermediate_size": 59}, name)

    monkeypatch.setattr(counted, "_on_meta", wider)
    found = verify(config("llama"), length=LENGTH)
    assert not found.equal
    layers, width, more = 3, 40, 59 - 53
    assert found.counted_parameters - found.parameters == layers * 3 * width * more
    assert found.counted_forward - found.forward == 2 * LENGTH * layers * 3 * width * more


def test_a_family_that_is_not_known():
    with pytest.raises(ModelError, match="has the model type 'rwkv'; allowed: "):
        verify({"model_type": "rwkv"}, length=5)


def test_a_class_that_transformers_does_not_have(monkeypatch):
    plain = counted.parts_of
    named = lambda given: replace(plain(given), model_class="LlamaForNothing")  # noqa: E731
    monkeypatch.setattr(counted, "parts_of", named)
    with pytest.raises(ModelError, match=r"transformers [\d.]+ has no class LlamaForNothing"):
        verify(config("llama"), length=5)


def test_sizes_that_transformers_does_not_take():
    odd = config("llama", hidden_size=44)  # heads of 11, which cannot be turned in pairs
    with pytest.raises(ModelError, match="transformers cannot build LlamaForCausalLM: ") as caught:
        verify(odd, length=5)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", [RuntimeError, TypeError, AttributeError])
def test_a_model_that_does_not_run_without_values(monkeypatch, kind):
    build = counted._on_meta

    def broken(configuration, name):
        model = build(configuration, name)

        def forward(**inputs):
            raise kind("cannot take\n  a value from the meta device")

        model.register_forward_pre_hook(lambda module, args: forward())
        return model

    monkeypatch.setattr(counted, "_on_meta", broken)
    says = "GPT2LMHeadModel does not run on the meta device: cannot take a value from the meta"
    with pytest.raises(ModelError, match=says):
        verify(config("gpt2"), length=5)


def test_no_output_with_a_gradient():
    with pytest.raises(ModelError, match="no output with a gradient"):
        counted._total({"logits": torch.zeros(3), "ids": torch.zeros(3, dtype=torch.long)})
