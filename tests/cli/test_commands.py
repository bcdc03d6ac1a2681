"""What each command measures, writes and prints."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from headwise import __version__
from headwise.results.io import load
from headwise.results.label import to_dataset
from tests.results.synthetic import make_record

NOTHING = {
    "text": None,
    "tokens": None,
    "batch": 1,
    "window": None,
    "layers": None,
    "heads": None,
    "rows": None,
    "dtype": None,
    "device": None,
    "gradients": False,
    "allow_long": False,
    "trust_remote_code": False,
    "progress": None,
}


def test_version_and_help(stage):
    assert stage.run("--version") == (0, f"headwise {__version__}\n", "")
    code, out, err = stage.run()
    assert (code, err) == (0, "")
    assert stage.run("--help") == (0, out, "")
    for command in ("report", "scan", "show"):
        assert f"\n  {command} " in out
        code, text, err = stage.run(command, "--help")
        assert (code, err) == (0, "")
        assert text.startswith(f"Usage: headwise {command} ")


def test_report_writes_the_page(stage):
    code, out, err = stage.run("report", "org/Model-1.5B")
    assert (code, err) == (0, "")
    assert stage.files() == ["headwise-Model-1.5B.html"]
    assert out.endswith("wrote headwise-Model-1.5B.html\n")
    assert stage.calls == [("org/Model-1.5B", {**NOTHING, "each": None})]
    assert "<html" in (stage.folder / "headwise-Model-1.5B.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("model", "page"),
    [
        ("folder/SmolLM2.Q4_1.gguf", "headwise-SmolLM2.Q4_1.html"),
        ("org/name/", "headwise-name.html"),
        ("we ird/<b>", "headwise-b.html"),
        ("///", "headwise-model.html"),
    ],
)
def test_the_name_of_the_page(stage, model, page):
    assert stage.run("report", model, "--quiet") == (0, "", "")
    assert stage.files() == [page]


def test_every_option_reaches_the_scan(stage):
    (stage.folder / "t.txt").write_bytes("\ufeffCall me Ishmael.\r\n".encode())
    line = (
        "report m --text t.txt --tokens 31 --batch 3 --window 17 --layers 2,0-1 --heads 4 --rows 7 "
        "--dtype bfloat16 --device cuda:1 --gradients --allow-long --trust-remote-code --quiet"
    )
    assert stage.run(*line.split())[0] == 0
    assert stage.calls == [
        (
            "m",
            {
                "text": "Call me Ishmael.\r\n",
                "tokens": 31,
                "batch": 3,
                "window": 17,
                "layers": [0, 1, 2],
                "heads": [4],
                "rows": 7,
                "dtype": "bfloat16",
                "device": "cuda:1",
                "gradients": True,
                "allow_long": True,
                "trust_remote_code": True,
                "progress": None,
                "each": None,
            },
        )
    ]


def test_circuits_are_part_of_a_report_unless_turned_off(stage):
    assert stage.run("report", "m")[0] == 0
    assert stage.circuits == ["m"]
    assert stage.run("report", "m", "--no-circuits")[0] == 0
    assert stage.circuits == ["m"]


def test_statements_are_part_of_a_report_unless_turned_off(stage):
    (stage.folder / "t.txt").write_text("Call me Ishmael.")
    assert stage.run("report", "m", "--text", "t.txt", "--tokens", "31")[0] == 0
    assert stage.theorems == [("m", "Call me Ishmael.", 31)]
    assert stage.run("report", "m", "--no-theorems")[0] == 0
    assert len(stage.theorems) == 1


def test_report_saves_and_writes_json(stage):
    line = "report m --out page.html --save scan.nc --json found.json"
    code, out, err = stage.run(*line.split())
    assert (code, err) == (0, "")
    assert stage.files() == ["found.json", "page.html", "scan.nc"]
    assert out.endswith("wrote scan.nc\nwrote page.html\nwrote found.json\n")
    assert load("scan.nc").identical(to_dataset(stage.record))
    assert isinstance(json.loads((stage.folder / "found.json").read_text()), dict)


@pytest.mark.parametrize(
    "line",
    ["report m --json", "report m --json -", "report --json m", "report m --json --out p.html"],
)
def test_json_on_standard_output_stands_alone(stage, line):
    code, out, err = stage.run(*line.split())
    assert code == 0
    assert isinstance(json.loads(out), dict)
    assert "wrote" in err


def test_quiet_prints_nothing(stage):
    assert stage.run("report", "m", "--quiet", "--save", "s.zarr") == (0, "", "")
    assert stage.files() == ["headwise-m.html", "s.zarr"]


def test_scan_saves(stage):
    code, out, err = stage.run("scan", "m", "--out", "s.nc", "--keep-rows")
    assert (code, out, err) == (0, "the scan in words\nwrote s.nc\n", "")
    assert stage.files() == ["s.nc"]
    assert stage.calls == [("m", {**NOTHING, "keep_rows": True})]
    assert load("s.nc").identical(to_dataset(stage.record))


def test_show_gives_the_same_page_as_report(stage):
    assert stage.run("report", "m", "--out", "a.html", "--save", "s.zarr", "--quiet")[0] == 0
    assert stage.run("show", "s.zarr", "--quiet") == (0, "", "")
    assert stage.files() == ["a.html", "headwise-synthetic-decoder.html", "s.zarr"]
    pages = [(stage.folder / name).read_bytes() for name in stage.files()[:2]]
    assert pages[0] == pages[1]


def test_a_layer_that_is_not_finite_is_named_and_the_rest_written(stage):
    stage.record = make_record(layers=3, nan_layer=1)
    code, _, err = stage.run("report", "m", "--save", "s.nc")
    assert code == 2
    assert err == (
        "headwise: 1 of 3 attention layers is not finite: NaN in the queries of "
        "model.layers.1.self_attn; the results hold the other 2\n"
    )
    assert stage.files() == ["headwise-m.html", "s.nc"]


def test_weights_that_are_not_finite_are_named_though_no_layer_was_reached(stage):
    about = {**stage.record.about, "non_finite_weights": ["lm_head.weight", "x.bias"]}
    stage.record = replace(stage.record, about=about)
    code, _, err = stage.run("report", "m")
    assert code == 2
    assert err == (
        "headwise: NaN or infinity in the weights lm_head.weight and 1 more; no attention layer "
        "was reached by it\n"
    )
    assert stage.files() == ["headwise-m.html"]


def test_a_run_that_was_stopped_keeps_what_is_done(stage):
    stage.record = make_record(interrupted=True)
    code, _, err = stage.run("report", "m")
    assert code == 130
    assert err == "headwise: stopped; the results hold what was measured until then\n"
    assert stage.files() == ["headwise-m.html"]


def test_names_are_not_markup(stage):
    about = {**stage.record.about, "model": "[red]m[/red][/]"}
    stage.record = replace(stage.record, about=about)
    code, out, err = stage.run("report", "[m]", "--out", "[page].html")
    assert (code, err) == (0, "")
    assert "[red]m[/red][/]" in out
    assert "wrote [page].html" in out
