"""``train``: a decoder trained on text, step by step, and the folder that it leaves."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from headwise.errors import NonFiniteError, OptionError
from headwise.models.build import build
from headwise.monitoring.monitor import Monitor
from headwise.monitoring.tensorboard import TensorBoardWriter
from headwise.training.checkpoint import State, restore, save
from headwise.training.config import TrainConfig, read_config
from headwise.training.data import validation_windows
from headwise.training.interrupts import Interrupts
from headwise.training.log import EVENTS, Log
from headwise.training.prepare import Prepared, continued, prepare, run_folder
from headwise.training.processes import Processes, processes
from headwise.training.schedule import learning_rate
from headwise.training.step import Objective, Step, Stepper, autocast

__all__ = ["TrainResult", "train"]

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class TrainResult:
    """How a run ended: losses in nats per token, and where the model is."""

    folder: Path
    steps: int
    loss: float
    validation_loss: float | None
    tokens: int
    parameters: int
    seconds: float
    interrupted: bool


def train(
    text: str | Path,
    config: TrainConfig | Mapping[str, Any] | str | Path | None = None,
    *,
    out: str | Path,
    resume: bool = False,
    tensorboard: bool = False,
    monitor: bool = False,
    monitor_every: int | None = None,
    progress: Progress | None = None,
    **options: Any,
) -> TrainResult:
    """Train a decoder to predict the next token of a text, a file or a folder of files.

    ``config`` is a ``TrainConfig``, a mapping, or a TOML or JSON file; ``options`` are
    settings that win over it. ``out`` becomes a checkpoint folder with a log; ``resume`` continues
    the run there, with the same losses as if it had not stopped. Ctrl-C saves after the step.
    ``monitor`` or ``monitor_every`` records the health of every head and layer, each 10 or so many
    steps, in the same folder for ``headwise health``; the losses are the same, bit for bit.
    Under ``torchrun`` every process takes its share of each batch, and the first one writes.

    Raises:
        InputError: a setting, the text, or the folder does not fit; nothing was trained.
        NonFiniteError: the loss or the gradient became NaN or infinite; the last checkpoint stands.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> _ = (folder / "a.txt").write_text("to be or not to be " * 40)
        >>> sizes = {"d_model": 16, "layers": 1, "heads": 2}
        >>> result = train(folder / "a.txt", {"tokenizer": "bytes", "model": sizes}, steps=2,
        ...                context=16, batch=2, device="cpu", out=folder / "run")
        >>> result.steps, sorted(file.name for file in result.folder.iterdir())[:3]
        (2, ['architecture.json', 'log.jsonl', 'model.safetensors'])
    """
    every = _every(monitor, monitor_every)
    folder = run_folder(out, resume)
    state = None
    if resume:
        given = config is not None or any(value is not None for value in options.values())
        saved = continued(folder, None)[0]
        wanted = read_config(saved if config is None else config, **options) if given else None
        chosen, state = continued(folder, wanted)
    else:
        chosen = read_config(config, **options)
    if chosen.threads is not None:
        torch.set_num_threads(chosen.threads)
    with processes(chosen.device) as here, _seeds_kept(here.device):
        prepared = prepare(text, chosen, folder, here, state)
        run = _Run(chosen, prepared, folder, here, state, progress)
        with run.monitored(every, tensorboard), run.log(tensorboard) as log, Interrupts() as asked:
            return run.go(log, asked)


def _every(monitor: bool, steps: int | None) -> int | None:
    """Steps between records; None: no monitor."""
    if steps is not None and steps < 1:
        raise OptionError(f"monitor_every is {steps}", allowed="1 or more")
    return steps or (10 if monitor else None)


def _seeds_kept(device: torch.device) -> AbstractContextManager[Any]:
    """The caller's random generators are afterwards what they were."""
    return torch.random.fork_rng(devices=[device] if device.type == "cuda" else [])


