"""Norms of gradients, weights, updates and of the residual stream in one training step.

Gradients are read when a backward pass has ended, before anybody clips them: after what
``DistributedDataParallel`` does to them, and once for all micro-batches of a step, because the last
pass of a step holds their sum.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

__all__ = ["Stream", "Weights", "after_backward"]

_SAMPLE: Final = 4096  # entries of a weight by which its update is known


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

    for tensor in _tensors(outputs):
        if tensor.requires_grad:
            tensor.register_hook(reached)


def _tensors(outputs: Any) -> Iterable[Tensor]:
    if isinstance(outputs, Tensor):
        yield outputs
    elif isinstance(outputs, dict):
        for value in outputs.values():
            yield from _tensors(value)
    elif isinstance(outputs, (list, tuple)):
        for value in outputs:
            yield from _tensors(value)


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
            chosen = torch.randint(p.numel(), (_SAMPLE,), generator=generator)
            self.places[name] = None if every else chosen.to(p.device)

    @torch.no_grad()
    def read_gradients(self, scale: float = 1.0) -> None:
        """Take the norms of the gradients that are there now; ``scale`` is that of the loss."""
        names = [name for name, p in self.named.items() if p.grad is not None]
        grads = [p.grad for name, p in self.named.items() if p.grad is not None]
        if not grads:
            return
        norms = torch._foreach_norm([g.float() if g.dtype.itemsize < 4 else g for g in grads])
        values = torch.stack([norm.double().cpu() for norm in norms]) / scale
        self.gradients = dict(zip(names, values.tolist(), strict=True))

    @torch.no_grad()
    def remember(self) -> None:
        """Keep the sampled entries: the optimizer is about to change them."""
        self.before = {name: self._sampled(name) for name in self.named}

    @torch.no_grad()
    def figures(self) -> dict[str, dict[str, float]]:
        """Name → gradient, weight and update norm; NaN where there is none."""
        found = {}
        for name, p in self.named.items():
            update = math.nan
            if name in self.before:
                change = (self._sampled(name).double() - self.before[name].double()).norm()
                share = 1.0 if self.places[name] is None else p.numel() / _SAMPLE
                update = float(change) * math.sqrt(share)
            found[name] = {
                "gradient": self.gradients.get(name, math.nan),
                "weight": float(p.detach().double().norm()),
                "update": update,
            }
        self.before, self.gradients = {}, {}
        return found

    def _sampled(self, name: str) -> Tensor:
        flat, places = self.named[name].detach().reshape(-1), self.places[name]
        return flat.clone() if places is None else flat[places]


@dataclass
class _Sums:
    """Squares of the entries of one block's output: of first tokens and of the others."""

    first: float = 0.0
    first_count: int = 0
    others: float = 0.0
    others_count: int = 0
    gradient: float = 0.0
    gradient_seen: bool = False


class Stream:
    """The residual stream after every block: its rms, first tokens apart, and its gradient."""

    def __init__(self, blocks: Iterable[str], model: nn.Module) -> None:
        modules = dict(model.named_modules())
        self.modules = {path: modules[path] for path in blocks}
        self.sums = {path: _Sums() for path in self.modules}
        self.non_finite = ""

    def attach(self) -> list[Any]:
        """Hooks for one forward pass; the caller removes them."""
        return [m.register_forward_hook(self._hook(path)) for path, m in self.modules.items()]

    def _hook(self, path: str) -> Callable[..., None]:
        def after(module: nn.Module, inputs: Any, output: Any) -> None:
            x = next((t for t in _tensors(output) if t.dim() == 3), None)
            if x is None:
                return
            self._absorb(path, x.detach())
            if x.requires_grad:
                x.register_hook(lambda gradient: self._gradient(path, gradient))

        return after

    def _absorb(self, path: str, x: Tensor) -> None:
        squares = x.float().square().sum(-1)
        sums, d = self.sums[path], x.shape[-1]
        first, whole = float(squares[:, 0].double().sum()), float(squares.double().sum())
        sums.first += first
        sums.first_count += x.shape[0] * d
        sums.others += whole - first
        sums.others_count += x.shape[0] * (x.shape[1] - 1) * d
        if not math.isfinite(whole) and not self.non_finite and not bool(torch.isfinite(x).all()):
            self.non_finite = path

    def _gradient(self, path: str, gradient: Tensor) -> None:
        self.sums[path].gradient += float(gradient.detach().float().square().sum())
        self.sums[path].gradient_seen = True

    def figures(self, scale: float = 1.0) -> dict[str, dict[str, float]]:
        """Path of the block → rms of first tokens and of the others, and the gradient's norm."""
        found = {
            path: {
                "rms_first": _root(s.first, s.first_count),
                "rms": _root(s.others, s.others_count),
                "gradient": math.sqrt(s.gradient) / scale if s.gradient_seen else math.nan,
            }
            for path, s in self.sums.items()
        }
        self.sums = {path: _Sums() for path in self.modules}
        return found


def _root(squares: float, count: int) -> float:
    return math.sqrt(squares / count) if count and squares >= 0 else math.nan
