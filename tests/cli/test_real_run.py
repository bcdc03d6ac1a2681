"""The whole path on a tiny random model on disk: folder in, page out, or one line and exit 2."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import torch

from headwise.cli.app import run
from headwise.results.io import load

LAYERS, HEADS, CONTEXT = 3, 3, 128
LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ ,.;:'!?-\n"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A Llama of random weights that reads single letters."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("models") / "tiny"
    vocabulary = {"<unk>": 0, **{letter: i + 1 for i, letter in enumerate(LETTERS)}}
    letters = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    letters.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(tokenizer_object=letters, unk_token="<unk>").save_pretrained(folder)
    config = LlamaConfig(
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=1,
        vocab_size=len(vocabulary),
        max_position_embeddings=CONTEXT,
    )
    torch.manual_seed(7)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture
def copy(tiny, tmp_path):
    """A copy of the model to break."""
    return shutil.copytree(tiny, tmp_path / "broken")


@pytest.fixture
def here(tmp_path, monkeypatch):
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_report(tiny, here, capsys):
    line = "--tokens 101 --save scan.nc --json found.json --gradients"
    assert run(["report", str(tiny), *line.split()]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert "wrote headwise-tiny.html" in out
    assert names(here) == ["found.json", "headwise-tiny.html", "scan.nc"]
    dataset = load("scan.nc")
    assert dict(dataset.sizes) | {"layer": LAYERS, "head": HEADS, "key": 101} == dict(dataset.sizes)
    assert dataset["entropy"].notnull().all()
    assert "gradient_norm" in dataset
    assert json.loads((here / "found.json").read_text())
    assert "<script" in (here / "headwise-tiny.html").read_text(encoding="utf-8")


def test_the_text_that_was_given_is_the_text_that_is_read(tiny, here, capsys):
    (here / "t.txt").write_text("</script><b>Call me Ishmael.")
    assert run(["scan", str(tiny), "--text", "t.txt", "--out", "s.zarr", "--quiet"]) == 0
    tokens = "".join(load("s.zarr")["token"].to_numpy())
    assert tokens.endswith("Call me Ishmael.")


def test_layers_and_heads_are_chosen(tiny, here):
    line = "--layers 0,2 --heads 1 --tokens 53 --out s.nc --quiet"
    assert run(["scan", str(tiny), *line.split()]) == 0
    dataset = load("s.nc")
    assert dataset["number"].to_numpy().tolist() == [0, 2]
    assert dataset["entropy"].notnull().to_numpy().tolist() == [[False, True, False]] * 2


def test_sampled_rows(tiny, here):
    line = "--rows 11 --tokens 53 --keep-rows --out s.nc --quiet"
    assert run(["scan", str(tiny), *line.split()]) == 0
    dataset = load("s.nc")
    assert dataset["rows"].to_numpy().tolist() == [11] * LAYERS
    assert dataset["rows_total"].to_numpy().tolist() == [53] * LAYERS
    assert dataset["entropy_rows"].notnull().sum("query").to_numpy().tolist() == [[11] * HEADS] * 3
    mean = dataset["entropy_rows"].mean("query")
    np.testing.assert_allclose(mean, dataset["entropy"], rtol=1e-5)


def one_line(capsys, *arguments: str) -> str:
    """The line on stderr of a command that must fail with exit code 2."""
    assert run(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("headwise: ")
    assert err.count("\n") == 1
    return err


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--tokens 300", "300 tokens, but tiny was trained on at most 128; add --allow-long"),
        ("--layers 7", "the model has no layer 7; allowed: layers 0 to 2"),
        ("--heads 0,9", "the model has no head 9; allowed: heads 0 to 2"),
        ("--dtype float7", "--dtype is 'float7'; allowed: float32, bfloat16, float16"),
        ("--device nowhere", "--device is 'nowhere'"),
    ],
)
def test_what_the_model_does_not_allow(tiny, here, capsys, line, said):
    assert said in one_line(capsys, "report", str(tiny), *line.split(), "--save", "s.nc")
    assert names(here) == []


def test_a_text_of_one_token(tiny, here, capsys):
    (here / "t.txt").write_text("a")
    assert "2" in one_line(capsys, "report", str(tiny), "--text", "t.txt")
    assert names(here) == ["t.txt"]


def test_a_folder_without_a_config(here, capsys):
    (here / "empty").mkdir()
    assert "config.json" in one_line(capsys, "report", "empty")
    assert names(here) == ["empty"]


def test_weights_cut_short(copy, here, capsys):
    weights = copy / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert "model.safetensors" in one_line(capsys, "report", str(copy))
    assert names(here) == []


def test_an_architecture_that_does_not_exist(copy, here, capsys):
    config = json.loads((copy / "config.json").read_text())
    changes = {"model_type": "frobnicator", "architectures": ["Frob"]}
    (copy / "config.json").write_text(json.dumps({**config, **changes}))
    assert "frobnicator" in one_line(capsys, "report", str(copy)).lower()
    assert names(here) == []


def test_nan_in_the_weights_is_named_and_the_healthy_part_written(copy, here, capsys):
    from safetensors.torch import load_file, save_file

    weights = load_file(copy / "model.safetensors")
    weights["model.layers.1.self_attn.q_proj.weight"][3, 5] = float("nan")
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    assert run(["report", str(copy), "--tokens", "53", "--save", "s.nc", "--quiet"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "model.layers.1.self_attn" in err
    assert err.count("\n") == 1
    assert names(here) == ["headwise-broken.html", "s.nc"]
    finite = load("s.nc")["entropy"].notnull().any("head").to_numpy().tolist()
    assert finite[0] is True
    assert finite[1] is False
