"""Whole runs: what they leave, that they learn, and that stopping changes nothing."""

from __future__ import annotations

import json
import signal

import pytest
import torch
from safetensors.torch import load_file

from headwise.errors import (
    FileError,
    HeadwiseError,
    NonFiniteError,
    OptionError,
    TextError,
)
from headwise.models import preset
from headwise.models.checkpoints.loading import load
from headwise.monitoring.record import ABOUT, RECORDS, read_run
from headwise.training import loop
from headwise.training.checkpoint import STATE, read_state
from headwise.training.log import read_log
from headwise.training.loop import train
from headwise.training.tokenizer import byte_tokenizer
from tests.training.small import losses, settings, text_file


@pytest.fixture
def text(tmp_path):
    return text_file(tmp_path)


def press(step):
    """A progress function that presses Ctrl-C when a step is done."""

    def progress(done, total, what):
        if done == step:
            signal.raise_signal(signal.SIGINT)

    return progress


def test_the_folder_is_a_checkpoint(text, tmp_path):
    result = train(text, settings(), out=tmp_path / "run")
    assert result.steps == 7
    assert result.tokens == 7 * 6 * 23
    loaded = load(tmp_path / "run")
    ids = torch.tensor([[84, 104, 101]])
    logits = loaded.model(ids)
    assert logits.shape == (1, 3, 257)
    assert loaded.tokenizer.encode("The").ids == ids[0].tolist()
    state = read_state(tmp_path / "run")
    for name, tensor in load_file(tmp_path / "run" / "model.safetensors").items():
        assert tensor.equal(state.tensors[f"model.{name}"])
    assert not list((tmp_path / "run").glob(".*"))  # nothing half-written


def test_it_learns(text, tmp_path):
    changed = settings(steps=60, repeated=0.0, lr=1e-2, model={"d_model": 24, "heads": 2})
    result = train(text, changed, out=tmp_path / "run")
    first = losses(tmp_path / "run")[0]["loss"]
    assert 5 < first < 6  # ln 257
    assert result.loss < 3
    assert result.validation_loss < 3.5


def test_the_log_says_everything(text, tmp_path):
    result = train(text, settings(), out=tmp_path / "run")
    lines = read_log(tmp_path / "run")
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6, 7]
    assert [line["step"] for line in lines if "validation_loss" in line] == [3, 6, 7]
    assert any("repeated_loss" in line for line in lines)
    for line in lines:
        assert {"loss", "lr", "grad_norm", "tokens", "seconds"} <= set(line)
    assert lines[-1]["validation_loss"] == result.validation_loss
    assert lines[-1]["loss"] == result.loss
    assert lines[1]["lr"] == 3e-3


@pytest.mark.parametrize("stop", [2, 4])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_a_run_that_was_stopped_goes_on_bit_for_bit(text, tmp_path, stop, dropout):
    sizes = {"d_model": 12, "layers": 2, "heads": 3, "dropout": dropout}
    given = settings(model=sizes)
    train(text, given, out=tmp_path / "whole")
    stopped = train(text, given, out=tmp_path / "cut", progress=press(stop))
    assert stopped.interrupted
    assert stopped.steps == stop + 1  # the step that had begun is finished
    assert read_state(tmp_path / "cut").about["step"] == stop + 1
    resumed = train(text, out=tmp_path / "cut", resume=True)
    assert not resumed.interrupted
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")
    for file in ("model.safetensors", STATE):
        mine, theirs = (load_file(tmp_path / run / file) for run in ("cut", "whole"))
        assert mine.keys() == theirs.keys()
        assert all(mine[name].equal(theirs[name]) for name in mine)


def test_a_killed_run_goes_on_from_its_checkpoint(text, tmp_path, monkeypatch):
    train(text, settings(), out=tmp_path / "whole")

    def die(done, total, what):
        if done == 5:
            raise RuntimeError("killed")

    with pytest.raises(RuntimeError, match="killed"):
        train(text, settings(), out=tmp_path / "cut", progress=die)
    assert read_log(tmp_path / "cut")[-1]["step"] == 5  # past the checkpoint of step 3
    train(text, out=tmp_path / "cut", resume=True)
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")


