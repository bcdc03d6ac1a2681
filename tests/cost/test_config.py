"""From what a user names to parts: files, folders, objects, GGUF files, the hub's cache."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import gguf
import pytest
from transformers import GPT2Config, LlamaConfig

from headwise.cost.config import Source, known_families, load_parts, parts_of, read_source
from headwise.cost.counting import count
from headwise.cost.gguf_names import BUFFERS, FAMILIES, GPT2_KEYS, KEYS, PARTS, SHOWN
from headwise.cost.parts import Component, Parts
from headwise.cost.workload import Workload
from headwise.errors import ModelError
from headwise.models import build, preset
from headwise.models.architecture import Architecture, Relative
from headwise.models.build import skeleton
from headwise.models.checkpoints import save
from headwise.models.presets import PRESETS, decoder_sizes, encoder_sizes, transformer_sizes
from tests.cost.decoder_configs import CASES, config_of
from tests.cost.gguf_of_parts import shapes, write

PLAIN = Workload(length=7)
LLAMA = LlamaConfig(
    hidden_size=40, intermediate_size=67, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, vocab_size=257, max_position_embeddings=61,
)  # fmt: skip


def parameters(parts: Parts) -> int:
    return count(parts, PLAIN).parameters


def test_every_way_to_name_one_model(tmp_path):
    expected = parts_of(LLAMA.to_dict())
    LLAMA.save_pretrained(tmp_path)
    named = tmp_path / "of any name.txt"
    (tmp_path / "config.json").rename(named)
    assert load_parts(named).stacks == load_parts(str(named)).stacks == expected.stacks
    named.rename(tmp_path / "config.json")
    assert load_parts(tmp_path).stacks == load_parts(str(tmp_path)).stacks == expected.stacks
    assert load_parts(LLAMA).stacks == load_parts(LLAMA.to_dict()).stacks == expected.stacks
    assert load_parts(expected) is expected
    source = read_source(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert source == Source(
        load_parts(tmp_path), str(tmp_path / "config.json"), stored=None, config=config
    )
    assert read_source(source) is source


def test_a_byte_order_mark_is_no_hindrance(tmp_path):
    file = tmp_path / "config.json"
    file.write_text(LLAMA.to_json_string(use_diff=False), encoding="utf-8-sig")
    assert load_parts(file).stacks == load_parts(LLAMA).stacks


def test_a_folder_of_both_formats_is_read_as_transformers_would(tmp_path):
    save(build(preset("tiny")), tmp_path / "model")
    GPT2Config(n_embd=32, n_layer=1, n_head=4).save_pretrained(tmp_path / "model")
    assert load_parts(tmp_path / "model").family == "gpt2"


SIZES: dict[str, Any] = {
    "vocab": 257, "d_model": 48, "layers": 3, "heads": 4, "d_ff": 67, "context": 61,
}  # fmt: skip
OWN = [
    *(preset(name) for name in PRESETS),
    decoder_sizes(**SIZES, sinks=True, qk_norm="head", kv_heads=2, windows=(7, None, 5)),
    decoder_sizes(**SIZES, norm="layer", qk_norm="all", placement="parallel", tied=False),
    decoder_sizes(**SIZES, d_head=14, qkv_bias=True, placement="branch", gated=False),
    encoder_sizes(**SIZES, norm="rms"),
    encoder_sizes(**SIZES).model_copy(
        update={"pooler": True, "classes": 5, "unembedding": None}
    ),
    transformer_sizes(**SIZES, qk_norm="head", relative=Relative(buckets=11)),
    transformer_sizes(**SIZES, placement="sandwich", final_norm=True, norm="layer"),
]  # fmt: skip


@pytest.mark.parametrize("architecture", OWN, ids=range(len(OWN)))
def test_own_models(architecture: Architecture):
    parts = load_parts(architecture)
    assert parameters(parts) == sum(p.numel() for p in skeleton(architecture).parameters())
    assert [stack.name for stack in parts.stacks] == [
        name for name in ("encoder", "decoder") if getattr(architecture, name) is not None
    ]
    for stack in parts.stacks:
        of = getattr(architecture, stack.name)
        assert [layer.attentions[0].window for layer in stack.layers] == [
            of.window(layer) for layer in range(of.layers)
        ]
        assert {attention.causal for layer in stack.layers for attention in layer.attentions
                if attention.role == "self"} == {of.causal}  # fmt: skip


def test_an_own_folder(tmp_path):
    save(build(preset("tiny")), tmp_path / "model")
    assert parameters(load_parts(tmp_path / "model")) == 32_960


def gguf_metadata(family: str, config: dict[str, Any]) -> dict[str, Any]:
    """The keys of a header, from a configuration."""
    if FAMILIES[family] in ("gpt2", "gpt_bigcode"):
        config = {**config, **{key: config[name] for name, key in GPT2_KEYS.items()}}
    found = {key: config.get(name) for name, key in KEYS.items()}
    if "n_routed_experts" in config:
        found |= {
            "expert_count": config["n_routed_experts"],
            "rope.dimension_count": config["qk_rope_head_dim"],
            "attention.key_length": config["qk_nope_head_dim"] + config["qk_rope_head_dim"],
            "attention.value_length": config["v_head_dim"],
            "attention.head_count_kv": 1,
        }
    elif config.get("num_experts"):
        found["expert_count"] = config["num_experts"]
    if config["model_type"] in ("gemma3_text", "qwen2", "qwen2_moe", "qwen3", "llama"):
        found["attention.sliding_window"] = config.get("sliding_window")
    return {key: value for key, value in found.items() if value is not None}


GGUF = [(family, FAMILIES[family]) for family in FAMILIES if family != "llama"]
GGUF += [("llama", "llama"), ("llama", "mixtral")]


def gguf_model(family: str, model_type: str) -> tuple[dict[str, Any], Parts]:
    more = next(more for other, more in CASES if other == model_type)
    if model_type in ("mixtral", "starcoder2", "phi3", "qwen3_moe"):
        more = {**more, "sliding_window": None}
    config = config_of(model_type, more).to_dict()
    if config["model_type"] == "llama":
        config.pop("sliding_window", None)
    return config, parts_of(config)


@pytest.mark.parametrize(("family", "model_type"), GGUF)
def test_a_gguf_header_says_what_a_configuration_says(family, model_type, tmp_path):
    config, parts = gguf_model(family, model_type)
    final = parts.stacks[0].vectors
    norm_bias = bool(final) and final[0].size != parts.stacks[0].d_model
    file = tmp_path / "model.gguf"
    write(file, family, gguf_metadata(family, config), shapes(parts, norm_bias))
    found = read_source(file)
    assert found.parts.stacks == parts.stacks
    assert found.parts.vocab == parts.vocab
    assert found.parts.notes == ()
    assert found.stored is not None
    assert found.stored.whole.numbers == parameters(parts)
    assert found.stored.whole.bytes == 2 * parameters(parts)  # float16


def test_a_tensor_more_is_noted(tmp_path):
    config, parts = gguf_model("llama", "llama")
    tensors = {**shapes(parts, False), "blk.0.attn_q_norm.weight": (10,), "rope_freqs.weight": (5,)}
    file = write(tmp_path / "m.gguf", "llama", gguf_metadata("llama", config), tensors)
    (note,) = load_parts(file).notes
    assert f"{parameters(parts) + 10:,} numbers" in note
    assert f"make {parameters(parts):,}" in note


def test_bytes_of_a_quantised_file(tmp_path):
    wide = LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=257, tie_word_embeddings=True,
    ).to_dict()  # fmt: skip
    parts = parts_of(wide)
    kind = gguf.GGMLQuantizationType.Q8_0
    file = tmp_path / "model.gguf"
    write(file, "llama", gguf_metadata("llama", wide), shapes(parts, False), quantised=kind)
    source = read_source(file)
    stored = source.stored
    assert stored is not None
    norms = 7 * 64
    numbers = parameters(parts) - norms
    assert stored.by_type["Q8_0"].bits_per_weight == 8.5  # 32 numbers in 34 bytes
    assert stored.by_type["Q8_0"].numbers == numbers
    assert stored.by_type["F16"].bytes == 2 * norms
    assert stored.whole.bytes == numbers * 34 // 32 + 2 * norms
    assert stored.whole.tensors == 1 + 1 + 3 * 9
    counts = count(source.parts, PLAIN).by_component("parameters")
    for component, part in stored.by_component.items():
        assert part.numbers == counts[component]
    assert Component.UNEMBEDDING not in stored.by_component  # tied
    header = gguf.GGUFReader(file)
    assert stored.whole.bytes == sum(int(tensor.n_bytes) for tensor in header.tensors)


def pieces(folder: Path) -> tuple[Path, Path, Parts]:
    config, parts = gguf_model("llama", "llama")
    tensors = list(shapes(parts, False).items())
    first, second = (folder / f"model-0000{i}-of-00002.gguf" for i in (1, 2))
    write(first, "llama", gguf_metadata("llama", config), dict(tensors[2:]))
    write(second, "llama", {}, dict(tensors[:2]))  # the vocabulary is in the other piece
    return first, second, parts


def test_a_model_in_pieces(tmp_path):
    first, second, parts = pieces(tmp_path)
    for piece in (first, second):
        source = read_source(piece)
        assert source.parts.stacks == parts.stacks
        assert source.stored is not None
        assert source.stored.whole.bytes == 2 * parameters(parts)


def test_a_piece_that_is_missing(tmp_path):
    first, second, _ = pieces(tmp_path)
    second.unlink()
    with pytest.raises(ModelError, match=r"one of 2 pieces.*00002-of-00002.gguf is not there"):
        load_parts(first)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A hub that cannot be reached, with one model in its cache."""
    import huggingface_hub.constants as constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    model = tmp_path / "models--some--model"
    (model / "refs").mkdir(parents=True)
    (model / "refs" / "main").write_text("a" * 40)
    (model / "snapshots" / ("a" * 40)).mkdir(parents=True)
    (model / "snapshots" / ("a" * 40) / "config.json").write_text(
        json.dumps(LLAMA.to_dict()), encoding="utf-8"
    )


