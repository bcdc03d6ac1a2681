"""``Monitor``: what every head and layer does, from inside anybody's training loop.

    monitor = hw.Monitor(model, every=10, out="run")
    for batch in batches:                  # the loop stays as it is
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
    monitor.close()

A step ends when optimizers have used every gradient of the model, however many micro-batches it
has and however many optimizers there are; what a gradient scaler skips is no step. Nothing that the
model or the optimizers compute changes, not in the last bit: attention is looked at beside the
model's own (``observation.tap``).
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Final
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from headwise.circuits.head_weights import head_weights
from headwise.errors import HeadwiseError, ModelError, NonFiniteError, OptionError
from headwise.monitoring.alarms import Alarm, Watch
from headwise.monitoring.gradients import Weights, after_backward
from headwise.monitoring.head_sums import HeadSums, sums_of
from headwise.monitoring.processes import of_all_processes, processes, speaks
from headwise.monitoring.record import LayerRecord, StepRecord
from headwise.monitoring.spectra import spectral_norms
from headwise.monitoring.stream import Stream
from headwise.monitoring.writer import RunWriter
from headwise.observation.survey import Survey, survey
from headwise.observation.tap import Seen, tapped
from headwise.observation.uncompiled import refuse_compiled

__all__ = ["Monitor"]

_MONITORED: WeakSet[nn.Module] = WeakSet()  # attention modules, of all monitors
_SEEDS: Final = 1009  # more than the micro-batches of a step: each draws rows of its own


class Monitor:
    """Record the health of a model while it is trained, every so many steps.

    Args:
        model: of transformers (routed attention) or of ``headwise.models``; one wrapped in
            ``DistributedDataParallel`` is unwrapped.
        every: steps from one record to the next.
        rows: query rows of each sequence, a stratified random sample (None: all). Means are then
            unbiased; maxima are those of the rows that were seen.
        out: folder of the run, for ``headwise health``; None: records are only kept.
        spectra: records from one look at the spectral norms to the next; 0: never.
        loss_scale: gives the factor of the loss, of ``torch.amp.GradScaler.get_scale``, say.
        step: steps done before, of a run that goes on; later records in ``out`` are dropped.
        called: the module whose call is a forward pass, where that is not the model's own.
        on_record: called with every record.
        on_alarm: called with every alarm, after the record that raised it.

    Attributes:
        records: those made so far.
        alarms: those raised so far, in that order; ``alarms(records)`` gives the same by step.

    Raises:
        ModelError: the model's attention cannot be seen, or a monitor is attached already.
        OptionError: a number out of range.

    Example:
        >>> import torch
        >>> from headwise.models import build, preset
        >>> model = build(preset("tiny")).train()
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> with Monitor(model, every=1) as monitor:
        ...     for _ in range(2):
        ...         model(torch.arange(12)[None]).square().mean().backward()
        ...         optimizer.step()
        >>> [record.step for record in monitor.records], len(monitor.records[0].layers)
        ([1, 2], 2)
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        every: int = 10,
        rows: int | None = None,
        out: str | Path | None = None,
        spectra: int = 10,
        loss_scale: Callable[[], float] | None = None,
        step: int = 0,
        called: nn.Module | None = None,
        on_record: Callable[[StepRecord], None] | None = None,
        on_alarm: Callable[[Alarm], None] | None = None,
    ) -> None:
        for name, value, least in (
            ("every", every, 1), ("rows", rows, 1), ("spectra", spectra, 0), ("step", step, 0)
        ):  # fmt: skip
            if value is not None and value < least:
                raise OptionError(f"{name} is {value}", allowed=f"{least} or more")
        inner = getattr(model, "module", None)
        self.model: nn.Module = inner if isinstance(inner, nn.Module) else model
        self._called = called or self.model
        self._found = _survey(self.model)
        self.every, self.rows, self.spectra = every, rows, spectra
        self.records: list[StepRecord] = []
        self.alarms: list[Alarm] = []
        self._watch = Watch({name: p.numel() for name, p in self.model.named_parameters()})
        self._on_alarm = on_alarm
        self.step = step
        self._scale = loss_scale or (lambda: 1.0)
        self._listeners = [] if on_record is None else [on_record]
        self._writer: RunWriter | None = None
        if out is not None and speaks():
            self._writer = RunWriter(Path(out), self._about(), step)
            for record in self._writer.before:  # what is an alarm depends on them
                self._watch.look(record)
            self._listeners.append(self._writer.write)
        self._weights = Weights(self.model)
        blocks = [(block.path, block.stack) for block in self._found.blocks]
        self._stream = Stream(blocks, self.model, self._bad)
        self._stacks = {info.path: info.stack for info in self._found.modules.values()}
        self._looking = False
        self._stepped: set[int] = set()  # parameters that optimizers have changed in this step
        self._own: dict[str, float] = {}
        self._pass, self._restore = ExitStack(), ExitStack()
        self._heads: dict[str, HeadSums] = {}
        self._losses: list[float] = []
        self._itemised, self._non_finite = False, ""
        self._passes, self._loss_scale = 0, 1.0
        self._attach()

    def _about(self) -> dict[str, Any]:
        modules = sorted(self._found.modules.values(), key=lambda m: (m.stack, m.number))
        return {
            **self._found.about,
            "every": self.every,
            "rows": self.rows,
            "layers": [m.path for m in modules],
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "sizes": self._watch.history.sizes,
        }

    @property
    def recording(self) -> bool:
        """Whether the step that is going on is one that will be recorded."""
        return (self.step + 1) % self.every == 0 or self.step == 0

    def log(self, **values: float) -> None:
        """Numbers of your own for the record of this step, such as the loss or the rate.

        Before the optimizer's step: what is logged after it belongs to the next one.
        """
        self._own.update({name: float(value) for name, value in values.items()})

    # ------------------------------------------------------------------ attached to the model

    def _attach(self) -> None:
        parts = [m for m in self.model.modules() if id(m) in self._found.modules]
        _MONITORED.update(parts)
        self._restore.callback(_MONITORED.difference_update, parts)
        self._parameters = list(self.model.parameters())
        self._mine = {id(p) for p in self._parameters}
        for handle in (
            self._called.register_forward_pre_hook(self._before, with_kwargs=True),
            self._called.register_forward_hook(self._after, with_kwargs=True, always_call=True),
            register_optimizer_step_pre_hook(self._about_to_step),
            register_optimizer_step_post_hook(self._has_stepped),
        ):
            self._restore.callback(handle.remove)

    def __deepcopy__(self, memo: dict[int, Any]) -> Monitor:
        """Copies of the model (an average of its weights, say) are not monitored."""
        return self

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """A forward pass begins; the repeated ones of gradient checkpointing are no new ones."""
        repeated = torch._C._current_graph_task_id() != -1
        training = module.training and torch.is_grad_enabled() and not repeated
        if module is not self._called or not training:
            return
        self._pass.close()  # of a pass that was interrupted
        if self._stepped:
            self._finish()
        if not self.recording:
            return
        refuse_compiled(self.model)
        scale = self._scale()
        if self._passes and scale != self._loss_scale:
            self._forget()  # the scaler has skipped the step of what was seen
        self._loss_scale = scale
        self._looking = True
        self._passes += 1
        self._pass.enter_context(tapped(self.model, self._found, self._tell))
        for handle in self._stream.attach(scale):
            self._pass.callback(handle.remove)

    def _after(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if module is not self._called or not self._looking:
            return
        self._looking = False
        self._pass.close()
        self._stream.detach()
        scale = self._loss_scale
        after_backward(output, lambda: self._bad(self._weights.read_gradients(scale)))
        loss = getattr(output, "loss", None)
        if isinstance(loss, Tensor) and loss.numel() == 1:
            value = float(loss.detach())
            self._losses.append(value)
            # With the number of items of the whole step, losses of its parts add up to its own.
            self._itemised = kwargs.get("num_items_in_batch") is not None
            self._bad("" if math.isfinite(value) else "the loss")

    def _tell(self, seen: Seen) -> None:
        self._bad(_not_finite(seen))
        if not seen.cross:
            self._stream.tokens(self._stacks[seen.path], seen.real, seen.first)
        found = sums_of(seen, self.rows, seed=self.step * _SEEDS + self._passes)
        if found is not None:
            before = self._heads.get(seen.path)
            self._heads[seen.path] = found if before is None else before.merged(found)

    def _bad(self, name: str) -> None:
        """The first one is the one that is told."""
        self._non_finite = self._non_finite or name

    # ------------------------------------------------------------------- attached to optimizers

    def _held(self, optimizer: Optimizer) -> set[int]:
        groups = optimizer.param_groups
        return self._mine.intersection(id(p) for group in groups for p in group["params"])

    def _about_to_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        held = self._held(optimizer)
        if held & self._stepped:
            self._finish()
        if held and self.recording and not self._stepped:
            self._weights.remember()

    def _has_stepped(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """A step ends when all gradients are used: several optimizers may share the model."""
        held = self._held(optimizer)
        if not held:
            return
        self._stepped |= held
        if all(id(p) in self._stepped for p in self._parameters if p.grad is not None):
            self._finish()

    # ---------------------------------------------------------------------------- the record

    def _forget(self) -> None:
        """Nothing is known of the step that goes on."""
        self._heads, self._losses = {}, []
        self._itemised, self._non_finite = False, ""
        self._passes, self._loss_scale = 0, 1.0
        self._weights.forget()
        self._stream.forget()

    def _finish(self) -> None:
        recorded = self.recording
        self.step += 1
        self._stepped = set()
        try:
            if recorded:
                self._write(self._record())
        finally:
            self._own = {}
            if recorded:
                self._forget()

    def _record(self) -> StepRecord:
        weights, bad = self._weights.figures()
        self._bad(bad)
        loss = sum(self._losses) / (1 if self._itemised else max(len(self._losses), 1))
        mine = [loss, float(bool(self._losses)), *self._stream.sums()]
        heads, sums, bad = of_all_processes(self._heads, mine, self._non_finite)
        count = len(self.records)
        norms = self._spectral() if self.spectra and count % self.spectra == 0 else {}
        layers = [
            LayerRecord(
                module=info.path,
                number=info.number,
                role="cross" if info.named_cross else "self",
                figures={**heads[info.path].figures(), **norms.get(info.path, {})},
            )
            for info in self._found.modules.values()
            if info.path in heads
        ]
        return StepRecord(
            step=self.step,
            time=time.time(),
            layers=tuple(layers),
            stream=self._stream.figures(sums[2:], processes()),
            weights=weights,
            non_finite=bad,
            values={**({"loss": sums[0] / sums[1]} if sums[1] else {}), **self._own},
        )

    def _spectral(self) -> dict[str, dict[str, list[float]]]:
        try:
            found = head_weights(self.model, validate=False)
        except NonFiniteError:
            return {}  # the record names it
        except HeadwiseError as error:
            warnings.warn(f"no spectral norms: {error}", stacklevel=2)
            self.spectra = 0
            return {}
        norms = {}
        for layer in found.layers:
            qk, ov = spectral_norms(layer)
            norms[layer.module] = {"qk_norm": qk.tolist(), "ov_norm": ov.tolist()}
        return norms

    def _write(self, record: StepRecord) -> None:
        self.records.append(record)
        for listener in self._listeners:
            listener(record)
        for alarm in self._watch.look(record):
            self.alarms.append(alarm)
            if self._on_alarm is not None:
                self._on_alarm(alarm)

    # -------------------------------------------------------------------------------- the end

    def abandon(self) -> StepRecord:
        """The record of a step that no optimizer will take: its loss is not finite, say."""
        self.step += 1
        record = self._record()
        self._own = {}
        self._forget()
        self._write(record)
        return record

    def close(self) -> None:
        """Take everything off the model again; records stay.

        A step that some optimizer has not finished is recorded first.
        """
        if self._stepped:
            self._finish()
        self._looking = False
        self._pass.close()
        self._restore.close()
        if self._writer is not None:
            self._writer.close()

    def __enter__(self) -> Monitor:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _survey(model: nn.Module) -> Survey:
    """What can be seen of a model; refused where it is being looked at already."""
    refuse_compiled(model)
    found = survey(model)
    if any(part in _MONITORED for part in model.modules()):
        raise ModelError(
            f"{type(model).__name__} has a monitor already", to_do="close that one first"
        )
    return found


def _not_finite(seen: Seen) -> str:
    """The first of the call's tensors that holds NaN or infinity where there are tokens."""
    call = seen.call
    sums = torch.stack([x.sum(dtype=torch.float32) for x in (call.q, call.k, call.v)])
    if bool(torch.isfinite(sums).all()):  # one number for each tells of NaN and infinity
        return ""
    parts = [call.part(piece) for piece in seen.pieces]
    for at, name in enumerate(("queries", "keys", "values")):
        if not all(bool(torch.isfinite(part[at]).all()) for part in parts):
            return f"the {name} of {seen.path}"
    return ""
