"""What ``load`` refuses, and how it names it: no tensor and no setting is passed over."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import headwise as hw
from headwise.errors import ModelError, OptionError
from headwise.models import Decoder
from headwise.models.checkpoints import load
from tests.models.checkpoints import gguf_files
from tests.parity.loaded_checks import saved
from tests.parity.loaded_models import CASES

Tensors = dict[str, Tensor]
WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One saved model of each family."""
    place = tmp_path_factory.mktemp("saved")
    names = ("gpt2", "gpt_neox", "llama", "mistral", "qwen2", "qwen3", "gemma2")
    makers = {case.name: case.make for case in CASES}
    return {name: saved(makers[name](), place / name) for name in names}


@pytest.fixture
def change(folders: dict[str, Path], tmp_path: Path) -> Callable[..., Path]:
    """A copy of a saved model with other tensors or settings."""

    def changed(
        name: str, edit: Callable[[Tensors], object] | None = None, **settings: Any
    ) -> Path:
        folder = Path(shutil.copytree(folders[name], tmp_path / "m", dirs_exist_ok=True))
        if edit is not None:
            tensors = load_file(folder / WEIGHTS)
            edit(tensors)
            save_file(tensors, folder / WEIGHTS)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **settings}))
        return folder

    return changed


def refused(path: Path | str) -> str:
    with pytest.raises(ModelError) as caught:
        load(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_missing_tensor(change: Callable[..., Path]) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    folder = change("llama", lambda tensors: tensors.pop(name))
    assert refused(folder).startswith(f"{folder} lacks {name}; fetch the files again")
    folder = change("gpt2", lambda tensors: tensors.pop("transformer.h.2.attn.c_attn.bias"))
    assert "lacks transformer.h.2.attn.c_attn.bias;" in refused(folder)
    folder = change("gemma2", lambda tensors: tensors.pop("model.embed_tokens.weight"))
    assert refused(folder).startswith("the checkpoint lacks model.embed_tokens.weight;")


def test_a_tensor_that_is_left_over(change: Callable[..., Path]) -> None:
    extra = {"model.layers.0.self_attn.q_proj.lora_A": torch.ones(2, 3)}
    folder = change("llama", lambda tensors: tensors.update(extra))
    assert f"{folder} has {next(iter(extra))}, which its configuration has no place for" in (
        refused(folder)
    )
    # A layer more than the configuration says.
    folder = change("qwen3", num_hidden_layers=2, layer_types=["full_attention"] * 2)
    assert "has model.layers.2.input_layernorm.weight, " in refused(folder)
    assert " and 8 more, which its configuration has no place for" in refused(folder)


def test_a_bias_that_the_configuration_does_not_name(change: Callable[..., Path]) -> None:
    bias = {"model.layers.0.self_attn.o_proj.bias": torch.ones(60)}
    assert "has model.layers.0.self_attn.o_proj.bias, " in (
        refused(change("qwen2", lambda tensors: tensors.update(bias)))
    )


def test_a_wrong_shape(change: Callable[..., Path]) -> None:
    name = "transformer.h.1.mlp.c_fc.weight"
    folder = change("gpt2", lambda tensors: tensors.update({name: torch.ones(240, 60)}))
    assert refused(folder).startswith(
        f"{folder} has {name} (240, 60), which does not give"
        " decoder.blocks.1.feed_forward.branch.up.weight (240, 60)"
    )
    message = refused(change("llama", head_dim=10))
    assert "has model.layers.0.self_attn.q_proj.weight (84, 60), which does not give" in message


def test_a_fused_matrix_that_cannot_be_cut(change: Callable[..., Path]) -> None:
    name = "gpt_neox.layers.0.attention.query_key_value.weight"
    folder = change("gpt_neox", lambda tensors: tensors.update({name: torch.ones(181, 60)}))
    assert f"has {name} (181, 60), which does not give" in refused(folder)


def test_derived_buffers_are_no_error(change: Callable[..., Path]) -> None:
    ids = torch.arange(11)[None]
    buffers = {
        "gpt2": {"transformer.h.0.attn.bias": torch.ones(1, 1, 5, 5).tril().bool()},
        "gpt_neox": {
            "gpt_neox.layers.0.attention.masked_bias": torch.tensor(-1e9),
            "gpt_neox.layers.0.attention.rotary_emb.inv_freq": torch.ones(3),
        },
        "llama": {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(7)},
    }
    for name, more in buffers.items():
        plain = load(change(name)).model(ids)
        folder = change(name, lambda tensors, more=more: tensors.update(more))
        assert torch.equal(load(folder).model(ids), plain)


def test_a_head_that_is_missing_is_not_invented(change: Callable[..., Path]) -> None:
    folder = change("llama", lambda tensors: tensors.pop("lm_head.weight"))
    message = refused(folder)
    assert message.startswith("the checkpoint lacks lm_head.weight, and ")
    assert "or set tie_word_embeddings to true" in message
    tied = load(change("llama", None, tie_word_embeddings=True))
    assert tied.model.architecture.unembedding.tied is False  # the head is there, and another


def test_tied_is_decided_by_the_tensors(change: Callable[..., Path]) -> None:
    table = "model.embed_tokens.weight"

    def same(tensors: Tensors) -> None:
        tensors["lm_head.weight"] = tensors[table].clone()

    def other(tensors: Tensors) -> None:
        tensors["lm_head.weight"] = tensors[table] + 1

    def tied(folder: Path) -> bool:
        model = load(folder).model
        assert isinstance(model, Decoder)
        assert (model.unembedding.weight is None) == model.architecture.unembedding.tied
        return model.unembedding.weight is None

    assert tied(change("qwen2"))
    assert tied(change("qwen2", same))
    assert not tied(change("qwen2", same, tie_word_embeddings=False))
    assert not tied(change("qwen2", other, tie_word_embeddings=True))


def test_old_names_of_a_head(change: Callable[..., Path]) -> None:
    def renamed(tensors: Tensors) -> None:
        there = "embed_out.weight" if "embed_out.weight" in tensors else "lm_head.weight"
        head = tensors.pop(there)
        tensors["lm_head.weight" if there == "embed_out.weight" else "embed_out.weight"] = head

    ids = torch.arange(11)[None]
    plain = load(change("gpt_neox")).model(ids)
    assert torch.equal(load(change("gpt_neox", renamed)).model(ids), plain)


def test_broken_folders(change: Callable[..., Path], folders: dict[str, Path]) -> None:
    folder = change("llama")
    data = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(data[:-100])
    assert f"{folder / WEIGHTS} is truncated" in refused(folder)
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    (folder / f"{WEIGHTS}.index.json").write_text(json.dumps(index))
    (folder / WEIGHTS).rename(folder / "one.safetensors")
    assert f"{folder} lacks two.safetensors of its 2 weight files" in refused(folder)
    (folder / "config.json").write_text("{")
    assert "config.json is not valid JSON" in refused(folder)
    (folder / "config.json").unlink()
    assert "has no config.json" in refused(folder)


def test_what_is_no_model(tmp_path: Path, change: Callable[..., Path]) -> None:
    assert refused("no-one/some-model") == (
        "there is no file or folder no-one/some-model; a name on a hub is not fetched here:"
        " download the model and give its folder"
    )
    assert refused("/no/such") == "there is no file or folder /no/such"
    weights = change("llama") / WEIGHTS
    assert refused(weights).endswith(f"name its folder: {weights.parent}")
    (tmp_path / "x.gguf").write_bytes(b"nothing")
    assert "is not a GGUF file" in refused(tmp_path / "x.gguf")


def test_an_unknown_architecture_lists_the_known(change: Callable[..., Path]) -> None:
    message = refused(change("llama", model_type="mamba"))
    assert "holds a model of the architecture 'mamba'; allowed: " in message
    for known in ("gpt2", "gpt_neox", "llama", "mistral", "qwen2", "qwen3", "gemma2"):
        assert known in message
    assert "architecture None; allowed" in refused(change("llama", model_type=None))


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("llama", {"clip_qkv": 8.0}, "clip_qkv = 8.0, which is not known here"),
        ("llama", {"quantization_config": {"bits": 4}}, "quantization_config = {'bits': 4}, which"),
        ("llama", {"sliding_window": 7}, "sliding_window = 7, which is not known here"),
        ("llama", {"hidden_act": "quick_gelu"}, "hidden_act = 'quick_gelu'; allowed: gelu, "),
        ("llama", {"partial_rotary_factor": 0.5}, "turns 0.5 of each head; allowed: 1 in this fam"),
        ("llama", {"rope_scaling": {"type": "su"}}, "rope_scaling is of the type 'su'; allowed: d"),
        ("llama", {"rope_scaling": {"type": "linear"}}, "rope_scaling of .* lacks factor"),
        ("llama", {"rope_scaling": {"type": "linear", "factor": 2, "beta": 3}}, "has beta = 3, "),
        ("llama", {"rope_scaling": [1]}, r"rope_scaling = \[1\]; allowed: a table of rope"),
        ("llama", {"vocab_size": "127"}, "vocab_size = '127'; allowed: a whole number"),
        ("llama", {"vocab_size": None}, "lacks vocab_size"),
        ("llama", {"num_key_value_heads": 4}, "6 query heads cannot share 4"),
        ("llama", {"rms_norm_eps": "small"}, "rms_norm_eps = 'small'; allowed: a number"),
        ("llama", {"attention_bias": 1}, "attention_bias = 1; allowed: true or false"),
        ("llama", {"pruned_heads": {"0": [1]}}, "pruned_heads = .*, which is not known here"),
        ("mistral", {"layer_types": ["full_attention"] * 3}, "layer_types = .*, which is not kn"),
        ("qwen2", {"layer_types": ["chunked_attention"] * 3}, "allowed: a list of full_attention"),
        ("qwen2", {"layer_types": ["full_attention"]}, "has 1 layer_types; allowed: 3, one a lay"),
        ("qwen2", {"layer_types": ["sliding_attention"] * 3}, "sliding_attention layers and no wi"),
        ("qwen3", {"max_window_layers": "2"}, "max_window_layers = '2'; allowed: a whole number"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention = True; al"),
        ("gemma2", {"sliding_window_size": 11}, "sliding_window_size = 11; allowed: 7"),
        ("gemma2", {"sliding_window": None}, "sliding_attention layers and no window"),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention = True; allowed: False"),
        ("gpt2", {"embd_pdrop": 0.2}, "resid_pdrop = 0.1 and embd_pdrop = 0.2; allowed: one share"),
        ("gpt2", {"n_head": 7}, "7 heads do not divide the width 60"),
        ("gpt_neox", {"rope_theta": 77.0}, "rope_theta = 77.0; allowed: 10000.0"),
    ],
)  # fmt: skip
def test_settings_that_mean_something_else(
    name: str, settings: dict[str, Any], message: str, change: Callable[..., Path]
) -> None:
    with pytest.raises(ModelError, match=message):
        load(change(name, **settings))


