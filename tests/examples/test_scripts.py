"""The scripts in examples/ run as a reader would run them, on tiny models."""

from __future__ import annotations

import runpy
import sys

import pytest

from headwise.monitoring.record import read_run
from tests.examples.blocks import ROOT
from tests.examples.models import DECODER, OTHER_DECODER

SCRIPTS = sorted((ROOT / "examples").glob("*.py"))
MOST_LINES = 60


@pytest.fixture
def shown(models, monkeypatch, capsys):
    def run(script: str, *arguments: str) -> str:
        path = ROOT / "examples" / f"{script}.py"
        monkeypatch.setattr(sys, "argv", [str(path), *arguments])
        runpy.run_path(str(path), run_name="__main__")
        return capsys.readouterr().out

    return run


def test_observe_your_loop(shown, models):
    out = shown("observe_your_loop", models[DECODER])
    assert "exact over all rows" in out
    assert "4 (2 key-value heads)" in out
    assert len(out.split("previous_mass")[1].splitlines()) == 6


def test_generate(shown, models):
    out = shown("generate", models[DECODER], "abc", "--tokens", "5").splitlines()
    lines = out[-7:]  # three of the prompt, four of the five new ones: the last is never read
    assert [line.endswith("new") for line in lines] == [False] * 3 + [True] * 4
    first = lines[0].split()
    assert first[:4] == ["'a'", "1.000", "0.000", "1.000"]
    assert "(12 of 12)" in lines[0]


def test_long_text(shown, models):
    out = shown("long_text", models[DECODER], "--layer", "1", "--tokens", "1031")
    assert "1,031" in out
    assert "layer 0 |" in out
    assert "layer 1 |" not in out
    assert "the 4 matrices of weights:     16 MiB" in out


def test_training_step(shown, models):
    lines = shown("training_step", models[DECODER]).splitlines()
    assert lines[0].startswith("loss 5.")  # about ln 263
    rows = [line.split() for line in lines[2:5]]
    assert [row[0] for row in rows] == ["0", "1", "2"]
    assert all(float(row[3]) > 0 for row in rows)


def test_compare_two_models(shown, models):
    out = shown("compare_two_models", models[DECODER], models[OTHER_DECODER], "--tokens", "101")
    assert "entropy_fraction" in out.split("the head that differs most")[0]
    assert len(out.split("the head that differs most")[1].strip().splitlines()) == 5


def test_attention_from_scratch(shown):
    lines = shown("attention_from_scratch").splitlines()
    assert [line for line in lines[:-1] if not line.startswith("passed")] == []
    assert lines[-1] == "attention meets 17 of 17 requirements."


def health_page(out, folder, *names):
    """The page of an experiment, and what was printed of each of its runs."""
    lines = out.splitlines()
    assert [line.split(":")[0] for line in lines if line[:1] not in " w"] == list(names)
    assert lines[-1] == f"wrote {folder}.html"
    assert all((folder / name / "health.jsonl").is_file() for name in names)
    page = folder.with_suffix(".html").read_text(encoding="utf-8")
    assert f"<h1>Training health: {', '.join(names)}</h1>" in page
    return page


def test_post_norm_without_warmup(shown, tmp_path):
    folder = tmp_path / "run"
    options = ("--steps", "6", "--layers", "2", "--out", str(folder))
    page = health_page(shown("post_norm_without_warmup", *options), folder, "post", "pre")
    assert "post: gradient norm by step and layer" in page


def test_no_scaling(shown, tmp_path):
    folder = tmp_path / "run"
    out = shown("no_scaling", "--steps", "6", "--out", str(folder))
    health_page(out, folder, "unscaled", "scaled")
    first = [read_run(folder / name).records[0].layers[0] for name in ("unscaled", "scaled")]
    logits = [layer.figures["max_abs_logit"][0] for layer in first]
    # The same weights and the same batch: 1 instead of 64^(-1/2), in float32.
    assert logits[0] == pytest.approx(8 * logits[1], rel=1e-5)


def test_logits_explode(shown, tmp_path):
    folder = tmp_path / "run"
    out = shown("logits_explode", "--steps", "6", "--out", str(folder))
    health_page(out, folder, "plain", "qk-norm", "qk-clip")
    assert len(read_run(folder / "qk-clip").records) == 6


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_scripts_are_short_and_tested(script):
    source = script.read_text(encoding="utf-8")
    assert len(source.splitlines()) <= MOST_LINES
    assert f"python examples/{script.name}" in source
    assert f"def test_{script.stem}(" in (ROOT / "tests/examples/test_scripts.py").read_text()
