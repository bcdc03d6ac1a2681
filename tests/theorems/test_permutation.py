"""Equivariance: on random encoders, on trained models, and what breaks it."""

from __future__ import annotations

import sys

import pytest
import torch

from headwise.attention.masks import Window
from headwise.models import build, preset
from headwise.observation.loading import wrap_model
from headwise.observation.run import opened
from headwise.theorems import causal_order, permutation, permuted_model
from headwise.theorems.statement import Effort
from headwise.theorems.trained import Trained
from tests.theorems.models import loaded_model

BY_NAME = {each.name: each for each in permutation.THEOREMS}
EQUIVARIANCE, CAUSAL = BY_NAME["permutation-equivariance"], BY_NAME["causal-mask-orders"]


@pytest.fixture(scope="module")
def embedded():
    return Trained(opened(None, None, None, False))


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("name", list(BY_NAME))
def test_holds(name, seed):
    assert BY_NAME[name].check(seed=seed).verdict == "HOLDS"


def test_controls_are_the_conditions():
    names = [control.name for control in EQUIVARIANCE.check().evidence.controls]
    assert {"a causal mask", "rotary positions", "ALiBi", "a token shift"} <= set(names)


def test_attention_that_sees_places_is_noticed(monkeypatch):
    module = sys.modules["headwise.models.attention"]
    right = module.compute

    def placed(call):
        out = right(call)
        return out * (1 + 1e-6 * torch.arange(out.shape[2], dtype=out.dtype))[:, None]

    monkeypatch.setattr(module, "compute", placed)
    assert EQUIVARIANCE.check().verdict == "FAILS"


def test_a_control_that_is_symmetric_breaks_the_check(monkeypatch):
    monkeypatch.setattr(permutation, "_token_shift", lambda model: None)
    assert EQUIVARIANCE.check().verdict == "CHECK-BROKEN"


def test_one_layer_with_a_window_sees_the_order(monkeypatch):
    right = causal_order._decoder

    def windowed(seed, layers, rotary=None):
        model = right(seed, layers, rotary)
        for block in model.decoder.blocks:
            block.attention.branch.mask = Window(5)
        return model

    monkeypatch.setattr(causal_order, "_decoder", windowed)
    assert CAUSAL.check().verdict == "FAILS"


def test_causal_mask_breaks_it_by_fourteen_orders_more_than_rounding():
    evidence = EQUIVARIANCE.check().evidence
    causal = next(c for c in evidence.controls if c.name == "a causal mask")
    assert evidence.measured[0].value < 1e-14  # notes: 4e-16 in one layer
    assert causal.measured[0].value > 0.05  # 1.65 in a toy whose outputs are not divided by size


def test_prefix_survives_one_causal_layer_and_not_two():
    one, two = CAUSAL.check().evidence.measured
    assert one.value < 1e-14  # notes: 1e-16
    assert two.value > 0.01  # .42 in a toy without residual stream and norms


def test_plot_has_the_control_beside_the_measurement():
    (plot,) = EQUIVARIANCE.check().evidence.plots
    assert [curve.name for curve in plot.curves][1:] == ["measured", "with a causal mask"]
    assert all(len(curve.values) == len(plot.places) for curve in plot.curves)


def test_full_effort_draws_more():
    quick, full = Effort(False, 0).pick((17, 3), (101, 11)), Effort(True, 0).pick(1, 2)
    assert (quick, full) == ((17, 3), 2)


def test_embedded_model_sees_order_by_mask_and_rotation(embedded):
    outcome = EQUIVARIANCE.check_model(embedded)
    assert outcome.verdict == "ASSUMPTION-VIOLATED"
    assert outcome.evidence.violated == "the order is seen by the causal mask and rotary positions"
    assert "the causal mask alone" in outcome.evidence.finding


def test_embedded_model_without_positions_reads_a_set_in_one_block(embedded):
    assert CAUSAL.check_model(embedded).verdict == "HOLDS"


def test_encoder_with_its_positions_removed_is_equivariant():
    model = Trained(wrap_model(build(preset("tiny-encoder")), name="tiny"), _ids())
    outcome = EQUIVARIANCE.check_model(model)
    assert outcome.verdict == "HOLDS"
    (control,) = outcome.evidence.controls
    assert control.name == "with learned positions"
    assert CAUSAL.check_model(model).evidence.inconclusive == "it has no causal mask"


def test_positions_that_are_not_removed_are_noticed(monkeypatch):
    right = permuted_model.block_outputs
    monkeypatch.setattr(
        permuted_model, "block_outputs", lambda model, ids, at_zero=False: right(model, ids)
    )
    model = Trained(wrap_model(build(preset("tiny-encoder")), name="tiny"), _ids())
    assert EQUIVARIANCE.check_model(model).verdict == "FAILS"


def test_half_precision_is_not_judged():
    model = wrap_model(build(preset("tiny-encoder"), dtype=torch.bfloat16), name="tiny")
    outcome = EQUIVARIANCE.check_model(Trained(model, _ids()))
    assert outcome.verdict == "INCONCLUSIVE"
    assert "float32" in outcome.evidence.finding


def test_encoder_decoders_are_inconclusive():
    model = Trained(wrap_model(build(preset("tiny-encoder-decoder")), name="tiny"), _ids())
    assert EQUIVARIANCE.check_model(model).verdict == "INCONCLUSIVE"


@pytest.mark.real_model
def test_minilm_without_its_positions():
    outcome = EQUIVARIANCE.check_model(loaded_model("minilm"))
    assert outcome.verdict == "HOLDS"
    assert outcome.evidence.measured[0].value < 5e-6  # notes: 1.9e-6 after 6 layers
    assert 3 < outcome.evidence.controls[0].measured[0].value < 8  # notes: 5.9


@pytest.mark.real_model
def test_smollm2_sees_the_order():
    model = loaded_model("smollm2")
    outcome = EQUIVARIANCE.check_model(model)
    assert outcome.verdict == "ASSUMPTION-VIOLATED"
    assert "the causal mask and rotary positions" in outcome.evidence.violated
    assert CAUSAL.check_model(model).verdict == "HOLDS"


def _ids():
    return torch.randint(97, (71,), generator=torch.Generator().manual_seed(3)).tolist()
