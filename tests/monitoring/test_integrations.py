"""Monitors in other people's loops: Trainer, Lightning, TensorBoard, and runs that go on."""

from __future__ import annotations

import importlib
import json
import math
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

import headwise as hw
from headwise.errors import ModelError, OptionError
from headwise.models import build as build_own
from headwise.models import preset
from headwise.monitoring import lightning, tensorboard
from headwise.monitoring.lightning import LightningMonitor
from headwise.monitoring.monitor import Monitor
from headwise.monitoring.record import RECORDS, LayerRecord, StepRecord, read_run
from headwise.monitoring.tensorboard import TensorBoardWriter
from headwise.monitoring.trainer import TrainerMonitor
from headwise.monitoring.writer import RunWriter
from tests.parity.families import build

# Of PyTorch and accelerate on a machine without a GPU.
pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning:transformers.*"),
    pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true:UserWarning"),
]

BATCH, CUT, STEPS = 3, 2, 5  # sequences of a micro-batch, micro-batches of a step, steps


def llama() -> Any:
    torch.manual_seed(3)
    return build("llama", AutoModelForCausalLM).train()


def texts(count: int = BATCH * CUT * STEPS, length: int = 13) -> list[dict[str, Any]]:
    ids = torch.randint(3, 31, (count, length), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": each, "labels": each} for each in ids]


class Heard(TrainerCallback):
    """Losses and rates that a Trainer logs."""

    def __init__(self) -> None:
        self.logs: list[dict[str, float]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **given: Any) -> None:
        self.logs.append({"step": state.global_step, **logs})

    def of(self, name: str) -> list[float]:
        return [each[name] for each in self.logs if name in each]


def trained(
    folder: Path, *callbacks: Any, resume: Any = None, kind: type = Trainer, **changed: Any
) -> tuple[Any, Heard]:
    model, heard = llama(), Heard()
    args = TrainingArguments(
        **{
            "output_dir": str(folder), "per_device_train_batch_size": BATCH,
            "gradient_accumulation_steps": CUT, "max_steps": STEPS, "logging_steps": 1,
            "report_to": [], "use_cpu": True, "disable_tqdm": True, "save_strategy": "no",
            "learning_rate": 1e-2, "seed": 7, **changed,
        }
    )  # fmt: skip
    data = texts()
    trainer = kind(
        model, args, train_dataset=data, eval_dataset=data[:BATCH], callbacks=[heard, *callbacks]
    )
    trainer.train(resume_from_checkpoint=resume)
    return model, heard


# ------------------------------------------------------------------------------------ Trainer


def test_a_trainer_is_recorded_and_not_changed(tmp_path: Path) -> None:
    plain, alone = trained(tmp_path / "plain", eval_strategy="steps", eval_steps=2)
    callback = hw.TrainerMonitor(every=1)
    model, heard = trained(tmp_path / "run", callback, eval_strategy="steps", eval_steps=2)
    assert heard.of("loss") == alone.of("loss")
    assert heard.of("eval_loss") == alone.of("eval_loss")
    for a, b in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(a, b)

    run = read_run(tmp_path / "run")
    assert [record.step for record in run.records] == [1, 2, 3, 4, 5]
    for i, record in enumerate(run.records):
        assert len(record.layers) == len(callback.monitor._found.modules)
        # A mean over micro-batches in float32, and the Trainer's own.
        assert record.values["loss"] == pytest.approx(heard.of("loss")[i], rel=1e-5)
        assert record.values["lr"] == heard.of("learning_rate")[i]
        assert all(math.isfinite(w["gradient"]) for w in record.weights.values())
    # What the Trainer logs after a step is told with the next one.
    assert "logged_loss" not in run.records[0].values
    assert [r.values["logged_loss"] for r in run.records[1:]] == heard.of("loss")[:-1]
    assert [r.step for r in run.records if "eval_loss" in r.values] == [3, 5]


def test_the_callback_takes_itself_off(tmp_path: Path) -> None:
    callback = TrainerMonitor(every=2)
    model, _ = trained(tmp_path, callback, max_steps=3)
    assert [record.step for record in callback.monitor.records] == [1, 2]
    with Monitor(model, every=1):
        pass


def test_what_was_logged_between_records_is_not_lost(tmp_path: Path) -> None:
    callback = TrainerMonitor(every=4)
    _, heard = trained(tmp_path, callback, logging_steps=3)
    assert [record.step for record in callback.monitor.records] == [1, 4]
    assert callback.monitor.records[1].values["logged_loss"] == heard.of("loss")[0]


def test_a_trainer_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    whole = TrainerMonitor(every=1, spectra=0)
    trained(tmp_path / "whole", whole)
    run = {"save_strategy": "steps", "save_steps": 2}
    trained(tmp_path / "cut", TrainerMonitor(every=1, spectra=0), **run)
    with (tmp_path / "cut" / RECORDS).open("a") as file:
        file.write('{"step":9,"ti')  # killed while it wrote
    callback = TrainerMonitor(every=1, spectra=0)
    trained(tmp_path / "cut", callback, resume=str(tmp_path / "cut" / "checkpoint-2"), **run)
    assert [record.step for record in callback.monitor.records] == [3, 4, 5]
    lines = (tmp_path / "cut" / RECORDS).read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 4, 5]
    for mine, theirs in zip(read_run(tmp_path / "cut").records, whole.monitor.records, strict=True):
        assert mine.layers == theirs.layers
        assert mine.weights == theirs.weights


