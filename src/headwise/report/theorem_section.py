"""Which statements of the theory hold on a measured model, as a section of its page."""

from __future__ import annotations

from dataclasses import dataclass

import xarray as xr

from headwise.report.quantities import about
from headwise.report.theorem_facts import counts
from headwise.report.theorem_page import StatementView, views
from headwise.theorems.checked import from_json

__all__ = ["TheoremSection", "theorem_section"]


@dataclass(frozen=True, slots=True)
class TheoremSection:
    """How many of each verdict, every statement under its subject, and what was left out."""

    counts: str
    subjects: list[tuple[str, list[StatementView]]]
    left_out: list[str]


def theorem_section(dataset: xr.Dataset) -> TheoremSection | None:
    """What the checks found; None where there were none, or facts of another version."""
    facts = about(dataset).get("theorems")
    if not isinstance(facts, dict):
        return None
    try:
        found = [from_json(each) for each in facts["checked"]]
        left_out = [str(name) for name in facts["left_out"]]
    except (KeyError, TypeError, ValueError):
        return None  # a scan from another version: its checks cannot be read any more
    return TheoremSection(counts(found), views(found), left_out) if found else None
