"""The circuits of a model in a terminal: labels, strongest heads, pairs, and numbers by layer."""

from __future__ import annotations

import math
from typing import Any, Final

import xarray as xr
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from headwise.report.circuit_facts import (
    Z_FROM,
    Told,
    compared,
    edges,
    head_names,
    labelled_heads,
    strongest,
)
from headwise.report.circuit_figures import circuit_notes
from headwise.report.circuit_run import circuit_title
from headwise.report.numbers import three
from headwise.report.quantities import about
from headwise.report.terminal import ByLayer

__all__ = ["circuit_summary"]

_SHOWN: Final = 3
_LINES: Final = (
    ("qk_effective_rank_folded", "rank of W_QK", "effective", False),
    ("ov_effective_rank_folded", "rank of W_OV", "effective", False),
    ("qk_spectral_norm_folded", "norm of W_QK", "spectral", True),
    ("ov_spectral_norm_folded", "norm of W_OV", "spectral", True),
    ("copying", "copying", "−1 to 1", False),
    ("qk_sign", "sign of W_QK", "−1 to 1", False),
    ("rotary_slow_share", "slow pairs", "of W_QK", False),
    ("qk_change_relative", "change of W_QK", "of ‖W‖", True),
    ("ov_change_relative", "change of W_OV", "of ‖W‖", True),
)
_STRONGEST: Final = (
    ("copying", "copying"),
    ("qk_sign", "sign of W_QK"),
    ("qk_spectral_norm_folded", "norm of W_QK"),
    ("ov_spectral_norm_folded", "norm of W_OV"),
    ("qk_change_relative", "change of W_QK"),
    ("ov_change_relative", "change of W_OV"),
)


def circuit_summary(dataset: xr.Dataset) -> RenderableType:
    """What the heads of a model are made of, in some twenty lines."""
    facts = about(dataset)
    name, line = circuit_title(dataset)
    parts: list[RenderableType] = [
        Text(name, style="bold"),
        Text(" · ".join(line), style="dim"),
        Text(),
        _behaviours(dataset, facts),
        Text(),
        _heads(dataset),
        *_composition(dataset),
        Text(),
        ByLayer(dataset=dataset, lines=_LINES),
    ]
    notes = circuit_notes(dataset)
    if notes:
        parts += [Text(), *(Text(f"Note: {note}.", style="dim") for note in notes)]
    return Group(*parts)


def _behaviours(dataset: xr.Dataset, facts: dict[str, Any]) -> Text:
    """How many heads do what on repeated tokens, on the text, and on both."""
    data = {on: facts[on] for on in ("repeated", "text") if facts.get(on) is not None}
    if not data:
        return Text("Behaviours were not measured.", style="bold")
    measured = sum(
        int(heads)
        for heads, role in zip(dataset["heads"].values, dataset["role"].values, strict=True)
        if str(role) != "cross"
    )
    text = Text(style="bold")
    for on, words in data.items():
        found = labelled_heads(dataset, on)
        names = {place for heads in found.values() for place, _ in heads}
        counts = [f"{word} {len(heads)}" for word, heads in found.items()]
        counts.append(f"no label {measured - len(names)}")
        text.append("\n" if text else "")
        text.append(f"Of {measured} heads: {', '.join(counts)}.")
        text.append(f" On {words}.", style="not bold dim")
    both = [each for each in compared(dataset) if each.scored_on_both]
    if both:
        text.append("\n")
        for words, attribute in (("On both", "both"), ("only on repeated tokens", "repeated"),
                                 ("only on the text", "text")):  # fmt: skip
            counts = [f"{e.word} {len(getattr(e, attribute))}" for e in both
                      if getattr(e, attribute)]  # fmt: skip
            text.append("" if attribute == "both" else "; ")
            text.append(f"{words}: {', '.join(counts) or 'none'}")
        text.append(".")
    return text


def _heads(dataset: xr.Dataset) -> Table:
    """Behaviours and scores, each with its strongest heads."""
    names = head_names(dataset)
    table = Table.grid(padding=(0, 1, 0, 0))
    table.add_column(width=15, no_wrap=True)
    table.add_column()
    both = compared(dataset)
    scores = "scores on repeated tokens / on the text" if both else ""
    table.add_row(Text("strongest heads", style="bold"), Text(scores, style="dim"))
    rows: list[tuple[str, list[tuple[tuple[int, int], str]]]] = []
    for each in both:
        heads = sorted((*each.both, *each.repeated, *each.text), key=lambda head: -head.highest)
        rows.append((each.word, [(head.place, _pair(head)) for head in heads]))
    if not both:
        on = "repeated" if "behaviours" in dataset else "text"
        for word, found in labelled_heads(dataset, on).items():
            rows.append((word, [(place, three(value)) for place, value in found]))
    for variable, label in _STRONGEST:
        if variable in dataset:
            top = strongest(dataset, variable)
            rows.append((label, [(place, three(value)) for place, value in top]))
    for label, told in rows:
        if not told:
            continue
        line = Text(", ".join(f"{names[place]} ({words})" for place, words in told[:_SHOWN]))
        more = len(told) - _SHOWN
        if more > 0:
            line.append(f" and {more} more", style="dim")
        table.add_row(Text(label), line)
    return table


def _pair(head: Told) -> str:
    scores = (head.repeated, head.text)
    return " / ".join("–" if math.isnan(score) else three(score) for score in scores)


def _composition(dataset: xr.Dataset) -> list[RenderableType]:
    found = edges(dataset, most=_SHOWN)
    if not found.pairs:
        return []
    names = head_names(dataset)
    text = Text("\n")
    text.append("composition    ", style="bold")
    text.append(f" {found.above:,} of {found.pairs:,} pairs have z > {Z_FROM:g}")
    for edge in found.shown:
        text.append(
            f"\n                {edge.kind}: {names[edge.earlier]} → {names[edge.later]}"
            f" ({three(edge.value)}, z {three(edge.z)})"
        )
    return [text]
