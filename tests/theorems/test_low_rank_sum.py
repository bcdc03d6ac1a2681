"""Multi-head attention as a sum of low-rank maps: the sum, ranks, biases, bases."""

from __future__ import annotations

import re
import sys

import pytest
import torch
from torch.nn import functional
from transformers import GPT2Config, GPT2LMHeadModel

from headwise.attention.definition import weights
from headwise.observation.loading import wrap_model
from headwise.observation.run import opened
from headwise.theorems import head_biases, head_gauge, head_ranks, low_rank_sum, spectra
from headwise.theorems.rewritten import output_projection
from headwise.theorems.statement import NotApplicable
from headwise.theorems.trained import Trained
from tests.theorems.models import loaded_model

BY_NAME = {each.name: each for each in low_rank_sum.THEOREMS}
_IDS = [i % 97 for i in range(256)]
IN_MODELS = [name for name, each in BY_NAME.items() if each.model is not None]


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
    model = GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        for name, x in model.named_parameters():
            if "ln_" not in name or "bias" in name:
                x.normal_(0, 0.3)
    return Trained(wrap_model(model, name="gpt2"), _IDS)


@pytest.fixture
def no_softmax(monkeypatch):
    """Attention by the logits themselves: rows sum to anything, and see every constant."""

    def linear(q, k, v, *, scale, **others):
        return scale * (q @ k.mT) @ v / 7

    module = sys.modules["headwise.models.fused"]
    monkeypatch.setattr(module.functional, "scaled_dot_product_attention", linear)


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("name", list(BY_NAME))
def test_holds(name, seed):
    assert BY_NAME[name].check(seed=seed).verdict == "HOLDS"


# -- the checks can fail ----------------------------------------------------------------------


def test_heads_merged_without_their_axis_are_noticed(monkeypatch):
    module = sys.modules["headwise.models.attention"]
    monkeypatch.setattr(module, "merge_heads", lambda x: x.flatten(1, 2).view(1, x.shape[2], -1))
    assert BY_NAME["concat-is-sum"].check().verdict == "FAILS"


def test_a_forgotten_scale_in_one_form_is_noticed(monkeypatch):
    module = sys.modules["headwise.models.fused"]
    right = module.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        module.functional,
        "scaled_dot_product_attention",
        lambda *args, scale, **others: right(*args, scale=1.0, **others),
    )
    assert BY_NAME["concat-is-sum"].check().verdict == "FAILS"


def test_logits_that_are_no_product_are_noticed(monkeypatch):
    right = head_ranks.scores
    monkeypatch.setattr(head_ranks, "scores", lambda q, k, **o: right(q, k, softcap=3.0, **o))
    assert BY_NAME["head-ranks"].check().verdict == "FAILS"


def test_weights_that_are_no_softmax_need_more_rank(monkeypatch):
    def sigmoid(s, keep=None):
        return torch.sigmoid(s)

    monkeypatch.setattr(head_ranks, "weights", sigmoid)
    assert BY_NAME["low-rank-bottleneck"].check().verdict in ("FAILS", "CHECK-BROKEN")


def test_wider_spectra_are_noticed(monkeypatch):
    right = spectra.random_products

    def orthonormal(count, d, rank, generator):
        product = right(count, d, rank, generator)
        u, _, v = product.svd()
        return type(product)(u, v)

    monkeypatch.setattr(spectra, "random_products", orthonormal)
    assert BY_NAME["trained-ranks"].check().verdict in ("FAILS", "CHECK-BROKEN")


@pytest.mark.usefixtures("no_softmax")
@pytest.mark.parametrize("name", ["value-bias-constant", "key-bias-null"])
def test_biases_without_a_softmax(name):
    assert BY_NAME[name].check().verdict == "FAILS"


@pytest.mark.parametrize(
    ("name", "what"), [("key-bias-null", "_keys"), ("value-bias-constant", "_values")]
)
def test_controls_of_biases_are_needed(name, what):
    evidence = getattr(head_biases, what)(_quick())
    assert all(control.failed for control in evidence.controls)
    assert BY_NAME[name].check().evidence.controls[0].failed


def test_entries_that_have_a_meaning_of_their_own_are_noticed(monkeypatch):
    module = sys.modules["headwise.models.attention"]
    right = module.split_heads
    monkeypatch.setattr(module, "split_heads", lambda x, heads: functional.relu(right(x, heads)))
    assert BY_NAME["gauge-freedom"].check().verdict == "FAILS"


def test_a_basis_that_does_not_commute_is_noticed(monkeypatch):
    def any_basis(count, width, turned, layout, generator):
        return head_gauge.invertible(count, width, generator)

    monkeypatch.setattr(head_gauge, "commuting", any_basis)
    assert BY_NAME["gauge-freedom"].check().verdict == "FAILS"


# -- the figures of the theory ----------------------------------------------------------------