@dataclass
class _Run:
    config: TrainConfig
    prepared: Prepared
    folder: Path
    here: Processes
    state: State | None
    progress: Progress | None
    step: int = 0
    saved: int = 0  # the step of the last checkpoint
    seconds: float = 0.0
    tokens: int = 0
    last: dict[str, float | None] = field(default_factory=lambda: {"loss": math.nan})
    monitor: Monitor | None = None

    def __post_init__(self) -> None:
        autocast(self.config, self.here.device)
        self.model: Any = build(
            self.prepared.architecture, seed=self.config.seed, device=self.here.device
        )
        self.stepper = Stepper(self.model, self.prepared.batches, self.config, self.here)
        if self.state is not None:
            restore(self.state, self.model, self.stepper.optimizer)
            for name in ("step", "seconds", "tokens", "last"):
                setattr(self, name, self.state.about[name])
        self.saved = self.step
        self._began = time.monotonic() - self.seconds
        self.state = None  # its tensors are in the model now

    def log(self, tensorboard: bool) -> AbstractContextManager[Log | None]:
        """The log that the first process writes."""
        if not self.here.first:
            return nullcontext()
        return Log(self.folder, step=self.step, tensorboard=tensorboard)

    @contextmanager
    def monitored(self, every: int | None, tensorboard: bool) -> Iterator[None]:
        """Look at the model every so many steps, in all processes; None: never."""
        if every is None:
            yield
            return
        events = None
        if tensorboard:
            events = TensorBoardWriter(self.folder / EVENTS / "health", step=self.step)
        try:
            with Monitor(
                self.model,
                every=every,
                out=self.folder,
                step=self.step,
                called=self.stepper.objective,
                on_record=events,
            ) as self.monitor:
                yield
        finally:
            if events is not None:
                events.close()

    def go(self, log: Log | None, interrupts: Interrupts) -> TrainResult:
        self.model.train()
        stopped = False
        while self.step < self.config.steps and not stopped:
            found = self._one(interrupts.asked)
            # Over several processes all have to agree, which they do at the start of a step.
            stopped = found.stop or (self.here.count == 1 and interrupts.asked)
            self._record(found, log)
            if self.step % self.config.save_every == 0 or stopped or self.step == self.config.steps:
                self._save(log)
        return TrainResult(
            folder=self.folder,
            steps=self.step,
            loss=float(self.last["loss"] or math.nan),
            validation_loss=self.last.get("validation_loss"),
            tokens=self.tokens,
            parameters=sum(p.numel() for p in self.model.parameters()),
            seconds=time.monotonic() - self._began,
            interrupted=stopped and self.step < self.config.steps,
        )

    def _one(self, asked: bool) -> Step:
        """One step: gradient, a look at it, and the update."""
        found = self.stepper.gradient(self.step, stop=asked)
        for name, value in (("loss", found.objective), ("gradient norm", found.grad_norm)):
            if not math.isfinite(value):
                raise NonFiniteError(
                    f"the {name} is {value} at step {self.step + 1}{self._origin(found)}",
                    to_do=(
                        f"the checkpoint of step {self.saved} stands in {self.folder}"
                        if self.saved
                        else "nothing was saved yet"
                    )
                    + "; lower lr, set clip, or use float32",
                )
        self._tell(found)
        self.stepper.update(self._lr())
        self.step += 1
        self.tokens += found.tokens
        return found

    def _tell(self, found: Step) -> None:
        """What the record of this step says besides."""
        if self.monitor is not None:
            about = {"loss": found.loss, "repeated_loss": found.repeated_loss, "lr": self._lr()}
            self.monitor.log(**{name: x for name, x in about.items() if x is not None})

    def _origin(self, found: Step) -> str:
        """Where the first number that is not finite was met, if there is a monitor."""
        if self.monitor is None:
            return ""
        if not self.monitor.recording:
            self.monitor.every = 1
            self.stepper.gradient(self.step)  # the same once more: of weights and step alone
        self._tell(found)
        name = self.monitor.abandon().non_finite
        return f", first in {name}" if name else ""

    def _lr(self) -> float:
        c = self.config
        return learning_rate(
            self.step, peak=c.lr, steps=c.steps, warmup=c.warmup, shape=c.schedule, final=c.final_lr
        )

    def _record(self, found: Step, log: Log | None) -> None:
        last = self.step == self.config.steps
        self.seconds = time.monotonic() - self._began
        if math.isfinite(found.loss):
            self.last["loss"] = found.loss
        values: dict[str, float] = {}
        if self.step % self.config.log_every == 0 or last:
            values = {"loss": found.loss} if math.isfinite(found.loss) else {}
            if found.repeated_loss is not None:
                values["repeated_loss"] = found.repeated_loss
            group = self.stepper.optimizer.param_groups[0]
            values |= {"lr": group["lr"], "grad_norm": found.grad_norm, "tokens": self.tokens}
        if self.step % self.config.eval_every == 0 or last:
            validation = self._validation_loss()
            if validation is not None:
                self.last["validation_loss"] = values["validation_loss"] = validation
        if log is not None and values:
            log.write(self.step, **values, seconds=round(self.seconds, 3))
        if self.progress is not None:
            speed = self.tokens / self.seconds if self.seconds else 0.0
            words = f"loss {self.last['loss']:.3f}, {speed:,.0f} tokens/s"
            if "validation_loss" in self.last:
                words += f", validation {self.last['validation_loss']:.3f}"
            self.progress(self.step, self.config.steps, words)

    def _validation_loss(self) -> float | None:
        """The mean loss over the same windows every time, shared out over the processes."""
        most, context = self.config.eval_windows, self.config.context
        windows = list(validation_windows(self.prepared.validation, context, most))
        if not windows:
            return None
        objective = Objective(self.model)
        total = torch.zeros(1, dtype=torch.float64)
        self.model.eval()
        with torch.no_grad(), autocast(self.config, self.here.device):
            for window in windows[self.here.rank :: self.here.count]:
                both = torch.from_numpy(window.astype("int64")).to(self.here.device)[None]
                ids, targets = both[:, :-1], both[:, 1:]
                _, each = objective(ids, targets, torch.ones_like(targets, dtype=torch.float32))
                total += each.double().sum().cpu()
        self.model.train()
        return float(self.here.sum(total.to(self.here.device))) / (len(windows) * context)

    def _save(self, log: Log | None) -> None:
        if log is not None:
            log.flush()
            save(
                self.folder,
                self.prepared.architecture,
                self.model,
                self.stepper.optimizer,
                step=self.step,
                seconds=self.seconds,
                tokens=self.tokens,
                last=self.last,
                data=self.prepared.data,
                config=self.config.model_dump(mode="json", exclude_unset=True),
            )
        self.here.wait()
        self.saved = self.step