def test_moments_matter_to_a_resumed_run(text, tmp_path, monkeypatch):
    """The comparison above would notice a resume that forgets the moments of AdamW."""
    train(text, settings(), out=tmp_path / "whole")
    train(text, settings(), out=tmp_path / "cut", progress=press(2))

    def forgetful(state, model, optimizer):
        for name, parameter in model.named_parameters():
            parameter.data.copy_(state.tensors[f"model.{name}"])

    monkeypatch.setattr(loop, "restore", forgetful)
    train(text, out=tmp_path / "cut", resume=True)
    assert losses(tmp_path / "cut")[:4] == losses(tmp_path / "whole")[:4]
    assert losses(tmp_path / "cut") != losses(tmp_path / "whole")


def test_a_second_ctrl_c_stops_at_once(text, tmp_path):
    def twice(done, total, what):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        train(text, settings(), out=tmp_path / "run", progress=twice)
    assert signal.getsignal(signal.SIGINT) is before
    assert not (tmp_path / "run" / STATE).exists()


def test_a_finished_run_can_be_made_longer(text, tmp_path):
    train(text, settings(schedule="constant"), out=tmp_path / "short", steps=3)
    train(text, out=tmp_path / "short", resume=True, steps=7)
    train(text, settings(schedule="constant"), out=tmp_path / "long")
    mine, theirs = (losses(tmp_path / run) for run in ("short", "long"))
    assert mine == theirs


def test_resuming_a_finished_run_keeps_it(text, tmp_path):
    done = train(text, settings(), out=tmp_path / "run")
    again = train(text, out=tmp_path / "run", resume=True)
    assert (again.steps, again.loss, again.validation_loss) == (
        done.steps, done.loss, done.validation_loss,
    )  # fmt: skip


@pytest.mark.parametrize("tokenizer", ["bpe", "file"])
def test_other_tokenizers(text, tmp_path, tokenizer):
    if tokenizer == "file":
        byte_tokenizer().save(str(tmp_path / "mine.json"))
        tokenizer = str(tmp_path / "mine.json")
    given = settings(tokenizer=tokenizer, vocab=300, steps=2)
    train(text, given, out=tmp_path / "run")
    loaded = load(tmp_path / "run")
    assert loaded.tokenizer.get_vocab_size() == loaded.model.architecture.vocab
    assert loaded.tokenizer.decode(loaded.tokenizer.encode("lazy dogs").ids) == "lazy dogs"


def test_an_architecture_in_full(text, tmp_path):
    train(text, settings(steps=1), out=tmp_path / "first")
    given = json.loads((tmp_path / "first" / "architecture.json").read_text())
    given["context"] = 29
    result = train(text, settings(steps=1, architecture=given), out=tmp_path / "run")
    assert load(result.folder).model.architecture.context == 29
    given["vocab"] = 100
    with pytest.raises(OptionError, match="the run needs 257 and 23"):
        train(text, settings(architecture=given), out=tmp_path / "other")


def test_a_preset_takes_the_vocabulary_of_the_tokenizer(text, tmp_path):
    given = settings(tokenizer="bpe", vocab=300, preset="tiny", steps=1)
    del given["model"]
    result = train(text, given, out=tmp_path / "run")
    model, tokenizer = load(result.folder).model, load(result.folder).tokenizer
    assert model.architecture.vocab == tokenizer.get_vocab_size() > 257
    assert model.architecture.context == 23
    assert model.architecture.stack == preset("tiny").stack


@pytest.mark.parametrize("also", ["model", "architecture"])
def test_a_preset_stands_alone(text, tmp_path, also):
    given = settings(preset="tiny")
    if also == "architecture":
        del given["model"]
        given["architecture"] = preset("tiny").model_dump(mode="json")
    with pytest.raises(OptionError, match=r"the preset tiny and .*; allowed: one of the two"):
        train(text, given, out=tmp_path / "run")


def test_the_callers_generator_is_left_alone(text, tmp_path):
    torch.manual_seed(5)
    want = torch.rand(3)
    torch.manual_seed(5)
    train(text, settings(steps=1), out=tmp_path / "run")
    assert torch.rand(3).equal(want)


