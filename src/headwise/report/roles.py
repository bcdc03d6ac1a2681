"""What the heads do on this text: each head under the first description that fits it.

The thresholds are those of ``rules.toml``, so that roles and findings agree.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import xarray as xr

from headwise.report.numbers import counted
from headwise.report.quantities import QUANTITIES, Place
from headwise.report.rules import rules

__all__ = ["Role", "in_words", "roles"]

# (key, words, words for one head, rule, quantity), the most particular description first.
_ROLES: Final = (
    (
        "previous",
        "read the token before",
        "reads the token before",
        "previous_token_heads",
        "previous_mass",
    ),
    ("local", "look within 16 tokens", "looks within 16 tokens", "local_heads", "local_mass"),
    (
        "uniform",
        "average over everything",
        "averages over everything",
        "near_uniform",
        "entropy_fraction",
    ),
    ("sink", "rest on the first token", "rests on the first token", "sinks", "resting_mass"),
)
_SHOWN: Final = ("sink", "previous", "local", "uniform", "other")


@dataclass(frozen=True, kw_only=True, slots=True)
class Role:
    """One description, and the heads it fits: (layer, head) as the data set numbers them."""

    key: str
    words: str
    places: tuple[Place, ...]
    quantity: str

    @property
    def count(self) -> int:
        """The number of heads."""
        return len(self.places)


def roles(dataset: xr.Dataset) -> list[Role]:
    """The roles that any head has; empty where nothing was measured.

    A head with more than 0.4 of its weight on the token before "reads the token before"; else
    one with more than 0.8 within 16 tokens is local; else one above 0.95 of the largest entropy
    averages; else one with more than 0.3 on the first token (or a learned sink) rests; all
    others have no simple pattern.

    Example:
        >>> import xarray as xr
        >>> shares = xr.Dataset(
        ...     {"previous_mass": (("layer", "head"), [[0.1, 0.7, 0.2]]),
        ...      "sink_mass": (("layer", "head"), [[0.8, 0.3, 0.1]])},
        ...     coords={"layer": [0], "head": [0, 1, 2], "role": ("layer", ["decoder"]),
        ...             "number": ("layer", [0])})
        >>> [(role.key, role.places) for role in roles(shares)]
        [('sink', ((0, 0),)), ('previous', ((0, 1),)), ('other', ((0, 2),))]
    """
    learned = "null_mass" in dataset and bool(np.nansum(dataset["null_mass"].values) > 0)
    thresholds = {rule.kind: rule.threshold for rule in rules()}
    found: dict[str, Role] = {}
    taken: np.ndarray | None = None
    places: tuple[tuple[Place, ...], ...] = ()
    for key, many, one, kind, name in _ROLES:
        needs, measure = QUANTITIES[name]
        if not all(variable in dataset.variables for variable in needs):
            continue
        quantity = measure(dataset)
        known, places = np.isfinite(quantity.values), quantity.places
        if taken is None:
            taken, seen = np.zeros(len(known), dtype=bool), np.zeros(len(known), dtype=bool)
        seen |= known
        fits = known & ~taken & (quantity.values > thresholds[kind])
        taken |= fits
        words = [w.replace("the first token", "a sink") if learned else w for w in (one, many)]
        found[key] = _role(key, (words[0], words[1]), name, fits, places)
    if taken is None:
        return []
    other = ("has no simple pattern", "have no simple pattern")
    found["other"] = _role("other", other, "entropy_fraction", seen & ~taken, places)
    return [found[key] for key in _SHOWN if key in found and found[key].places]


def in_words(found: list[Role]) -> str:
    """All roles in one line.

    Example:
        >>> in_words([Role(key="local", words="looks near", places=((0, 0),), quantity="")])
        'Of 1 head, 1 looks near.'
    """
    total = sum(role.count for role in found)
    parts = ", ".join(f"{role.count:,} {role.words}" for role in found)
    return f"Of {counted(total, 'head')}, {parts}."


def _role(
    key: str,
    words: tuple[str, str],
    quantity: str,
    fits: np.ndarray,
    places: tuple[tuple[Place, ...], ...],
) -> Role:
    chosen = tuple(place for i in np.flatnonzero(fits) for place in places[int(i)])
    return Role(key=key, words=words[len(chosen) != 1], places=chosen, quantity=quantity)
