"""Facts of the run in words: the title line of the page, and how it was measured."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import Any

import xarray as xr

from headwise.report.choices import CIRCUIT_STATISTICS
from headwise.report.numbers import counted, duration, memory
from headwise.report.quantities import about
from headwise.results.circuit_definitions import CIRCUITS

__all__ = [
    "date_in_words",
    "definition_in_words",
    "definitions",
    "printable",
    "run_facts",
    "shape_words",
    "title_facts",
]

# Of the circuits, what the page shows; the schema defines them all.
_SHOWN = {statistic.name for statistic in CIRCUIT_STATISTICS}


def title_facts(dataset: xr.Dataset) -> tuple[str, list[str]]:
    """The model's name, and the facts beside it: size, tokens, mask, dtype, exactness, date."""
    facts = about(dataset)
    rows_measured, rows_total = facts.get("rows_measured"), facts.get("rows_total")
    sampled = rows_measured and rows_total and rows_measured < rows_total
    exactness = (
        f"exact on {rows_measured:,} of {rows_total:,} rows"
        if sampled
        else facts.get("exactness", "")
    )
    parts = [
        *shape_words(dataset),
        counted(int(facts.get("tokens", dataset.sizes["key"])), "token"),
        _masks(dataset),
        str(facts.get("dtype", "")),
        str(exactness),
        date_in_words(facts.get("created_at")),
    ]
    return printable(facts.get("model", "model")), [part for part in parts if part]


def printable(name: Any) -> str:
    """A name from elsewhere may hold any character, also those that move a terminal's cursor."""
    return "".join(c if c.isprintable() else "\ufffd" for c in str(name))


def run_facts(dataset: xr.Dataset) -> list[tuple[str, str]]:
    """Rows of the table of the run; what is not known is left out."""
    facts = about(dataset)
    versions = facts.get("versions") or {}
    rows: Iterable[tuple[str, Any]] = (
        ("Model", facts.get("model")),
        ("Architecture", facts.get("architecture")),
        ("Tokens", _number(facts.get("tokens"))),
        ("Documents", _number(facts.get("documents"))),
        ("Trained length", _with_word(facts.get("context"), "tokens")),
        ("Weights", facts.get("dtype")),
        ("Statistics computed in", facts.get("computed_dtype")),
        ("Exactness", facts.get("exactness")),
        ("Query rows measured", _rows(facts)),
        ("The sink is", _sink(facts.get("sink_keys"))),
        ("Loss", _with_word(facts.get("loss"), "nats per token")),
        ("Device", facts.get("device")),
        ("Time", duration(facts["seconds"]) if facts.get("seconds") else None),
        ("CPU time", duration(facts["cpu_seconds"]) if facts.get("cpu_seconds") else None),
        (
            "Peak memory",
            memory(facts["peak_memory_bytes"]) if facts.get("peak_memory_bytes") else None,
        ),
        ("Versions", ", ".join(f"{name} {version}" for name, version in versions.items())),
        ("Measured at", facts.get("created_at")),
    )
    return [(name, str(value)) for name, value in rows if value]


def definitions(dataset: xr.Dataset) -> list[dict[str, str]]:
    """The definition of every statistic per head and per block that the data set holds."""
    keys = ("long_name", "definition", "units", "exactness", "source")
    rows = []
    for name, array in dataset.data_vars.items():
        basic = array.dims in (("layer", "head"), ("block",)) or name in (
            "band_mass",
            "received",
            "pooled",
            "gradient_norm",
        )
        if name in CIRCUITS and name not in _SHOWN:
            continue
        if basic and array.attrs.get("definition"):
            row = {key: str(array.attrs.get(key, "")) for key in keys}
            row["definition"] = definition_in_words(dataset, str(name))
            row["units"] = "" if row["units"] == "1" else row["units"]
            rows.append(row)
    return rows


def definition_in_words(dataset: xr.Dataset, name: str) -> str:
    """The definition of a variable, with the number of sink keys of this scan in it."""
    text = str(dataset[name].attrs.get("definition", ""))
    keys = about(dataset).get("sink_keys") or 1
    if keys == 1:
        for long, short in (
            ("one of the first sink_keys keys", "the first key"),
            ("the first sink_keys keys", "the first key"),
            ("after the first sink_keys", "after the first"),
        ):
            text = text.replace(long, short)
    return text.replace("sink_keys", str(keys))


def shape_words(dataset: xr.Dataset) -> list[str]:
    """Layers and heads, one entry per kind of layer."""
    roles = [str(role) for role in dataset["role"].values]
    names = {"decoder": "decoder", "encoder": "encoder", "cross": "cross-attention"}
    lines = []
    for role in dict.fromkeys(roles):
        chosen = dataset.isel(layer=[i for i, r in enumerate(roles) if r == role])
        heads = sorted({int(number) for number in chosen["heads"].values})
        shared = sorted({int(number) for number in chosen["kv_heads"].values})
        text = f"{counted(chosen.sizes['layer'], 'layer')} × {_range(heads)} heads"
        if heads == [1]:
            text = text.removesuffix("s")
        if shared != heads:
            text += f" ({_range(shared)} key-value)"
        lines.append(text if len(set(roles)) == 1 else f"{names[role]}: {text}")
    return lines


def _range(numbers: list[int]) -> str:
    return str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]}–{numbers[-1]}"


def _masks(dataset: xr.Dataset) -> str:
    masks = list(dict.fromkeys(str(mask) for mask in dataset["mask"].values))
    return f"mask: {masks[0]}" if len(masks) == 1 else f"{len(masks)} kinds of masks"


def date_in_words(text: str | None) -> str:
    """``30 November 2026`` of a moment in ISO form; other texts as they are."""
    if not text:
        return ""
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return text
    return f"{moment.day} {moment:%B %Y}"


def _number(value: float | None) -> str | None:
    return None if value is None else f"{value:,}"


def _with_word(value: float | None, word: str) -> str | None:
    if value is None:
        return None
    return f"{value:,} {word}" if isinstance(value, int) else f"{value:.4g} {word}"


def _rows(facts: dict[str, Any]) -> str | None:
    measured, total = facts.get("rows_measured"), facts.get("rows_total")
    if not measured or not total:
        return None
    return f"all {total:,}" if measured == total else f"{measured:,} of {total:,}"


def _sink(keys: int | None) -> str | None:
    if not keys:
        return None
    return "the first token" if keys == 1 else f"the first {keys} tokens"
