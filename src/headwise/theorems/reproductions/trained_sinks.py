"""Windows with and without the first tokens: what a trained decoder loses."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from headwise.attention.masks import Causal, Mask, Predicate, Prefix, Window
from headwise.theorems.measured import Measured, bootstrap, within
from headwise.theorems.reproductions.trained_text import (
    check_masked,
    embedded,
    losses,
    sequences,
)
from headwise.theorems.statement import (
    Control,
    Curve,
    Effort,
    Evidence,
    NotApplicable,
    Plot,
)
from headwise.theorems.trained import Trained

__all__ = ["sinks_of_a_model", "sinks_of_the_embedded"]

_LEAST: Final = 1.5  # ratio of perplexities that the paper's claim has to reach here
_SINK: Final = 0.3  # mean weight on the first token that makes a head a sink (Gu et al. 2024)
_SINK_TOKENS: Final = 64  # over which it is averaged
_SHORTEST: Final = 64  # context of which a quarter is a window that can spare 4 keys
_COUNTS: Final = (0, 1, 4)  # first tokens that are kept


@dataclass(frozen=True, slots=True)
class _Sizes:
    """``tokens`` of each of ``count`` sequences; the second half is scored, a quarter is seen."""

    tokens: int
    count: int

    @property
    def width(self) -> int:
        return self.tokens // 4


def sinks_of_the_embedded(effort: Effort) -> Evidence:
    """On the model inside the package."""
    return _evidence(embedded(), _Sizes(512, effort.pick(4, 17)))


def sinks_of_a_model(model: Trained) -> Evidence:
    """On a trained decoder: 512 tokens of the text, or as many as its context."""
    sizes = _Sizes(min(512, model.loaded.context or 512), 3)
    if sizes.tokens < _SHORTEST:
        raise NotApplicable(f"its context of {sizes.tokens} tokens is too short for a window")
    return _evidence(model, sizes)


def _evidence(model: Trained, sizes: _Sizes) -> Evidence:
    ids = sequences(model, sizes.tokens, sizes.count)
    check_masked(model, ids)
    scored = {name: _scored(model, ids, mask) for name, mask in _masks(sizes).items()}
    full, window, kept = scored["full"], scored[_kept(0)], scored[_kept(4)]
    if torch.equal(full, window):
        raise NotApplicable("its attention takes no mask of one's own")
    sinks = _share_of_sinks(model)
    perplexity = {name: math.exp(float(loss.mean())) for name, loss in scored.items()}
    ratio = _ratio("perplexity, window / window with 4 first tokens", window, kept)
    return Evidence(
        measured=(ratio,),
        controls=(
            Control(
                name="4 other early tokens are kept, not the first",
                measured=(_ratio(ratio.name, window, scored["others"]),),
            ),
        ),
        finding=_finding(sizes, perplexity, ratio, sinks),
        violated="" if sinks else f"no head puts {_SINK} of its weight on the first token",
        plots=(_plot(perplexity, scored),),
    )


def _kept(count: int) -> str:
    return f"{count} first"


def _masks(sizes: _Sizes) -> Mapping[str, Mask]:
    """All see the same number of keys once the window is full; ``others`` begin at an eighth."""
    width, begin = sizes.width, sizes.tokens // 8
    found: dict[str, Mask] = {"full": Causal()}
    for count in _COUNTS:
        first = Window(width - count) | Prefix(count) if count else Window(width)
        found[_kept(count)] = Causal() & first

    def other(batch: int, query: Tensor, key: Tensor) -> Tensor:
        return (key >= begin) & (key < begin + 4) & (query >= 0)

    found["others"] = Causal() & (Window(width - 4) | Predicate(other))
    return found


def _scored(model: Trained, ids: Tensor, mask: Mask) -> Tensor:
    """Mean loss of each sequence over its second half."""
    return losses(model.model, ids, mask)[:, ids.shape[1] // 2 :].mean(1)


def _ratio(name: str, cut: Tensor, kept: Tensor) -> Measured:
    draws = (cut - kept).tolist()
    low, high = bootstrap(draws, lambda some: math.exp(sum(some) / len(some)))
    value = math.exp(sum(draws) / len(draws))
    return within(name, value, allowed=(_LEAST, math.inf), interval=(low, high), draws=len(draws))


def _share_of_sinks(model: Trained) -> float:
    """Share of heads whose mean weight on the first token is above 0.3, over 64 tokens."""
    means = [each.weights()[:, 1:_SINK_TOKENS, 0].mean(1) for each in model.heads]
    return float((torch.cat(means) > _SINK).double().mean())


def _finding(sizes: _Sizes, perplexity: Mapping[str, float], ratio: Measured, sinks: float) -> str:
    text = (
        f"{sizes.tokens} tokens, {sizes.width} seen, perplexity of the second half:"
        f" {perplexity['full']:.3g} with all keys, {perplexity[_kept(0)]:.3g} with a window,"
        f" {perplexity[_kept(1)]:.3g} and {perplexity[_kept(4)]:.3g} with 1 and 4 first tokens"
        f" kept; {100 * sinks:.3g} % of the heads are sinks"
    )
    if ratio.holds:
        return f"{text}."
    return f"{text}; the paper's claim does not reproduce on this model."


def _plot(perplexity: Mapping[str, float], scored: Mapping[str, Tensor]) -> Plot:
    names = [_kept(count) for count in _COUNTS]
    root = math.sqrt(len(scored["full"]))
    errors = [perplexity[name] * float(scored[name].std()) / root for name in names]
    every = len(names)
    return Plot(
        title="Perplexity of a window that keeps the first tokens",
        across="first tokens kept",
        up="perplexity",
        places=tuple(float(count) for count in _COUNTS),
        curves=(
            Curve("window", tuple(perplexity[name] for name in names), tuple(errors)),
            Curve("all keys", (perplexity["full"],) * every),
            Curve("control: 4 other tokens", (perplexity["others"],) * every),
        ),
    )
