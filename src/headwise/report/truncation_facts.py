"""What a truncation says: a row per rank, the suggested rank in a sentence, and all of it as JSON.

Numbers are those of the data set of ``truncate``; nothing is computed anew.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np

from headwise.circuits.truncation import Truncation, parsed_tolerance
from headwise.report.circuit_facts import head_names
from headwise.report.numbers import counted, three
from headwise.report.run import printable

__all__ = [
    "RankRow",
    "alone_sentence",
    "loss_words",
    "rank_rows",
    "signed",
    "suggestion",
    "title",
    "to_json",
]

_NAMES: Final = {"qk": "W_QK", "ov": "W_OV"}
_SHOWN: Final = 5


@dataclass(frozen=True)
class RankRow:
    """The heads at one rank; energies are the share of Σ σ² that is kept, over heads."""

    rank: int
    loss: float
    change: float
    energy_min: float
    energy_median: float
    parameters: int
    of_stored: float


def rank_rows(found: Truncation) -> list[RankRow]:
    """A row per rank, smallest first."""
    data, stored = found.dataset, found.facts["stored"]
    rows = []
    for i, rank in enumerate(found.losses.ranks):
        energy = data["energy"].isel(rank=i).values
        parameters = int(data["parameters"].values[i])
        rows.append(
            RankRow(
                rank=rank,
                loss=found.losses.losses[i],
                change=found.losses.changes[i],
                energy_min=float(np.nanmin(energy)),
                energy_median=float(np.nanmedian(energy)),
                parameters=parameters,
                of_stored=parameters / stored,
            )
        )
    return rows


def title(found: Truncation) -> tuple[str, list[str]]:
    """The model's name, and what was cut and read."""
    facts, sizes = found.facts, found.dataset.sizes
    names = " and ".join(_NAMES[str(each)] for each in found.dataset["matrix"].values)
    folded = " with the norm's gain" if facts["folded"] else ""
    parts = [
        f"{names}{folded} of {counted(facts['heads'], 'head')}"
        f" in {counted(sizes['layer'], 'layer')}",
        counted(facts["tokens"], "token"),
        f"loss of the whole model {loss_words(found.losses.whole)} nats per token",
    ]
    return printable(facts["model"]), parts


def suggestion(found: Truncation) -> str:
    """The smallest rank within the tolerance, or that there is none."""
    allowed, ranks = _tolerance(found), found.losses.ranks
    whole = loss_words(found.losses.whole)
    if found.suggested is None:
        loss = loss_words(found.losses.losses[-1])
        return (
            f"No measured rank is enough: at rank {ranks[-1]} the loss is {loss} against {whole},"
            f" which is more than {allowed} above it."
        )
    loss = loss_words(found.losses.losses[ranks.index(found.suggested)])
    return (
        f"Rank {found.suggested} of {found.facts['width']} is enough: from there on no measured"
        f" rank costs more than {allowed}; the loss is {loss} against {whole}."
    )


def alone_sentence(found: Truncation) -> str | None:
    """Which heads can bear the rank alone; None where they were not cut one at a time."""
    if "change_alone" not in found.dataset:
        return None
    names, values = head_names(found.dataset), found.dataset["change_alone"].values
    changes = {names[at]: float(x) for at, x in np.ndenumerate(values) if np.isfinite(x)}
    order = sorted(changes, key=lambda name: changes[name])
    bear = sum(change <= found.tolerance for change in changes.values())

    def listed(some: list[str]) -> str:
        return ", ".join(f"{name} ({signed(changes[name])})" for name in some)

    line = (
        f"One at a time at rank {found.facts['each']}, {bear} of {counted(len(order), 'head')}"
        f" cost no more than that. Most: {listed(order[::-1][:_SHOWN])}."
    )
    rest = order[: max(0, len(order) - _SHOWN)][:_SHOWN]
    return f"{line} Least: {listed(rest)}." if rest else line


def to_json(found: Truncation) -> dict[str, Any]:
    """Facts, a row per rank and a row per head; numbers that do not exist are null."""
    data = found.dataset
    heads = []
    for i, layer in enumerate(data["layer"].values):
        for h, head in enumerate(data["head"].values):
            energy = data["energy"].values[:, :, i, h]
            if np.isnan(energy).all():  # the layer has no such head
                continue
            alone = data["change_alone"].values[i, h] if "change_alone" in data else math.nan
            matrices = [str(name) for name in data["matrix"].values]
            heads.append(
                {
                    "layer": int(layer),
                    "role": str(data["role"].values[i]),
                    "number": int(data["number"].values[i]),
                    "head": int(head),
                    "energy": dict(zip(matrices, energy.tolist(), strict=True)),
                    "change_alone": None if math.isnan(alone) else float(alone),
                }
            )
    return {
        "about": found.facts,
        "tolerance_nats": found.tolerance,
        "suggested_rank": found.suggested,
        "suggestion": suggestion(found),
        "saved": None if found.saved is None else str(found.saved),
        "ranks": [asdict(row) for row in rank_rows(found)],
        "heads": heads,
    }


def loss_words(loss: float) -> str:
    """A loss with four decimals."""
    return f"{loss:.4f}"


def signed(change: float) -> str:
    """A change with its sign and four decimals, never minus nothing.

    Example:
        >>> signed(0.25), signed(-1e-9), signed(-0.5)
        ('+0.2500', '0.0000', '−0.5000')
    """
    text = f"{change:+.4f}"
    return "0.0000" if float(text) == 0 else text.replace("-", "−")


def _tolerance(found: Truncation) -> str:
    nats = f"{three(found.tolerance)} nats per token"
    value, share = parsed_tolerance(found.facts["tolerance"])
    return f"{100 * value:g}% of the loss ({nats})" if share else nats
