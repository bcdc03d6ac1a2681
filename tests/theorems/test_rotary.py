"""Rotary positions: the checks hold, each can fail, and the known figures come out."""

from __future__ import annotations

import sys

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from headwise.models import build
from headwise.models.architecture import Rotary
from headwise.models.presets import decoder_sizes
from headwise.observation.loading import wrap_model
from headwise.observation.run import opened
from headwise.positions import Layout, frequencies, rotate
from headwise.positions.scalings import DynamicNTK
from headwise.theorems import rotary
from headwise.theorems.rotary_decay import CURVE, partial_sums
from headwise.theorems.statement import Effort
from headwise.theorems.trained import Trained
from tests.theorems.models import loaded_model

BY_NAME = {each.name: each for each in rotary.THEOREMS}
RELATIVITY = sys.modules["headwise.theorems.rotary_relativity"]
DECAY = sys.modules["headwise.theorems.rotary_decay"]
IDS = [i % 97 for i in range(61)]


@pytest.fixture(scope="module")
def embedded():
    return Trained(opened(None, None, None, False))


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("name", list(BY_NAME))
def test_holds(name, seed):
    assert BY_NAME[name].check(seed=seed).verdict == "HOLDS"


def test_the_exercise_has_a_proof():
    exercise = BY_NAME["rotary-relative"]
    assert (exercise.exercise, exercise.proof) == (5, "rotary-relative")


# -- the checks can fail ----------------------------------------------------------------------


def _with_positions(change):
    def broken(x, ids, inv_freq, **others):
        return rotate(x, change(ids), inv_freq, **others)

    return broken


def test_rotations_of_squared_positions_fail(monkeypatch):
    monkeypatch.setattr(RELATIVITY, "rotate", _with_positions(lambda ids: ids**2 % 10_007))
    for name in ("rotary-relative", "rotary-conventions"):
        assert BY_NAME[name].check().verdict == "FAILS"


def test_a_rotation_that_does_not_turn_is_a_broken_check(monkeypatch):
    monkeypatch.setattr(RELATIVITY, "rotate", _with_positions(torch.zeros_like))
    for name in ("rotary-relative", "rotary-conventions"):
        assert BY_NAME[name].check().verdict == "CHECK-BROKEN"


def test_angles_in_half_precision_fail(monkeypatch):
    def coarse(x, ids, inv_freq, **others):
        angle = (ids.bfloat16()[..., None] * inv_freq.bfloat16()).to(x.dtype)
        a, b = x.chunk(2, -1)
        cos, sin = angle.cos(), angle.sin()
        return torch.cat((a * cos - b * sin, a * sin + b * cos), -1)

    monkeypatch.setattr(RELATIVITY, "rotate", coarse)
    assert BY_NAME["rotary-precision"].check().verdict == "FAILS"


def test_a_bound_of_half_the_size_fails(monkeypatch):
    monkeypatch.setattr(DECAY, "partial_sums", lambda *sizes: partial_sums(*sizes) / 2)
    assert BY_NAME["rotary-decay-bound"].check().verdict == "FAILS"


def test_a_rotation_that_shrinks_with_distance_fails(monkeypatch):
    def fading(x, ids, inv_freq, **others):
        turned = rotate(x, ids, inv_freq, **others)
        return turned / (1 + ids.to(x.dtype))[:, None] ** 0.1

    monkeypatch.setattr(DECAY, "rotate", fading)
    assert BY_NAME["rotary-no-decay"].check().verdict == "FAILS"


def test_a_wrong_count_of_turns_fails(monkeypatch):
    known = RELATIVITY.incomplete
    monkeypatch.setattr(RELATIVITY, "incomplete", lambda use, length: known(use, 2 * length))
    assert BY_NAME["rotary-incomplete-turns"].check().verdict == "FAILS"


# -- known figures ----------------------------------------------------------------------------


def test_a_mixture_of_conventions_errs_by_more_than_a_tenth():
    inv_freq = frequencies(64).inv_freq
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 211, 1, 64, generator=generator, dtype=torch.float64)
    p, r = (torch.randint(1009, (211, 1), generator=generator) for _ in range(2))
    mixed = rotate(q, p, inv_freq, layout=Layout.INTERLEAVED) * rotate(k, r, inv_freq)
    right = q * rotate(k, r - p, inv_freq)
    error = (mixed.sum(-1) - right.sum(-1)).abs() / (q.norm(dim=-1) * k.norm(dim=-1))
    assert 0.1 < float(error.mean()) < 0.3  # 6.6 and 14.5 of 65 in two pairs


