"""Decoders: parameters and FLOPs to the unit, for every family, variant and head."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING

from headwise.cost.config import known_families, load_parts, parts_of
from headwise.cost.counting import count
from headwise.cost.families import deepseek, gpt2, llama, opt
from headwise.cost.parts import Component, Parts
from headwise.cost.workload import Workload
from tests.cost.decoder_configs import CASES, base_of, class_names, config_of
from tests.cost.flop_counter import built, counted, flops, planned, stored

BATCH, LENGTH = 2, 11
PLAIN = Workload(length=LENGTH, batch=BATCH, attention="materialised")
FAMILIES = [*llama.FAMILIES, *deepseek.FAMILIES, *gpt2.FAMILIES, *opt.FAMILIES]
HERE = [family for family in FAMILIES if family in CONFIG_MAPPING]  # that transformers has


def inputs(family: str) -> dict[str, Any]:
    """Tokens, and a mask of four axes: from one of two, transformers reads values."""
    found: dict[str, Any] = {
        "input_ids": torch.zeros(BATCH, LENGTH, dtype=torch.long, device="meta"),
        "attention_mask": torch.zeros(BATCH, 1, LENGTH, LENGTH, device="meta"),
        "use_cache": False,
    }
    if family == "opt":  # counts positions by the mask unless they are given
        found["position_ids"] = torch.zeros(BATCH, LENGTH, dtype=torch.long, device="meta")
    return found


def named(case: tuple[str, dict[str, Any]]) -> str:
    return "-".join((case[0], *(f"{k}={v}" for k, v in case[1].items())))[:90]


def test_every_family_has_a_case():
    assert {family for family, _ in CASES} == set(HERE)
    assert set(FAMILIES) - set(HERE) == {"kimi_k2"}


@pytest.mark.parametrize("case", CASES, ids=named)
def test_parameters_and_flops(case):
    family, more = case
    config, name = config_of(family, more), class_names(family)[0]
    model, found = built(name, config), counted(name, config, PLAIN)
    assert found.parameters == stored(model)
    assert (found.flops, found.training_flops) == flops(model, inputs(family))


QUICK = ("llama", "phi", "gpt2", "opt", "deepseek_v3")  # one of each make
HEADS = [f if f in QUICK else pytest.param(f, marks=pytest.mark.slow) for f in HERE]


@pytest.mark.parametrize("family", HEADS)
def test_every_head(family):
    more = next(more for other, more in CASES if other == family)
    names = class_names(family)[1:]
    assert names[-1].endswith("Model")
    for name in names:
        config = config_of(family, more)
        model, found = built(name, config), counted(name, config, PLAIN)
        assert found.parameters == stored(model), name
        assert (found.flops, found.training_flops) == flops(model, inputs(family)), name


def windows(parts: Parts) -> list[int | None]:
    return [attention.window for _, _, attention in parts.attentions()]


@pytest.mark.parametrize("case", CASES, ids=named)
def test_windows(case):
    family, more = case
    config, parts = config_of(family, more), planned("X" + "Model", config_of(family, more))
    width = getattr(config, "sliding_window", None) or None
    if llama.MANNERS.get(family, llama.Manner(name="")).windows is None:
        width = None  # the key is not one of the family's
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    expected = [width if kind == "sliding_attention" else None for kind in kinds]
    if more.get("use_bidirectional_attention"):
        expected = [None] * len(kinds)
        assert not any(attention.causal for _, _, attention in parts.attentions())
    assert windows(parts) == expected


# Sizes that every configuration has; 32 heads can share every default number of key-value heads.
BARE = {
    "hidden_size": 128, "intermediate_size": 67, "num_hidden_layers": 3, "num_attention_heads": 32,
    "vocab_size": 257, "max_position_embeddings": 61, "pad_token_id": 0,
}  # fmt: skip
COUNTS = {"num_experts": 5, "num_local_experts": 5, "n_routed_experts": 8, "num_experts_per_tok": 2}
NEEDED = {"ministral": {"head_dim": 6}, "nemotron": {"num_key_value_heads": 4}}  # by its class
ALSO = ("moe_intermediate_size", "shared_expert_intermediate_size")


def bare(family: str) -> dict[str, Any]:
    if family in gpt2.MANNERS:
        small = {"n_embd": 128, "n_layer": 3, "n_head": 8, "n_positions": 61, "vocab_size": 257}
        return small | ({"rotary_dim": 4} if family == "gptj" else {})
    has = set(CONFIG_MAPPING[family]().to_dict())
    given = {
        **BARE,
        **NEEDED.get(family, {}),
        **{key: value for key, value in COUNTS.items() if key in has},
    }
    if family == "opt":
        given = {**given, "ffn_dim": 67}
    return {**given, **{key: 19 for key in ALSO if key in has}}


@pytest.mark.parametrize("family", HERE)
def test_keys_that_are_left_out_have_the_defaults_of_the_class(family):
    given = bare(family)
    config = CONFIG_MAPPING[family](**given)
    parts = parts_of({"model_type": family, **given})
    assert count(parts, PLAIN).parameters == stored(built(parts.model_class, config))
    whole = parts_of(config.to_dict())
    assert windows(parts) == windows(whole)
    assert Counter(parts.stacks) == Counter(whole.stacks)


@pytest.mark.parametrize("case", CASES, ids=named)
def test_a_saved_configuration_says_the_same(case, tmp_path):
    family, more = case
    config = config_of(family, more)
    config.save_pretrained(tmp_path)
    assert load_parts(tmp_path).stacks == load_parts(config).stacks


def test_sizes_that_were_not_said_are_noted():
    given = {"model_type": "mistral", **BARE}
    (note,) = parts_of(given, "old.json").notes
    assert "old.json" in note
    assert "num_key_value_heads = 8" in note
    assert "sliding_window = 4,096" in note
    assert parts_of({**given, "num_key_value_heads": 4, "sliding_window": None}).notes == ()


@pytest.mark.parametrize("family", [f for f in FAMILIES if f != "kimi_k2"])
def test_twice_the_expansion_changes_the_mlp_and_nothing_else(family):
    more = next(more for other, more in CASES if other == family)
    keys = ("intermediate_size", "n_inner", "ffn_dim", "moe_intermediate_size",
            "shared_expert_intermediate_size")  # fmt: skip
    config = config_of(family, more).to_dict()
    wider = {**config, **{key: 2 * config[key] for key in keys if config.get(key)}}
    before, after = (count(parts_of(each), PLAIN).lines for each in (config, wider))
    mlp = {Component.MLP, Component.EXPERTS, Component.SHARED_EXPERTS}
    changed = {line.component for line, other in zip(before, after, strict=True) if line != other}
    assert changed
    assert changed <= mlp
    for line, other in zip(before, after, strict=True):
        if line.component in mlp and line.name != "shared gate":
            assert other.macs == 2 * line.macs > 0


@pytest.mark.parametrize(
    ("key", "value"), [("intermediate_size", 68), ("num_key_value_heads", 4), ("vocab_size", 258)]
)
def test_a_wrong_size_is_noticed(key, value):
    config = config_of("llama", {})
    wrong = count(parts_of({**config.to_dict(), key: value}), PLAIN)
    model = built("LlamaForCausalLM", config)
    assert wrong.parameters != stored(model)
    assert wrong.flops != flops(model, inputs("llama"))[0]


def test_layers_of_one_family_differ_where_the_configuration_says():
    config = config_of("deepseek_v3", dict(CASES[-2][1])).to_dict()
    layers = parts_of(config).stacks[0].layers
    dense = [any(m.component is Component.MLP for m in layer.matrices) for layer in layers]
    assert dense == [True, True, True, False, False]
    every_other = parts_of({**config, "model_type": "deepseek_v2", "moe_layer_freq": 2})
    dense = [
        any(m.component is Component.MLP for m in layer.matrices)
        for layer in every_other.stacks[0].layers
    ]
    assert dense == [True, True, True, True, False]


LLAMA_3 = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "vocab_size": 128_256, "max_position_embeddings": 8192,
}  # fmt: skip
DEEPSEEK_V2 = {
    "model_type": "deepseek_v2", "hidden_size": 5120, "intermediate_size": 12_288,
    "moe_intermediate_size": 1536, "num_hidden_layers": 60, "num_attention_heads": 128,
    "num_key_value_heads": 128, "n_routed_experts": 160, "n_shared_experts": 2,
    "num_experts_per_tok": 6, "first_k_dense_replace": 1, "vocab_size": 102_400,
}  # fmt: skip
PUBLISHED = [
    ({"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024,
      "vocab_size": 50_257}, 124_439_808),
    (LLAMA_3, 8_030_261_248),
    ({**LLAMA_3, "hidden_size": 16_384, "intermediate_size": 53_248, "num_hidden_layers": 126,
      "num_attention_heads": 128}, 405_853_388_800),
    ({**LLAMA_3, "model_type": "mixtral", "vocab_size": 32_000, "num_local_experts": 8,
      "num_experts_per_tok": 2}, 46_702_792_704),
    (DEEPSEEK_V2, 235_741_434_880),
    ({**DEEPSEEK_V2, "model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18_432,
      "moe_intermediate_size": 2048, "num_hidden_layers": 61, "n_routed_experts": 256,
      "n_shared_experts": 1, "num_experts_per_tok": 8, "first_k_dense_replace": 3,
      "vocab_size": 129_280}, 671_026_404_352),
]  # fmt: skip


@pytest.mark.parametrize(("config", "parameters"), PUBLISHED)
def test_published_sizes(config, parameters):
    parts = parts_of(config)
    assert count(parts, PLAIN).parameters == parameters
    given = {key: value for key, value in config.items() if key != "model_type"}
    form = CONFIG_MAPPING[config["model_type"]](**given)
    assert stored(built(parts.model_class, form)) == parameters


def test_what_is_not_part_of_the_pass_is_said():
    config = {**PUBLISHED[-1][0], "num_nextn_predict_layers": 1}
    assert any("MTP" in note for note in parts_of(config).notes)


def test_kimi_k2_is_deepseek_v3_in_other_sizes():
    config = {**PUBLISHED[-1][0], "num_attention_heads": 64, "n_routed_experts": 384}
    same = parts_of({**config, "model_type": "kimi_k2"})
    assert same.stacks == parts_of(config).stacks
    assert same.family == "kimi_k2"


def test_text_of_a_model_of_text_and_pictures():
    text = {"hidden_size": 40, "intermediate_size": 67, "num_hidden_layers": 7}
    config = CONFIG_MAPPING["gemma3"](text_config=dict(text), vision_config={"hidden_size": 8})
    parts = parts_of(config.to_dict())
    assert parts.model_class == "Gemma3ForCausalLM"
    assert "vision_config" in parts.notes[0]
    model = built("Gemma3ForCausalLM", config.text_config)
    assert count(parts, PLAIN).parameters == stored(model)
    # As the published files are: what the class has by default is left out of text_config.
    short = parts_of({"model_type": "gemma3", "text_config": text, "vision_config": {}})
    assert short.stacks == parts.stacks
    assert "vocab_size = 262,208" in short.notes[1]


def test_every_family_is_known_under_one_name():
    assert set(FAMILIES) < set(known_families())
    assert all(base_of(family) for family in FAMILIES)
