"""Findings: what a scan shows, in ranked plain sentences with number, place, threshold and source.

Every rule of ``rules.toml`` looks at one quantity. A rule whose threshold is passed gives a
finding; one that is not stays silent, or states the healthy fact for the verdict.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np
import xarray as xr

from headwise.report.numbers import counted, percent, three
from headwise.report.quantities import QUANTITIES, Place, Quantity, about
from headwise.report.rules import SEVERITIES, Rule, Severity, rules

__all__ = ["Finding", "findings", "healthy", "open_dataset", "to_json", "verdict"]

_NAMED_IN_SENTENCE: Final = 5
_IN_VERDICT: Final = 3
_COUNTED_SHARES: Final = ("of rows", "of the rows", "of heads")  # written in percent


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One thing that a scan shows.

    ``places`` are (layer, head) as the data set numbers them, worst first; head is None where the
    whole layer or block is meant. ``value`` is the worst number, in ``unit``; ``evidence`` names
    the variable of the data set to look at.
    """

    kind: str
    severity: Severity
    title: str
    sentence: str
    places: tuple[Place, ...]
    value: float
    unit: str
    threshold: float
    source: str
    meaning: str
    remedy: str
    evidence: str


def open_dataset(scan: Any) -> xr.Dataset:
    """The data set of a scan, or the data set itself."""
    return scan if isinstance(scan, xr.Dataset) else scan.dataset


def findings(scan: Any) -> list[Finding]:
    """What a scan shows that is not plainly healthy, worst first; empty when all is well.

    The order is by severity (bad, watch, note), then that of the table ``rules.toml``.

    Args:
        scan: a ``Scan``, or its data set.

    Example:
        >>> import xarray as xr
        >>> logits = xr.Dataset(
        ...     {"max_logit": (("layer", "head"), [[12.0, 240.0]])},
        ...     coords={"layer": [0], "head": [0, 1], "role": ("layer", ["decoder"]),
        ...             "number": ("layer", [0])})
        >>> [(f.kind, f.severity, f.places, f.value) for f in findings(logits)]
        [('exploding_logits', 'watch', ((0, 1),), 240.0)]
    """
    found = [finding for finding in _examine(open_dataset(scan)) if finding.severity != "healthy"]
    return sorted(found, key=lambda finding: SEVERITIES.index(finding.severity))


def healthy(scan: Any) -> list[Finding]:
    """The healthy facts of a scan: rules that looked and did not find.

    Example:
        >>> import xarray as xr
        >>> logits = xr.Dataset(
        ...     {"max_logit": (("layer", "head"), [[12.0, 19.54]])},
        ...     coords={"layer": [0], "head": [0, 1], "role": ("layer", ["decoder"]),
        ...             "number": ("layer", [0])})
        >>> [fact.sentence for fact in healthy(logits)]
        ['no attention logit above 100 (largest 19.5)']
    """
    found = _examine(open_dataset(scan))
    return [f for f in found if f.severity == "healthy" and f.sentence]


def verdict(found: Sequence[Finding]) -> str:
    """One sentence over all findings, for the top of the page.

    Example:
        >>> verdict([])
        'Nothing stands out: every check is within its threshold.'
    """
    if not found:
        return "Nothing stands out: every check is within its threshold."
    bad, watch, note = (
        [f.title for f in found if f.severity == severity] for severity in ("bad", "watch", "note")
    )
    parts = []
    if bad:
        parts.append(f"{counted(len(bad), 'problem')} to act on: {_listed(bad)}")
    if watch:
        parts.append(f"{counted(len(watch), 'thing')} to watch: {_listed(watch)}")
    if not parts:
        return f"No problem found. Worth knowing: {_listed(note)}."
    start = "" if bad else "No alarm. "
    return start + _capital("; ".join(parts)) + "."


