"""``Monitor``: what every head and layer does, from inside anybody's training loop.

    monitor = hw.Monitor(model, every=10, out="run")
    for batch in batches:                  # the loop stays as it is
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
    monitor.close()

A step is what lies between two steps of an optimizer that holds parameters of the model, however
many micro-batches it has. Nothing that the model or the optimizer computes changes, not in the last
bit: attention is looked at beside the model's own (``observation.tap``).
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

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from headwise.circuits.head_weights import head_weights
from headwise.errors import HeadwiseError, ModelError, OptionError
from headwise.monitoring.gradients import Stream, Weights, after_backward
from headwise.monitoring.head_sums import HeadSums, sums_of
from headwise.monitoring.processes import merged_over_processes
from headwise.monitoring.record import LayerRecord, StepRecord
from headwise.monitoring.spectra import spectral_norms
from headwise.monitoring.writer import RunWriter
from headwise.observation.call import Call
from headwise.observation.survey import survey
from headwise.observation.tap import tapped

__all__ = ["Monitor"]

_MARK: Final = "_headwise_monitored"
Listener = Callable[[StepRecord], None]


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
        on_record: called with every record.

    Attributes:
        records: those made so far.

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
        on_record: Listener | None = None,
    ) -> None:
        for name, value, least in (("every", every, 1), ("rows", rows, 1), ("spectra", spectra, 0)):
            if value is not None and value < least:
                raise OptionError(f"{name} is {value}", allowed=f"{least} or more")
        inner = getattr(model, "module", None)
        self.model: nn.Module = inner if isinstance(inner, nn.Module) else model
        if getattr(self.model, _MARK, False):
            raise ModelError(
                f"{type(self.model).__name__} has a monitor already", to_do="close that one first"
            )
        self.every, self.rows, self.spectra = every, rows, spectra
        self.records: list[StepRecord] = []
        self.step = 0
        self._found = survey(self.model)
        self._scale = loss_scale or (lambda: 1.0)
        self._listeners = [] if on_record is None else [on_record]
        self._writer = None if out is None else RunWriter(Path(out), self._about())
        if self._writer is not None:
            self._listeners.append(self._writer.write)
        self._weights = Weights(self.model)
        self._stream = Stream([block.path for block in self._found.blocks], self.model)
        self._heads: dict[str, HeadSums] = {}
        self._non_finite = ""
        self._loss = math.nan
        self._inside = 0
        self._looking = False
        self._restore = ExitStack()
        self._attach()

    def _about(self) -> dict[str, Any]:
        modules = sorted(self._found.modules.values(), key=lambda m: (m.stack, m.number))
        return {
            **self._found.about,
            "every": self.every,
            "rows": self.rows,
            "layers": [m.path for m in modules],
            "parameters": sum(p.numel() for p in self.model.parameters()),
        }

    @property
    def recording(self) -> bool:
        """Whether the step that is going on is one that will be recorded."""
        return (self.step + 1) % self.every == 0 or self.step == 0

    def log(self, **values: float) -> None:
        """Numbers of your own for the record of this step, such as the loss or the rate."""
        self._own.update({name: float(value) for name, value in values.items()})

    # ------------------------------------------------------------------ attached to the model

    def _attach(self) -> None:
        self._own: dict[str, float] = {}
        setattr(self.model, _MARK, True)
        self._restore.callback(delattr, self.model, _MARK)
        pre = self.model.register_forward_pre_hook(self._before, with_kwargs=True)
        post = self.model.register_forward_hook(self._after, always_call=True)
        self._restore.callback(pre.remove)
        self._restore.callback(post.remove)
        mine = {id(p) for p in self.model.parameters()}

        def ours(optimizer: Optimizer) -> bool:
            groups = optimizer.param_groups
            return any(id(p) in mine for group in groups for p in group["params"])

        def about_to_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            if self.recording and ours(optimizer):
                self._weights.remember()

        def stepped(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            if ours(optimizer):
                self._finish()

        self._restore.callback(register_optimizer_step_pre_hook(about_to_step).remove)
        self._restore.callback(register_optimizer_step_post_hook(stepped).remove)
        self._pass = ExitStack()

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """A forward pass begins; the repeated ones of gradient checkpointing are no new ones."""
        self._inside += 1
        repeated = torch._C._current_graph_task_id() != -1
        if self._inside > 1 or repeated or not module.training or not self.recording:
            return
        self._looking = True
        self._pass.enter_context(tapped(self.model, self._found, self._tell))
        for handle in self._stream.attach():
            self._pass.callback(handle.remove)

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        self._inside -= 1
        if self._inside:
            return
        seen, self._looking = self._looking, False
        self._pass.close()
        if seen and torch.is_grad_enabled():
            after_backward(output, lambda: self._weights.read_gradients(self._scale()))
            loss = getattr(output, "loss", None)
            if isinstance(loss, torch.Tensor) and loss.numel() == 1:
                self._loss = float(loss.detach())

    def _tell(self, path: str, call: Call, cross: bool) -> None:
        if not self._non_finite:
            self._non_finite = _not_finite(path, call)
        found = sums_of(call, cross, self.rows)
        if found is not None:
            before = self._heads.get(path)
            self._heads[path] = found if before is None else before.merged(found)

    # ---------------------------------------------------------------------------- the record

    def _finish(self) -> None:
        recorded = self.recording
        self.step += 1
        if not recorded:
            return
        try:
            self._write(self._record())
        finally:
            self._heads, self._non_finite = {}, ""
            self._own, self._loss = {}, math.nan

    def _record(self) -> StepRecord:
        heads = merged_over_processes(self._heads)
        scale = self._scale()
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
        stream = self._stream.figures(scale)
        weights = self._weights.figures()
        return StepRecord(
            step=self.step,
            time=time.time(),
            layers=tuple(layers),
            stream=stream,
            weights=weights,
            non_finite=self._non_finite or self._stream.non_finite or _bad_gradient(weights),
            values={**({} if math.isnan(self._loss) else {"loss": self._loss}), **self._own},
        )

    def _spectral(self) -> dict[str, dict[str, list[float]]]:
        try:
            found = head_weights(self.model, validate=False)
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

    # -------------------------------------------------------------------------------- the end

    def close(self) -> None:
        """Take everything off the model again; records stay."""
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


def _not_finite(path: str, call: Call) -> str:
    for name, x in (("queries", call.q), ("keys", call.k), ("values", call.v)):
        if not bool(torch.isfinite(x.sum(dtype=torch.float32))) and not bool(
            torch.isfinite(x).all()
        ):
            return f"the {name} of {path}"
    return ""


def _bad_gradient(weights: dict[str, dict[str, float]]) -> str:
    for name, figures in weights.items():
        for what in ("weight", "gradient"):
            value = figures[what]
            if math.isinf(value) or (what == "weight" and math.isnan(value)):
                return f"the {what} of {name}"
    return ""
