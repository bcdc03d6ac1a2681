"""``headwise train``: bad input is one exact line; a run ends with what to do next."""

from __future__ import annotations

import json
import signal

import pytest

from headwise.errors import OptionError
from headwise.models import preset
from headwise.models.checkpoints import load
from headwise.monitoring.record import read_run
from headwise.training import loop
from tests.training.small import TEXT, settings

EXAMPLE = "for example: headwise train book.txt --out run\n"
DECODERS = "gpt2-small, gpt2-medium, gpt2-large, gpt2-xl, llama-15m, smollm2-135m, tiny"
LINES = {
    "train": f"headwise: TEXT is missing; {EXAMPLE}",
    "train t.txt": f"headwise: --out is missing; {EXAMPLE}",
    "train none.txt --out run": "headwise: there is no text file none.txt\n",
    "train empty.txt --out run": "headwise: the text empty.txt is empty; name a file with text in "
    "it\n",
    "train latin.txt --out run": "headwise: the text latin.txt is not UTF-8: byte 0xe9 at position "
    "3 (line 1); convert it first, for example: iconv -f LATIN1 -t UTF-8\n",
    "train folder --out run": "headwise: the folder folder holds no text; allowed: files ending in "
    ".txt, .text, .md\n",
    "train t.txt --out t.txt": "headwise: t.txt is a file; name a folder for the run\n",
    "train t.txt --out run --resume": "headwise: run holds no run to resume: there is no "
    "training.safetensors; leave out --resume to start one\n",
    "train t.txt --out old": "headwise: old holds a run already; add --resume to continue it, or "
    "name another folder\n",
    "train t.txt --out run --lr 0": "headwise: lr is 0.0: input should be greater than 0\n",
    "train t.txt --out run --lr -1": "headwise: lr is -1.0: input should be greater than 0\n",
    "train t.txt --out run --lr nan": "headwise: lr is nan: input should be a finite number\n",
    "train t.txt --out run --steps 0": "headwise: steps is 0: input should be greater than or "
    "equal to 1\n",
    "train t.txt --out run --vocab 100": "headwise: vocab is 100: input should be greater than or "
    "equal to 257\n",
    "train t.txt --out run --schedule linear": "headwise: schedule is linear: input should be "
    "'constant' or 'cosine'\n",
    "train t.txt --out run --precision float16": "headwise: precision is float16: input should be "
    "'float32' or 'bfloat16'\n",
    "train t.txt --out run --d-model 13 --heads 3": "headwise: 3 heads do not divide the width 13; "
    "allowed: a number of heads that divides d_model; change one of the two, or give d_head\n",
    "train t.txt --out run --heads 4 --kv-heads 3": "headwise: 4 query heads cannot share 3 "
    "key-value heads; allowed: a number of key-value heads that divides the query heads; "
    "change the sizes of the model\n",
    "train t.txt --out run --preset bert-base": "headwise: the preset bert-base is an encoder; "
    f"allowed: {DECODERS}\n",
    "train t.txt --out run --preset transformer-base": "headwise: the preset transformer-base is "
    f"an encoder-decoder; allowed: {DECODERS}\n",
    "train t.txt --out run --preset gpt5": f"headwise: no preset 'gpt5'; allowed: {DECODERS}\n",
    "train t.txt --out run --preset tiny --layers 3": "headwise: the preset tiny and sizes of the "
    "model; allowed: one of the two\n",
    "train t.txt --out run --batch 3 --accumulate 2": "headwise: a batch of 3 cannot be cut into 2 "
    "equal micro-batches\n",
    "train t.txt --out run --monitor --monitor-every 0": "headwise: monitor_every is 0; allowed: "
    "1 or more\n",
    "train t.txt --out run --config none.toml": "headwise: there is no config file none.toml\n",
    "train t.txt --out run --config odd.toml": "headwise: odd.toml: there is no setting learning\n",
    "train t.txt --out run --tokenizer t.json": "headwise: there is no tokenizer t.json; allowed: "
    '"bpe", "bytes", or a file tokenizer.json\n',
    "train t.txt --out run --device cuda:99": "headwise: the device cuda:99 is not there; allowed: "
    "auto, cpu; use cpu\n",
    "train t.txt --out run --tokenizer bytes --context 9999": "headwise: the text is too short: "
    "its training part has 1,046 tokens; allowed: more than the context of 9,999; use more text or "
    "a smaller context, or another validation share\n",
}


@pytest.fixture
def desk(stage):
    """The stage with texts, configs and a folder that holds a run."""
    (stage.folder / "t.txt").write_text(TEXT[:1100])
    (stage.folder / "empty.txt").write_text(" \n")
    (stage.folder / "latin.txt").write_bytes(b"caf\xe9")
    (stage.folder / "odd.toml").write_text("learning = 1\n")
    (stage.folder / "folder").mkdir()
    (stage.folder / "old").mkdir()
    (stage.folder / "old" / "training.safetensors").touch()
    (stage.folder / "small.json").write_text(json.dumps(settings()))
    return stage


