"""The residual stream: the checks hold, and each can fail."""

from __future__ import annotations

import sys

import pytest

from headwise.models import build
from headwise.models.block import PreNorm
from headwise.models.presets import decoder_sizes, encoder_sizes
from headwise.observation.loading import wrap_model
from headwise.observation.run import opened
from headwise.theorems import residual
from headwise.theorems.trained import Trained
from tests.theorems.models import loaded_model

BY_NAME = {each.name: each for each in residual.THEOREMS}
MODULE = sys.modules["headwise.theorems.residual"]
IDS = [i % 97 for i in range(61)]


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("name", list(BY_NAME))
def test_holds(name, seed):
    assert BY_NAME[name].check(seed=seed).verdict == "HOLDS"


def test_a_stream_that_is_scaled_fails(monkeypatch):
    monkeypatch.setattr(PreNorm, "forward", lambda self, x, *rest: 0.9 * x + self.write(x, *rest))
    for name in ("residual-jacobian", "residual-sum"):
        assert BY_NAME[name].check().verdict == "FAILS"


def test_a_branch_that_reads_the_stream_as_it_is_fails(monkeypatch):
    monkeypatch.setattr(PreNorm, "write", lambda self, x, *rest: self.branch(x, *rest))
    assert BY_NAME["residual-branch-shrinks"].check().verdict == "FAILS"


def test_models_that_are_all_pre_norm_are_a_broken_check(monkeypatch):
    known = MODULE._model
    monkeypatch.setattr(MODULE, "_model", lambda effort, placement: known(effort, "pre"))
    for name in ("residual-jacobian", "residual-sum"):
        assert BY_NAME[name].check().verdict == "CHECK-BROKEN"


# -- trained models ---------------------------------------------------------------------------


def _verdict(model):
    return BY_NAME["residual-sum"].check_model(model).verdict


def test_the_embedded_model_and_its_hooks():
    model = Trained(opened(None, None, None, False))
    assert _verdict(model) == "HOLDS"
    assert not any(module._forward_hooks for module in model.model.modules())


@pytest.mark.parametrize("placement", ["pre", "sandwich", "branch", "parallel"])
def test_every_placement_that_adds(placement):
    sizes = decoder_sizes(
        vocab=97, d_model=12, layers=2, heads=3, d_ff=29, context=61, placement=placement
    )
    assert _verdict(Trained(wrap_model(build(sizes, seed=1), name="own"), IDS)) == "HOLDS"


def test_post_norm_violates_the_condition():
    sizes = encoder_sizes(vocab=97, d_model=12, layers=2, heads=3, d_ff=29, context=61)
    model = Trained(wrap_model(build(sizes, seed=1), name="own"), IDS)
    assert _verdict(model) == "ASSUMPTION-VIOLATED"


def test_one_block_that_does_not_add_up_fails(monkeypatch):
    sizes = decoder_sizes(vocab=97, d_model=12, layers=3, heads=3, d_ff=29, context=61)
    own = build(sizes, seed=1)
    own.decoder.blocks[1].register_forward_hook(lambda _, args, output: 1.5 * output)
    assert _verdict(Trained(wrap_model(own, name="own"), IDS)) == "FAILS"


def test_a_scan_that_checks_nothing_is_a_broken_check(monkeypatch):
    monkeypatch.setattr(MODULE, "_scaled_streams", lambda model, blocks: 0)
    assert _verdict(Trained(opened(None, None, None, False))) == "CHECK-BROKEN"


@pytest.mark.real_model
def test_the_real_models():
    assert _verdict(loaded_model("smollm2")) == "HOLDS"
    assert _verdict(loaded_model("minilm")) == "ASSUMPTION-VIOLATED"