def test_settings_that_say_nothing(change: Callable[..., Path]) -> None:
    ids = torch.arange(11)[None]
    plain = load(change("llama")).model(ids)
    quiet = {
        "torch_dtype": "float32",
        "rope_interleaved": False,
        "is_llama_config": True,
        "transformers.js_config": {"a": 1},
        "pretraining_tp": 1,
        "pruned_heads": {},
        "hidden_dropout_prob": 0,
    }
    assert torch.equal(load(change("llama", **quiet)).model(ids), plain)


def test_types(change: Callable[..., Path]) -> None:
    def half(tensors: Tensors) -> None:
        tensors |= {name: tensor.bfloat16() for name, tensor in tensors.items()}

    def mixed(tensors: Tensors) -> None:
        half(tensors)
        tensors["model.norm.weight"] = tensors["model.norm.weight"].float()

    def types(folder: Path, **how: Any) -> set[torch.dtype]:
        return {parameter.dtype for parameter in load(folder, **how).model.parameters()}

    assert types(change("llama")) == {torch.float32}
    assert types(change("llama", half)) == {torch.bfloat16}
    assert types(change("llama", mixed)) == {torch.float32}
    assert types(change("llama", mixed), dtype=torch.float64) == {torch.float64}
    whole = "model.norm.weight"
    folder = change("llama", lambda tensors: tensors.update({whole: torch.ones(60).char()}))
    assert "decoder.norm.weight (torch.int8 for torch.float32)" in refused(folder)


