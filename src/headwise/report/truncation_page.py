"""The loss against the rank of the heads as one small self-contained page, without a script."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from headwise.circuits.truncation import Truncation
from headwise.report.numbers import percent, three
from headwise.report.shell import small_page
from headwise.report.truncation_facts import (
    alone_sentence,
    loss_words,
    rank_rows,
    signed,
    suggestion,
    title,
)
from headwise.report.truncation_terminal import COLUMNS

__all__ = ["truncation_page"]

# Of the drawing, in pixels.
_WIDTH: Final = 640
_HEIGHT: Final = 300
_LEFT: Final = 56
_BOTTOM: Final = 36
_TOP: Final = 12
_RIGHT: Final = 84
_LABEL: Final = 26


@dataclass(frozen=True)
class Plot:
    """Where everything of the drawing stands; ``y`` grows downwards."""

    width: int
    height: int
    points: tuple[tuple[float, float], ...]
    ranks: tuple[tuple[float, int], ...]  # x, rank: those whose labels do not touch
    ticks: tuple[tuple[float, str], ...]  # y, loss
    whole: float
    allowed: float

    @property
    def line(self) -> str:
        return " ".join(f"{x:.1f},{y:.1f}" for x, y in self.points)


def truncation_page(found: Truncation) -> str:
    """The HTML text: the sentence, the plot, the table."""
    name, facts = title(found)
    rows = [
        (
            str(row.rank),
            loss_words(row.loss),
            signed(row.change),
            percent(row.energy_min),
            percent(row.energy_median),
            f"{row.parameters:,}",
            percent(row.of_stored),
        )
        for row in rank_rows(found)
    ]
    return small_page(
        "truncation.html",
        title=f"{name} cut to rank r",
        facts=facts,
        sentences=[line for line in (suggestion(found), alone_sentence(found)) if line],
        columns=COLUMNS,
        rows=rows,
        plot=plot(found),
        left=_LEFT,
        right=_WIDTH - _RIGHT,
        base=_HEIGHT - _BOTTOM,
    )


def plot(found: Truncation) -> Plot:
    """Ranks on a logarithmic axis, losses on a linear one that holds the whole model's too."""
    losses, whole = found.losses, found.losses.whole
    finite = [x for x in losses.losses if math.isfinite(x)]
    low = min([*finite, whole])
    high = max([*finite, whole + found.tolerance])
    span = (high - low) or 1.0
    first, last = math.log2(losses.ranks[0]), math.log2(losses.ranks[-1])

    def x(rank: int) -> float:
        share = (math.log2(rank) - first) / (last - first) if last > first else 0.5
        return _LEFT + share * (_WIDTH - _LEFT - _RIGHT)

    def y(loss: float) -> float:
        return _HEIGHT - _BOTTOM - (loss - low) / span * (_HEIGHT - _BOTTOM - _TOP)

    pairs = zip(losses.ranks, losses.losses, strict=True)
    return Plot(
        width=_WIDTH,
        height=_HEIGHT,
        points=tuple((x(rank), y(loss)) for rank, loss in pairs if math.isfinite(loss)),
        ranks=_apart([(x(rank), rank) for rank in losses.ranks]),
        ticks=tuple((y(low + span * i / 4), three(low + span * i / 4)) for i in range(5)),
        whole=y(whole),
        allowed=y(whole + found.tolerance),
    )


def _apart(labels: list[tuple[float, int]]) -> tuple[tuple[float, int], ...]:
    """The largest, and from there down each that leaves room for the one before."""
    kept = labels[-1:]
    for label in labels[-2::-1]:
        if kept[-1][0] - label[0] >= _LABEL:
            kept.append(label)
    return tuple(reversed(kept))