def test_errors_of_single_precision():
    known = {1009: 5.7e-6, 10_007: 3.8e-5, 100_003: 4.1e-4, 1_000_003: 2.5e-3}
    for p, largest in known.items():
        found = RELATIVITY._angle_errors(Effort(full=True), p)
        assert largest / 3 < found["float32"] < 3 * largest  # a largest of other draws


def test_positions_in_half_precision():
    """Angles in bfloat16, as positions: half of one is lost at 100, some at 1000."""
    inv_freq = frequencies(64).inv_freq
    for p, low, high in ((100, 0.2, 0.6), (1000, 2.0, 8.0)):
        coarse = (torch.tensor([p]).bfloat16() * inv_freq.bfloat16()).double()
        assert low < float((coarse / inv_freq - p).abs().max()) < high


def test_the_curve_of_the_bound():
    found = partial_sums(torch.tensor(list(CURVE)), 128).mean(1).tolist()
    assert found == pytest.approx(list(CURVE.values()), rel=0.01, abs=0.05)
    assert float(partial_sums(torch.tensor([100_000]), 128).mean()) == pytest.approx(6.9, abs=0.05)


# -- trained models ---------------------------------------------------------------------------


def test_the_embedded_model(embedded):
    for name in ("rotary-relative", "rotary-incomplete-turns"):
        assert BY_NAME[name].check_model(embedded).verdict == "HOLDS"


def _own(**others):
    sizes = decoder_sizes(vocab=97, d_model=12, layers=2, heads=3, d_ff=29, context=61, **others)
    return Trained(wrap_model(build(sizes, seed=1), name="own"), IDS)


def test_a_model_whose_positions_are_squared_fails(monkeypatch):
    model = _own()

    def crooked(model, first, stride=1):
        ids = model.document(64).ids[None]
        at = first + stride * torch.arange(ids.shape[1])
        with torch.no_grad():
            return model.model(ids, position_ids=(at**2 % 1009)[None])[0].double()

    monkeypatch.setattr(rotary, "outputs_at", crooked)
    assert BY_NAME["rotary-relative"].check_model(model).verdict == "FAILS"


def test_a_model_that_ignores_positions_is_a_broken_check(monkeypatch):
    model = _own()
    same = torch.zeros(61, 97, dtype=torch.float64)
    monkeypatch.setattr(rotary, "outputs_at", lambda model, first, stride=1: same)
    assert BY_NAME["rotary-relative"].check_model(model).verdict == "CHECK-BROKEN"


def test_where_it_does_not_apply():
    config = GPT2Config(n_embd=12, n_head=2, n_layer=1, vocab_size=97, bos_token_id=0,
                        eos_token_id=0)  # fmt: skip
    absolute = Trained(wrap_model(GPT2LMHeadModel(config).eval(), name="gpt2"), IDS)
    scaling = DynamicNTK(factor=2.0, trained=31)
    by_length = _own(rotary=Rotary(width=4, scaling=scaling))
    half = Trained(
        wrap_model(build(_own().model.architecture, dtype=torch.bfloat16), name="b"), IDS
    )
    reasons = {
        "absolute positions": absolute,
        "depend on the length": by_length,
        "bfloat16": half,
        "no layer of it has rotary": _own(rotary=None, alibi=True),
    }
    for reason, model in reasons.items():
        outcome = BY_NAME["rotary-relative"].check_model(model)
        assert outcome.verdict == "INCONCLUSIVE"
        assert reason in outcome.evidence.finding


def test_a_model_of_transformers():
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=24,
        num_attention_heads=3,
        num_key_value_heads=3,
        num_hidden_layers=2,
        intermediate_size=29,
        vocab_size=97,
        max_position_embeddings=61,
        bos_token_id=0,
        eos_token_id=0,
        initializer_range=0.5,
    )
    model = Trained(wrap_model(LlamaForCausalLM(config).eval(), name="llama"), IDS)
    assert BY_NAME["rotary-relative"].check_model(model).verdict == "HOLDS"
    assert BY_NAME["rotary-incomplete-turns"].check_model(model).verdict == "HOLDS"


@pytest.mark.real_model
def test_the_real_models():
    model = loaded_model("smollm2")
    outcome = BY_NAME["rotary-relative"].check_model(model)
    assert outcome.verdict == "HOLDS"
    near, far = (each.value for each in outcome.evidence.measured)
    assert near < 3e-4
    assert far == pytest.approx(1.9e-3, rel=0.7)
    turns = BY_NAME["rotary-incomplete-turns"].check_model(model)
    assert turns.evidence.finding.startswith("12 of 32 pairs")
    for name in ("rotary-relative", "rotary-incomplete-turns"):
        assert BY_NAME[name].check_model(loaded_model("minilm")).verdict == "INCONCLUSIVE"
