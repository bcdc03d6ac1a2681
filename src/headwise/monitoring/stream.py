"""The residual stream in one training step: its size after every block, and its gradient there."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn

from headwise.monitoring.gradients import tensors_in

__all__ = ["Stream"]

# Of one block: squares and entries of first tokens, of the others; of the gradient, and passes.
_SUMS: Final = 6


class Stream:
    """Sums over the tokens of all micro-batches, for every block.

    Args:
        blocks: paths of the blocks, and the stack that each is of.
        model: what they are in.
        bad: told of what is not finite, when it is met.
    """

    def __init__(
        self, blocks: Iterable[tuple[str, str]], model: nn.Module, bad: Callable[[str], None]
    ) -> None:
        modules = dict(model.named_modules())
        self._stacks = dict(blocks)
        self._modules = {path: modules[path] for path in self._stacks}
        self._bad = bad
        self._tokens: dict[str, tuple[Tensor, Tensor]] = {}
        self._waiting: list[tuple[str, Tensor]] = []
        self._scale = 1.0
        self.forget()

    def forget(self) -> None:
        """Nothing of this step is kept."""
        self._sums = {path: [0.0] * _SUMS for path in self._modules}

    def attach(self, scale: float) -> list[Any]:
        """Hooks for one forward pass, whose loss is scaled; the caller removes them."""
        self._scale = scale
        self._tokens, self._waiting = {}, []
        return [m.register_forward_hook(self._hook(path)) for path, m in self._modules.items()]

    def tokens(self, stack: str, real: Tensor, first: Tensor) -> None:
        """Which positions of a stack are tokens, and first ones: ``batch position``."""
        self._tokens[stack] = (real, first)

    def detach(self) -> None:
        """The pass has ended: outputs made inside a checkpoint have their gradients only now."""
        for path, x in self._waiting:
            self._watch(path, x)
        self._tokens, self._waiting = {}, []

    def _hook(self, path: str) -> Callable[..., None]:
        def after(module: nn.Module, inputs: Any, output: Any) -> None:
            x = next((t for t in tensors_in(output) if t.dim() == 3), None)
            if x is None:
                return
            with torch.no_grad():
                self._absorb(path, x.detach())
            if x.requires_grad:
                self._watch(path, x)
            elif not torch.is_grad_enabled():
                self._waiting.append((path, x))

        return after

    def _absorb(self, path: str, x: Tensor) -> None:
        squares = x.float().square().sum(-1).double()
        real, first = self._places(path, squares)
        of_first = torch.where(first, squares, 0.0).sum()
        of_others = torch.where(real & ~first, squares, 0.0).sum()
        count = (first.sum() * x.shape[-1], (real & ~first).sum() * x.shape[-1])
        found = torch.stack([of_first, count[0], of_others, count[1]]).tolist()
        sums = self._sums[path]
        for i, value in enumerate(found):
            sums[i] += value
        if not all(map(math.isfinite, found)) and not bool(torch.isfinite(x[real]).all()):
            self._bad(f"the output of {path}")

    def _places(self, path: str, squares: Tensor) -> tuple[Tensor, Tensor]:
        """Which positions are tokens; all of them where no attention call has said so."""
        known = self._tokens.get(self._stacks[path])
        if known is not None and known[0].shape == squares.shape:
            return known[0].to(squares.device), known[1].to(squares.device)
        first = torch.zeros_like(squares, dtype=torch.bool)
        first[:, 0] = True
        return torch.ones_like(first), first

    def _watch(self, path: str, x: Tensor) -> None:
        if x.requires_grad:
            scale = self._scale
            x.register_hook(lambda gradient: self._gradient(path, gradient, scale))

    def _gradient(self, path: str, gradient: Tensor, scale: float) -> None:
        g = gradient.detach()
        squares = float(g.float().square().sum(dtype=torch.float64))
        self._sums[path][4] += squares / scale**2
        self._sums[path][5] += 1
        if not math.isfinite(squares) and not bool(torch.isfinite(g).all()):
            self._bad(f"the gradient at {path}")

    def sums(self) -> list[float]:
        """All sums in a row: what processes add up."""
        return [value for of_block in self._sums.values() for value in of_block]

    def figures(self, sums: Sequence[float], processes: int) -> dict[str, dict[str, float]]:
        """Path of the block → rms of first tokens and of the others, and the gradient's norm.

        The gradient is that of the mean of the processes' losses, over all tokens of the step.
        """
        found = {}
        for i, path in enumerate(self._modules):
            first, firsts, others, rest, gradient, passes = sums[i * _SUMS : (i + 1) * _SUMS]
            found[path] = {
                "rms_first": _root(first, firsts),
                "rms": _root(others, rest),
                "gradient": math.sqrt(gradient) / processes if passes else math.nan,
            }
        return found


def _root(squares: float, count: float) -> float:
    return math.sqrt(squares / count) if count else math.nan
