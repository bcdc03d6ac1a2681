"""The cost of a measured model: planned from its sizes, held against what is in memory."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM

import headwise as hw
from headwise.observation import costed
from headwise.observation.costed import add_cost
from headwise.observation.loading import wrap_model
from headwise.observation.run import opened
from headwise.report.cost_section import cost_section
from headwise.report.page import render
from headwise.results.validate import about

LLAMA = LlamaConfig(
    hidden_size=24,
    intermediate_size=31,
    num_hidden_layers=2,
    num_attention_heads=3,
    num_key_value_heads=1,
    vocab_size=53,
    max_position_embeddings=64,
)
BERT = BertConfig(
    hidden_size=24,
    intermediate_size=31,
    num_hidden_layers=2,
    num_attention_heads=3,
    vocab_size=53,
    max_position_embeddings=64,
)


def measured(model):
    loaded = wrap_model(model.eval())
    ids = torch.arange(17) % 53
    with hw.observe(model) as scan, torch.no_grad():
        model(ids[None])
    return scan.dataset, loaded


@pytest.mark.parametrize("model", [LlamaForCausalLM(LLAMA), BertModel(BERT)], ids=["llama", "bert"])
def test_planned_and_counted_are_equal(model):
    found = about(add_cost(*measured(model)))["cost"]
    assert found["length"] == 17
    assert [what for what, *_ in found["checks"]] == [
        "parameters",
        "FLOPs forward",
        "FLOPs forward and backward",
    ]
    assert all(planned == counted for _, planned, counted in found["checks"])
    assert found["checks"][0][2] == sum(p.numel() for p in model.parameters())


def test_a_model_with_a_layer_too_many_is_noticed():
    model = LlamaForCausalLM(LLAMA)
    model.model.extra = torch.nn.Linear(3, 5)
    what, planned, counted = about(add_cost(*measured(model)))["cost"]["checks"][0]
    assert (what, counted - planned) == ("parameters", 20)


def test_own_models_are_held_against_their_parameters():
    loaded = opened(None, None, None, False)
    scan = hw.scan(loaded, tokens=40).dataset
    found = add_cost(scan, loaded)
    assert [what for what, *_ in about(found)["cost"]["checks"]] == ["parameters"]
    section = cost_section(found)
    assert section.tables[0].rows[0][-1] == "equal"
    assert "1,916,640" in render(found)


def test_an_unknown_family_is_a_note(monkeypatch):
    dataset, loaded = measured(LlamaForCausalLM(LLAMA))
    config = costed._config
    monkeypatch.setattr(costed, "_config", lambda m: {**config(m), "model_type": "unheard-of"})
    found = add_cost(dataset, loaded)
    assert "cost" not in about(found)
    assert any(note.startswith("no cost: ") for note in about(found)["notes"])
    assert cost_section(found) is None
    assert 'id="cost"' not in render(found)


def test_facts_that_cannot_be_read_leave_the_section_out():
    found = add_cost(*measured(LlamaForCausalLM(LLAMA)))
    facts = about(found)
    facts["cost"]["config"] = {"model_type": "from the future"}
    found.attrs["about"] = json.dumps(facts)
    assert cost_section(found) is None
