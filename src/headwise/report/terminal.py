"""The summary in a terminal: verdict, findings, and the model layer by layer in 80 columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import xarray as xr
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from headwise.report.findings import Finding, healthy, verdict
from headwise.report.numbers import three
from headwise.report.roles import in_words, roles
from headwise.report.run import title_facts

__all__ = ["ByLayer", "Lines", "bars", "summary"]

Lines = Sequence[tuple[str, str, str, bool]]  # variable, label, unit, logarithmic

_SHOWN: Final = 7
_MARKS: Final = {
    "bad": ("act", "bold white on red"),
    "watch": ("watch", "bold yellow"),
    "note": ("note", "dim"),
}
_BARS: Final = "▁▂▃▄▅▆▇█"
_WIDEST: Final = 36  # bars; 44 columns hold the words and numbers beside them
_BESIDE: Final = 44
_LINES: Final = (
    ("entropy_fraction", "entropy", "of ln n", False),
    ("sink_mass", "sink", "of weight", False),
    ("previous_mass", "previous token", "of weight", False),
    ("distance", "distance", "tokens", True),
    ("max_logit", "max logit", "", False),
)
_ROLES: Final = {"decoder": "decoder", "encoder": "encoder", "cross": "cross-attention"}


def summary(dataset: xr.Dataset, found: Sequence[Finding]) -> RenderableType:
    """The verdict, what the heads do, the findings worst first, and five statistics by layer.

    Example:
        >>> import xarray as xr
        >>> from rich.console import Console
        >>> logits = xr.Dataset(
        ...     {"max_logit": (("layer", "head"), [[12.0, 19.5], [3.0, 4.0]])},
        ...     coords={"layer": [0, 1], "head": [0, 1], "key": [0, 1, 2],
        ...             "role": ("layer", ["decoder"] * 2), "number": ("layer", [0, 1]),
        ...             "heads": ("layer", [2, 2]), "kv_heads": ("layer", [2, 2]),
        ...             "mask": ("layer", ["causal"] * 2)})
        >>> console = Console(width=80, color_system=None)
        >>> console.print(summary(logits, []))  # doctest: +NORMALIZE_WHITESPACE
        model
        2 layers × 2 heads · 3 tokens · mask: causal
        <BLANKLINE>
        Nothing stands out: every check is within its threshold.
        Healthy: no attention logit above 100 (largest 19.5).
        <BLANKLINE>
        by layer        first to last, mean over heads              least     most
        max logit       █▁                                           3.50     15.8
    """
    name, facts = title_facts(dataset)
    parts: list[RenderableType] = [
        Text(name, style="bold"),
        Text(" · ".join(facts), style="dim"),
        Text(),
        Text(verdict(found), style="bold"),
    ]
    fine = [fact.sentence for fact in healthy(dataset)]
    if fine:
        parts.append(Text(f"Healthy: {'; '.join(fine[:3])}.", style="dim"))
    told = roles(dataset)
    if told:
        parts += [Text(), Text(in_words(told))]
    if found:
        parts += [Text(), _findings(found)]
    if len(found) > _SHOWN:
        parts.append(Text(f"      and {len(found) - _SHOWN} more", style="dim"))
    parts += [Text(), ByLayer(dataset=dataset, lines=_LINES)]
    return Group(*parts)


def _findings(found: Sequence[Finding]) -> Table:
    table = Table.grid(padding=(0, 1, 0, 0))
    table.add_column(width=5, no_wrap=True)
    table.add_column()
    for finding in found[:_SHOWN]:
        mark, style = _MARKS[finding.severity]
        table.add_row(Text(f"{mark:^5}", style=style), Text(finding.sentence))
    return table


@dataclass(frozen=True, kw_only=True, eq=False)
class ByLayer:
    """The table by layer, its bars as wide as the terminal allows."""

    dataset: xr.Dataset
    lines: Lines

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield _by_layer(self.dataset, self.lines, max(4, min(_WIDEST, options.max_width - _BESIDE)))


def _by_layer(dataset: xr.Dataset, lines: Lines, widest: int) -> Table:
    table = Table.grid(padding=(0, 1, 0, 0))
    table.add_column(width=15, no_wrap=True)
    table.add_column(width=widest, no_wrap=True)
    for _ in range(2):
        table.add_column(width=8, justify="right", no_wrap=True)
    table.add_column(width=9, no_wrap=True)
    roles = dataset["role"].values.astype(str)
    for role in dict.fromkeys(roles.tolist()):
        several = len(set(roles)) > 1
        heading = _ROLES[role] if several else "by layer"
        rows = [
            _line(label, dataset[name].values[roles == role], unit, log, widest)
            for name, label, unit, log in lines
            if name in dataset
        ]
        if role != "cross" and "stream_out_rms" in dataset:
            chosen = dataset["stack"].values.astype(str) == role
            stream = dataset["stream_out_rms"].values[chosen]
            rows.append(_line("stream rms", stream[:, None], "", True, widest))
        words = "first to last, mean over heads" if widest > 29 else "first to last"
        table.add_row(Text(heading, style="bold"), Text(words, style="dim"), *_ENDS)
        for row in rows:
            if row is not None:
                table.add_row(*row)
    return table


_ENDS: Final = (Text("least", style="dim"), Text("most", style="dim"), Text())


def _line(
    label: str, values: np.ndarray, unit: str, log: bool, widest: int
) -> tuple[Text, Text, Text, Text, Text] | None:
    count = np.isfinite(values).sum(1)
    total = np.where(np.isfinite(values), values, 0.0).sum(1)
    means = np.divide(total, count, out=np.full(len(values), np.nan), where=count > 0)
    known = means[np.isfinite(means)]
    if not known.size:
        return None
    least, most = Text(three(float(known.min()))), Text(three(float(known.max())))
    drawn = Text(bars(means, log, widest), style="cyan")
    return Text(label), drawn, least, most, Text(unit, style="dim")


def bars(means: np.ndarray, log: bool, widest: int) -> str:
    """One bar per layer, or per few layers when there are more than fit; ``·`` where unknown."""
    groups = np.array_split(means, min(len(means), widest))
    values = [
        float(part[np.isfinite(part)].mean()) if np.isfinite(part).any() else np.nan
        for part in groups
    ]
    known = [value for value in values if np.isfinite(value)]
    low, high = min(known), max(known)
    if log and low > 0:
        values, low, high = (
            [float(np.log(v)) for v in values],
            float(np.log(low)),
            float(np.log(high)),
        )
    span = (high - low) or 1.0
    return "".join(
        _BARS[round((value - low) / span * (len(_BARS) - 1))] if np.isfinite(value) else "·"
        for value in values
    )
