"""``TrainerMonitor``: a monitor for every run of a ``transformers.Trainer``.

trainer = Trainer(model, args, train_dataset=data, callbacks=[hw.TrainerMonitor(every=10)])
trainer.train()                        # then: headwise health OUTPUT_DIR
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from torch import nn

from headwise.errors import OptionError
from headwise.monitoring.alarms import Alarm
from headwise.monitoring.monitor import Monitor
from headwise.monitoring.record import StepRecord
from headwise.observation.trainer_callback import LoopCallback

__all__ = ["TrainerMonitor"]


class TrainerMonitor(LoopCallback):
    """A callback of ``transformers.Trainer`` that records the health of the model it trains.

    Steps are the Trainer's, with all their micro-batches; evaluation is not recorded. A run that
    goes on from a checkpoint goes on with its records. They hold the rate ``lr`` of the step, the
    loss of the model (of a loss function of your own, what the Trainer logged last), and what the
    Trainer has logged since the record before.

    Args:
        every, rows, spectra, on_record, on_alarm: of ``Monitor``.
        out: folder of the run, for ``headwise health``; None: the Trainer's ``output_dir``.

    Attributes:
        monitor: the ``Monitor`` of the run that goes on, or went last.

    Raises:
        OptionError: a number out of range.
        ModelError: when training begins: the model cannot be monitored.

    Example:
        >>> callback = TrainerMonitor(every=10, rows=64)
        >>> callback.monitor is None  # until training begins
        True
    """

    def __init__(
        self,
        *,
        every: int = 10,
        rows: int | None = None,
        out: str | Path | None = None,
        spectra: int = 10,
        on_record: Callable[[StepRecord], None] | None = None,
        on_alarm: Callable[[Alarm], None] | None = None,
    ) -> None:
        if every < 1:
            raise OptionError(f"every is {every}", allowed="1 or more")
        self.monitor: Monitor | None = None
        self._every, self._rows, self._out, self._spectra = every, rows, out, spectra
        self._on_record, self._on_alarm = on_record, on_alarm
        self._pending: dict[str, float] = {}
        self._stands_in = False  # what the Trainer logs, for a loss that the model does not give

    def begin(self, model: nn.Module, folder: Path, step: int, scale: Callable[[], float]) -> None:
        """Attach a monitor; one of a run that an error has ended is taken off first."""
        self.end()
        self._pending, self._stands_in = {}, False
        self.monitor = Monitor(
            model,
            every=self._every,
            rows=self._rows,
            out=self._out or folder,
            spectra=self._spectra,
            loss_scale=scale,
            step=step,
            on_record=self._on_record,
            on_alarm=self._on_alarm,
        )

    def begin_step(self, step: int) -> None:
        """The Trainer also counts steps that its scaler skips."""
        if self.monitor is not None:
            self.monitor.step = step

    def update(self, values: dict[str, float]) -> None:
        """Log, if this step is recorded; else keep what was logged for the step that is."""
        if self.monitor is None:
            return
        self._pending |= values
        if self.monitor.recording:
            records, logged = self.monitor.records, self._pending.get("logged_loss")
            self._stands_in |= bool(records) and "loss" not in records[-1].values
            if self._stands_in and logged is not None:
                self._pending["loss"] = logged
            self.monitor.log(**self._pending)
            self._pending = {}

    def end(self) -> None:
        """Take the monitor off; its records stay."""
        if self.monitor is not None:
            self.monitor.close()
