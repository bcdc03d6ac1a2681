"""The circuits of a model in a terminal: labels, strongest heads, pairs, and numbers by layer."""

from __future__ import annotations

from typing import Final

import xarray as xr
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from headwise.report.circuit_facts import Z_FROM, edges, head_names, labelled_heads, strongest
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
        _behaviours(dataset, facts.get("repeated")),
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


def _behaviours(dataset: xr.Dataset, data: str | None) -> Text:
    if data is None:
        return Text("Behaviours were not measured.", style="bold")
    found = labelled_heads(dataset)
    measured = sum(
        int(heads)
        for heads, role in zip(dataset["heads"].values, dataset["role"].values, strict=True)
        if str(role) != "cross"
    )
    names = {place for heads in found.values() for place, _ in heads}
    counts = [f"{word} {len(heads)}" for word, heads in found.items()]
    counts.append(f"no label {measured - len(names)}")
    text = Text(f"Of {measured} heads: {', '.join(counts)}.", style="bold")
    return text.append(f" On {data}.", style="not bold dim")


def _heads(dataset: xr.Dataset) -> Table:
    """Behaviours and scores, each with its strongest heads."""
    names = head_names(dataset)
    table = Table.grid(padding=(0, 1, 0, 0))
    table.add_column(width=15, no_wrap=True)
    table.add_column()
    table.add_row(Text("strongest heads", style="bold"), "")
    rows = list(labelled_heads(dataset).items())
    for variable, label in _STRONGEST:
        if variable in dataset:
            rows.append((label, strongest(dataset, variable)))
    for label, heads in rows:
        if not heads:
            continue
        shown = ", ".join(f"{names[place]} ({three(value)})" for place, value in heads[:_SHOWN])
        line = Text(shown)
        more = len(heads) - _SHOWN
        if more > 0:
            line.append(f" and {more} more", style="dim")
        table.add_row(Text(label), line)
    return table


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
