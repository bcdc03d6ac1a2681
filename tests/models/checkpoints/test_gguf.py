"""GGUF files give the tensors they were written from, and those that transformers loads."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from headwise.errors import ModelError
from headwise.models.checkpoints.family import assemble
from headwise.models.checkpoints.gguf import GgufFile, RopeScaling, halves
from headwise.models.checkpoints.llama import LLAMA
from headwise.models.checkpoints.settings import Settings
from tests.models.checkpoints import gguf_files

FAMILIES = tuple(gguf_files.ARCHITECTURES)


def same(file: GgufFile, model: Any) -> None:
    state = model.state_dict()
    assert set(file) == set(state)
    assert len(file) == len(state)
    for name, tensor in state.items():
        assert file.shape(name) == tuple(tensor.shape)
        assert file.dtype(name) == torch.float32
        assert torch.equal(file.read(name), tensor), name
        assert torch.equal(file[name](), tensor), name


def refused(path: Path) -> str:
    with pytest.raises(ModelError) as caught:
        GgufFile.open(path)
    return str(caught.value)


@pytest.mark.parametrize("family", FAMILIES)
def test_tensors_are_those_of_the_model(family: str, tmp_path: Path) -> None:
    model = gguf_files.build(family)
    gguf_files.write(tmp_path / "m.gguf", family, model)
    file = GgufFile.open(tmp_path / "m.gguf")
    same(file, model)
    s = file.sizes
    assert (s.family, s.vocab, s.d_model, s.d_ff, s.layers) == (family, 263, 64, 96, 3)
    assert (s.heads, s.kv_heads, s.d_head, s.rope_width, s.context) == (4, 2, 16, 16, 97)
    assert (s.rope_base, s.rope_scaling, s.rope_factors, s.window) == (7000.0, None, None, None)
    assert s.norm_eps == float(np.float32(1e-5))
    assert (s.tied, s.qkv_bias, s.qk_norm) == (False, family == "qwen2", family == "qwen3")


def test_rows_of_interleaved_heads_are_put_into_halves() -> None:
    rows = torch.arange(2 * 6 * 5.0).view(12, 5)
    assert torch.equal(halves(gguf_files.interleaved(rows, 2), 2), rows)
    assert not torch.equal(halves(rows, 2), rows)
    bias = torch.arange(12.0)
    assert torch.equal(halves(gguf_files.interleaved(bias, 2), 2), bias)


def test_llama_with_biases(tmp_path: Path) -> None:
    model = gguf_files.build("llama", attention_bias=True)
    gguf_files.write(tmp_path / "m.gguf", "llama", model)
    file = GgufFile.open(tmp_path / "m.gguf")
    same(file, model)
    assert file.config()["attention_bias"]


def test_tied_or_not_is_decided_from_the_tensors(tmp_path: Path) -> None:
    model = gguf_files.build("llama", tie_word_embeddings=True)
    gguf_files.write(tmp_path / "m.gguf", "llama", model, leave_out=("output.weight",))
    file = GgufFile.open(tmp_path / "m.gguf")
    assert file.sizes.tied
    assert file.config()["tie_word_embeddings"]
    assert "lm_head.weight" not in file


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1", "F16", "BF16"])
def test_quantised_tensors_are_near_and_as_the_library_has_them(kind: str, tmp_path: Path) -> None:
    model = gguf_files.build("qwen2")
    quantisation = gguf.GGMLQuantizationType[kind]
    gguf_files.write(tmp_path / "m.gguf", "qwen2", model, quantise=quantisation)
    file = GgufFile.open(tmp_path / "m.gguf")
    state = model.state_dict()
    for name in ("model.layers.1.self_attn.q_proj.weight", "model.embed_tokens.weight"):
        array = state[name].numpy()
        packed = gguf.quants.quantize(array, quantisation)
        want = torch.from_numpy(gguf.quants.dequantize(packed, quantisation).copy())
        assert torch.equal(file.read(name), want)
        # Q4: 16 levels of a block's range, so at most 1/15 of twice its largest entry.
        assert float((want - state[name]).abs().max()) <= 2 / 15 * float(state[name].abs().max())
    assert torch.equal(file.read("model.norm.weight"), state["model.norm.weight"])


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_loads_the_same(family: str, tmp_path: Path) -> None:
    from headwise.observation.loading import load_model

    # transformers takes heads of Qwen 3 to be 128 wide, whatever the file says.
    model = gguf_files.build(family, head_dim=128 if family == "qwen3" else 16)
    gguf_files.write(tmp_path / "m.gguf", family, model)
    same(GgufFile.open(tmp_path / "m.gguf"), load_model(tmp_path / "m.gguf", device="cpu").model)


def logits_agree(file: GgufFile, model: Any) -> None:
    """fp32 logits within 1e-5 of the largest, beyond the trained context of the scalings too."""
    ours = assemble(LLAMA, Settings(file.config(), "m"), file)
    ids = torch.randint(0, 263, (2, 89), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        got, want = ours(ids), model(ids).logits
    assert float((got - want).abs().max()) <= 1e-5 * float(want.abs().max())


@pytest.mark.parametrize("family", FAMILIES)
def test_the_configuration_makes_the_same_model(family: str, tmp_path: Path) -> None:
    model = gguf_files.build(family)
    gguf_files.write(tmp_path / "m.gguf", family, model)
    logits_agree(GgufFile.open(tmp_path / "m.gguf"), model)


SCALINGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "linear": ({"factor": 4.0}, {"factor": 4.0}),
    "yarn": (
        {"factor": 4.0, "original_max_position_embeddings": 31},
        {"factor": 4.0, "original_context_length": 31},
    ),
}


@pytest.mark.parametrize("kind", SCALINGS)
def test_a_scaling_makes_the_same_model(kind: str, tmp_path: Path) -> None:
    theirs, ours = SCALINGS[kind]
    model = gguf_files.build("llama", rope_parameters=rope(kind, **theirs))
    metadata = {f"rope.scaling.{key}": value for key, value in {"type": kind, **ours}.items()}
    gguf_files.write(tmp_path / "m.gguf", "llama", model, metadata=metadata)
    file = GgufFile.open(tmp_path / "m.gguf")
    logits_agree(file, model)
    with pytest.raises(AssertionError):
        logits_agree(file, gguf_files.build("llama"))


def test_factors_make_the_same_model(tmp_path: Path) -> None:
    """Llama 3.1: its files hold what every frequency is divided by."""
    options = {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 31,
    }
    model = gguf_files.build("llama", rope_parameters=rope("llama3", **options))
    plain = gguf_files.build("llama").model.rotary_emb.inv_freq
    factors = (plain / model.model.rotary_emb.inv_freq).numpy()
    assert len(set(factors.round(3).tolist())) > 2
    gguf_files.write(tmp_path / "m.gguf", "llama", model, extra={"rope_freqs.weight": factors})
    logits_agree(GgufFile.open(tmp_path / "m.gguf"), model)


def rope(kind: str, **options: Any) -> dict[str, Any]:
    return {"rope_type": kind, "rope_theta": 7000.0, **options}


def test_scalings(tmp_path: Path) -> None:
    model, path = gguf_files.build("llama"), tmp_path / "m.gguf"
    linear = {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}
    gguf_files.write(path, "llama", model, metadata=linear)
    file = GgufFile.open(path)
    assert file.sizes.rope_scaling == RopeScaling(kind="linear", factor=4.0)
    assert file.config()["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}
    yarn = {**linear, "rope.scaling.type": "yarn", "rope.scaling.original_context_length": 31}
    gguf_files.write(path, "llama", model, metadata=yarn)
    words = GgufFile.open(path).config()["rope_scaling"]
    assert (words["rope_type"], words["original_max_position_embeddings"]) == ("yarn", 31)
    assert words["attention_factor"] == pytest.approx(0.1 * np.log(4) + 1)
    gguf_files.write(path, "llama", model, metadata={**linear, "rope.scaling.type": "longrope"})
    assert refused(path).endswith("rope.scaling.type = 'longrope'; allowed: none, linear, yarn")


def test_factors_of_the_frequencies(tmp_path: Path) -> None:
    factors = np.linspace(1, 8, 8, dtype=np.float32)
    model, path = gguf_files.build("llama"), tmp_path / "m.gguf"
    gguf_files.write(path, "llama", model, extra={"rope_freqs.weight": factors})
    file = GgufFile.open(path)
    assert file.sizes.rope_factors == tuple(factors.tolist())
    assert file.config()["rope_scaling"]["long_factor"] == factors.tolist()
    same(file, model)


def test_a_window_makes_it_mistral(tmp_path: Path) -> None:
    model, path = gguf_files.build("llama"), tmp_path / "m.gguf"
    gguf_files.write(path, "llama", model, metadata={"attention.sliding_window": 29})
    config = GgufFile.open(path).config()
    assert (config["model_type"], config["sliding_window"]) == ("mistral", 29)
    gguf_files.write(
        path, "qwen2", gguf_files.build("qwen2"), metadata={"attention.sliding_window": 29}
    )
    assert "qwen2.attention.sliding_window = 29; allowed: none in this family" in refused(path)


def test_what_is_not_known_is_refused(tmp_path: Path) -> None:
    model, path = gguf_files.build("llama"), tmp_path / "m.gguf"
    gguf_files.write(path, "llama", model, metadata={"attention.logit_softcapping": 30})
    assert "llama.attention.logit_softcapping = 30, which is not known here" in refused(path)
    gguf_files.write(path, "llama", model, metadata={"expert_count": 8})
    assert "has llama.expert_count = 8" in refused(path)
    gguf_files.write(path, "llama", model, metadata={"expert_count": 0})
    assert len(GgufFile.open(path))
    extra = {"blk.0.ffn_gate_inp.weight": np.ones((3, 5), dtype=np.float32)}
    gguf_files.write(path, "llama", model, extra=extra)
    assert refused(path).startswith(
        f"{path} has tensors that are not of a Llama-family model: blk.0.ffn_gate_inp.weight; use"
    )
    gguf_files.write(path, "llama", model, leave_out=("token_embd.weight",))
    assert refused(path) == f"{path} has no tensor token_embd.weight"
    gguf_files.write(path, "llama", gguf_files.build("llama"), metadata={"attention.key_length": 0})
    assert refused(path).endswith("key_length = 0; allowed: one whole number, 1 or more")


def test_broken_files(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    gguf_files.write(path, "llama", gguf_files.build("llama"))
    with pytest.raises(ModelError, match=r"has no tensor x; allowed: "):
        GgufFile.open(path).read("x")
    with pytest.raises(KeyError):
        GgufFile.open(path)["x"]
    os.truncate(path, path.stat().st_size - 1000)
    assert f"{path} is truncated" in refused(path)
    path.write_bytes(b"hello")
    assert "is not a GGUF file" in refused(path)
    writer = gguf.GGUFWriter(path, "rwkv6")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert "of the family 'rwkv6'; allowed: llama, mistral, qwen2, qwen3" in refused(path)


@pytest.mark.real_model
def test_the_real_file_gives_the_tensors_that_transformers_loads() -> None:
    from headwise.observation.loading import load_model

    path = next((Path(os.environ["HEADWISE_MODELS"]) / "smollm2").glob("*.gguf"))
    file, state = GgufFile.open(path), load_model(path, device="cpu").model.state_dict()
    assert file.sizes.tied
    state.pop("lm_head.weight")
    assert set(file) == set(state)
    for name in file:
        assert torch.equal(file.read(name), state[name]), name