def test_cut_of_eight_tokens():
    generator = torch.Generator().manual_seed(0)
    errors = {8: [], 7: [], 6: [], 5: []}
    for _ in range(41):
        s = torch.randn(1, 1, 8, 8, generator=generator, dtype=torch.float64)
        a = weights(s)[0, 0]
        for rank, found in errors.items():
            found.append(head_ranks.cut_error(a, rank))
    assert max(errors[8] + errors[7]) < 1e-14  # 3e-16 in one draw
    middle = {rank: sorted(found)[20] for rank, found in errors.items()}
    assert 0.003 < middle[6] < 0.05  # .011 in one draw
    assert 0.02 < middle[5] < 0.15  # .030 in one draw


def test_a_random_reference_of_smollm2s_shape():
    drawn = spectra.random_products(19, 576, 64, torch.Generator().manual_seed(0))
    assert float(drawn.effective_rank().mean()) == pytest.approx(62.1, abs=0.1)
    assert float(drawn.stable_rank().mean()) == pytest.approx(30.4, abs=1.0)
    assert spectra.widest_stable_rank(576, 64) == pytest.approx(28.587, abs=1e-3)


def test_edge_of_two_square_factors():
    # c = 1: the law of the product of two square Ginibre matrices ends at 27/4 (Fuss–Catalan).
    assert 1 / spectra.widest_stable_rank(1, 1) == pytest.approx(27 / 4)


def test_ranks_that_are_said():
    named = {m.name: m.value for m in BY_NAME["head-ranks"].check().evidence.measured}
    assert named["rank of the logits"] == 13
    assert named["rank of log A"] == 14
    assert named["rank of A"] == 67
    assert named["rank of Σ_m W_OV^m"] == 59


# -- models -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", IN_MODELS)
def test_embedded_model(embedded, name):
    expected = "INCONCLUSIVE" if "bias" in name else "HOLDS"
    assert BY_NAME[name].check_model(embedded).verdict == expected


@pytest.mark.parametrize("name", [n for n in IN_MODELS if n != "trained-ranks"])
def test_a_model_with_biases_and_one_projection_for_all(gpt2, name):
    before = {key: x.clone() for key, x in gpt2.model.state_dict().items()}
    assert BY_NAME[name].check_model(gpt2).verdict == "HOLDS"
    after = gpt2.model.state_dict()
    assert all(torch.equal(x, after[key]) for key, x in before.items())


def test_random_weights_are_not_taken_for_trained_ones(gpt2):
    outcome = BY_NAME["trained-ranks"].check_model(gpt2)
    assert outcome.verdict in ("FAILS", "INCONCLUSIVE")


def test_a_wrong_output_projection_is_noticed(gpt2, monkeypatch):
    other = gpt2.model.transformer.h[1].attn.c_proj
    monkeypatch.setattr(low_rank_sum, "output_projection", lambda model, layer: other)
    assert BY_NAME["concat-is-sum"].check_model(gpt2).verdict == "FAILS"


def test_an_output_projection_that_is_not_there(gpt2):
    layer = gpt2.weights.layers[0]
    copied = type(layer)(**{**vars(layer), "output": layer.output.clone()})
    with pytest.raises(NotApplicable, match="not stored as it is used"):
        output_projection(gpt2, copied)


@pytest.mark.real_model
def test_smollm2():
    model = loaded_model("smollm2")
    verdicts = {name: BY_NAME[name].check_model(model).verdict for name in IN_MODELS}
    assert verdicts == {n: "INCONCLUSIVE" if "bias" in n else "HOLDS" for n in IN_MODELS}
    finding = BY_NAME["trained-ranks"].check_model(model).evidence.finding
    found = {
        name: [float(x) for x in numbers.split("/")]
        for name, numbers in re.findall(r"(\w+ rank of W_\w+) ([\d./]+) \(random", finding)
    }
    assert found == {
        "effective rank of W_QK": pytest.approx([8, 41, 54, 60, 61], abs=0.6),
        "effective rank of W_OV": pytest.approx([31, 54, 60, 62, 63], abs=0.6),
        "stable rank of W_QK": pytest.approx([1.1, 7.6, 13.4, 20.6, 29], abs=0.3),
        "stable rank of W_OV": pytest.approx([1.2, 8.5, 17.5, 28, 37], abs=0.3),
    }


@pytest.mark.real_model
def test_minilm():
    model = loaded_model("minilm")
    verdicts = {name: BY_NAME[name].check_model(model).verdict for name in IN_MODELS}
    assert set(verdicts.values()) == {"HOLDS"}
    key = BY_NAME["key-bias-null"].check_model(model).evidence
    assert key.measured[0].value < 5e-6  # notes: 2e-6
    assert 1 < key.controls[0].measured[0].value < 3  # notes: 1.4


def _quick():
    from headwise.theorems.statement import Effort

    return Effort(full=False, seed=5)
