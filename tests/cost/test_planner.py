"""``hw.cost``: one record from one configuration, and what its options change."""

from __future__ import annotations

import pytest

import headwise as hw
from headwise.cost.counting import count
from headwise.cost.explicit import explicit
from headwise.cost.memory import memory
from headwise.cost.parts import Component
from headwise.errors import ModelError, OptionError

GPT2 = {
    "model_type": "gpt2", "n_embd": 24, "n_layer": 2, "n_head": 3, "vocab_size": 53,
    "n_positions": 37,
}  # fmt: skip
DEEPSEEK = {
    "model_type": "deepseek_v3", "hidden_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 56,
    "moe_intermediate_size": 20, "n_routed_experts": 6, "n_shared_experts": 1,
    "num_experts_per_tok": 2, "first_k_dense_replace": 1, "kv_lora_rank": 10, "q_lora_rank": 14,
    "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6, "vocab_size": 61,
    "max_position_embeddings": 128, "n_group": 2, "topk_group": 1,
}  # fmt: skip


def test_the_record_is_made_of_its_parts():
    found = hw.cost(GPT2, length=11, batch=3)
    assert found.forward == count(found.parts, found.workload)
    assert found.inference == memory(found.parts, found.workload, activation=None)
    assert found.parameters == found.forward.parameters
    assert found.flops == 2 * found.forward.macs
    assert (found.time, found.fits, found.stored) == (None, {}, None)
    assert found.config == GPT2


def test_the_usual_length_is_the_trained_one():
    assert hw.cost(GPT2).workload.length == 37
    long = hw.cost({**GPT2, "n_positions": 100_000})
    assert long.workload.length == 8192


def test_one_more_token_reads_what_is_cached():
    found = hw.cost(GPT2, length=11, batch=3)
    scores = found.decode.by_component()[Component.SCORES]
    assert scores == 2 * 3 * 12 * 24  # layers, sequences, keys, width
    assert hw.cost(explicit(d_model=24, layers=1, heads=2, vocab=7, causal=False)).decode is None


def test_latent_keys_are_expanded_or_absorbed():
    found = hw.cost(DEEPSEEK, length=50)
    expanded, absorbed = (f.by_component() for f in (found.decode, found.absorbed))
    # 51 keys made of latents of 10: heads · d_nope each; absorbed: the query's side alone.
    assert expanded[Component.KEY] == 3 * 51 * 10 * 4 * 8
    assert absorbed[Component.KEY] == 3 * 10 * 4 * 8
    assert absorbed[Component.SCORES] == 3 * 51 * 4 * (10 + 4)
    assert hw.cost(GPT2).absorbed is None


def test_memory_in_which_it_has_to_fit():
    found = hw.cost(GPT2, length=11, memory_bytes=10**6)
    for name in ("inference context", "training context", "inference batch", "training batch"):
        assert found.fits[name].need <= 10**6 < found.fits[name].next_need
    longest = found.fits["inference context"].largest
    assert hw.cost(GPT2, length=longest).inference.total <= 10**6
    assert hw.cost(GPT2, length=longest + 1).inference.total > 10**6


def test_a_machine_brings_time_and_memory():
    found = hw.cost(GPT2, length=11, on="h100-sxm")
    assert found.time.prefill.flops == found.flops
    assert found.fits["inference batch"].memory_bytes == 80_000_000_000


def test_the_activation_that_the_configuration_names():
    # Of ReLU nothing is kept besides its result, of GELU what it was made of.
    relu = hw.cost({**GPT2, "activation_function": "relu"}, length=11).training.activations
    gelu = hw.cost({**GPT2, "activation_function": "gelu"}, length=11).training.activations
    assert gelu - relu == 2 * 11 * 4 * 24 * 2
    unknown = hw.cost({**GPT2, "activation_function": "mish"}, length=11)
    assert unknown.training == hw.cost(GPT2, length=11).training
    assert any("mish" in note for note in unknown.parts.notes)


def test_quantised_weights_are_not_trained():
    found = hw.cost(GPT2, length=11, weights="q8_0")
    assert found.training is None
    assert found.inference.weights < hw.cost(GPT2, length=11).inference.weights


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"length": 0}, OptionError),
        ({"weights": "q9"}, OptionError),
        ({"on": "abacus"}, OptionError),
        ({"source_length": 3}, OptionError),
        ({"optimizer": "magic"}, OptionError),
    ],
)
def test_what_is_refused(options, error):
    with pytest.raises(error):
        hw.cost(GPT2, **options)


def test_an_encoder_has_no_cache():
    encoder = explicit(d_model=24, layers=1, heads=2, vocab=7, causal=False)
    with pytest.raises(OptionError, match="does not decode"):
        hw.cost(encoder, length=5, cached=3)


def test_a_model_of_another_make_is_refused():
    with pytest.raises(ModelError, match="unheard-of"):
        hw.cost({"model_type": "unheard-of"})
