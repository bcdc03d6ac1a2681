"""Norms of gradients, weights and updates of the parameters of a model in one training step.

Gradients are read when a backward pass has ended, before anybody clips them: after what
``DistributedDataParallel`` does to them, and once for all micro-batches of a step, because the last
pass of a step holds their sum.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn

__all__ = ["Weights", "after_backward", "tensors_in"]

_SAMPLE: Final = 4096  # entries of a weight by which its update is known
_CHUNK: Final = 1 << 16  # entries whose squares are added up in float32 on a CPU


def after_backward(outputs: Any, then: Callable[[], None]) -> None:
    """Call ``then`` once when a backward pass that reaches one of the outputs has ended."""
    queued: list[int] = []

    def reached(gradient: Tensor) -> None:
        task = torch._C._current_graph_task_id()
        if task in queued:
            return
        queued.append(task)
        engine: Any = torch.autograd.Variable._execution_engine
        # Queued from a callback, so that it comes after those of DistributedDataParallel.
        engine.queue_callback(lambda: engine.queue_callback(then))

    for tensor in tensors_in(outputs):
        if tensor.requires_grad:
            tensor.register_hook(reached)


def tensors_in(outputs: Any) -> Iterable[Tensor]:
    """The tensors of what a module returned, in order."""
    if isinstance(outputs, Tensor):
        yield outputs
    elif isinstance(outputs, dict):
        for value in outputs.values():
            yield from tensors_in(value)
    elif isinstance(outputs, (list, tuple)):
        for value in outputs:
            yield from tensors_in(value)


class Weights:
    """The parameters of a model by name: norms of what they hold, of gradients and of updates.

    The norm of an update is exact for parameters of up to 4,096 entries. Of larger ones it is
    that of 4,096 entries, drawn once, scaled to all: its square is an unbiased estimate.
    """

    def __init__(self, model: nn.Module, seed: int = 0) -> None:
        self.named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.gradients: dict[str, float] = {}
        self.before: dict[str, Tensor] = {}
        self.places: dict[str, Tensor | None] = {}
        generator = torch.Generator().manual_seed(seed)
        for name, p in self.named.items():
            every = p.numel() <= _SAMPLE
            chosen = torch.randint(max(p.numel(), 1), (_SAMPLE,), generator=generator)
            self.places[name] = None if every else chosen.to(p.device)

    @torch.no_grad()
    def read_gradients(self, scale: float = 1.0) -> str:
        """Take the norms of the gradients that are there now; ``scale`` is that of the loss.

        Returns the first gradient that is not finite, in the order of a backward pass, or "".
        """
        there = {name: p.grad for name, p in self.named.items() if p.grad is not None}
        norms = _norms(list(there.values()))
        self.gradients = {name: x / scale for name, x in zip(there, norms, strict=True)}
        bad = _first_not_finite(reversed(list(there.items())), self.gradients)
        return f"the gradient of {bad}" if bad else ""

    @torch.no_grad()
    def remember(self) -> None:
        """Keep the sampled entries: the optimizer is about to change them."""
        self.before = {name: self._sampled(name) for name in self.named}

    @torch.no_grad()
    def figures(self) -> tuple[dict[str, dict[str, float]], str]:
        """Name → gradient, weight and update norm, NaN where there is none; and the first weight
        that is not finite, or ""."""
        weights = dict(zip(self.named, _norms(list(self.named.values())), strict=True))
        changes = {
            name: self._sampled(name).double() - before.double()
            for name, before in self.before.items()
        }
        updates = dict(zip(changes, _norms(list(changes.values())), strict=True))
        found = {
            name: {
                "gradient": self.gradients.get(name, math.nan),
                "weight": weights[name],
                "update": updates.get(name, math.nan) * self._share(name),
            }
            for name in self.named
        }
        bad = _first_not_finite(self.named.items(), weights)
        self.forget()
        return found, f"the weight of {bad}" if bad else ""

    def forget(self) -> None:
        """Nothing of this step is kept."""
        self.before, self.gradients = {}, {}

    def _share(self, name: str) -> float:
        sampled = self.places[name] is not None
        return math.sqrt(self.named[name].numel() / _SAMPLE) if sampled else 1.0

    def _sampled(self, name: str) -> Tensor:
        flat, places = self.named[name].detach().reshape(-1), self.places[name]
        return flat.clone() if places is None else flat[places.to(flat.device)]


def _norms(tensors: Sequence[Tensor]) -> list[float]:
    """Euclidean norms without a copy of any tensor: parts in float32, their squares in float64."""
    parts: list[Tensor] = []
    counts = []
    for x in tensors:
        flat = (x.coalesce().values() if x.is_sparse else x).detach().reshape(-1)
        # Sums on a CPU run through all entries: short ones stay exact.
        cut = flat.split(_CHUNK) if flat.device.type == "cpu" else (flat,)
        parts += cut
        counts.append(len(cut))
    found: list[Tensor] = [part.new_empty(0) for part in parts]
    for half in (True, False):
        at = [i for i, part in enumerate(parts) if (part.dtype.itemsize < 4) == half]
        chosen = [parts[i] for i in at]
        norms = torch._foreach_norm(chosen, 2, torch.float32 if half else None) if at else ()
        for i, norm in zip(at, norms, strict=True):
            found[i] = norm
    if not found:
        return []
    every = torch.stack([norm.to(found[0].device, torch.float64) for norm in found]).cpu()
    return [math.sqrt(float(of_one.square().sum())) for of_one in every.split(counts)]


def _first_not_finite(tensors: Iterable[tuple[str, Tensor]], norms: dict[str, float]) -> str:
    """Its name; a norm that is not finite may only be too large for its squares."""
    for name, x in tensors:
        if not math.isfinite(norms[name]):
            values = x.coalesce().values() if x.is_sparse else x
            if not bool(torch.isfinite(values).all()):
                return name
    return ""
