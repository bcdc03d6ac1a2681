"""Sinks, prunable heads and logit growth: what is found, and that the checks can fail."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from headwise.attention.masks import Causal, Window
from headwise.models import build, preset
from headwise.observation.loss import mean_loss
from headwise.observation.run import opened
from headwise.theorems.reproductions import trained_pruning as pruning
from headwise.theorems.reproductions import trained_sharpness as sharpness
from headwise.theorems.reproductions import trained_sinks as sinks
from headwise.theorems.reproductions import trained_text
from headwise.theorems.reproductions.trained import THEOREMS
from headwise.theorems.reproductions.trained_text import check_masked, embedded, losses, sequences
from headwise.theorems.statement import Effort, NotApplicable
from headwise.theorems.trained import Trained
from headwise.theorems.verdict import Verdict, verdict
from tests.observation import tiny_models

BY_NAME = {each.name: each for each in THEOREMS}
SMOLLM2 = "smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(scope="module")
def own():
    return embedded()


@pytest.fixture(scope="module")
def routed():
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=24, intermediate_size=17, num_hidden_layers=2, num_attention_heads=3,
        num_key_value_heads=1, vocab_size=37, max_position_embeddings=128,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def test_each_is_a_reproduction():
    assert list(BY_NAME) == ["xiao-sinks", "michel-prunable-heads", "wortsman-logit-growth"]
    assert all(each.reproduces and each.source for each in THEOREMS)


@pytest.mark.parametrize("kind", ["own", "routed"])
def test_a_mask_of_ones_own_is_the_models_causal_mask_and_hides(kind, own, routed):
    model = own.model if kind == "own" else routed
    ids = torch.randint(37, (2, 31), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        logits = model(ids) if kind == "own" else model(input_ids=ids).logits
    wanted = torch.nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1).double(), ids[:, 1:].flatten(), reduction="none"
    )
    # float32 logits of about 10 after 5 layers: some hundred units in the last place
    assert torch.allclose(losses(model, ids, Causal()).flatten(), wanted, atol=1e-4)
    changed = ids.clone()
    changed[:, 0] = 36 - ids[:, 0]
    layers = 5 if kind == "own" else 2
    seen, other = (losses(model, each, Window(4)) for each in (ids, changed))
    far = layers * 3 + 1  # a window of 4 reaches 3 further back in each layer
    assert torch.equal(seen[:, far:], other[:, far:])
    assert not torch.equal(seen[:, 1:4], other[:, 1:4])


def test_sequences_are_the_text_in_pieces(own):
    ids = sequences(own, 61, 3)
    assert ids.shape == (3, 61)
    assert torch.equal(ids.flatten(), sequences(own, 183, 1)[0])
    short = Trained(own.loaded, "to be or not to be")
    with pytest.raises(NotApplicable, match="token"):
        sequences(short, 61, 3)


def test_the_embedded_model_has_no_sinks():
    found = BY_NAME["xiao-sinks"].check()
    assert found.verdict == Verdict.VIOLATED
    assert "does not reproduce" in found.evidence.finding
    assert 0.9 < found.evidence.measured[0].value < 1.1


def told(monkeypatch, by_mask, share=0.8):
    """The losses of a model that has these, and this share of sinks."""

    def losses(model, ids, mask):
        names = {str(each): name for name, each in sinks._masks(sinks._Sizes(512, 4)).items()
                 if name != "others"}  # fmt: skip
        name = names.get(str(mask), "others")
        spread = 0.01 * torch.arange(len(ids), dtype=torch.float64)[:, None]
        return torch.full((len(ids), 511), by_mask[name], dtype=torch.float64) + spread

    monkeypatch.setattr(sinks, "losses", losses)
    monkeypatch.setattr(sinks, "check_masked", lambda model, ids: None)
    monkeypatch.setattr(sinks, "_share_of_sinks", lambda model: share)


WITH_SINKS = {"full": 3.0, "0 first": 4.0, "1 first": 3.2, "4 first": 3.2, "others": 4.0}


@pytest.mark.parametrize(
    ("changes", "share", "expected"),
    [
        ({}, 0.8, Verdict.HOLDS),
        ({}, 0.0, Verdict.VIOLATED),
        ({"0 first": 3.4, "others": 3.4}, 0.8, Verdict.FAILS),
        ({"others": 3.2}, 0.8, Verdict.BROKEN),  # any early token helps: nothing to do with sinks
        ({"0 first": 3.0}, 0.8, Verdict.INCONCLUSIVE),  # the mask changed nothing
    ],
)
def test_the_verdict_on_windows_follows_the_losses(monkeypatch, changes, share, expected):
    told(monkeypatch, WITH_SINKS | changes, share)
    assert BY_NAME["xiao-sinks"].check().verdict == expected


def test_removing_a_head_is_zeroing_its_output_weights(own, routed):
    gated = pruning._Gated(own)
    ids = sequences(own, 67, 2)
    before = {name: each.clone() for name, each in own.model.state_dict().items()}
    learned = [each.requires_grad for each in own.model.parameters()]
    with gated.opened():
        whole = gated.without(torch.tensor([], dtype=torch.long), ids)
        without = gated.without(torch.tensor([7]), ids)
    assert [each.requires_grad for each in own.model.parameters()] == learned
    assert not own.model.decoder.blocks[1].attention.branch.output._forward_pre_hooks
    documents = [type(own.document())(row) for row in ids]
    assert whole == pytest.approx(mean_loss(own.loaded, documents), rel=1e-5)
    output = own.model.decoder.blocks[1].attention.branch.output.weight
    with torch.no_grad():
        output[:, 2 * 32 : 3 * 32] = 0  # head 7 of 5 a layer: head 2 of layer 1
        zeroed = mean_loss(own.loaded, documents)
        own.model.load_state_dict(before)
    assert without == pytest.approx(zeroed, rel=1e-5)
    assert abs(without - whole) > 1e-4


def test_the_gates_derivative_is_that_of_the_loss(own):
    gated = pruning._Gated(own)
    ids = sequences(own, 67, 1)
    with gated.opened():
        found = gated.importance(ids)
        assert all(not gate.requires_grad for gate in gated.gates)
        slopes = []
        for head in range(5):
            values = []
            for step in (-0.05, 0.05):
                gated.gates = [torch.ones(5) for _ in range(5)]
                gated.gates[2][head] += step
                with torch.no_grad():
                    values.append(float(gated.loss(ids[0])))
            slopes.append(abs(values[1] - values[0]) / 0.1)
    slopes = torch.tensor(slopes)
    # central differences of step 0.05 in float32: the third derivative and rounding, per cents
    assert torch.allclose(found[10:15], slopes / slopes.norm(), atol=0.05)


def test_heads_of_the_embedded_model_can_be_pruned():
    found = BY_NAME["michel-prunable-heads"].check()
    assert found.verdict == Verdict.HOLDS
    assert found.evidence.measured[0].value < 0.15
    assert "5 of 25 heads" in found.evidence.finding


def test_the_wrong_order_is_noticed(monkeypatch, own):
    right = pruning._Gated.importance
    monkeypatch.setattr(pruning._Gated, "importance", lambda self, ids: -right(self, ids))
    found = pruning._evidence(own, 127, 4, 8, 0)
    assert verdict(found) != Verdict.HOLDS
    monkeypatch.setattr(pruning._Gated, "importance", lambda self, ids: torch.zeros(self.heads))
    assert verdict(pruning._evidence(own, 127, 4, 8, 0)) != Verdict.HOLDS


def test_dividing_the_logits_undoes_the_size():
    text, run = sharpness._text(), sharpness._Run(7, 3)
    small = sharpness._trained(text, run, 1.0, 0)
    # √κ is a power of two, so only the order of products differs
    assert sharpness._trained(text, run, 4.0**6, 0, divided=True) == pytest.approx(small, abs=1e-3)
    assert 2.4 < text.pairs < 2.5


def pretend(monkeypatch, by_size, undone):
    """Trainings that end at these losses."""

    def trained(text, run, kappa, seed, *, divided=False):
        return undone if divided else by_size[kappa]

    monkeypatch.setattr(sharpness, "_trained", trained)


FOUND = {1.0: 2.09, 1e1: 2.1, 1e2: 2.4, 1e3: 2.6, 1e4: 2.7}


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize(
    ("changes", "divided", "expected"),
    [
        ({}, 2.09, Verdict.HOLDS),
        ({1e3: 2.1}, 2.09, Verdict.FAILS),  # the loss does not grow
        ({1e4: 2.3}, 2.09, Verdict.FAILS),  # attention still gives something
        ({1.0: 2.5}, 2.09, Verdict.FAILS),  # it never gave anything
        ({}, 2.7, Verdict.BROKEN),  # it was not the logits
    ],
)
def test_the_verdict_on_sizes_follows_the_losses(monkeypatch, full, changes, divided, expected):
    pretend(monkeypatch, FOUND | changes, divided)
    found = sharpness.sharpness(Effort(full=full))
    assert verdict(found) == expected
    assert ("does not reproduce" in found.finding) == (expected == Verdict.FAILS)


@pytest.mark.slow
def test_large_logits_worsen_the_loss():
    found = BY_NAME["wortsman-logit-growth"].check()
    assert found.verdict == Verdict.HOLDS


def test_models_that_have_no_decoder_are_inconclusive(own):
    short = build(preset("tiny"), seed=0)
    for name in ("xiao-sinks", "michel-prunable-heads"):
        tiny = Trained(opened(short, None, None, False), "to be or not to be")
        assert BY_NAME[name].check_model(tiny).verdict == Verdict.INCONCLUSIVE
    found = BY_NAME["wortsman-logit-growth"].check_model(own)
    assert found.verdict == Verdict.INCONCLUSIVE


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gemma2", "opt"])
def test_models_of_transformers_that_learnt_nothing(tmp_path, architecture):
    saved = tiny_models.save(tmp_path, architecture)
    model = Trained(opened(saved, None, None, False))
    assert BY_NAME["xiao-sinks"].check_model(model).verdict == Verdict.VIOLATED
    found = BY_NAME["michel-prunable-heads"].check_model(model)
    assert found.verdict == Verdict.INCONCLUSIVE
    assert "no order of heads can be told" in found.evidence.finding


def test_a_model_that_ignores_the_mask_is_refused(monkeypatch, own):
    ids = sequences(own, 67, 1)
    check_masked(own, ids)
    monkeypatch.setattr(trained_text, "losses", lambda *given: torch.zeros(1, 66))
    with pytest.raises(NotApplicable, match="another model"):
        check_masked(own, ids)
    monkeypatch.setattr(trained_text, "losses", lambda *given: [][0])
    with pytest.raises(NotApplicable, match="IndexError"):
        check_masked(own, ids)


@pytest.mark.real_model
def test_a_real_decoder():
    loaded = opened(Path(os.environ["HEADWISE_MODELS"]) / SMOLLM2, None, None, False)
    model = Trained(loaded)
    found = BY_NAME["xiao-sinks"].check_model(model)
    assert found.verdict == Verdict.HOLDS
    assert 2.0 < found.evidence.measured[0].value < 4.0
    found = BY_NAME["michel-prunable-heads"].check_model(model)
    assert found.verdict == Verdict.HOLDS
    assert found.evidence.measured[0].value == pytest.approx(0.199, abs=0.03)