def test_a_loss_that_is_not_finite_ends_the_run(text, tmp_path, monkeypatch):
    train(text, settings(), out=tmp_path / "whole")
    gradient = loop.Stepper.gradient

    def broken(self, step, **options):
        if step == 4:
            next(self.model.parameters()).data.fill_(float("nan"))
        return gradient(self, step, **options)

    monkeypatch.setattr(loop.Stepper, "gradient", broken)
    with pytest.raises(NonFiniteError, match="the loss is nan at step 5; the checkpoint of step 3"):
        train(text, settings(), out=tmp_path / "run")
    assert read_state(tmp_path / "run").about["step"] == 3
    monkeypatch.undo()
    train(text, out=tmp_path / "run", resume=True)
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")


def test_before_the_first_checkpoint_it_says_so(text, tmp_path):
    with pytest.raises(NonFiniteError, match=r"at step \d; nothing was saved yet; lower lr"):
        train(text, settings(lr=1e30, clip=None, save_every=99), out=tmp_path / "run")


@pytest.mark.parametrize(
    ("changed", "error", "line"),
    [
        ({"lr": 0}, OptionError, "lr is 0: input should be greater than 0"),
        ({"lr": float("nan")}, OptionError, "lr is nan"),
        ({"lerning": 1}, OptionError, "there is no setting lerning"),
        ({"model": {"d_mdel": 1}}, OptionError, "there is no setting model.d_mdel"),
        ({"model": {"d_model": 13, "heads": 3}}, HeadwiseError, "3 heads do not divide"),
        ({"model": {"heads": 4, "kv_heads": 3, "d_model": 16}}, HeadwiseError, "4 query heads"),
        ({"batch": 5, "accumulate": 2}, OptionError, "a batch of 5 cannot be cut into 2"),
        ({"betas": (0.9, 1.0)}, OptionError, "betas"),
        ({"final_lr": 1.0}, OptionError, "final_lr 1.0 is above lr"),
        ({"longest_period": 99}, OptionError, "repeated periods from 3 to 99 with a context of 23"),
        ({"context": 5000}, TextError, "the text is too short"),
        ({"tokenizer": "none.json"}, FileError, "there is no tokenizer none.json"),
        ({"tokenizer": "bpe", "vocab": 4000}, TextError, "too short for a vocabulary of 4,000"),
    ],
)
def test_what_does_not_fit_is_refused(text, tmp_path, changed, error, line):
    with pytest.raises(error, match=line):
        train(text, settings(**changed), out=tmp_path / "run")
    assert not (tmp_path / "run" / STATE).exists()
    assert not (tmp_path / "run" / "log.jsonl").exists()


def test_a_folder_with_a_run_is_only_entered_to_resume(text, tmp_path):
    with pytest.raises(FileError, match="holds no run to resume"):
        train(text, settings(), out=tmp_path / "run", resume=True)
    train(text, settings(steps=1), out=tmp_path / "run")
    with pytest.raises(OptionError, match="holds a run already; add --resume"):
        train(text, settings(), out=tmp_path / "run")
    with pytest.raises(OptionError, match="seed is 1 and was 0 in the run; allowed: a resumed run"):
        train(text, out=tmp_path / "run", resume=True, seed=1)
    text.write_text(text.read_text() + "More.")
    with pytest.raises(TextError, match="is not the one that the run in"):
        train(text, out=tmp_path / "run", resume=True)
    text.unlink()
    with pytest.raises(TextError, match="there is no text file"):
        train(text, out=tmp_path / "run", resume=True)
    (tmp_path / "file").write_text("x")
    with pytest.raises(FileError, match="is a file; name a folder"):
        train(text, settings(), out=tmp_path / "file")