@pytest.mark.parametrize("line", LINES)
def test_bad_input(desk, line):
    code, out, err = desk.run(*line.split())
    assert (code, out, err) == (2, "", LINES[line])
    assert not (desk.folder / "run" / "training.safetensors").exists()


def test_a_text_that_is_too_short_leaves_no_folder_when_it_was_not_read(desk):
    desk.run("train", "none.txt", "--out", "run")
    assert not (desk.folder / "run").exists()


def test_a_run_and_what_to_do_next(desk):
    code, out, err = desk.run("train", "t.txt", "--config", "small.json", "--out", "run")
    assert (code, err) == (0, "")
    first, second, *rest = out.splitlines()
    assert first.startswith("7 steps, 966 tokens in 0:0")
    assert " on validation (nats per token); " in second
    assert rest == [
        "the model is in run; next:",
        "  headwise report run",
        '  headwise generate --model run "…"',
    ]
    again = desk.run("train", "t.txt", "--config", "small.json", "--out", "run", "--resume", "-q")
    assert again == (0, "", "")


@pytest.mark.parametrize(
    ("options", "steps"), [((), None), (("--monitor",), [1]), (("--monitor-every", "3"), [1, 3, 6])]
)
def test_a_monitor_is_off_until_it_is_asked_for(desk, options, steps):
    line = "train t.txt --config small.json --out run -q"
    assert desk.run(*line.split(), *options) == (0, "", "")
    if steps is None:
        assert not list((desk.folder / "run").glob("health*"))
    else:
        assert [record.step for record in read_run(desk.folder / "run").records] == steps


def test_a_preset_by_name(desk):
    given = {**settings(steps=1), "repeated": 0, "validation": 0.2}
    del given["model"], given["context"]
    (desk.folder / "bare.json").write_text(json.dumps(given))
    line = "train t.txt --config bare.json --preset tiny -q --out"
    assert desk.run(*line.split(), "run") == (0, "", "")
    made = load(desk.folder / "run").model.architecture
    assert made == preset("tiny")  # of 257 tokens, as the tokenizer of bytes
    assert desk.run(*line.split(), "run", "--resume", "--steps", "2") == (0, "", "")
    assert desk.run(*line.split(), "short", "--context", "19") == (0, "", "")
    assert load(desk.folder / "short").model.architecture.context == 19
    code, _, err = desk.run(*line.split(), "run", "--resume", "--context", "19")
    assert (code, err.split(" in the run")[0]) == (2, "headwise: context is 19 and was 64")


def test_the_next_commands_work(desk):
    desk.run("train", "t.txt", "--config", "small.json", "--out", "run", "-q")
    code, out, err = desk.run("generate", "--model", "run", "The quick", "--tokens", "5")
    assert (code, err) == (0, "")
    assert out


def test_options_win_over_the_file(desk, monkeypatch):
    seen = {}

    def train(text, config, **arguments):
        seen.update(arguments, config=config)
        raise OptionError("enough")

    monkeypatch.setattr(loop, "train", train)
    desk.run("train", "t.txt", "--config", "small.json", "--out", "run", "--lr", "0.5",
             "--layers", "3", "--seed", "9")  # fmt: skip
    assert (seen["lr"], seen["model"], seen["seed"]) == (0.5, {"layers": 3}, 9)
    config = loop.read_config(seen["config"], lr=0.5, model={"layers": 3}, seed=9)
    assert (config.model.layers, config.model.d_model, config.lr) == (3, 12, 0.5)


def test_ctrl_c_is_one_line_and_130(desk, monkeypatch):
    record = loop._Run._record

    def press(self, found, log):
        if self.step == 1:
            signal.raise_signal(signal.SIGINT)
        record(self, found, log)

    with monkeypatch.context() as patched:
        patched.setattr(loop._Run, "_record", press)
        code, out, err = desk.run("train", "t.txt", "--config", "small.json", "--out", "run")
    assert (code, out) == (130, "")
    assert err == ("headwise: stopped at step 2; saved in run; --resume goes on from there\n")
    code, out, _ = desk.run("train", "t.txt", "--out", "run", "--resume")
    assert code == 0
    assert out.startswith("7 steps, ")


def test_a_second_ctrl_c_says_what_stands(desk, monkeypatch):
    def press(self, found, log):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(loop._Run, "_record", press)
    code, out, err = desk.run("train", "t.txt", "--config", "small.json", "--out", "run")
    assert (code, out) == (130, "")
    assert err == "headwise: stopped; the last checkpoint, if there is one, stands in run\n"
