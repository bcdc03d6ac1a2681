"""``LightningMonitor``: a monitor for every run of a Lightning ``Trainer``.

trainer = L.Trainer(callbacks=[hw.LightningMonitor(every=10)])
trainer.fit(module)                    # then: headwise health DEFAULT_ROOT_DIR
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from torch import nn

from headwise.errors import ModelError, OptionError
from headwise.monitoring.alarms import Alarm
from headwise.monitoring.monitor import Monitor
from headwise.monitoring.record import StepRecord

__all__ = ["LightningMonitor"]


def LightningMonitor(
    *,
    model: str = "model",
    every: int = 10,
    rows: int | None = None,
    out: str | Path | None = None,
    spectra: int = 10,
    on_record: Callable[[StepRecord], None] | None = None,
    on_alarm: Callable[[Alarm], None] | None = None,
) -> Any:
    """A callback of Lightning that records the health of the model it trains.

    Steps are the Trainer's ``global_step``, with all their micro-batches; validation is not
    recorded. A run that goes on from a checkpoint goes on with its records. They hold the loss that
    ``training_step`` returned and the rate ``lr``. The callback's ``monitor`` is the ``Monitor`` of
    the run.

    Args:
        model: the attribute of your ``LightningModule`` that holds the transformer which
            ``training_step`` calls; dots lead on.
        every, rows, spectra, on_record, on_alarm: of ``Monitor``.
        out: folder of the run, for ``headwise health``; None: the Trainer's ``default_root_dir``.

    Raises:
        OptionError: Lightning is not installed, or a number out of range.
        ModelError: when training begins: the model is not there, or cannot be monitored.
    """
    if every < 1:
        raise OptionError(f"every is {every}", allowed="1 or more")
    options = {"every": every, "rows": rows, "spectra": spectra}
    listeners = {"on_record": on_record, "on_alarm": on_alarm}
    return _callback_class()(model, out, {**options, **listeners})


def _lightning() -> Any:
    for name in ("lightning.pytorch", "pytorch_lightning"):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not name.startswith(error.name):
                raise  # it is there, and something that it needs is not
    raise OptionError(
        "a monitor for Lightning was asked for and lightning is not installed",
        to_do="pip install 'headwise[lightning]'",
    )


@cache
def _callback_class() -> Any:
    """The class, made when Lightning is there."""
    return type("LightningMonitor", (_Callback, _lightning().Callback), {})


class _Callback:
    """The hooks of a Lightning callback: what they do is here, and what they are in Lightning."""

    def __init__(self, model: str, out: str | Path | None, options: dict[str, Any]) -> None:
        super().__init__()
        self.monitor: Monitor | None = None
        self._path, self._out, self._options = model, out, options
        self._loss = 0.0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Attach a monitor; one of a run that an error has ended is taken off first."""
        self._close()
        scaler = getattr(getattr(trainer, "precision_plugin", None), "scaler", None)
        self._loss = 0.0
        self.monitor = Monitor(
            _part(pl_module, self._path),
            out=self._out or trainer.default_root_dir,
            step=trainer.global_step,
            loss_scale=None if scaler is None else scaler.get_scale,
            **self._options,
        )

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        """Losses of micro-batches are divided by their number: their sum is that of the step."""
        if self.monitor is not None and self.monitor.recording:
            self._loss += float(loss.detach())

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """After the last micro-batch."""
        if self.monitor is not None and self.monitor.recording:
            self.monitor.log(loss=self._loss, lr=float(optimizer.param_groups[0]["lr"]))
        self._loss = 0.0

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Take the monitor off; its records stay."""
        self._close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Training has failed, or was stopped by hand."""
        self._close()

    def _close(self) -> None:
        if self.monitor is not None:
            self.monitor.close()


def _part(module: nn.Module, path: str) -> nn.Module:
    found: Any = module
    for name in path.split("."):
        found = getattr(found, name, None)
    if not isinstance(found, nn.Module):
        children = ", ".join(name for name, _ in module.named_children())
        raise ModelError(
            f"{type(module).__name__} has no module {path}",
            allowed=children or None,
            to_do="name the transformer that training_step calls: hw.LightningMonitor(model=...)",
        )
    return found
