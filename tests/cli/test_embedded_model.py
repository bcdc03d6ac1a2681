"""Without a MODEL the small model inside the package is measured: here one with random weights."""

from __future__ import annotations

import json

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import headwise as hw
from headwise.cli.app import run
from headwise.models import build, decoder_sizes, embedded
from headwise.models.checkpoints import save
from headwise.results.io import load
from headwise.results.validate import about

CONTEXT = 131


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    letters = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    letters.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    letters.decoder = decoders.ByteLevel()
    sizes = decoder_sizes(vocab=256, d_model=24, layers=2, heads=3, d_ff=40, context=CONTEXT)
    return save(build(sizes), tmp_path_factory.mktemp("data") / "model", letters)


@pytest.fixture
def here(tmp_path, monkeypatch, folder):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(embedded, "embedded_folder", lambda: folder)
    return tmp_path


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_report(here, capsys):
    assert run(["report", "--gradients", "--save", "scan.nc", "--json", "found.json"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert out.startswith("embedded model\n")
    assert "wrote headwise-embedded-model.html" in out
    assert names(here) == ["found.json", "headwise-embedded-model.html", "scan.nc"]
    page = (here / "headwise-embedded-model.html").read_text(encoding="utf-8")
    assert "<title>embedded model · Headwise</title>" in page
    dataset = load("scan.nc")
    facts = about(dataset)
    assert (facts["model"], facts["tokens"], facts["context"]) == (
        "embedded model", CONTEXT, CONTEXT
    )  # fmt: skip
    assert dataset["writes_verified"].all()
    assert json.loads((here / "found.json").read_text())


def test_scan(here, capsys):
    assert run(["scan", "--tokens", "37", "--out", "s.nc"]) == 0
    assert "embedded model" in capsys.readouterr().out
    assert load("s.nc").sizes["key"] == 37


def test_the_library_measures_it_too(here):
    assert hw.scan(tokens=41).record.about["model"] == "embedded model"


def test_a_folder_is_called_by_its_own_name(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert run(["report", str(folder), "--tokens", "31"]) == 0
    assert "wrote headwise-model.html" in capsys.readouterr().out


def test_an_installation_without_it_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(embedded, "embedded_folder", lambda: tmp_path / "model")
    assert run(["report"]) == 2
    assert capsys.readouterr().err == (
        "headwise: this installation of Headwise holds no model of its own; allowed: the name of a"
        " MODEL; name one, or install the released package, which brings a small trained model\n"
    )
    assert names(tmp_path) == []
