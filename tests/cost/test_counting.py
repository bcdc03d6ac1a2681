"""Laws of the counts that hold for every model; equality with real counts is in test_decoders."""

from __future__ import annotations

from dataclasses import replace

import pytest

from headwise.cost.config import parts_of
from headwise.cost.counting import count
from headwise.cost.elementwise import elementwise
from headwise.cost.explicit import explicit
from headwise.cost.other_counters import other_counters
from headwise.cost.parts import Component
from headwise.cost.workload import Workload
from headwise.errors import OptionError

SIZES = {"d_model": 24, "layers": 3, "heads": 4, "kv_heads": 2, "vocab": 101}


def test_by_hand():
    found = count(explicit(**SIZES, d_ff=52), Workload(length=7, batch=2))
    d, a, kv, n = 24, 24, 12, 14
    assert found.parameters == 3 * (d * (2 * a + 2 * kv) + 2 * d * 52 + 2 * d) + d + 2 * 101 * d
    layer = n * d * (2 * a + 2 * kv) + 2 * n * d * 52 + 2 * (2 * 7 * 7 * a)
    assert found.macs == 3 * layer + n * d * 101
    assert found.flops == 2 * found.macs
    assert found.embedding == 101 * d


def test_a_tied_matrix_is_stored_once_and_multiplied_every_time():
    own = count(explicit(**SIZES), Workload(length=7))
    tied = count(explicit(**SIZES, tied=True), Workload(length=7))
    assert own.parameters - tied.parameters == 101 * 24
    assert own.macs == tied.macs


@pytest.mark.parametrize("pairs", ["all", "visible"])
def test_decoding_token_by_token_is_a_prefill(pairs):
    # With the pairs that the mask shows, the parts of a text add up to the whole.
    parts = explicit(**SIZES, window=3)
    whole = count(parts, Workload(length=11, pairs=pairs)).macs
    steps = sum(count(parts, Workload(length=1, cached=i, pairs=pairs)).macs for i in range(11))
    if pairs == "visible":
        assert steps == whole
    else:
        assert steps < whole


def test_packed_documents_see_only_themselves():
    parts = explicit(**SIZES)
    packed = count(parts, Workload(length=11, documents=(4, 7), pairs="visible"))
    alone = [count(parts, Workload(length=n, pairs="visible")).macs for n in (4, 7)]
    assert packed.macs == sum(alone)


def test_logits_of_the_last_position():
    parts = explicit(**SIZES)
    every, last = (count(parts, Workload(length=11, logits=which)) for which in ("all", "last"))
    assert every.macs - last.macs == 10 * 24 * 101


def test_only_the_chosen_experts_work():
    parts = explicit(**SIZES, experts=7, experts_used=2, gated=True, d_ff=10)
    found = count(parts, Workload(length=5))
    assert found.parameters - found.active == 3 * 5 * (3 * 24 * 10)
    assert found.by_component()[Component.EXPERTS] == 3 * 5 * 2 * (3 * 24 * 10)
    assert found.by_component()[Component.ROUTER] == 3 * 5 * 24 * 7


def test_backward():
    parts = explicit(**SIZES)
    plain = count(parts, Workload(length=11, attention="materialised"))
    assert plain.training_flops == 3 * plain.flops
    # Fused: the scores once more.
    fused = count(parts, Workload(length=11))
    scores = fused.by_component()[Component.SCORES]
    assert fused.backward - plain.backward == scores
    full = count(parts, Workload(length=11, recompute="full"))
    inside = full.macs - full.by_component()[Component.UNEMBEDDING]
    assert full.recomputed == inside
    selective = count(parts, Workload(length=11, recompute="selective"))
    products = (Component.SCORES, Component.MIX)
    assert selective.recomputed == sum(selective.by_component()[c] for c in products)


def test_integers_do_not_overflow():
    parts = explicit(d_model=10**6, layers=1000, heads=1000, vocab=10**9)
    found = count(parts, Workload(length=10**12, batch=10**6))
    assert found.by_component()[Component.SCORES] == 1000 * 10**6 * (10**12) ** 2 * 10**6


def test_doubling_the_expansion_changes_the_mlp_alone():
    one, two = (count(explicit(**SIZES, d_ff=f), Workload(length=11)) for f in (52, 104))
    changed = {
        line.name
        for line, other in zip(one.lines, two.lines, strict=True)
        if (line.macs, line.parameters) != (other.macs, other.parameters)
    }
    assert changed == {"W_in", "W_out"}
    assert two.by_component()[Component.MLP] == 2 * one.by_component()[Component.MLP]