def test_dtypes_and_devices_by_name(change: Callable[..., Path]) -> None:
    folder = change("llama")
    model = load(folder, dtype="bfloat16", device="cpu").model
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    for wrong, message in (
        ({"dtype": "bf16"}, "'bf16'; allowed: float32, bfloat16, float16, float64"),
        ({"device": "moon"}, "'moon', which cannot be used here"),
        ({"device": "meta"}, "it holds no numbers"),
        ({"device": "auto"}, "device is 'auto', which spreads a model over several devices"),
    ):
        with pytest.raises(OptionError) as caught:
            load(folder, **wrong)
        assert message in str(caught.value)


def test_a_tokenizer_comes_along(change: Callable[..., Path]) -> None:
    folder = change("llama")
    loaded = load(folder)
    assert (loaded.tokenizer, loaded.note) == (None, f"{folder} has no tokenizer.json")
    (folder / "tokenizer.json").write_text("{}")
    assert "tokenizer.json cannot be read" in refused(folder)


def test_a_gguf_file(tmp_path: Path) -> None:
    model = gguf_files.build("llama")
    text = "It was the best of times, it was the worst of times."
    words = gguf_files.trained(text, "smollm")
    gguf_files.write(tmp_path / "m.gguf", "llama", model, tokenizer=words)
    loaded = load(tmp_path / "m.gguf", dtype="float64")
    assert (loaded.path, loaded.note) == (tmp_path / "m.gguf", None)
    assert loaded.tokenizer is not None
    assert loaded.tokenizer.decode(loaded.tokenizer.encode(text).ids) == text
    assert {parameter.dtype for parameter in loaded.model.parameters()} == {torch.float64}
    # A tokenizer of another kind does not keep the model away.
    gguf_files.write(tmp_path / "n.gguf", "llama", model, tokenizer={**words, "model": "llama"})
    other = load(tmp_path / "n.gguf")
    assert other.tokenizer is None
    assert "has a tokenizer of the kind 'llama'; allowed: gpt2" in str(other.note)
    gguf_files.write(tmp_path / "x.gguf", "llama", model, leave_out=("output_norm.weight",))
    assert f"{tmp_path / 'x.gguf'} lacks model.norm.weight; fetch" in refused(tmp_path / "x.gguf")


def test_the_public_names() -> None:
    assert hw.load is load
    assert hw.models.Decoder is Decoder