class OwnLoss(Trainer):
    """Labels stay away from the model."""

    def compute_loss(self, model: Any, inputs: Any, **given: Any) -> Any:
        return model(input_ids=inputs["input_ids"]).logits.float().square().mean()


def test_a_loss_of_ones_own_is_the_one_that_was_logged(tmp_path: Path) -> None:
    callback = TrainerMonitor(every=1)
    _, heard = trained(tmp_path, callback, kind=OwnLoss, max_steps=3)
    first, *others = callback.monitor.records
    assert "loss" not in first.values
    assert [record.values["loss"] for record in others] == heard.of("loss")[:2]


class Fails(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        raise RuntimeError("the disk is gone")


def test_a_run_that_failed_can_be_started_again(tmp_path: Path) -> None:
    callback = TrainerMonitor(every=1, out=tmp_path / "health")
    args = TrainingArguments(str(tmp_path), report_to=[], use_cpu=True, disable_tqdm=True,
                             max_steps=2, save_strategy="no")  # fmt: skip
    trainer = Trainer(llama(), args, train_dataset=texts(), callbacks=[callback, Fails])
    with pytest.raises(RuntimeError, match="the disk is gone"):
        trainer.train()
    trainer.remove_callback(Fails)
    trainer.train()
    assert [r.step for r in read_run(tmp_path / "health").records] == [1, 2]


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        ({"torch_compile": True}, "compiles the model, .* set torch_compile=False"),
        ({"n_gpu": 3}, "copies the model to 3 devices .* allowed: one device for each process"),
    ],
)
def test_trainers_that_cannot_be_seen_are_refused(changed: dict[str, Any], line: str) -> None:
    args = SimpleNamespace(**{"torch_compile": False, "n_gpu": 1, "output_dir": "x", **changed})
    callback = TrainerMonitor()
    with pytest.raises(ModelError, match=line):
        callback.on_train_begin(args, SimpleNamespace(global_step=0), None, model=llama())
    assert callback.monitor is None


def test_steps_are_those_that_the_trainer_counts(tmp_path: Path) -> None:
    """A step that its scaler skips is counted there, and is none for the optimizer."""
    callback, model = TrainerMonitor(every=1, spectra=0), llama()
    callback.begin(model, tmp_path, 0, lambda: 1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for done in (0, 2):
        callback.begin_step(done)
        batch = torch.stack([each["input_ids"] for each in texts(2)])
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    callback.end()
    assert [record.step for record in callback.monitor.records] == [1, 3]


@pytest.mark.parametrize("kind", [TrainerMonitor, LightningMonitor])
def test_numbers_out_of_range_are_refused_at_once(kind: Any) -> None:
    with pytest.raises(OptionError, match="every is 0; allowed: 1 or more"):
        kind(every=0)


# ---------------------------------------------------------------------------------- Lightning


class _Hooks:
    """What Lightning's Callback brings: hooks that do nothing."""

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None: ...


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> None:
    """As much of Lightning as the callback needs."""
    package, inner = ModuleType("lightning"), ModuleType("lightning.pytorch")
    inner.Callback = _Hooks  # type: ignore[attr-defined]
    package.pytorch = inner  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "lightning", package)
    monkeypatch.setitem(sys.modules, "lightning.pytorch", inner)
    lightning._callback_class.cache_clear()
    yield
    lightning._callback_class.cache_clear()


