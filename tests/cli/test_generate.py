"""``headwise generate``: what it prints and when, and how bad input ends."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

import headwise as hw
from headwise.models import build, preset
from headwise.models.architecture import Unembedding
from headwise.models.checkpoints import save
from headwise.training.tokenizer import byte_tokenizer


@pytest.fixture
def folder(stage):
    """A tiny model over bytes whose answers vary, with its tokenizer."""
    sizes = preset("tiny").model_copy(update={"unembedding": Unembedding(tied=False)})
    model = build(sizes)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.mul_(10)
    save(model, stage.folder / "bare")
    return save(model, stage.folder / "model", byte_tokenizer())


def test_the_answer_is_that_of_the_library(stage, folder):
    answer = hw.generate(folder, "Where?", tokens=23)
    line = ("generate", "--model", "model", "Where?", "--tokens", "23")
    assert stage.run(*line) == (0, answer + "\n", "")
    drawn = hw.generate(
        folder, "Where?", tokens=23, temperature=1.5, top_k=50, top_p=0.9,
        repetition_penalty=1.1, seed=3,
    )  # fmt: skip
    more = "--temperature 1.5 --top-k 50 --top-p 0.9 --repetition-penalty 1.1 --seed 3"
    assert stage.run(*line, *more.split()) == (0, drawn + "\n", "")
    assert drawn != answer
    short = hw.generate(folder, "Where?", tokens=23, stop=[answer[7], answer[5]])
    stops = ("--stop", answer[7], "--stop", answer[5])
    assert stage.run(*line, *stops) == (0, short + "\n", "")
    assert len(short) < len(answer)


def test_the_prompt_from_standard_input(stage, folder, monkeypatch):
    line = ("generate", "--model", "model", "--tokens", "5")
    wanted = stage.run(*line, "Where?")
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(b"Where?\n")))
    assert stage.run(*line, "-") == wanted
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(b"")))
    assert stage.run(*line, "-")[2].startswith("headwise: the text standard input is empty")


LINES = {
    "generate": "headwise: TEXT is missing; for example: headwise generate ",
    "generate --model model": "headwise: TEXT is missing",
    "generate --model none text": "headwise: there is no file or folder none",
    "generate --model bare text": "headwise: bare has no tokenizer.json; put it there",
    "generate --model model text --tokens 0": "headwise: 0 new tokens; allowed: 1 or more",
    "generate --model model text --tokens 61": "headwise: a prompt of 4 and 61 new tokens for a "
    "context of 64; allowed: 60 new tokens; shorten the prompt or ask for fewer tokens",
    "generate --model none text --temperature -1": "headwise: a temperature of -1; allowed: 0 (the",
    "generate --model none text --temperature nan": "headwise: a temperature of nan",
    "generate --model none text --top-p 0": "headwise: a top-p of 0; allowed: above 0, up to 1",
    "generate --model none text --top-p 1.01": "headwise: a top-p of 1.01",
    "generate --model none text --top-k 0": "headwise: a top-k of 0; allowed: 1 or more",
    "generate --model none text --repetition-penalty 0": "headwise: a repetition penalty of 0",
    "generate --model none text --dtype int8": "headwise: --dtype is 'int8'; allowed: float32",
    "generate --model none text --device auto": "headwise: device is 'auto', which spreads",
    "generate --model none two words": "headwise: got unexpected extra argument",
}


@pytest.mark.parametrize("line", LINES)
def test_bad_input(stage, folder, line):
    code, out, err = stage.run(*line.split())
    assert (code, out) == (2, "")
    assert err.startswith(LINES[line])
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "headwise: the prompt is empty; give a text to go on from\n"),
        ("a" * 64, "headwise: a prompt of 64 and 1 new tokens for a context of 64; allowed: a "
         "prompt of 63 or fewer; shorten the prompt or ask for fewer tokens\n"),
    ],
)  # fmt: skip
def test_bad_prompts(stage, folder, text, message):
    assert stage.run("generate", "--model", "model", text) == (2, "", message)


def test_without_a_model_the_packaged_one_answers(stage, folder, monkeypatch):
    monkeypatch.setattr("headwise.models.embedded.embedded_model", lambda: folder)
    answer = hw.generate(folder, "Where?", tokens=5)
    assert stage.run("generate", "Where?", "--tokens", "5") == (0, answer + "\n", "")


def test_ctrl_c_leaves_what_was_printed(stage, monkeypatch):
    def stopped(*arguments, **settings):
        yield "what was "
        yield "printed"
        raise KeyboardInterrupt

    monkeypatch.setattr("headwise.models.text.stream", stopped)
    line = ("generate", "--model", "model", "text")
    assert stage.run(*line) == (130, "what was printed\n", "headwise: stopped\n")


def test_pieces_are_printed_as_they_are_made(stage, monkeypatch):
    seen: list[str] = []

    class Terminal(io.StringIO):
        encoding = "ascii"

        def isatty(self) -> bool:
            return True

        def flush(self) -> None:
            seen.append(self.getvalue())

    def pieces(*arguments, **settings):
        for count, piece in enumerate(("one", " \x1b[2Jtwo", "\té\n")):
            assert len(seen) == count  # what came before has been flushed
            yield piece

    monkeypatch.setattr("headwise.models.text.stream", pieces)
    monkeypatch.setattr(sys, "stdout", Terminal())
    assert stage.run("generate", "--model", "model", "text")[0] == 0
    assert seen[:3] == ["one", "one \\x1b[2Jtwo", "one \\x1b[2Jtwo\t?\n"]


def test_help_loads_nothing_heavy():
    code = (
        "import sys; from headwise.cli.app import run; run(['generate', '--help']);"
        "assert run(['generate']) == 2; assert 'torch' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False,
        env={**os.environ, "COLUMNS": "100"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "--repetition-penalty" in done.stdout
