"""What cannot be counted is refused in one line that names the file and the key."""

from __future__ import annotations

import contextlib
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwise.cost.config import known_families, load_parts, parts_of
from headwise.cost.explicit import explicit
from headwise.errors import InputError, ModelError, OptionError
from tests.cost.decoder_configs import CASES, config_of
from tests.cost.gguf_of_parts import write

LLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 40, "intermediate_size": 67, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 257,
    "max_position_embeddings": 61,
}  # fmt: skip


def refused(source: object) -> str:
    """The message, which is one line of a length that can be read."""
    with pytest.raises(ModelError) as caught:
        load_parts(source)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 1500
    return message


def written(folder: Path, text: str | bytes, name: str = "config.json") -> Path:
    file = folder / name
    file.write_bytes(text.encode() if isinstance(text, str) else text)
    return file


def test_the_case_without_a_fault():
    assert load_parts(LLAMA).model_class == "LlamaForCausalLM"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "holds no JSON: "),
        ("{", "holds no JSON: "),
        (json.dumps(LLAMA)[:-7], "holds no JSON: "),
        ("[1, 2]", "holds no JSON object"),
        ("null", "holds no JSON object"),
        ("17", "holds no JSON object"),
        ("[" * 100_000, "nested too deep"),
        ('{"a": ' * 100_000, "nested too deep"),
        (b"\xff\xfe{\x00}\x00", "not text in UTF-8"),
        (b"\x80\x04\x95pickle", "not text in UTF-8"),
        ('{"hidden_size": ' + "9" * 5000 + "}", "holds no JSON: "),
        ("{}", "has no keys"),
        ('{"hidden_size": 40, "layers": 3}', "has no model_type, but hidden_size, layers"),
    ],
    ids=range(13),
)
def test_files_that_are_no_configuration(text, why, tmp_path):
    file = written(tmp_path, text)
    assert re.match(f".*{re.escape(str(file))}.*{re.escape(why)}", refused(file))
    assert str(file) in refused(tmp_path)


def test_a_file_that_is_far_too_big(tmp_path):
    file = tmp_path / "weights.json"
    with file.open("wb") as out:
        out.truncate(100 * 2**20)
    assert "has 104,857,600 bytes; allowed: a configuration" in refused(file)


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0, "0"), (-1, "-1"), (10**9 + 1, "1000000001"), (math.nan, "nan"), (math.inf, "inf"),
        (2.5, "2.5"), (True, "True"), (False, "False"), ("40", "'40'"), ([40], "[40]"),
        ({"a": 1}, "{'a': 1}"), (10**1000, "a number of 3,322 bits"),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize(
    "key",
    ["hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
     "num_key_value_heads", "vocab_size", "max_position_embeddings", "head_dim"],
)  # fmt: skip
def test_sizes_that_are_none(key, value, shown, tmp_path):
    file = written(tmp_path, json.dumps({**LLAMA, key: value}))
    message = refused(file)
    if type(value) is int and value > 10**999:
        assert re.search(re.escape(f"{key} is {shown} in {file}; allowed: a whole number"), message)
    else:
        assert message.startswith(f"{key} is {shown} in {file}; allowed: a whole number, 1 to ")


def test_more_layers_than_can_be_listed():
    message = refused({**LLAMA, "num_hidden_layers": 10_001})
    assert "num_hidden_layers is 10001" in message
    assert "1 to 10,000" in message
    assert len(load_parts({**LLAMA, "num_hidden_layers": 10_000}).stacks[0].layers) == 10_000


def test_whole_numbers_written_with_a_point_are_taken():
    assert load_parts({**LLAMA, "hidden_size": 40.0}).stacks == load_parts(LLAMA).stacks


@pytest.mark.parametrize(
    "key", ["hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
            "vocab_size"],
)  # fmt: skip
def test_keys_that_are_missing_are_named(key, tmp_path):
    file = written(tmp_path, json.dumps({k: v for k, v in LLAMA.items() if k != key}))
    assert refused(file).startswith(f"{file} has no {key}; add the key, or give the sizes")


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"num_attention_heads": 3, "num_key_value_heads": 3}, "3 heads do not divide hidden_size"),
        ({"num_key_value_heads": 3}, "4 query heads cannot share 3 key-value heads"),
        ({"num_key_value_heads": 8}, "4 query heads cannot share 8 key-value heads"),
        ({"attention_bias": 1}, "attention_bias is 1"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes'"),
        ({"architectures": ["LlamaForMusic"]}, "the class LlamaForMusic"),
        ({"architectures": "LlamaForCausalLM"}, "architectures"),
        ({"architectures": [7]}, "architectures"),
        ({"model_type": ["llama"]}, "model_type is ['llama']"),
        ({"model_type": 3}, "model_type is 3"),
    ],
    ids=range(10),
)
def test_what_does_not_fit_together(more, why):
    assert why in refused({**LLAMA, **more})
    assert "the configuration" in refused({**LLAMA, **more})


