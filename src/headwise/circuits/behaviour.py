"""The behaviours that name a head, and what a measurement of them leaves behind.

A label is a mean over rows of the weight on keys that the behaviour picks out, and a threshold.
The thresholds are those of the findings (results/thresholds.py): one table for both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from torch import Tensor

from headwise.errors import OptionError
from headwise.results.thresholds import LOCAL_TOKENS, THRESHOLDS

__all__ = ["BEHAVIOURS", "Behaviour", "HeadLabels", "LayerScores"]

_OURS: Final = "the cut at {} is a rule of thumb, ours"
_OLSSON: Final = "Olsson et al. 2022 (arXiv:2209.11895)"


@dataclass(frozen=True, kw_only=True, slots=True)
class Behaviour:
    """What a head may do: how it is scored, above which score a head is called so, and whose
    words these are. Without a threshold the score is there to be read only."""

    name: str
    score: str
    threshold: float | None
    source: str


def _behaviour(name: str, score: str, kind: str | None, source: str) -> Behaviour:
    threshold = None if kind is None else THRESHOLDS[kind]
    cut = "" if threshold is None else f"; {_OURS.format(threshold)}"
    return Behaviour(name=name, score=score, threshold=threshold, source=source + cut)


BEHAVIOURS: Final[Mapping[str, Behaviour]] = MappingProxyType(
    {
        each.name: each
        for each in (
            _behaviour(
                "previous_token",
                "mean of A[i, i-1]",
                "previous_token_heads",
                f"Voita et al. 2019 (arXiv:1905.09418), {_OLSSON}",
            ),
            _behaviour(
                "next_token",
                "mean of A[i, i+1], in encoders",
                "next_token_heads",
                "Clark et al. 2019 (arXiv:1906.04341)",
            ),
            _behaviour(
                "induction",
                "mean of A[i, i-T+1] from the second copy on: the key after the token's last copy",
                "induction_heads",
                f"{_OLSSON}, prefix matching on repeated random tokens",
            ),
            _behaviour(
                "induction_all",
                "the same, summed over the keys after every earlier copy",
                None,
                _OLSSON,
            ),
            _behaviour(
                "duplicate_token",
                "mean of A[i, i-T] from the second copy on: the token's last copy; in encoders the"
                " sum over all other copies",
                "duplicate_token_heads",
                "Wang et al. 2022 (arXiv:2211.00593)",
            ),
            Behaviour(
                name="sink",
                score="mean weight on the first token, a learned sink included",
                threshold=THRESHOLDS["sinks"],
                source="Gu et al. 2024 (arXiv:2410.10781), at 64 tokens",
            ),
            _behaviour(
                "local",
                f"mean weight on keys nearer than {LOCAL_TOKENS} tokens",
                "local_heads",
                "Clark et al. 2019 (arXiv:1906.04341) describe such heads",
            ),
            _behaviour("distance", "mean of |i - j| under the weights, in tokens", None, "ours"),
        )
    }
)


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerScores:
    """The scores of one attention module: name of a behaviour -> ``head``, float64.

    ``rows`` are the rows behind each mean, ``uniform`` the score of a head that attends to all it
    may see alike; where a scan's own record gives the score, it has none. ``spread`` is the
    standard deviation between seeds, on repeated random tokens.
    """

    module: str
    role: str
    number: int
    scores: Mapping[str, Tensor]
    rows: Mapping[str, int]
    spread: Mapping[str, Tensor]
    uniform: Mapping[str, float]


@dataclass(frozen=True, kw_only=True, eq=False)
class HeadLabels:
    """Scores of every head on one kind of data."""

    data: str  # in words
    layers: tuple[LayerScores, ...]

    def heads(self, name: str) -> tuple[tuple[int, int], ...]:
        """(layer, head) of the heads whose score is above the threshold, the highest first.

        Layers are counted in the order of ``layers``.
        """
        known = BEHAVIOURS.get(name)
        if known is None or known.threshold is None:
            allowed = ", ".join(n for n, b in BEHAVIOURS.items() if b.threshold is not None)
            raise OptionError(f"no label is called {name!r}", allowed=allowed)
        found = [
            (float(score), index, head)
            for index, layer in enumerate(self.layers)
            for head, score in enumerate(layer.scores.get(name, ()))
            if float(score) > known.threshold
        ]
        return tuple((index, head) for _, index, head in sorted(found, key=lambda x: -x[0]))
