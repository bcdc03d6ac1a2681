"""How many parameters heads have, and that their order does not matter."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from headwise.models import build, preset
from headwise.observation.loading import wrap_model
from headwise.observation.run import opened, scan
from headwise.theorems import head_sizes
from headwise.theorems.trained import Trained
from tests.theorems.models import loaded_model

BY_NAME = {each.name: each for each in head_sizes.THEOREMS}
PARAMETERS, EXCHANGE = BY_NAME["multi-head-parameters"], BY_NAME["heads-exchangeable"]


@pytest.fixture(scope="module")
def embedded():
    return Trained(opened(None, None, None, False))


@pytest.fixture(scope="module")
def gpt2():
    torch.manual_seed(0)
    config = GPT2Config(
        n_embd=33,
        n_head=3,
        n_layer=2,
        vocab_size=97,
        n_positions=256,
        bos_token_id=0,
        eos_token_id=0,
    )
    ids = [i % 97 for i in range(256)]
    return Trained(wrap_model(GPT2LMHeadModel(config).eval(), name="gpt2"), ids)


@pytest.mark.parametrize("seed", [0, 1, 2, 3])
@pytest.mark.parametrize("name", list(BY_NAME))
def test_holds(name, seed):
    assert BY_NAME[name].check(seed=seed).verdict == "HOLDS"


def test_a_forgotten_parameter_is_noticed(monkeypatch):
    right = head_sizes.random_attention

    def wider(*args, **others):
        return right(*args, **{**others, "bias": True})

    monkeypatch.setattr(head_sizes, "random_attention", wider)
    assert PARAMETERS.check().verdict == "FAILS"


def test_a_wrong_count_of_cost_is_noticed(monkeypatch):
    right = head_sizes.explicit
    monkeypatch.setattr(
        head_sizes, "explicit", lambda **sizes: right(**{**sizes, "kv_heads": sizes["heads"]})
    )
    assert PARAMETERS.check().verdict == "FAILS"


def test_a_symmetric_control_breaks_the_check(monkeypatch):
    monkeypatch.setattr(head_sizes._Sizes, "projections", lambda self: 4 * self.d**2)
    assert PARAMETERS.check().verdict == "FAILS"  # shared keys do not have 4 d²


def test_heads_that_are_merged_without_their_axis_are_noticed(monkeypatch):
    module = sys.modules["headwise.models.attention"]
    monkeypatch.setattr(module, "merge_heads", lambda x: x.flatten(1, 2).view(1, x.shape[2], -1))
    assert EXCHANGE.check().verdict == "FAILS"


def test_shared_keys_that_are_tiled_are_noticed(monkeypatch):
    module = sys.modules["headwise.models.attention"]
    right = module.compute

    def tiled(call):
        times = call.q.shape[1] // call.k.shape[1]
        k, v = call.k.repeat(1, times, 1, 1), call.v.repeat(1, times, 1, 1)
        return right(replace(call, k=k, v=v))

    monkeypatch.setattr(module, "compute", tiled)
    assert EXCHANGE.check().verdict == "FAILS"


def test_embedded_model(embedded):
    assert PARAMETERS.check_model(embedded).verdict == "HOLDS"
    assert EXCHANGE.check_model(embedded).verdict == "HOLDS"


def test_the_model_is_as_it_was_afterwards(embedded):
    before = {name: x.clone() for name, x in embedded.model.state_dict().items()}
    EXCHANGE.check_model(embedded)
    after = embedded.model.state_dict()
    assert all(torch.equal(x, after[name]) for name, x in before.items())


def test_fused_projections_are_written_too(gpt2):
    outcome = EXCHANGE.check_model(gpt2)
    assert outcome.verdict == "HOLDS"
    assert outcome.evidence.controls[0].measured[0].value > 1e-3
    assert PARAMETERS.check_model(gpt2).verdict == "HOLDS"


def test_sinks_by_head_are_inconclusive():
    stack = preset("tiny").decoder.model_copy(update={"sinks": True})
    model = build(preset("tiny").model_copy(update={"decoder": stack}))
    loaded, ids = wrap_model(model, name="sinks"), list(range(71))
    trained = Trained(loaded, ids)
    trained.scanned = scan(loaded, ids, tokens=64).dataset
    outcome = EXCHANGE.check_model(trained)
    assert outcome.verdict == "INCONCLUSIVE"
    assert "sinks" in outcome.evidence.finding


@pytest.mark.real_model
@pytest.mark.parametrize(("name", "ratio"), [("smollm2", "0.667"), ("minilm", "1")])
def test_real_models(name, ratio):
    model = loaded_model(name)
    outcome = PARAMETERS.check_model(model)
    assert outcome.verdict == "HOLDS"
    assert f": {ratio} of 4 d²" in outcome.evidence.finding
    assert EXCHANGE.check_model(model).verdict == "HOLDS"
