"""``headwise truncate`` as a user types it."""

from __future__ import annotations

import json

import pandas as pd
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from headwise.cli.app import run
from headwise.models import build, decoder_sizes, embedded
from headwise.models.checkpoints import save
from tests.observation import tiny_models
from tests.observation.own_models import shaken

CONTEXT = 131
SIZES = {"vocab": 256, "d_model": 24, "layers": 2, "heads": 3, "d_ff": 40, "context": CONTEXT}


def letters() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return made


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A rotary model, one with ALiBi, one of transformers, and one without a head."""
    parent = tmp_path_factory.mktemp("models")
    rotary, alibi = decoder_sizes(**SIZES), decoder_sizes(**SIZES, rotary=None, alibi=True)
    return {
        "rotary": save(shaken(build(rotary)), parent / "rotary", letters()),
        "alibi": save(shaken(build(alibi)), parent / "alibi", letters()),
        "llama": tiny_models.save(parent / "llama"),
        "headless": tiny_models.save(parent / "headless", "bert", None),
    }


@pytest.fixture
def here(tmp_path, monkeypatch, folders):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(embedded, "embedded_folder", lambda: folders["rotary"])
    return tmp_path


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def found(capsys, *arguments):
    """The JSON of a run, which prints nothing else."""
    code = run(["truncate", *arguments, "--json", "--quiet"])
    out, err = capsys.readouterr()
    assert (code, err) == (0, "")
    return json.loads(out)


def test_a_row_per_rank_and_the_suggested_one(here, capsys):
    assert run(["truncate", "--tokens", "61"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    lines = out.splitlines()
    assert lines[0] == "embedded model"
    assert "W_OV of 6 heads in 2 layers · 61 tokens" in out
    at = next(i for i, line in enumerate(lines) if line.startswith("rank"))
    assert [line.split()[0] for line in lines[at + 1 : at + 5]] == ["1", "2", "4", "8"]
    full = lines[at + 4].split()
    assert full[2:5] == ["0.0000", "100%", "100%"]
    assert "of 8 is enough: from there on no measured rank costs more than 1%" in out
    assert names(here) == []


def test_json_stands_alone_on_standard_output(here, capsys):
    assert run(["truncate", "--tokens", "37", "--ranks", "1,3", "--json"]) == 0
    out, err = capsys.readouterr()
    rows = json.loads(out)["ranks"]
    assert [row["rank"] for row in rows] == [1, 3]
    assert "W_OV of 6 heads" in err
    assert rows[0]["energy_min"] < rows[1]["energy_min"] <= rows[1]["energy_median"] <= 1


def test_every_option_reaches_the_cut(here, capsys, folders):
    (here / "t.txt").write_text("to be or not to be, that is the question", encoding="utf-8")
    line = "--text t.txt --tokens 31 --window 17 --matrix both --layers 1 --heads 0,2 --ranks 2,5-6"
    options = "--tolerance 0.25 --each 3 --dtype float64 --device cpu"
    got = found(capsys, str(folders["alibi"]), *line.split(), *options.split())
    assert [row["rank"] for row in got["ranks"]] == [2, 5, 6]
    assert [(row["number"], row["head"]) for row in got["heads"]] == [(1, 0), (1, 2)]
    assert set(got["heads"][0]["energy"]) == {"qk", "ov"}
    assert got["tolerance_nats"] == 0.25
    assert got["about"]["tokens"] == 31
    assert all(isinstance(row["change_alone"], float) for row in got["heads"])
    joined = [word for word in line.split() if word not in ("--window", "17")]
    one_piece = found(capsys, str(folders["alibi"]), *joined, *options.split())
    assert one_piece["about"]["whole"] != got["about"]["whole"]
    folded = found(capsys, "--tokens", "31", "--ranks", "2", "--folded")
    raw = found(capsys, "--tokens", "31", "--ranks", "2")
    assert folded["ranks"][0]["loss"] != raw["ranks"][0]["loss"]
    assert folded["about"]["whole"] == raw["about"]["whole"]


def test_one_head_at_a_time_is_a_sentence(here, capsys):
    assert run(["truncate", "--tokens", "37", "--ranks", "8", "--each", "1"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "One at a time at rank 1, " in out
    assert "of 6 heads cost no more than that. Most: L" in out


def test_files(here, capsys):
    arguments = ["truncate", "--tokens", "37", "--ranks", "2,8"]
    for name in ("t.csv", "t.html", "t.json"):
        assert run([*arguments, "--out", name]) == 0
        assert capsys.readouterr().out.endswith(f"wrote {name}\n")
    table = pd.read_csv("t.csv")
    rows = json.loads((here / "t.json").read_text(encoding="utf-8"))["ranks"]
    assert table["rank"].tolist() == [2, 8]
    assert table["loss"].tolist() == [row["loss"] for row in rows]
    page = (here / "t.html").read_text(encoding="utf-8")
    assert "<title>embedded model cut to rank r · Headwise</title>" in page
    assert names(here) == ["t.csv", "t.html", "t.json"]


@pytest.mark.parametrize("kind", ["rotary", "llama"])
def test_the_saved_model_is_opened_by_every_command(here, capsys, folders, kind):
    model = str(folders[kind])
    before = {path.name: path.read_bytes() for path in folders[kind].iterdir()}
    got = found(
        capsys, model, "--tokens", "37", "--ranks", "2,5", "--save", "cut", "--save-rank", "2"
    )
    assert got["saved"] == "cut"
    again = found(capsys, "cut", "--tokens", "37", "--ranks", "2")
    # the same weights in float32, laid out anew: sums of 24 products, 64 of them after one another
    assert again["about"]["whole"] == pytest.approx(got["ranks"][0]["loss"], rel=24 * 64 * 2**-24)
    assert again["suggested_rank"] == 2
    assert {path.name: path.read_bytes() for path in folders[kind].iterdir()} == before
    assert run(["report", "cut", "--tokens", "37", "--no-circuits", "--quiet"]) == 0
    assert names(here) == ["cut", "headwise-cut.html"]


def test_nothing_is_saved_where_no_rank_is_within_the_tolerance(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)  # with the trained model inside the package, which a cut harms
    code = run(["truncate", "--tokens", "131", "--ranks", "1", "--save", "cut"])
    out, err = capsys.readouterr()
    assert code == 2
    assert "No measured rank is enough: at rank 1 the loss is" in out
    assert err == (
        "headwise: no measured rank is within the tolerance, so cut was not written; raise"
        " --tolerance, or name the rank with --save-rank\n"
    )
    assert names(tmp_path) == []


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("--ranks 0", "the rank is 0; allowed: 1 to the width of a head\n"),
        ("--ranks 1,9", "the rank is 9; allowed: 1 to 8, the width of a head\n"),
        ("--ranks two", "--ranks 'two'; allowed: numbers and ranges"),
        ("--each 9", "the rank is 9; allowed: 1 to 8"),
        ("--layers 2", "the model has no layer 2; allowed: 0 to 1\n"),
        ("--heads 3", "the model has no head 3; allowed: 0 to 2\n"),
        ("--matrix vo", "--matrix is 'vo'; allowed: qk, ov, both\n"),
        ("--matrix qk", "(rotary positions), so no cut to a rank is that of every distance;"),
        ("--matrix both", 'allowed: W_OV alone (circuits=["ov"], --matrix ov)\n'),
        ("--tolerance much", "the tolerance is much; allowed: 0 or more nats per token"),
        ("--tokens 1", "--tokens is 1; allowed: 2 or more\n"),
        ("--text none.txt", "there is no text file none.txt\n"),
        ("--text short.txt", "the text has 1 token; at least 2 are needed\n"),
        ("--out t.txt", "cannot save a truncation as t.txt; allowed: .html"),
        ("--out no/t.csv", "there is no folder no"),
        ("--save full", "the folder holds x, which would be lost; name a new folder\n"),
        ("--save-rank 2", "a rank to save is named; name the folder: --save DIR\n"),
        ("headless", "(BertModel) has no language-model head, so it has no loss\n"),
        ("/no/such/model", "there is no file or folder /no/such/model\n"),
    ],
)
def test_what_cannot_be_done_is_one_line(here, capsys, folders, line, says):
    (here / "short.txt").write_text("a", encoding="utf-8")
    (here / "full").mkdir()
    (here / "full" / "x").touch()
    arguments = [str(folders[word]) if word in folders else word for word in line.split()]
    assert run(["truncate", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("headwise: ")
    assert says in err
    assert err.count("\n") == 1
    assert names(here) == ["full", "short.txt"]