def test_tensorboard_is_said_to_be_missing(text, tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(OptionError, match="tensorboard is not installed; pip install"):
        train(text, settings(), out=tmp_path / "run", tensorboard=True)


def test_tensorboard_events(text, tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    train(text, settings(), out=tmp_path / "run", tensorboard=True)
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    found = {e.step: e.value for e in events.Scalars("loss")}
    for line in read_log(tmp_path / "run"):
        assert found[line["step"]] == pytest.approx(line["loss"], rel=1e-6)


# ------------------------------------------------------------------------------------ monitored


def monitored(text, out, **changed):
    given = settings(accumulate=2)
    return train(text, given, out=out, monitor_every=2, **changed)


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_a_monitor_changes_nothing(text, tmp_path, dropout):
    sizes = {"d_model": 12, "layers": 2, "heads": 3, "dropout": dropout}
    given = settings(model=sizes, accumulate=2)
    train(text, given, out=tmp_path / "plain")
    train(text, given, out=tmp_path / "seen", monitor=True, monitor_every=2)
    assert losses(tmp_path / "seen") == losses(tmp_path / "plain")
    mine, theirs = (load_file(tmp_path / run / STATE) for run in ("seen", "plain"))
    assert all(mine[name].equal(theirs[name]) for name in mine)
    assert not (tmp_path / "plain" / RECORDS).exists()
    assert not (tmp_path / "plain" / ABOUT).exists()


def test_a_monitor_records_heads_layers_loss_and_rate(text, tmp_path):
    monitored(text, tmp_path / "run")
    run = read_run(tmp_path / "run")
    assert [record.step for record in run.records] == [1, 2, 4, 6]
    lines = {line["step"]: line for line in read_log(tmp_path / "run")}
    for record in run.records:
        line = lines[record.step]
        assert record.values["loss"] == line["loss"]
        assert record.values.get("repeated_loss") == line.get("repeated_loss")
        assert record.values["lr"] == line["lr"]
        assert [layer.number for layer in record.layers] == [0, 1]
        assert len(record.layers[0].figures["max_logit"]) == 3
        assert len(record.stream) == 2
        # The loss has no scale, and gradients are read before they are clipped.
        norm = sum(w["gradient"] ** 2 for w in record.weights.values()) ** 0.5
        assert norm == pytest.approx(line["grad_norm"], rel=1e-5)


@pytest.mark.parametrize("killed", [5, 6])
def test_a_monitored_run_goes_on(text, tmp_path, killed):
    monitored(text, tmp_path / "whole")

    def die(done, total, what):
        if done == killed:
            raise RuntimeError("killed")

    with pytest.raises(RuntimeError, match="killed"):
        monitored(text, tmp_path / "cut", progress=die)
    # Past the checkpoint: that of step 6 would have come after.
    assert read_run(tmp_path / "cut").records[-1].step == killed // 2 * 2
    train(text, out=tmp_path / "cut", resume=True, monitor=True, monitor_every=2)
    lines = (tmp_path / "cut" / RECORDS).read_text().splitlines()
    steps = [json.loads(line)["step"] for line in lines]
    assert steps == [1, 2, 4, 6]
    both = (read_run(tmp_path / run).records for run in ("whole", "cut"))
    for mine, theirs in zip(*both, strict=True):
        assert (mine.weights, mine.stream) == (theirs.weights, theirs.stream)
        assert mine.values == theirs.values


@pytest.mark.parametrize("every", [2, 5])
@pytest.mark.parametrize("step", [1, 5])
def test_a_monitor_says_where_the_first_nan_was(text, tmp_path, monkeypatch, every, step):
    gradient = loop.Stepper.gradient

    def broken(self, at, **options):
        if at == step - 1:
            attention = self.model.decoder.blocks[1].attention.branch
            attention.key.weight.data[0, 0] = float("nan")
        return gradient(self, at, **options)

    monkeypatch.setattr(loop.Stepper, "gradient", broken)
    where = "the keys of decoder.blocks.1.attention.branch"
    with pytest.raises(NonFiniteError, match=f"loss is nan at step {step}, first in {where}; "):
        train(text, settings(), out=tmp_path / "run", monitor=True, monitor_every=every)
    last = read_run(tmp_path / "run").records[-1]
    assert (last.step, last.non_finite) == (step, where)
    assert last.values["lr"] > 0


def test_a_monitor_every_nothing_is_refused(text, tmp_path):
    with pytest.raises(OptionError, match="monitor_every is 0; allowed: 1 or more"):
        train(text, settings(), out=tmp_path / "run", monitor=True, monitor_every=0)
    assert not (tmp_path / "run").exists()


def test_tensorboard_has_the_monitors_figures_too(text, tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monitored(text, tmp_path / "run", tensorboard=True)
    found = EventAccumulator(str(tmp_path / "run" / "tensorboard" / "health")).Reload()
    [layer, _] = read_run(tmp_path / "run").records[-1].layers
    last = found.Scalars(f"max_logit/{layer.module}")[-1]
    assert last.step == 6
    assert last.value == pytest.approx(max(layer.figures["max_logit"]), rel=1e-6)  # float32
