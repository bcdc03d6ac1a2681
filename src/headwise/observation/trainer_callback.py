"""What a run of ``transformers.Trainer`` tells of itself: its beginning, every step, its end."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from headwise.errors import ModelError

__all__ = ["LoopCallback"]

# Of what a Trainer logs: its own clock and counters, and the rate after the step instead of in it.
_CLOCK: Final = ("runtime", "_per_second", "_flos", "epoch", "learning_rate")


class LoopCallback(TrainerCallback):
    """A callback of a Trainer for what looks at the model in every training step.

    What the Trainer logs (the loss is named ``logged_loss``: a mean over several steps) is passed
    on before the optimizer's next step, with the rate ``lr`` of that step.
    """

    @abstractmethod
    def begin(self, model: nn.Module, folder: Path, step: int, scale: Callable[[], float]) -> None:
        """Training begins after ``step`` steps; ``scale`` gives the factor of the loss."""

    @abstractmethod
    def begin_step(self, step: int) -> None:
        """The next step begins; ``step`` are done."""

    @abstractmethod
    def update(self, values: dict[str, float]) -> None:
        """The optimizer is about to step."""

    @abstractmethod
    def end(self) -> None:
        """Training has ended."""

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        """Begin, or say why not."""
        if args.torch_compile:
            raise ModelError(
                "the Trainer compiles the model, and compiled code calls no attention function",
                to_do="set torch_compile=False while the model is monitored",
            )
        if args.n_gpu > 1:
            raise ModelError(
                f"the Trainer copies the model to {args.n_gpu} devices in one process",
                allowed="one device for each process",
                to_do="start the script with torchrun, or set CUDA_VISIBLE_DEVICES=0",
            )
        self._logged: dict[str, float] = {}
        scaler = getattr(given.get("optimizer"), "scaler", None)
        scale = (lambda: 1.0) if scaler is None else scaler.get_scale
        self.begin(given["model"], Path(args.output_dir or "."), state.global_step, scale)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        """Before the first micro-batch."""
        self.begin_step(state.global_step)

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        """After the last micro-batch; gradients are clipped."""
        groups = given["optimizer"].param_groups
        self.update({"lr": float(groups[0]["lr"]), **self._logged})
        self._logged = {}

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        """Keep the numbers for the next step."""
        for name, value in (given.get("logs") or {}).items():
            if isinstance(value, (int, float)) and not name.endswith(_CLOCK):
                self._logged["logged_loss" if name == "loss" else name] = float(value)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        """End; the Trainer may be started again."""
        self.end()