def lightning_steps(callback: Any, module: nn.Module, trainer: Any, steps: int) -> list[float]:
    """The order of Lightning: the optimizer calls a closure with the passes of the last batch."""
    optimizer, losses = torch.optim.SGD(module.parameters(), lr=0.25), []
    callback.on_train_start(trainer, module)
    for _ in range(steps):
        parts = torch.stack([each["input_ids"] for each in texts(4)]).split(2)

        def passes(ids: Any) -> float:
            loss = module.net.llama(input_ids=ids, labels=ids).loss / len(parts)  # noqa: B023
            callback.on_before_backward(trainer, module, loss)
            loss.backward()
            return float(loss.detach())

        def closure() -> float:
            found = passes(parts[1])  # noqa: B023
            callback.on_before_optimizer_step(trainer, module, optimizer)
            return found

        first = passes(parts[0])
        losses.append(first + optimizer.step(closure))
        optimizer.zero_grad()
        trainer.global_step += 1
    return losses


def of_lightning() -> nn.Module:
    module = nn.Module()
    module.net = nn.Module()
    module.net.llama = llama()
    return module


@pytest.mark.usefixtures("fake")
def test_lightning_is_recorded(tmp_path: Path) -> None:
    callback = hw.LightningMonitor(model="net.llama", every=2)
    assert isinstance(callback, _Hooks)
    trainer = SimpleNamespace(global_step=0, default_root_dir=str(tmp_path))
    losses = lightning_steps(callback, of_lightning(), trainer, 4)
    callback.on_train_end(trainer, None)
    records = read_run(tmp_path).records
    assert [record.step for record in records] == [1, 2, 4]
    for record in records:
        assert record.values == {"loss": losses[record.step - 1], "lr": 0.25}
    assert all(math.isfinite(w["update"]) for w in records[-1].weights.values())

    trainer.global_step = 3  # a checkpoint from before the last record
    lightning_steps(callback, of_lightning(), trainer, 1)
    callback.on_exception(trainer, None, KeyboardInterrupt())
    assert [record.step for record in read_run(tmp_path).records] == [1, 2, 4]
    assert [record.step for record in callback.monitor.records] == [4]


@pytest.mark.usefixtures("fake")
def test_a_model_that_lightning_does_not_have_is_named(tmp_path: Path) -> None:
    callback = hw.LightningMonitor()
    trainer = SimpleNamespace(global_step=0, default_root_dir=str(tmp_path))
    with pytest.raises(ModelError, match="has no module model; allowed: net; name the transformer"):
        callback.on_train_start(trainer, of_lightning())


def test_lightning_is_said_to_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("lightning", "lightning.pytorch", "pytorch_lightning"):
        monkeypatch.setitem(sys.modules, name, None)
    lightning._callback_class.cache_clear()
    with pytest.raises(OptionError, match=r"lightning is not installed; pip install 'headwise\["):
        LightningMonitor()


def test_a_real_lightning_run(tmp_path: Path) -> None:
    L = pytest.importorskip("lightning")

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = llama()

        def training_step(self, batch: Any, number: int) -> Any:
            return self.model(**batch).loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.25)

    lightning._callback_class.cache_clear()
    trainer = L.Trainer(
        max_steps=3, accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, accumulate_grad_batches=CUT,
        default_root_dir=str(tmp_path), callbacks=[LightningMonitor(every=1)],
    )  # fmt: skip
    trainer.fit(Module(), torch.utils.data.DataLoader(texts(), batch_size=BATCH))
    records = read_run(tmp_path).records
    assert [record.step for record in records] == [1, 2, 3]
    assert all(record.values["lr"] == 0.25 for record in records)


