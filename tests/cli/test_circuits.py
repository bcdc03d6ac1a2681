"""``headwise circuits`` as a user types it."""

from __future__ import annotations

import json

import pandas as pd
import pytest

from headwise.cli.app import run


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