def to_json(scan: Any, found: Sequence[Finding]) -> dict[str, Any]:
    """The run, the verdict, the findings and every number per layer and head, ready for JSON.

    NaN and infinities become None.

    Example:
        >>> import xarray as xr
        >>> logits = xr.Dataset(
        ...     {"max_logit": (("layer", "head"), [[12.0, float("nan")]])},
        ...     coords={"layer": [0], "head": [0, 1], "role": ("layer", ["decoder"]),
        ...             "number": ("layer", [0])})
        >>> to_json(logits, [])["heads"]["max_logit"]
        [[12.0, None]]
    """
    dataset = open_dataset(scan)
    names = list(dataset.variables)
    result = {
        "schema_version": dataset.attrs.get("schema_version"),
        "about": about(dataset),
        "verdict": verdict(found),
        "findings": [asdict(finding) for finding in found],
        "healthy": [fact.sentence for fact in healthy(dataset)],
        "layers": {n: dataset[n].values for n in names if dataset[n].dims == ("layer",)},
        "heads": {n: dataset[n].values for n in names if dataset[n].dims == ("layer", "head")},
        "blocks": {n: dataset[n].values for n in names if dataset[n].dims == ("block",)},
        "gradients": {n: dataset[n].values for n in names if dataset[n].dims == ("parameter",)},
    }
    plain: dict[str, Any] = _plain(result)
    return plain


def _examine(dataset: xr.Dataset) -> list[Finding]:
    return [
        _apply(rule, QUANTITIES[rule.quantity][1](dataset), dataset)
        for rule in rules()
        if all(name in dataset.variables for name in QUANTITIES[rule.quantity][0])
    ]


def _apply(rule: Rule, quantity: Quantity, dataset: xr.Dataset) -> Finding:
    """The finding of one rule; severity "healthy" with an empty sentence when it says nothing."""
    values, known = quantity.values, np.isfinite(quantity.values)
    sign = 1.0 if rule.beyond == "above" else -1.0
    order = [int(i) for i in np.argsort(-sign * values, kind="stable") if known[i]]
    beyond = [i for i in order if sign * values[i] > sign * rule.threshold]
    worst = float(values[order[0]]) if order else math.nan
    share = len(beyond) / len(order) if order else 0.0
    severity = rule.severity(share if rule.by == "share" else worst) if order else "healthy"
    template = rule.sentence if severity != "healthy" else rule.healthy if order else ""
    fields = _fields(rule, quantity, order, beyond, share)
    places = (
        [place for i in beyond for place in quantity.places[i]] if severity != "healthy" else []
    )
    return Finding(
        kind=rule.kind,
        severity=severity,
        title=rule.title,
        sentence=template.format(**fields),
        places=tuple(dict.fromkeys(places)),
        value=worst,
        unit=rule.unit,
        threshold=float(rule.threshold),
        source=rule.source,
        meaning=rule.meaning,
        remedy=rule.remedy,
        evidence=rule.evidence,
    )


def _fields(
    rule: Rule, quantity: Quantity, order: list[int], beyond: list[int], share: float
) -> Mapping[str, str]:
    if not order:
        return {}
    first = order[0]
    value = float(quantity.values[first])
    number = percent(value) if rule.unit in _COUNTED_SHARES else three(value)
    unit = "" if not rule.unit or rule.unit.startswith("of ") else f" {rule.unit}"
    if rule.unit == "×":
        unit = "×"
    places = [quantity.labels[i] for i in beyond[:_NAMED_IN_SENTENCE]]
    more = len(beyond) - len(places)
    return {
        "count": f"{len(beyond):,} of {counted(len(order), quantity.word)}",
        "share": percent(share),
        "value": number,
        "worst": f"{number}{unit} at {quantity.labels[first]}",
        "place": quantity.labels[first],
        "places": ", ".join(places) + (f" and {more:,} more" if more > 0 else ""),
        "threshold": f"{rule.threshold:,g}",
    }


def _listed(titles: Sequence[str]) -> str:
    shown = list(titles[:_IN_VERDICT])
    if len(titles) > len(shown):
        return ", ".join(shown) + f" and {len(titles) - len(shown)} more"
    return " and ".join([", ".join(shown[:-1]), shown[-1]] if len(shown) > 1 else shown)


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _plain(value: Any) -> Any:
    """Python numbers, strings, lists and dicts only; NaN and infinities become None."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, np.ndarray):
        return _plain(value.tolist())
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, np.generic):
        return _plain(value.item())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)