# -------------------------------------------------------------------------------- TensorBoard


def record(step: int, **changed: Any) -> StepRecord:
    given: dict[str, Any] = {
        "step": step,
        "time": 0.0,
        "layers": (
            LayerRecord(
                module="blocks.1", number=1, role="self",
                figures={"max_logit": [2.0, 7.0, math.nan], "entropy": [1.0, 2.0, math.nan]},
            ),
        ),
        "stream": {"blocks.1": {"rms": 3.0}},
        "weights": {"w": {"gradient": 0.5, "weight": 8.0, "update": 2.0}},
        "non_finite": "",
        "values": {"loss": 11.0},
    }  # fmt: skip
    return StepRecord(**{**given, **changed})


def events(folder: Path) -> Any:
    accumulators = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="tensorboard"
    )
    return accumulators.EventAccumulator(str(folder)).Reload()


def test_tensorboard_has_a_scalar_for_every_layer(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    write = hw.TensorBoardWriter(tmp_path)
    write(record(3))
    write(record(5, non_finite="the keys of blocks.1"))
    write.close()
    found = events(tmp_path)
    told = {name: found.Scalars(name)[0].value for name in found.Tags()["scalars"]}
    assert told == {
        "max_logit/blocks.1": 7.0,  # the largest of the heads
        "entropy/blocks.1": 1.5,  # their mean
        "stream_rms/blocks.1": 3.0,
        "gradient/w": 0.5,
        "update/w": 0.25,
        "loss": 11.0,
    }
    assert [event.step for event in found.Scalars("loss")] == [3, 5]
    assert [event.step for event in found.Tensors("non_finite/text_summary")] == [5]


def test_tensorboard_listens_to_a_monitor(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    write, model = TensorBoardWriter(tmp_path), build_own(preset("tiny")).train()
    with Monitor(model, every=1, on_record=write) as monitor:
        model(torch.arange(11)[None]).square().mean().backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    write.close()
    layer = monitor.records[0].layers[1]
    [scalar] = events(tmp_path).Scalars(f"max_logit/{layer.module}")
    assert scalar.value == pytest.approx(max(layer.figures["max_logit"]), rel=1e-6)  # float32


def test_one_process_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensorboard, "speaks", lambda: False)
    write = TensorBoardWriter(tmp_path / "none")
    write(record(1))
    write.close()
    assert not (tmp_path / "none").exists()


def test_tensorboard_is_said_to_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(OptionError, match="tensorboard is not installed; pip install"):
        TensorBoardWriter("x")


# ---------------------------------------------------------------------- runs that go on, wrappers


def test_records_after_the_step_are_dropped(tmp_path: Path) -> None:
    def write(step: int, *steps: int) -> list[int]:
        writer = RunWriter(tmp_path, {}, step)
        for each in steps:
            writer.write(record(each))
        writer.close()
        return [json.loads(line)["step"] for line in (tmp_path / RECORDS).read_text().splitlines()]

    assert write(0, 1, 2, 3, 4) == [1, 2, 3, 4]
    assert write(2, 3) == [1, 2, 3]
    assert write(9) == [1, 2, 3]
    assert write(0, 1) == [1]  # another run


def test_a_run_that_goes_on_knows_its_alarms(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path, {})
    bad = record(1, non_finite="the keys of blocks.1")
    writer.write(bad)
    writer.close()
    with Monitor(build_own(preset("tiny")), out=tmp_path, step=1) as monitor:
        assert monitor._watch.raised
        assert monitor.step == 1
    with pytest.raises(OptionError, match="step is -1; allowed: 0 or more"):
        Monitor(build_own(preset("tiny")), step=-1)


class Around(nn.Module):
    """Calls no module of the whole model's."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Any) -> Any:
        return self.model.hidden(ids).square().mean()


@pytest.mark.parametrize("told", [True, False])
def test_a_forward_pass_by_way_of_another_module(told: bool) -> None:
    model = build_own(preset("tiny")).train()
    around = Around(model)
    with Monitor(model, every=1, called=around if told else None) as monitor:
        around(torch.arange(11)[None]).backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    [found] = monitor.records
    assert len(found.layers) == (2 if told else 0)
