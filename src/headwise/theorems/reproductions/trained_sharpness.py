"""Tiny language models whose queries and keys have a fixed size: the loss against that size."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from headwise.models import build, preset
from headwise.models.architecture import Architecture, Rotary
from headwise.models.attention import MultiHeadAttention
from headwise.observation.reading import default_text
from headwise.theorems.measured import Measured, bootstrap, within
from headwise.theorems.statement import Control, Curve, Effort, Evidence, Plot

__all__ = ["sharpness"]

_SIZES: Final = {"layers": 2, "heads": 2, "d_head": 32}
_CONTEXT: Final = 64
_RATE: Final = 3e-3
_SMOOTH: Final = 0.02  # added to every count of a pair
_CLEAR: Final = 0.1  # nats: several times what two seeds differ by


@dataclass(frozen=True, slots=True)
class _Text:
    """Bytes to learn from and bytes to be judged on."""

    learn: Tensor
    judge: Tensor

    @property
    def pairs(self) -> float:
        """Loss of the counts of neighbouring pairs: a model without attention can reach it."""
        counts = torch.full((256, 256), _SMOOTH, dtype=torch.float64)
        ones = torch.ones(len(self.learn) - 1, dtype=torch.float64)
        counts.index_put_((self.learn[:-1], self.learn[1:]), ones, accumulate=True)
        chances = counts / counts.sum(1, keepdim=True)
        return float(-chances[self.judge[:-1], self.judge[1:]].log().mean())


@dataclass(frozen=True, slots=True)
class _Run:
    """How long to train: ``steps`` batches of ``batch`` pieces."""

    steps: int
    batch: int


def sharpness(effort: Effort) -> Evidence:
    """Train one model for each κ and seed; the control divides the logits by κ again."""
    text, run = _text(), effort.pick(_Run(200, 8), _Run(300, 16))
    sizes = effort.pick((1.0, 1e3, 1e4), (1.0, 1e1, 1e2, 1e3, 1e4))
    seeds = range(effort.seed, effort.seed + effort.pick(1, 3))
    found = {kappa: [_trained(text, run, kappa, seed) for seed in seeds] for kappa in sizes}
    undone = [_trained(text, run, 1e4, seed, divided=True) for seed in seeds]
    pairs = text.pairs
    measured = _measured(found[1.0], found[1e3], found[1e4], pairs)
    logits = {kappa: kappa * math.sqrt(_SIZES["d_head"]) for kappa in sizes}
    means = [sum(each) / len(each) for each in found.values()]
    return Evidence(
        measured=measured,
        controls=(
            Control(
                name="κ = 10⁴, and the logits divided by κ again",
                measured=_measured(found[1.0], undone, undone, pairs)[1:],
            ),
        ),
        finding=_finding(sizes, means, pairs, logits, measured),
        plots=(_plot(sizes, list(found.values()), means, pairs, undone),),
    )


def _text() -> _Text:
    data = torch.tensor(list(default_text().encode()))
    cut = len(data) * 9 // 10
    return _Text(data[:cut], data[cut:])


def _architecture() -> Architecture:
    base = preset("tiny")
    stack, width = base.decoder, _SIZES["heads"] * _SIZES["d_head"]
    assert stack is not None
    changes: dict[str, Any] = _SIZES | {
        "kv_heads": _SIZES["heads"],
        "d_ff": 4 * width,
        "qk_norm": "head",
        "rotary": Rotary(width=_SIZES["d_head"]),
    }
    changed = stack.model_copy(update=changes)
    return base.model_copy(update={"d_model": width, "context": _CONTEXT, "decoder": changed})


def _fixed(kappa: float, seed: int, divided: bool) -> Any:
    """A decoder with q = √κ z/rms(z) and the same for k: logits of at most κ √d_k."""
    model = build(_architecture(), seed=seed)
    for part in model.modules():
        if isinstance(part, MultiHeadAttention):
            for norm in (part.query_norm, part.key_norm):
                assert norm is not None
                gain: Any = norm.weight
                gain.data.fill_(math.sqrt(kappa))
                gain.requires_grad_(False)
            part.scale = part.scale / kappa if divided else part.scale
    return model


def _trained(text: _Text, run: _Run, kappa: float, seed: int, *, divided: bool = False) -> float:
    """The loss after training, on text that was not learnt from, in nats per byte."""
    model = _fixed(kappa, seed, divided)
    learned = [each for each in model.parameters() if each.requires_grad]
    optimiser = torch.optim.AdamW(learned, lr=_RATE, weight_decay=0.0)
    generator = torch.Generator().manual_seed(seed)
    for step in range(run.steps):
        warm = min(1.0, 10 * (step + 1) / run.steps)
        optimiser.param_groups[0]["lr"] = _RATE * warm * (1 - step / run.steps)
        at = torch.randint(len(text.learn) - _CONTEXT - 1, (run.batch,), generator=generator)
        optimiser.zero_grad()
        _loss(model, text.learn, at).backward()
        torch.nn.utils.clip_grad_norm_(learned, 1.0)
        optimiser.step()
    with torch.no_grad():
        return float(_loss(model, text.judge, torch.arange(64) * _CONTEXT))


def _loss(model: Any, data: Tensor, at: Tensor) -> Tensor:
    ids = data[at[:, None] + torch.arange(_CONTEXT + 1)]
    logits = model(ids[:, :-1]).flatten(0, 1)
    return torch.nn.functional.cross_entropy(logits, ids[:, 1:].flatten())


def _measured(
    small: Sequence[float], large: Sequence[float], largest: Sequence[float], pairs: float
) -> tuple[Measured, ...]:
    return (
        _mean("loss at κ = 1 less that of pairs", [x - pairs for x in small], (-math.inf, 0.0)),
        _mean(
            "loss at κ = 10³ less that at κ = 1",
            [y - x for x, y in zip(small, large, strict=True)],
            (_CLEAR, math.inf),
        ),
        _mean("loss at κ = 10⁴ less that of pairs", [x - pairs for x in largest], (0.0, math.inf)),
    )


def _mean(name: str, draws: Sequence[float], allowed: tuple[float, float]) -> Measured:
    interval = bootstrap(draws, lambda some: sum(some) / len(some))
    value = sum(draws) / len(draws)
    return within(name, value, allowed=allowed, interval=interval, draws=len(draws), unit="nats")


def _finding(
    sizes: Sequence[float],
    means: Sequence[float],
    pairs: float,
    logits: dict[float, float],
    measured: Sequence[Measured],
) -> str:
    by_size = ", ".join(f"{m:.3g} at κ = {k:g}" for k, m in zip(sizes, means, strict=True))
    text = f"Losses {by_size} (logits up to {logits[1.0]:.3g} κ); counts of pairs reach {pairs:.3g}"
    if means[-1] < means[-2]:
        text += "; it does not grow further from κ = 10³ to 10⁴"
    if all(each.holds for each in measured):
        return f"{text}."
    return f"{text}; the paper's claim does not reproduce in full."


def _plot(
    sizes: Sequence[float],
    losses: Sequence[Sequence[float]],
    means: Sequence[float],
    pairs: float,
    undone: Sequence[float],
) -> Plot:
    spread = [
        float(torch.tensor(each).std()) / math.sqrt(len(each)) if len(each) > 1 else 0.0
        for each in losses
    ]
    every = len(sizes)
    return Plot(
        title="Loss of tiny models against the size of their queries and keys",
        across="κ",
        up="loss, nats per byte",
        places=tuple(sizes),
        curves=(
            Curve("trained with κ", tuple(means), tuple(spread)),
            Curve("counts of pairs", (pairs,) * every),
            Curve("control: logits divided by κ", (sum(undone) / len(undone),) * every),
        ),
        log=(True, False),
    )
