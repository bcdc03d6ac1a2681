"""``headwise theorems`` as a user types it, on statements that are made up and on real ones."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import pytest

from headwise.cli.app import run
from tests.theorems import made_up as m


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HEADWISE_TRACEBACK", raising=False)
    monkeypatch.setenv("COLUMNS", "80")
    return tmp_path


@pytest.fixture
def only(here, monkeypatch):
    """Let the given statements be all there are."""
    return lambda *statements, others=(): m.catalogue(monkeypatch, *statements, others=others)


@pytest.fixture
def model(monkeypatch):
    """A model that is not opened; what it was asked for."""
    told = SimpleNamespace(opened=[], trained=[])

    def trained(loaded, text, *, tokens, seed):
        told.trained.append((text, tokens, seed))
        return SimpleNamespace(name=loaded)

    opened = lambda *asked: told.opened.append(asked) or asked[0] or "embedded-model"  # noqa: E731
    monkeypatch.setitem(sys.modules, "headwise.observation.run", SimpleNamespace(opened=opened))
    made = SimpleNamespace(Trained=trained)
    monkeypatch.setitem(sys.modules, "headwise.theorems.trained", made)
    return told


def said(capsys, *arguments, code=0):
    """What a run prints, line breaks taken out."""
    assert run(["theorems", *arguments]) == code
    out, err = capsys.readouterr()
    assert err == ""
    return " ".join(out.split())


def found(capsys, *arguments, code=0):
    """The JSON of a run, which prints nothing else."""
    assert run(["theorems", *arguments, "--json", "--quiet"]) == code
    out, err = capsys.readouterr()
    assert err == ""
    return json.loads(out)


def refused(capsys, *arguments):
    """The one line of a run that could not be done."""
    assert run(["theorems", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    return err.removeprefix("headwise: ").strip()


# ------------------------------------------------------------------ random weights


def test_all_statements_that_can_be_checked(only, capsys):
    only(m.HOLDS, m.TRAINED, others=(m.OPEN,))
    out = said(capsys)
    assert out.startswith("What the theory says, on random weights seed 0 · quick")
    assert "Made up holds HOLDS Few. Others: 1/√d_k open INCONCLUSIVE" in out
    assert "trained" not in out


@pytest.mark.parametrize(
    ("statement", "code"),
    [(m.HOLDS, 0), (m.OPEN, 0), (m.OFTEN, 0), (m.FAILS, 3), (m.VIOLATED, 3), (m.BROKEN, 2)],
    ids=lambda each: getattr(each, "name", each),
)
def test_exit_codes(only, capsys, statement, code):
    only(m.HOLDS, statement, m.HOLDS)
    (_, got, _) = found(capsys, code=code)
    assert got["as_expected"] is (code == 0)


def test_a_broken_check_outweighs_a_surprise(only, capsys):
    only(m.FAILS, m.BROKEN)
    assert "Not as expected: fails, broken." in said(capsys, code=2)


def test_seed_and_effort(only, capsys):
    only(m.HOLDS)
    (got,) = found(capsys, "--seed", "7", "--full")
    assert got["evidence"]["finding"] == "many"
    assert got["evidence"]["measured"][0]["value"] == 7
    (got,) = found(capsys, "--quick")
    assert got["evidence"]["finding"] == "few"
    assert "seed 7 · full" in said(capsys, "--seed", "7", "--full")


def test_only_some(only, capsys):
    only(m.HOLDS, m.FAILS, others=(m.OPEN, m.TRAINED))
    got = found(capsys, "--only", "open, holds")
    assert [each["theorem"] for each in got] == ["holds", "open"]
    (got,) = found(capsys, "--only", "trained")
    assert got["evidence"]["inconclusive"] == "it is a statement about trained models"


def test_json_says_everything(only, capsys):
    only(m.HOLDS)
    (got,) = found(capsys)
    assert [*got] == [
        "theorem", "where", "verdict", "evidence", "seconds", "as_expected", "statement"
    ]  # fmt: skip
    assert got["statement"]["subject"] == "Made up"
    assert got["statement"]["latex"] == m.HOLDS.latex
    assert got["evidence"]["controls"][0]["measured"][0]["holds"] is False


def test_files(only, capsys, here):
    only(m.HOLDS)
    assert run(["theorems", "--out", "p.html", "--json", "p.json"]) == 0
    assert capsys.readouterr().out.endswith("wrote p.html\nwrote p.json\n")
    assert "<title>What the theory says, on random weights" in (here / "p.html").read_text("utf-8")
    assert json.loads((here / "p.json").read_text("utf-8"))[0]["theorem"] == "holds"
    assert run(["theorems", "--out", "q.html", "--quiet"]) == 0
    assert capsys.readouterr() == ("", "")
    assert run(["theorems", "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)
    assert "What the theory says" in err


def test_names_are_listed(only, capsys):
    only(m.HOLDS, others=(m.TRAINED,))
    out = said(capsys, "--list")
    assert "Made up holds What <holds> says of d_k (exercise 3)" in out
    assert "for --reproduce nobody-1906" in out
    got = found(capsys, "--list")
    assert [each["name"] for each in got] == ["holds", "trained", "nobody-1906"]
    assert got[1]["on_random_weights"] is False
    assert got[1]["on_trained_models"] is True


def test_a_paper_is_repeated(only, capsys):
    only(m.HOLDS)
    (got,) = found(capsys, "--reproduce", "nobody-1906")
    assert got["statement"]["reproduces"] == "figure 7"
    assert said(capsys, "--reproduce", "nobody-1906").startswith("Results of papers, repeated")


# ------------------------------------------------------------------ trained models


def test_what_can_be_said_of_a_model(only, capsys, model):
    only(m.HOLDS, m.FAILS, m.VIOLATED, m.OPEN, m.TRAINED)
    out = said(capsys, "folder/name")
    assert out.startswith("What the theory says of folder/name seed 0 · 256 tokens at most of a")
    assert "4 statements: 1 HOLDS, 1 ASSUMPTION-VIOLATED, 2 INCONCLUSIVE." in out
    assert "Layer 3 is NaN." in out
    assert model.opened == [("folder/name", None, None, False)]
    assert model.trained == [(None, 256, 0)]


def test_every_option_reaches_the_model(only, capsys, model, here):
    only(m.HOLDS)
    (here / "t.txt").write_text("Call me Ishmael.")
    line = "m --text t.txt --tokens 31 --dtype bfloat16 --device cuda:1 --trust-remote-code"
    (got,) = found(capsys, *line.split(), "--seed", "7")
    assert got["where"] == "m"
    assert model.opened == [("m", "bfloat16", "cuda:1", True)]
    assert model.trained == [("Call me Ishmael.", 31, 7)]
    assert "31 tokens at most of t.txt" in said(capsys, *line.split())


def test_the_model_inside_the_package(only, capsys, model):
    only(m.HOLDS)
    assert found(capsys, "--embedded")[0]["where"] == "embedded-model"
    assert model.opened == [(None, None, None, False)]


def test_a_statement_that_fails_on_a_model(only, capsys, model):
    only(m.theorem("x", None, lambda model: m.evidence(measured=(m.BAD,))))
    assert "Not as expected: x." in said(capsys, "m", code=3)


# ------------------------------------------------------------------ what cannot be done


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--only wrong", "no statement is called 'wrong'; allowed: holds"),
        ("--only holds,", "no statement is called ''; allowed: holds"),
        ("--reproduce wrong", "no statement is called 'wrong'; allowed: nobody-1906"),
        ("--list --only holds", "--list and --only were given; allowed: one of the two"),
        ("--reproduce x --grade y", "--reproduce and --grade were given; allowed: one of the two"),
        ("m --embedded", "MODEL m and --embedded; allowed: one of the two"),
        ("m --grade x", "--grade with a MODEL; leave one of the two out"),
        ("--embedded --reproduce x", "--reproduce with a MODEL; leave one of the two out"),
        ("m --full", "--full with a MODEL; allowed: --full on random weights"),
        ("--text t.txt", "--text without a MODEL; name one, or add --embedded"),
        ("--tokens 9", "--tokens without a MODEL; name one, or add --embedded"),
        ("--dtype float32", "--dtype without a MODEL; name one, or add --embedded"),
        ("--device cpu", "--device without a MODEL; name one, or add --embedded"),
        ("--trust-remote-code", "--trust-remote-code without a MODEL; name one, or add --embedded"),
        ("m --tokens 1", "--tokens is 1; allowed: 2 or more"),
        ("--seed -1", "--seed -1; allowed: 0 to 2^63 - 1"),
        ("--out x.txt", "x.txt as a file; allowed: a name that ends in .html"),
        ("--out no/x.html", "cannot write no/x.html: there is no folder no; make it or name"
         " another"),
        ("--grade a.py:f --out x.html", "--out with --grade; allowed: the terminal and --json"),
        ("--list --full", "--full with --list; leave it out"),
        ("--grade a.py", "'a.py' names no function of a file; allowed: FILE.py:FUNCTION"),
        ("--grade a.py:f", "there is no file a.py; allowed: FILE.py:FUNCTION"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_one_line(only, capsys, monkeypatch, line, message):
    only(m.HOLDS)
    assert refused(capsys, *line.split()) == message


def test_a_file_that_is_read_is_not_written_over(only, capsys, here):
    only(m.HOLDS)
    (here / "mine.json").write_text("{}")
    line = "--grade mine.json:f --json mine.json"
    assert "mine.json is read, so it cannot be written over" in refused(capsys, *line.split())


def test_nothing_is_opened_for_a_name_that_is_unknown(only, capsys, model):
    only(m.HOLDS)
    assert "no statement is called 'wrong'" in refused(capsys, "m", "--only", "wrong")
    assert model.opened == []


# ------------------------------------------------------------------ real statements


def test_one_real_statement(here, capsys):
    (got,) = found(capsys, "--only", "convex-combination")
    assert (got["verdict"], got["where"]) == ("HOLDS", "random weights")


def test_one_real_statement_on_the_model_inside_the_package(here, capsys):
    (got,) = found(capsys, "--embedded", "--only", "convex-combination", "--tokens", "61")
    assert (got["verdict"], got["as_expected"]) == ("HOLDS", True)


# ------------------------------------------------------------------ --grade

RIGHT = """
import math
import torch