@pytest.mark.parametrize(
    "wrong",
    [
        {"length": 0},
        {"length": -3},
        {"length": 10**13},
        {"length": 5, "batch": 0},
        {"length": 5, "cached": -1},
        {"length": 5, "pairs": "some"},
        {"length": 5, "recompute": "half"},
        {"length": 5, "documents": (2, 2)},
        {"length": 5, "documents": (5,), "cached": 3},
    ],
)
def test_nonsense_is_refused(wrong):
    with pytest.raises(OptionError):
        Workload(**wrong)


def test_operations_beside_the_products():
    parts = explicit(**SIZES, d_ff=52, gated=True)
    found = elementwise(parts, Workload(length=7, batch=2))
    assert found == {
        "softmax": 3 * 3 * 4 * 2 * 49,
        "norms": 4 * 14 * 24 * 7,
        "nonlinearity": 3 * 14 * 2 * 52,
        "residual": 3 * 14 * 24 * 2,
    }


GPT2 = {"d_model": 768, "layers": 12, "heads": 12, "vocab": 50257, "tied": True}


# What the counters themselves gave on GPT-2's and SmolLM2's matrices (torch 2.13, fvcore 0.1.5,
# torchinfo 1.8.0), as shares of the count or as parameters.
@pytest.mark.parametrize(("length", "share"), [(128, 0.98126), (2048, 0.76594)])
def test_fused_attention_on_the_cpu_is_not_seen(length, share):
    found = other_counters(explicit(**GPT2), Workload(length=length))
    counter = next(each for each in found if each.tool.startswith("torch FlopCounterMode"))
    assert round(float(counter.ratio), 5) == share


# What was missing in the counters with transformers' default attention (torch 2.13, fvcore 0.1.5,
# transformers 5.24). calflops misses what fvcore does, and adds elementwise operations.
_LATENT = {
    "model_type": "deepseek_v3", "hidden_size": 48, "intermediate_size": 80,
    "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 257,
    "n_routed_experts": 6, "num_experts_per_tok": 3, "n_shared_experts": 2,
    "moe_intermediate_size": 32, "first_k_dense_replace": 1, "kv_lora_rank": 22,
    "q_lora_rank": 26, "qk_rope_head_dim": 6, "qk_nope_head_dim": 8, "v_head_dim": 7,
}  # fmt: skip
_OTHER_SIZES = {
    "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 257, "num_local_experts": 4,
    "num_experts_per_tok": 2,
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "torches", "fvcores"),
    [
        (_LATENT, 1_769_472, 2_285_568),  # two widths: a CPU composes, which torch's counter sees
        ({"model_type": "gpt_oss", **_OTHER_SIZES}, 5_898_240, 5_898_240),  # eager by default
        ({"model_type": "gemma2", **_OTHER_SIZES}, 0, 0),
    ],
)
def test_what_is_not_seen_of_experts_and_of_composed_attention(config, torches, fvcores):
    found = other_counters(parts_of(config), Workload(length=32))
    missing = {
        e.tool.split(" (")[0]: e.right - e.counted for e in found if e.what == "forward FLOPs"
    }
    assert missing.get("torch FlopCounterMode", 0) == torches
    assert missing.get("fvcore", 0) == missing.get("calflops", 0) == fvcores


def test_a_mixture_loses_experts_as_well_as_attention():
    config = {
        **_OTHER_SIZES, "model_type": "mixtral", "hidden_size": 512, "intermediate_size": 1024,
        "num_hidden_layers": 8, "num_attention_heads": 8, "head_dim": 64, "vocab_size": 32000,
        "num_local_experts": 8,
    }  # fmt: skip
    found = other_counters(parts_of(config), Workload(length=128))
    counted = {(e.tool.split(" (")[0], e.what): e.counted for e in found}
    for tool in ("torch FlopCounterMode", "fvcore"):
        assert counted[tool, "forward FLOPs"] == 5_544_869_888
        assert counted[tool, "forward FLOPs, eager attention"] == 5_813_305_344


def test_a_tied_unembedding_is_counted_twice():
    found = other_counters(explicit(**GPT2), Workload(length=128))
    twice = next(each for each in found if each.tool.startswith("torchinfo"))
    assert twice.counted - twice.right == 50257 * 768
    untied = explicit(**{**GPT2, "tied": False})
    assert all(
        not each.tool.startswith("torchinfo")
        for each in other_counters(untied, Workload(length=128))
    )


def test_what_is_asked_does_not_change_the_comparison():
    parts = explicit(**GPT2)
    plain = other_counters(parts, Workload(length=128))
    other = Workload(length=128, pairs="visible", logits="last", recompute="full", cached=7)
    assert other_counters(parts, other) == plain
    assert other_counters(parts, replace(other, batch=2)) != plain