@pytest.mark.usefixtures("cache")
def test_a_name_on_the_hub():
    source = read_source("some/model")
    assert source.where == "some/model"
    assert source.parts.stacks == load_parts(LLAMA).stacks
    with pytest.raises(ModelError, match=r"no file or folder other/model, and the hub cannot be"):
        read_source("other/model")


@pytest.mark.real_model
def test_the_real_models():
    models = Path(os.environ["HEADWISE_MODELS"])
    source = read_source(models / "smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf")
    assert source.parts.notes == ()
    assert parameters(source.parts) == 134_515_008
    assert source.stored is not None
    assert source.stored.whole.bytes == 96_576_768
    assert source.stored.by_type["Q4_1"].bits_per_weight == 5
    assert parameters(load_parts(models / "minilm")) == 22_713_216


def test_the_names_of_gguf_are_those_of_its_library():
    keys = {
        value
        for group in (gguf.Keys.LLM, gguf.Keys.Attention, gguf.Keys.Rope)
        for value in vars(group).values()
        if isinstance(value, str)
    }
    assert {f"{{arch}}.{key}" for key in KEYS.values()} <= keys
    tensors = {name.removeprefix("blk.{bid}.") for name in gguf.TENSOR_NAMES.values()}
    shown = {name.rpartition(".")[0] for names in SHOWN.values() for name in names}
    assert set(PARTS) | BUFFERS | shown <= tensors
    assert set(FAMILIES) <= set(gguf.MODEL_ARCH_NAMES.values())
    assert set(FAMILIES.values()) <= set(known_families())
