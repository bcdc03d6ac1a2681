"""Facts of a run of ``circuits`` in words."""

from __future__ import annotations

from typing import Any

import xarray as xr

from headwise.report.numbers import duration
from headwise.report.quantities import about
from headwise.report.run import date_in_words, printable, shape_words

__all__ = ["circuit_run_facts", "circuit_title"]


def circuit_title(dataset: xr.Dataset) -> tuple[str, list[str]]:
    """The model's name, and the facts beside it: size, rank, dtype, date."""
    facts = about(dataset)
    parts = [
        *shape_words(dataset),
        f"rank {dataset.sizes['rank']} at most",
        str(facts.get("dtype", "")),
        *(f"against {facts[name]}" for name in ("base", "adapter") if facts.get(name)),
        date_in_words(facts.get("created_at")),
    ]
    return printable(facts.get("model", "model")), [printable(part) for part in parts if part]


def circuit_run_facts(dataset: xr.Dataset) -> list[tuple[str, str]]:
    """Rows of the table of the run; what is not known is left out."""
    facts = about(dataset)
    versions = facts.get("versions") or {}
    rows: tuple[tuple[str, Any], ...] = (
        ("Model", facts.get("model")),
        ("Architecture", facts.get("architecture")),
        ("Trained length", facts.get("context")),
        ("Weights", facts.get("dtype")),
        ("Computed in", facts.get("computed_dtype")),
        ("Exactness", facts.get("exactness")),
        ("Weights checked", "against what the model computes" if facts.get("validated") else None),
        ("Base", facts.get("base")),
        ("Adapter", facts.get("adapter")),
        ("Repeated tokens", facts.get("repeated")),
        ("Text", facts.get("text")),
        ("Time", duration(facts["seconds"]) if facts.get("seconds") else None),
        ("Versions", ", ".join(f"{name} {version}" for name, version in versions.items())),
        ("Computed at", facts.get("created_at")),
    )
    return [(name, str(value)) for name, value in rows if value]
