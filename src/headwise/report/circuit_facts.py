"""What the circuits of a model come to: labels, strongest heads, pairs that compose."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np
import xarray as xr

from headwise.report.quantities import about, layer_names
from headwise.results.frame import to_dataframe

__all__ = [
    "Z_FROM",
    "Compared",
    "Edge",
    "Edges",
    "Told",
    "compared",
    "edges",
    "head_names",
    "labelled_heads",
    "strongest",
    "to_json",
]

# A pair composes when its z is above this. Heads turned at random get there with a chance of less
# than 1e-9 where both have ten directions or more, and of 5e-4 where both have only one.
Z_FROM: Final = 8.0
_MOST_EDGES: Final = 40

_BEHAVIOURS: Final = (
    "previous token", "next token", "induction", "duplicate token", "sink", "local",
)  # fmt: skip
# What the scores and the names are called in the data set, by where they were measured.
_WHERE: Final = {"repeated": ("repeated_", "behaviours"), "text": ("text_", "text_behaviours")}

Place = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Told:
    """A head, and its scores of one behaviour on repeated tokens and on a text (NaN: none)."""

    place: Place
    repeated: float
    text: float

    @property
    def highest(self) -> float:
        """The larger of the scores that there are."""
        return max(score for score in (self.repeated, self.text) if not math.isnan(score))


@dataclass(frozen=True, kw_only=True, slots=True)
class Compared:
    """The heads that show one behaviour on both, or on one of the two only."""

    word: str
    scored_on_both: bool
    both: tuple[Told, ...]
    repeated: tuple[Told, ...]
    text: tuple[Told, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Edge:
    """The earlier head writes what the later one reads."""

    kind: str  # "Q", "K" or "V"
    earlier: Place
    later: Place
    value: float
    z: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Edges:
    """The strongest pairs above the threshold, how many there are above it, and of how many."""

    shown: tuple[Edge, ...]
    above: int
    pairs: int


def labelled_heads(
    dataset: xr.Dataset, on: str = "repeated"
) -> dict[str, list[tuple[Place, float]]]:
    """Behaviour -> its heads with their scores, the highest first; empty without a run.

    ``on``: "repeated" (random tokens that repeat) or "text".
    """
    prefix, names_as = _WHERE[on]
    if names_as not in dataset:
        return {}
    names = dataset[names_as].transpose("layer", "head").values
    found: dict[str, list[tuple[Place, float]]] = {}
    for word in _BEHAVIOURS:
        scores = _scores(dataset, prefix, word)
        if scores is None:
            continue
        places = [
            (place, float(scores[place]))
            for place in np.ndindex(names.shape)
            if word in str(names[place]).split(", ")
        ]
        if places:
            found[word] = sorted(places, key=lambda each: -each[1])
    return found


def compared(dataset: xr.Dataset) -> list[Compared]:
    """Behaviours on repeated tokens beside those on a text; empty unless both were measured."""
    if not all(names_as in dataset for _, names_as in _WHERE.values()):
        return []
    of = {on: labelled_heads(dataset, on) for on in _WHERE}
    out = []
    for word in _BEHAVIOURS:
        named = {on: {place for place, _ in of[on].get(word, [])} for on in _WHERE}
        if not named["repeated"] | named["text"]:
            continue
        scores = {on: _scores(dataset, prefix, word) for on, (prefix, _) in _WHERE.items()}
        heads = [
            Told(place, *(math.nan if s is None else float(s[place]) for s in scores.values()))
            for place in sorted(named["repeated"] | named["text"])
        ]
        heads.sort(key=lambda head: -head.highest)
        out.append(
            Compared(
                word=word,
                scored_on_both=all(each is not None for each in scores.values()),
                both=tuple(h for h in heads if h.place in named["repeated"] & named["text"]),
                repeated=tuple(h for h in heads if h.place in named["repeated"] - named["text"]),
                text=tuple(h for h in heads if h.place in named["text"] - named["repeated"]),
            )
        )
    return out


def _scores(dataset: xr.Dataset, prefix: str, word: str) -> np.ndarray | None:
    variable = prefix + word.replace(" ", "_")
    if variable not in dataset:
        return None
    scores: np.ndarray = dataset[variable].transpose("layer", "head").values
    return scores


def strongest(dataset: xr.Dataset, name: str, count: int = 3) -> list[tuple[Place, float]]:
    """The heads with the numbers farthest from 0, farthest first."""
    values = dataset[name].transpose("layer", "head").values
    size = np.where(np.isfinite(values), -np.abs(values), np.inf)
    order = np.argsort(size, axis=None, kind="stable")
    places = [np.unravel_index(int(i), values.shape) for i in order[:count]]
    chosen = [((int(a), int(b)), float(values[a, b])) for a, b in places]
    return [each for each in chosen if np.isfinite(each[1])]


def edges(dataset: xr.Dataset, most: int = _MOST_EDGES) -> Edges:
    """The pairs of heads that compose far more than heads turned at random would."""
    found: list[Edge] = []
    above = pairs = 0
    for letter in "qkv":
        if f"composition_{letter}_z" not in dataset:
            continue
        z = dataset[f"composition_{letter}_z"].values
        value = dataset[f"composition_{letter}"].values
        known = np.isfinite(z)
        pairs += int(known.sum())
        high = np.flatnonzero(known.ravel() & (z.ravel() > Z_FROM))
        above += high.size
        high = high[np.argsort(-z.ravel()[high], kind="stable")][:most]
        for flat in high.tolist():
            layer, head, earlier_layer, earlier_head = (
                int(i) for i in np.unravel_index(flat, z.shape)
            )
            place = (layer, head, earlier_layer, earlier_head)
            found.append(
                Edge(
                    kind=letter.upper(),
                    earlier=(earlier_layer, earlier_head),
                    later=(layer, head),
                    value=float(value[place]),
                    z=float(z[place]),
                )
            )
    found.sort(key=lambda edge: -edge.z)
    return Edges(shown=tuple(found[:most]), above=above, pairs=pairs)


def head_names(dataset: xr.Dataset) -> dict[Place, str]:
    """``L3 · H2`` of every place."""
    heads = [int(head) for head in dataset["head"].values]
    names = layer_names(dataset)
    return {
        (i, h): f"{name} · H{heads[h]}" for i, name in enumerate(names) for h in range(len(heads))
    }


def to_json(dataset: xr.Dataset) -> dict[str, Any]:
    """Facts, a row per head (numbers that do not exist are null), and the pairs that compose."""
    rows = [
        {
            str(name): None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in row.items()
        }
        for row in to_dataframe(dataset).to_dict("records")
    ]
    pairs = edges(dataset)
    return {
        "about": about(dataset),
        "heads": rows,
        "composition": {
            "z_from": Z_FROM,
            "pairs": pairs.pairs,
            "above": pairs.above,
            "strongest": [asdict(edge) for edge in pairs.shown],
        },
    }