@pytest.mark.parametrize(
    ("family", "more", "why"),
    [
        ("gemma2", {"layer_types": ["full_attention"]}, "layer_types has 1 entries"),
        ("gemma2", {"layer_types": ["chunked_attention"] * 5}, "layer_types has 'chunked_"),
        ("gemma2", {"layer_types": "full"}, "layer_types has 'full'"),
        ("gemma3_text", {"sliding_window_pattern": 0, "layer_types": None}, "_pattern is 0"),
        ("mistral", {"sliding_window": -1}, "sliding_window is -1"),
        ("mixtral", {"num_experts_per_tok": 6}, "6 of 5 experts work on a token"),
        ("mixtral", {"num_local_experts": 0}, "num_local_experts is 0"),
        ("qwen2_moe", {"mlp_only_layers": 3}, "mlp_only_layers has 3"),
        ("qwen2_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step is 0"),
        ("smollm3", {"use_sliding_window": True, "no_rope_layers": 1, "layer_types": None},
         "no_rope_layers has 1"),
        ("deepseek_v3", {"n_routed_experts": 2}, "3 of 2 experts work on a token"),
        ("deepseek_v3", {"first_k_dense_replace": -1}, "first_k_dense_replace is -1"),
        ("deepseek_v3", {"kv_lora_rank": None}, "has no kv_lora_rank"),
        ("gpt2", {"n_head": 7}, "7 heads do not divide n_embd 40"),
        ("gpt2", {"architectures": ["GPT2DoubleHeadsModel"]}, "two heads"),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention is true"),
        ("opt", {"word_embed_proj_dim": 0}, "word_embed_proj_dim is 0"),
        ("opt", {"enable_bias": "no"}, "enable_bias is 'no'"),
    ],
)  # fmt: skip
def test_families_in_their_own_keys(family, more, why):
    config = config_of(family, next(more for other, more in CASES if other == family)).to_dict()
    assert load_parts(config).family == family
    assert why in refused({**config, **more})


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"_class_name": "UNet2DConditionModel", "sample_size": 64}, "it is of diffusers ('UNet2D"),
        ({"dim": 4096, "n_layers": 32, "n_heads": 32}, "has no model_type, but dim, n_layers"),
        ({"model_type": "mamba", "hidden_size": 64}, "has the model type 'mamba'"),
        ({"model_type": "x" * 4000}, "has the model type 'xxx"),
        ({"model_type": "llava", "text_config": LLAMA}, "give its text_config alone, of the type"),
        ({"model_type": "gemma3"}, "has no text_config"),
        ({"model_type": "gemma3", "text_config": [1]}, "text_config is [1]"),
        ({"model_type": "gemma3", "text_config": LLAMA}, "model_type is 'llama' in"),
        ({"x" * 4000: 1}, "has no model_type"),
    ],
    ids=range(9),
)  # fmt: skip
def test_configurations_of_other_libraries_and_families(config, why):
    assert why in refused(config)


def test_the_known_families_are_listed_and_sizes_offered():
    message = refused({"model_type": "mamba"})
    assert ", ".join(sorted(known_families())) in message
    assert "give the sizes as options: --d-model" in message


OWN: dict[str, Any] = {
    "vocab": 257, "d_model": 32, "context": 61,
    "decoder": {"layers": 2, "heads": 4, "kv_heads": 2, "d_head": 8, "d_ff": 67},
}  # fmt: skip