def attention(x, w_q, w_k, w_v, w_o, heads, *, mask=None):
    b, n, d = x.shape
    q, k, v = ((x @ w).view(b, n, heads, -1).transpose(1, 2) for w in (w_q, w_k, w_v))
    s = q @ k.transpose(-1, -2) / math.sqrt(d // heads)
    if mask is not None:
        s = s.masked_fill(~mask, -math.inf)
    a = s.softmax(-1).nan_to_num(0.0)
    return (a @ v).transpose(1, 2).reshape(b, n, d) @ w_o
"""


def test_a_right_function_passes(here, capsys):
    (here / "mine.py").write_text(RIGHT)
    out = said(capsys, "--grade", "mine.py:attention")
    assert out.startswith("attention meets")
    assert "not supported: grouped heads" in out
    assert "FAILED" not in out


@pytest.mark.parametrize(
    ("old", "new", "requirement", "cause"),
    [
        (" / math.sqrt(d // heads)", "", "scale", "the scale 1/√d_k is missing"),
        (".transpose(1, 2).reshape", ".reshape", "heads", "merged without the transpose"),
        ("~mask", "mask", "causal mask", ""),
    ],
)
def test_wrong_functions_are_told_what_is_wrong(here, capsys, old, new, requirement, cause):
    assert RIGHT.count(old) == 1
    (here / "mine.py").write_text(RIGHT.replace(old, new))
    got = found(capsys, "--grade", "mine.py:attention", code=3)
    failed = [each for each in got["requirements"] if each["mark"] == "FAILED"]
    assert requirement in [each["requirement"] for each in failed]
    one = next(each for each in failed if each["requirement"] == requirement)
    assert cause in one["cause"]
    assert one["case"]["n"] <= 2
    out = said(capsys, "--grade", "mine.py:attention", code=3)
    assert f"{requirement} FAILED {one['asks']} {one['sentence']}" in out


def test_a_function_that_raises_gets_a_sentence(here, capsys):
    (here / "mine.py").write_text("def attention(*x, **y):\n    raise ValueError('[bold]no')\n")
    assert "it raised ValueError: [bold]no" in said(capsys, "--grade", "mine.py:attention", code=3)
