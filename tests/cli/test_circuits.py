"""``headwise circuits`` as a user types it."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path

import pandas as pd
import pytest

import headwise as hw
from headwise.cli.app import run
from headwise.errors import FileError


def test_the_embedded_model_has_its_induction_heads(capsys, tmp_path):
    target = tmp_path / "heads.csv"
    assert run(["circuits", "--out", str(target)]) == 0
    shown = capsys.readouterr().out
    assert "induction" in shown
    assert "composition" in shown
    assert "rank of W_QK" in shown
    assert f"wrote {target}" in shown.replace("\n", "")
    table = pd.read_csv(target)
    heads = table[table["behaviours"].fillna("").str.contains("induction")]
    assert len(heads) >= 1
    assert (heads["copying"] > 0.5).all()


def test_the_page_is_named_after_the_model(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run(["circuits", "--layers", "0"]) == 0
    assert capsys.readouterr().out.endswith("wrote headwise-circuits-embedded-model.html\n")
    page = (tmp_path / "headwise-circuits-embedded-model.html").read_text(encoding="utf-8")
    assert 'id="circuits"' in page
    assert 'id="text"' not in page


def test_json_goes_to_standard_output(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run(["circuits", "--layers", "1-2", "--json", "--quiet"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {row["number"] for row in found["heads"]} == {1, 2}
    assert found["composition"]["pairs"] == 75


def test_a_text_is_read_where_one_is_named(capsys, tmp_path):
    words, heads = tmp_path / "words.txt", tmp_path / "heads.csv"
    words.write_text("to be or not to be, that is the question. " * 5, encoding="utf-8")
    line = ["circuits", "--text", str(words), "--tokens", "61", "--out", str(heads)]
    assert run(line) == 0
    assert "On 61 tokens of text." in capsys.readouterr().out
    table = pd.read_csv(heads)
    assert table["text_induction"].between(0, 1).all()
    assert (table["text_previous_token"] > 0).all()
    assert run(["circuits", "--text", str(words), "--out", str(words)]) == 2
    assert run(["circuits", "--tokens", "1"]) == 2
    assert "--tokens is 1; allowed: 2 or more" in capsys.readouterr().err


def test_a_report_has_what_heads_do_on_its_text(tmp_path):
    page, scan = tmp_path / "page.html", tmp_path / "scan.nc"
    line = ["report", "--tokens", "61", "--out", str(page), "--save", str(scan), "--heads", "0,3"]
    assert run([*line, "--rows", "31", "--quiet"]) == 0
    dataset = hw.load_scan(scan)
    known = dataset["text_induction"].notnull().all("layer").values
    assert known.tolist() == [True, False, False, True, False]
    assert (dataset["text_induction_rows"] <= 31).all()
    assert "only on the text" in page.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Circuits of two layers: the files, and what the command printed."""
    folder = tmp_path_factory.mktemp("saved")
    said = {}
    for suffix in ("nc", "zarr"):
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            assert run(["circuits", "--layers", "0,2", "--out", f"{folder}/heads.{suffix}"]) == 0
        said[folder / f"heads.{suffix}"] = out.getvalue()
    return said


@pytest.mark.parametrize("suffix", ["nc", "zarr"])
def test_show_prints_the_summary_again_and_writes_the_page(
    saved, suffix, capsys, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    file, said = next((f, said) for f, said in saved.items() if f.suffix == f".{suffix}")
    assert run(["show", str(file)]) == 0
    shown, wrote = capsys.readouterr().out.rsplit("wrote ", 1)
    assert shown == said.rsplit("wrote ", 1)[0]
    assert wrote == "headwise-circuits-embedded-model.html\n"
    page = (tmp_path / wrote.strip()).read_text(encoding="utf-8")
    assert 'id="circuits"' in page
    assert 'id="text"' not in page


def test_show_gives_the_json_and_the_table_of_the_command(saved, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = str(next(iter(saved)))
    assert run(["show", file, "--out", "again.csv", "--json", "again.json", "--quiet"]) == 0
    assert capsys.readouterr() == ("", "")
    command = ["circuits", "--layers", "0,2", "--quiet", "--out", "heads.csv", "--json"]
    assert run([*command, "heads.json"]) == 0
    assert Path("again.csv").read_bytes() == Path("heads.csv").read_bytes()
    again, heads = (json.loads(Path(f"{name}.json").read_text()) for name in ("again", "heads"))
    assert again["heads"] == heads["heads"]
    assert again["composition"] == heads["composition"]


def test_show_refuses_what_it_cannot_write(saved, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for file in map(str, saved):
        assert run(["show", file, "--out", file]) == 2
        line = f"headwise: {file} is read, so it cannot be written over; name another file\n"
        assert capsys.readouterr() == ("", line)
    assert run(["show", file, "--out", "x.txt"]) == 2
    assert "cannot save circuits as x.txt; allowed: .nc" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_set_of_circuits_is_no_scan(saved, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = next(iter(saved))
    with pytest.raises(FileError, match=r"holds circuits, without a scan; .* headwise show"):
        hw.load_scan(file)
    (tmp_path / "cut.nc").write_bytes(file.read_bytes()[:-4096])
    assert run(["show", "cut.nc"]) == 2
    assert capsys.readouterr().err.startswith("headwise: cut.nc is damaged or cut short")
    assert [path.name for path in tmp_path.iterdir()] == ["cut.nc"]


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--layers", "5"], "headwise: the model has no layer 5; allowed: 0 to 4"),
        (["--out", "heads.txt"], "headwise: cannot save circuits as heads.txt; allowed: .nc"),
        (["--adapter", "/no/such/folder"], "/no/such/folder"),
        (["--base", "/no/such/model"], "there is no file or folder /no/such/model"),
    ],
)
def test_what_cannot_be_done_is_one_line(capsys, tmp_path, monkeypatch, arguments, line):
    monkeypatch.chdir(tmp_path)
    assert run(["circuits", *arguments]) == 2
    error = capsys.readouterr().err
    assert line in error
    assert error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
