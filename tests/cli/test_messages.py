"""Bad input ends in one exact line on stderr, exit code 2, and no file."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from headwise.errors import ModelError, ResourceError

LINES = {
    "report --tokens 1": "headwise: --tokens is 1; allowed: 2 or more\n",
    "scan": "headwise: --out is missing; for example: headwise scan --out scan.nc\n",
    "scan m": "headwise: --out is missing; for example: headwise scan m --out scan.nc\n",
    "report m --tokens 1": "headwise: --tokens is 1; allowed: 2 or more\n",
    "report m --tokens -5": "headwise: --tokens is -5; allowed: 2 or more\n",
    "report m --batch 0": "headwise: --batch is 0; allowed: 1 or more\n",
    "report m --window 1": "headwise: --window is 1; allowed: 2 or more\n",
    "report m --rows 0": "headwise: --rows is 0; allowed: 1 or more\n",
    "report m --layers 5-3": "headwise: --layers '5-3'; allowed: numbers and ranges from 0 on, "
    "such as 0,3-5\n",
    "report m --layers ,": "headwise: --layers ','; allowed: numbers and ranges from 0 on, "
    "such as 0,3-5\n",
    "report m --heads a": "headwise: --heads 'a'; allowed: numbers and ranges from 0 on, "
    "such as 0,3-5\n",
    "report m --heads 0-999999999": "headwise: --heads '0-999999999'; allowed: numbers and ranges "
    "from 0 on, such as 0,3-5\n",
    "report m --out no/page.html": "headwise: cannot write no/page.html: there is no folder no; "
    "make it or name another\n",
    "report m --out .": "headwise: cannot write .: a folder has that name; name another file\n",
    "report m --out -": "headwise: --out is -; allowed: the name of a file\n",
    "report m --json found.txt": "headwise: got unexpected extra argument(s) (found.txt); the FILE "
    "after --json has to end in .json; see headwise report --help\n",
    "report m --out /dev/null": "headwise: cannot write /dev/null: it is a device or a pipe; name "
    "a file\n",
    "report m --save s.txt": "headwise: cannot save a scan as s.txt; allowed: .nc (NetCDF, one "
    "file) or .zarr (Zarr, a folder)\n",
    "report m --save no/s.nc": "headwise: cannot write no/s.nc: there is no folder no; make it or "
    "name another\n",
    "report m --json no/f.json": "headwise: cannot write no/f.json: there is no folder no; make it "
    "or name another\n",
    "scan m --out s": "headwise: cannot save a scan as s; allowed: .nc (NetCDF, one file) or .zarr "
    "(Zarr, a folder)\n",
    "report m --text none.txt": "headwise: there is no text file none.txt\n",
    "report m --text .": "headwise: cannot read the text .: is a directory\n",
    "show none.nc": "headwise: there is no file none.nc\n",
    "show": "headwise: missing argument 'FILE'; see headwise show --help\n",
    "report m n": "headwise: got unexpected extra argument(s) (n); see headwise report --help\n",
    "frob": "headwise: no such command 'frob'; see headwise --help\n",
}


@pytest.mark.parametrize("line", LINES)
def test_bad_input(stage, line):
    assert stage.run(*line.split()) == (2, "", LINES[line])
    assert stage.calls == []
    assert stage.files() == []


@pytest.mark.parametrize(
    ("line", "start"),
    [
        ("report m --tokns 7", "headwise: no such option: --tokns"),
        ("report m --tokens seven", "headwise: invalid value for '--tokens': "),
        ("report m --tokens", "headwise: option '--tokens' requires an argument"),
    ],
)
def test_usage_errors_are_one_line(stage, line, start):
    code, out, err = stage.run(*line.split())
    assert (code, out) == (2, "")
    assert err.startswith(start)
    assert err.endswith("; see headwise report --help\n")
    assert err.count("\n") == 1


def test_two_results_in_one_file(stage):
    code, _, err = stage.run("report", "m", "--out", "a.json", "--json", "a.json")
    assert code == 2
    assert err == f"headwise: two results are to be written to {stage.folder / 'a.json'}; " + (
        "allowed: one each\n"
    )


@pytest.mark.parametrize(
    ("line", "file"),
    [
        ("report m.gguf --out m.gguf", "m.gguf"),
        ("report m --text t.txt --out t.txt", "t.txt"),
        ("report m --text t.json --json ./t.json", "t.json"),
        ("scan m --text s.nc --out s.nc", "s.nc"),
    ],
)
def test_what_is_read_is_not_written_over(stage, line, file):
    (stage.folder / file).write_text("precious")
    assert stage.run(*line.split()) == (
        2,
        "",
        f"headwise: {file} is read, so it cannot be written over; name another file\n",
    )
    assert (stage.folder / file).read_text() == "precious"
    assert stage.calls == []


def test_the_scan_that_is_shown_is_not_written_over(stage):
    assert stage.run("scan", "m", "--out", "s.nc", "--quiet")[0] == 0
    before = (stage.folder / "s.nc").read_bytes()
    line = "headwise: s.nc is read, so it cannot be written over; name another file\n"
    assert stage.run("show", "s.nc", "--out", "s.nc") == (2, "", line)
    assert (stage.folder / "s.nc").read_bytes() == before


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "the text t.txt is empty; name a file with text in it"),
        (b" \n\t\n", "the text t.txt is empty; name a file with text in it"),
        (
            b"one\ntwo\ncaf\xe9",
            "the text t.txt is not UTF-8: byte 0xe9 at position 11 (line 3); convert it first, for "
            "example: iconv -f LATIN1 -t UTF-8",
        ),
        (
            "hi".encode("utf-16"),
            "the text t.txt is not UTF-8: byte 0xff at position 0 (line 1); convert it first, for "
            "example: iconv -f LATIN1 -t UTF-8",
        ),
    ],
)
def test_bad_text(stage, data, message):
    (stage.folder / "t.txt").write_bytes(data)
    assert stage.run("report", "m", "--text", "t.txt") == (2, "", f"headwise: {message}\n")
    assert stage.calls == []


def test_bad_text_on_standard_input(stage, monkeypatch):
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(b"\xff")))
    code, _, err = stage.run("report", "m", "--text", "-")
    assert code == 2
    assert err.startswith("headwise: the text standard input is not UTF-8: byte 0xff at position 0")


@pytest.mark.parametrize("error", [ModelError("no such model m"), ResourceError("out of memory")])
def test_errors_of_the_run_are_one_line(stage, error):
    stage.error = error
    assert stage.run("report", "m", "--save", "s.nc") == (2, "", f"headwise: {error}\n")
    assert stage.files() == []


def test_ctrl_c_before_anything_was_measured(stage):
    stage.error = KeyboardInterrupt()
    line = "headwise: stopped; nothing was written\n"
    assert stage.run("report", "m") == (130, "", line)
    assert stage.files() == []


def test_names_do_not_reach_the_terminal_as_control_characters(stage):
    stage.error = ModelError("no model m\x1b[31m\x07")
    assert stage.run("report", "m") == (2, "", "headwise: no model m\\x1b[31m\\x07\n")


@pytest.mark.parametrize("line", ["report m", "report m --json --quiet", "scan m --out s.nc"])
def test_standard_output_on_a_full_disk(stage, line):
    # In a process of its own: what is left over at its exit counts too.
    script = (
        "import sys; from types import SimpleNamespace as N; from headwise.cli.app import run; "
        "from tests.cli.conftest import FakeScan; from tests.results.synthetic import make_record; "
        "from headwise.results.label import to_dataset; "
        "made = FakeScan(to_dataset(make_record(layers=3, heads=5, tokens=37))); "
        "run_module = N(scan=lambda *a, **k: made, opened=lambda *a: None); "
        "sys.modules['headwise.observation.run'] = run_module; "
        "circuits = N(add_circuits=lambda dataset, *a, **k: dataset, text_reader=lambda *a: None);"
        " "
        "sys.modules['headwise.circuits.dataset'] = circuits; "
        "same = lambda dataset, *a, **k: dataset; "
        "sys.modules['headwise.observation.costed'] = N(add_cost=same); "
        "sys.modules['headwise.theorems.reported'] = N(add_theorems=same); "
        "sys.exit(run(sys.argv[1:]))"
    )
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", script, *line.split()],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        )
    assert done.stderr == (
        "headwise: cannot write the output: no space left on device; make room there\n"
    )
    assert done.returncode == 2


def test_memory(stage):
    stage.error = MemoryError()
    line = "headwise: out of memory; lower --tokens, --batch or --window\n"
    assert stage.run("report", "m") == (2, "", line)


def test_a_bug_is_one_line_and_says_how_to_see_more(stage, monkeypatch):
    stage.error = IndexError("list index\nout of range")
    code, out, err = stage.run("report", "m")
    assert (code, out) == (1, "")
    assert err == (
        "headwise: a bug in Headwise: IndexError: list index out of range; run again with "
        "HEADWISE_TRACEBACK=1 and report what it prints\n"
    )
    monkeypatch.setenv("HEADWISE_TRACEBACK", "1")
    _, _, err = stage.run("report", "m")
    assert "Traceback (most recent call last)" in err


def test_showing_what_is_not_a_scan(stage):
    (stage.folder / "s.nc").write_bytes(b"something else")
    assert stage.run("show", "s.nc") == (
        2,
        "",
        "headwise: s.nc is not a Headwise scan; allowed: what --save or scan.save wrote: .nc or "
        ".zarr\n",
    )
    assert stage.files() == ["s.nc"]
