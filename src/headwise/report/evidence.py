"""The plot behind a finding: the numbers its rule looked at, ready for the page."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import xarray as xr

from headwise.report.findings import Finding
from headwise.report.quantities import QUANTITIES
from headwise.report.rules import rules

__all__ = ["evidence"]


def evidence(dataset: xr.Dataset, found: Sequence[Finding]) -> dict[str, dict[str, Any]]:
    """By kind of finding: the values (four digits), their labels and places, and the threshold."""
    table = {rule.kind: rule for rule in rules()}
    return {
        finding.kind: _entry(dataset, finding, table[finding.kind].quantity) for finding in found
    }


def _entry(dataset: xr.Dataset, finding: Finding, name: str) -> dict[str, Any]:
    quantity = QUANTITIES[name][1](dataset)
    rule = next(rule for rule in rules() if rule.kind == finding.kind)
    attributes = dataset[finding.evidence].attrs if finding.evidence in dataset else {}
    return {
        "title": finding.title,
        "quantity": name,
        "evidence": finding.evidence,
        "longName": rule.reading or attributes.get("long_name", finding.evidence),
        "word": quantity.word,
        "unit": finding.unit,
        "beyond": rule.beyond,
        "threshold": finding.threshold,
        "places": [list(place) for place in finding.places],
        "values": [float(f"{v:.3e}") if math.isfinite(v) else None for v in quantity.values],
        "labels": list(quantity.labels) if quantity.word != "head" else [],
    }
