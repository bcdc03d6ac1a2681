"""Headwise's own folders: saved and loaded bit for bit, strict, written whole or not at all."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models

import headwise as hw
from headwise.errors import FileError, ModelError
from headwise.models import Architecture, Rotary, Stack, Unembedding, build, preset
from headwise.models.checkpoints import load, save
from headwise.models.low_rank import add_low_rank, remove_low_rank
from headwise.positions import LongRope
from headwise.training.checkpoint import write_model

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def everything() -> Architecture:
    """A decoder with most of what a stack can have, and a scaling of its positions."""
    long = LongRope(short=(1.0, 2.0), long=(3.0, 4.0), factor=2.0, trained=8)
    stack = Stack(
        layers=2, heads=4, kv_heads=2, d_head=7, d_ff=11, norm="rms+1", placement="sandwich",
        qkv_bias=True, rotary=Rotary(width=4, scaling=long), windows=(5, None), qk_norm="head",
        softcap=3.0, sinks=True, scales=(0.5, 0.25),
    )  # fmt: skip
    untied = Unembedding(tied=False, softcap=5.0)
    return Architecture(vocab=13, d_model=28, context=17, decoder=stack, unembedding=untied)


ARCHITECTURES = {
    "everything": everything(),
    **{name: preset(name) for name in ("tiny", "tiny-encoder", "tiny-encoder-decoder")},
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_round_trip_changes_no_bit(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = build(ARCHITECTURES[name], seed=5, dtype=dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
            parameter.view(-1)[:2] = torch.tensor([float("nan"), -0.0])
    loaded = load(save(model, tmp_path / "m"))
    assert loaded.model.architecture == model.architecture
    assert type(loaded.model) is type(model)
    before, after = dict(model.named_parameters()), dict(loaded.model.named_parameters())
    assert list(before) == list(after)
    for each, parameter in before.items():
        assert after[each].dtype == dtype
        assert torch.equal(after[each].view(torch.uint8), parameter.view(torch.uint8))
    assert not loaded.model.training
    again = save(loaded.model, tmp_path / "again")
    for file in ("architecture.json", "model.safetensors"):
        assert (again / file).read_bytes() == (tmp_path / "m" / file).read_bytes()


def test_types_are_kept_where_they_are_mixed(tmp_path: Path) -> None:
    model = build(preset("tiny"), dtype=torch.bfloat16)
    model.decoder.norm.float()
    loaded = load(save(model, tmp_path / "m")).model
    assert loaded.decoder.norm.weight.dtype == torch.float32
    assert loaded.embedding.tokens.weight.dtype == torch.bfloat16
    wide = load(tmp_path / "m", dtype=torch.float64).model
    assert {parameter.dtype for parameter in wide.parameters()} == {torch.float64}


def test_a_model_of_another_format_is_kept_in_ours(tmp_path: Path) -> None:
    from tests.parity.loaded_checks import saved
    from tests.parity.loaded_models import CASES

    for name in ("gpt2", "gpt_neox", "gemma2"):
        theirs = next(case for case in CASES if case.name == name).make()
        first = load(saved(theirs, tmp_path / name)).model
        second = load(save(first, tmp_path / f"{name} of ours")).model
        ids = torch.arange(3, 29)[None]
        assert torch.equal(first(ids), second(ids))


def test_the_tokenizer_comes_along(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")]))
    folder = save(build(preset("tiny")), tmp_path / "m", tokenizer)
    found = load(folder).tokenizer
    assert found is not None
    assert found.to_str() == tokenizer.to_str()
    assert found.encode("abba").ids == [2, 1, 0]
    assert load(save(build(preset("tiny")), folder)).tokenizer is None  # the old one is gone


def test_what_is_broken_is_refused(tmp_path: Path) -> None:
    folder = save(build(preset("tiny")), tmp_path / "m")
    weights, words = folder / "model.safetensors", folder / "architecture.json"
    tensors, text = load_file(weights), words.read_text()

    def refused() -> str:
        with pytest.raises(ModelError) as caught:
            load(folder)
        return str(caught.value)

    save_file({name: t for name, t in tensors.items() if name != "decoder.norm.weight"}, weights)
    assert f"{folder} lacks decoder.norm.weight; the tensors do not belong" in refused()
    save_file({**tensors, "more": torch.ones(1)}, weights)
    assert "has more, which the model has no place for" in refused()
    save_file({**tensors, "decoder.norm.weight": torch.ones(31)}, weights)
    assert "decoder.norm.weight (31,) for (32,)" in refused()
    save_file(tensors, weights)
    words.write_text(json.dumps({**json.loads(text), "moon": 1}))
    assert f"{words} cannot be used: moon is 1: Extra inputs" in refused()
    words.write_text("{")
    assert "architecture.json cannot be used: " in refused()
    words.write_text(text)
    weights.write_bytes(weights.read_bytes()[:-1])
    assert "is truncated" in refused()
    weights.unlink()
    assert f"{folder} has no weights" in refused()


def test_nothing_else_is_lost(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text("{}")
    with pytest.raises(FileError, match=r"the folder holds config\.json, which would be lost"):
        save(build(preset("tiny")), tmp_path / "m")
    assert os.listdir(tmp_path / "m") == ["config.json"]


def test_the_folder_of_a_run_is_one_of_ours(tmp_path: Path) -> None:
    model = build(preset("tiny"), seed=3)
    weights = {name: each.detach() for name, each in model.named_parameters()}
    write_model(tmp_path, model.architecture, weights)
    (tmp_path / "log.jsonl").touch()
    loaded = load(tmp_path).model
    assert loaded.architecture == model.architecture
    ids = torch.arange(11)[None]
    assert torch.equal(loaded(ids), model(ids))


def test_a_model_with_adapters_is_not_written(tmp_path: Path) -> None:
    model = build(preset("tiny"))
    add_low_rank(model, rank=2, alpha=4.0, targets=["query"])
    with pytest.raises(ModelError, match=r"not those of its architecture: .*query.* take adapters"):
        save(model, tmp_path / "m")
    assert os.listdir(tmp_path) == []
    remove_low_rank(model)
    assert load(save(model, tmp_path / "m")).model.architecture == model.architecture


def test_the_public_names() -> None:
    assert hw.save is save


def test_files_get_the_permissions_of_new_files(tmp_path) -> None:
    """safetensors writes private files (0600), which others could not read where one installs."""
    plain = tmp_path / "plain"
    plain.touch()
    folder = save(build(preset("tiny")), tmp_path / "model")
    modes = {file.stat().st_mode for file in Path(folder).iterdir()}
    assert modes == {plain.stat().st_mode}