@pytest.mark.parametrize(
    ("more", "within", "why"),
    [
        ({"vocab": None}, {}, "has no vocab"),
        ({"d_model": -3}, {}, "d_model is -3"),
        ({"embedding": 3}, {}, "embedding is 3"),
        ({"embedding": {"positions": "rotary"}}, {}, "positions is 'rotary'"),
        ({"classes": -1}, {}, "classes is -1"),
        ({}, {"d_ff": None}, "has no d_ff"),
        ({}, {"kv_heads": 3}, "4 query heads cannot share 3 key-value heads"),
        ({}, {"norm": "batch"}, "norm is 'batch'"),
        ({}, {"norm": ["rms"]}, "norm is ['rms']"),
        ({}, {"placement": "above"}, "placement is 'above'"),
        ({}, {"windows": [7, 7, 7]}, "windows has 3 entries for 2 layers"),
        ({}, {"windows": [0]}, "windows is 0"),
        ({}, {"layers": 10**9}, "layers is 1000000000"),
    ],
    ids=range(13),
)
def test_own_architectures(more, within, why):
    assert load_parts(OWN).model_class == "Decoder"
    assert why in refused({**OWN, **more, "decoder": {**OWN["decoder"], **within}})


def test_names_of_nothing(tmp_path):
    assert refused("").startswith("there is no file or folder ''")
    assert "no config.json and no architecture.json" in refused(tmp_path)
    written(tmp_path, b"GGUF", "model.gguf")
    assert "name a file, such as" in refused(tmp_path)
    assert "there is no file or folder" in refused(tmp_path / "not there.json")
    assert "cannot look for" in refused("y/" + "x" * 5000)
    refused("with\0null")
    for other in (3, None, [1], LLAMA.items, dict):
        assert "a model as" in refused(other)


@pytest.mark.parametrize("cut", [4, 7, 8, 100, -1])
def test_a_gguf_file_that_is_cut(cut, tmp_path):
    file = write(tmp_path / "m.gguf", "llama", {"block_count": 2}, {"token_embd.weight": (7, 4)})
    whole = file.read_bytes()
    file.write_bytes(whole[:cut] if cut > 0 else whole[: len(whole) // 2])
    assert str(file) in refused(file)


GGUF: dict[str, Any] = {
    "embedding_length": 40, "block_count": 3, "attention.head_count": 4,
    "attention.head_count_kv": 2, "feed_forward_length": 67, "context_length": 61,
}  # fmt: skip


@pytest.mark.parametrize(
    ("family", "metadata", "why"),
    [
        ("rwkv6", GGUF, "the architecture 'rwkv6'; allowed: arcee, "),
        ("llama", {**GGUF, "attention.head_count_kv": [2, 2, 1]}, "one value for each layer"),
        ("llama", {**GGUF, "block_count": 0}, "num_hidden_layers is 0"),
        ("llama", {**GGUF, "attention.head_count_kv": 3}, "cannot share 3 key-value heads"),
        ("llama", {}, "has no hidden_size"),
        ("deepseek2", GGUF, "has no "),
    ],
    ids=range(6),
)
def test_gguf_headers_that_cannot_be_counted(family, metadata, why, tmp_path):
    file = write(tmp_path / "m.gguf", family, metadata, {"token_embd.weight": (7, 40)})
    message = refused(file)
    assert why in message
    assert str(file) in message


def test_a_gguf_file_without_a_vocabulary(tmp_path):
    file = write(tmp_path / "m.gguf", "llama", GGUF, {"output_norm.weight": (40,)})
    assert "has no tensor token_embd.weight" in refused(file)


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"heads": 3}, "3 heads do not divide d_model 40"),
        ({"kv_heads": 3}, "4 query heads cannot share 3"),
        ({"d_model": 0}, "d_model is 0"),
        ({"layers": 10_001}, "layers is 10001"),
        ({"layers": 2.0}, "layers is 2.0"),
        ({"heads": True}, "heads is True"),
        ({"d_ff": 10**12}, "d_ff is 1000000000000"),
        ({"experts": 4, "experts_used": 5}, "5 experts of 4 are used"),
        ({"experts": 4, "shared_experts": -1}, "shared_experts is -1"),
    ],
    ids=range(9),
)
def test_explicit_sizes(more, why):
    sizes: dict[str, Any] = {"d_model": 40, "layers": 3, "heads": 4, "vocab": 257}
    assert explicit(**sizes).vocab == 257
    with pytest.raises(OptionError, match=re.escape(why)):
        explicit(**{**sizes, **more})


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=5,
)


@given(data=st.data())
def test_no_value_of_any_key_of_any_family_ends_in_anything_but_a_refusal(data):
    family, more = data.draw(st.sampled_from(CASES))
    config = config_of(family, more).to_dict()
    key = data.draw(st.sampled_from(sorted(config)))
    with contextlib.suppress(InputError):
        parts_of({**config, key: data.draw(anything)})
