"""``headwise health`` as a user types it, on runs that are made up."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from headwise.cli.app import run as command
from headwise.cli.health_output import followed
from tests.report.health_runs import failing, record, run, write


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HEADWISE_TRACEBACK", raising=False)
    monkeypatch.setenv("COLUMNS", "80")
    write(tmp_path / "good", run())
    write(tmp_path / "bad", failing())
    return tmp_path


def said(capsys, *arguments, code=0):
    """What a run prints."""
    assert command(["health", *arguments]) == code
    out, err = capsys.readouterr()
    assert err == ""
    return out


def refused(capsys, *arguments):
    assert command(["health", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("headwise: ")
    assert err.count("\n") == 1
    return err


def test_a_healthy_run(here, capsys):
    out = said(capsys, "good")
    lines = [line.rstrip() for line in out.splitlines()]
    assert lines[0] == "good"
    assert lines[1] == (
        "Decoder · 3 layers × 5 heads · 1,013 parameters · 11 records · steps 1 to 100"
    )
    assert "No alarm." in lines
    [loss] = [line for line in lines if line.startswith("loss ")]
    assert loss.split()[-3:] == ["5", "3.15", "nats"]
    assert max(map(len, lines)) <= 80


def test_a_failing_run_tells_alarms_in_order(here, capsys):
    out = " ".join(said(capsys, "bad").split())
    assert "the first at step" in out
    assert "The loss shows it from step 181 on" in out
    assert "NaN" in out


def test_page_and_json_and_quiet(here, capsys):
    assert said(capsys, "bad", "good", "--out", "h.html", "--json", "h.json", "--quiet") == ""
    assert "Training health: bad, good" in (here / "h.html").read_text()
    first, second = json.loads((here / "h.json").read_text())
    assert first["loss"][-1] is None
    assert first["alarms"][0]["step"] == min(alarm["step"] for alarm in first["alarms"])
    assert second["alarms"] == []
    assert len(second["figures"]["max_logit"]["by_step"]) == 11
    assert second["figures"]["max_logit"]["layers"] == [f"blocks.{i}.attention" for i in range(3)]


def test_json_to_standard_output_leaves_the_summary_to_stderr(here, capsys):
    assert command(["health", "good", "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["steps"][0] == 1
    assert "No alarm." in err


def test_a_cut_line_is_left_out_and_told(here, capsys):
    write(here / "cut", run(), ending=record(999).to_json()[:77])
    out = " ".join(said(capsys, "cut").split())
    assert "11 records" in out
    assert "A line of the file was not whole and is left out" in out


def test_facts_that_are_no_facts_are_passed_over(here, capsys):
    for text in ("[1, 2]", "null", "{", '{"model": 3, "parameters": "x", "rows": []}'):
        (here / "good" / "health.json").write_text(text)
        assert "11 records" in said(capsys, "good")


@pytest.mark.parametrize("text", ["", "\n\n", "[1]\n5\n", '{"step": 1}\n', "\x00\x01\n", "null\n"])
def test_a_file_without_a_record(here, capsys, text):
    (here / "good" / "health.jsonl").write_text(text)
    assert "holds no whole record" in refused(capsys, "good")


@pytest.mark.parametrize(
    "change",
    [
        {"step": "a"}, {"time": []}, {"layers": 3}, {"layers": ["a"]}, {"stream": [1]},
        {"values": {"loss": "low"}}, {"weights": {"a": 1}}, {"non_finite": 0}, {"more": 1},
        {"layers": [{"module": "a", "number": 0, "role": "self", "figures": {"max_logit": "x"}}]},
        {"layers": [{"module": 1, "number": 0, "role": "self", "figures": {}}]},
    ],
)  # fmt: skip
def test_records_of_another_program(here, capsys, change):
    line = json.dumps(json.loads(record(5).to_json()) | change)
    (here / "good" / "health.jsonl").write_text(line + "\n")
    assert "holds no whole record" in refused(capsys, "good")


def test_records_of_two_models_in_one_file(here, capsys):
    lines = "".join(record(step, heads=heads).to_json() + "\n" for step, heads in ((1, 5), (2, 3)))
    (here / "good" / "health.jsonl").write_text(lines)
    assert "2 records" in said(capsys, "good")


def test_a_record_without_figures(here, capsys):
    made = json.loads(record(5).to_json())
    for layer in made["layers"]:
        layer["figures"] = {"entropy": [0.5]} if layer["number"] else {}
    (here / "good" / "health.jsonl").write_text(json.dumps(made) + "\n")
    (here / "good" / "health.json").write_text('{"sizes": [1]}')
    assert "1 record · step 5" in said(capsys, "good")


def test_folders_that_are_none_of_a_run(here, capsys):
    (here / "empty").mkdir()
    assert "empty has no health.jsonl" in refused(capsys, "empty")
    assert "missing is no folder" in refused(capsys, "missing")
    assert "is no folder" in refused(capsys, "good/health.jsonl")
    assert "is no folder" in refused(capsys, "good", "missing")


def test_options_that_do_not_fit(here, capsys):
    assert "a name that ends in .html" in refused(capsys, "good", "--out", "page.txt")
    assert "--follow and --out" in refused(capsys, "good", "--follow", "--out", "p.html")
    assert "--follow and OTHER_DIR" in refused(capsys, "good", "bad", "--follow")
    assert "--follow and --json" in refused(capsys, "good", "--follow", "--json")
    assert "is no folder" in refused(capsys, "missing", "--follow")
    assert "missing argument" in refused(capsys)
    assert sorted(path.name for path in here.iterdir()) == ["bad", "good"]


def test_follow_shows_new_records_until_it_is_stopped(here, monkeypatch):
    (here / "live").mkdir()
    shown = io.StringIO()
    monkeypatch.setattr("rich.console.Console", lambda: Console(file=shown, width=80))
    pauses = []

    def wait(seconds):
        pauses.append(seconds)
        if len(pauses) == 3:
            raise KeyboardInterrupt
        write(here / "live", run(len(pauses)))

    assert followed(here / "live", wait) == 0
    lines = [line.rstrip() for line in shown.getvalue().splitlines()]
    assert "Decoder · 3 layers × 5 heads · 1,013 parameters · 2 records · steps 1 to 10" in lines


def test_follow_starts_over_with_a_run_that_does(here, monkeypatch):
    shown = io.StringIO()
    monkeypatch.setattr("rich.console.Console", lambda: Console(file=shown, width=80))

    def wait(seconds):
        if len((here / "good" / "health.jsonl").read_text().splitlines()) == 1:
            raise KeyboardInterrupt
        write(here / "good", run(1))

    # The second look, after the file became shorter, is taken before the run is stopped.
    looks = iter((wait, lambda _: None, wait))
    assert followed(here / "good", lambda seconds: next(looks)(seconds)) == 0
    assert " 1 record · step 1" in shown.getvalue()
