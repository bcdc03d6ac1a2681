"""How a scan shows itself: HTML in a notebook, text in a terminal."""

from __future__ import annotations

from html import escape

import numpy as np
import xarray as xr

from headwise.errors import OptionError
from headwise.results.schema import VARIABLES
from headwise.results.validate import about

__all__ = ["html", "text"]

# Stops of a perceptually even ramp from dark blue to yellow, safe for the colour-blind (cividis).
_RAMP = np.array([(0, 34, 78), (65, 77, 107), (124, 123, 120), (188, 175, 111), (254, 232, 56)])
_SHADES = " ░▒▓█"
_MOST_LINES, _MOST_COLUMNS = 64, 64


def html(dataset: xr.Dataset, statistic: str = "entropy_fraction") -> str:
    """A small self-contained panel: the facts of the run and a heads × layers map of a statistic.

    ``statistic`` is any ``(layer, head)`` variable. Layers run downwards, heads across; hovering
    gives the number. Everything that came from the model or its text is escaped.
    """
    values = _map(dataset, statistic)
    entry = VARIABLES[statistic]
    low, high = _range(values, entry.units)
    size = 12 if values.size <= 1024 else 6
    cells = "".join(
        f'<rect x="{head * size}" y="{layer * size}" width="{size - 1}" height="{size - 1}" '
        f'fill="{_colour(value, low, high)}"><title>layer {layer} · head {head}: '
        f"{_number(value)}</title></rect>"
        for (layer, head), value in np.ndenumerate(values)
        if head < int(dataset["heads"][layer])
    )
    height, width = values.shape[0] * size, values.shape[1] * size
    facts = "".join(
        f'<tr><td style="text-align:left;opacity:.7;padding-right:12px">{escape(name)}</td>'
        f'<td style="text-align:left">{escape(value)}</td></tr>'
        for name, value in _facts(dataset)
    )
    caption = (
        f"{entry.long_name} by layer (down) and head (across), {_span(low, high, entry.units)}"
    )
    return (
        '<div style="font:13px system-ui,sans-serif;line-height:1.4;display:flex;gap:24px;'
        'flex-wrap:wrap;align-items:flex-start">'
        f'<table style="border-collapse:collapse"><tbody>{facts}</tbody></table>'
        f'<figure style="margin:0"><svg role="img" aria-label="{escape(caption)}" width="{width}" '
        f'height="{height}" viewBox="0 0 {width} {height}">{cells}</svg>'
        f'<figcaption style="opacity:.7">{escape(caption)}</figcaption></figure></div>'
    )


def text(dataset: xr.Dataset, statistic: str = "entropy_fraction") -> str:
    """The same in characters: facts, then one line per layer with a shade per head.

    Models of more than 64 layers or heads show the facts only.
    """
    lines = [f"{name:<14} {value}" for name, value in _facts(dataset)]
    values = _map(dataset, statistic)
    if values.shape[0] > _MOST_LINES or values.shape[1] > _MOST_COLUMNS:
        return "\n".join(lines)
    entry = VARIABLES[statistic]
    low, high = _range(values, entry.units)
    lines += ["", f"{entry.long_name}, {_span(low, high, entry.units)} (lowest blank, highest █)"]
    number_width = len(str(values.shape[0] - 1))
    for layer, row in enumerate(values):
        shades = "".join(
            _shade(value, low, high) if head < int(dataset["heads"][layer]) else ""
            for head, value in enumerate(row)
        )
        lines.append(f"layer {layer:>{number_width}} |{shades}|")
    return "\n".join(lines)


def _facts(dataset: xr.Dataset) -> list[tuple[str, str]]:
    facts = about(dataset)
    heads, kv_heads = dataset["heads"].to_numpy(), dataset["kv_heads"].to_numpy()
    layers = dataset.sizes["layer"]
    shape = f"{layers} × {_one_or_range(heads)}"
    if (heads != kv_heads).any():
        shape += f" ({_one_or_range(kv_heads)} key-value heads)"
    bad = int((dataset["non_finite"].to_numpy() != "").sum())
    rows = [
        ("model", str(facts.get("model", "unknown"))),
        ("layers × heads", shape),
        ("tokens", f"{dataset.sizes['key']:,}"),
        ("mask", ", ".join(dict.fromkeys(dataset["mask"].to_numpy().tolist()))),
        ("exactness", str(facts.get("exactness", "unknown"))),
        ("measured", str(facts.get("created_at", "unknown"))),
    ]
    if bad:
        rows.append(("not finite", f"{bad} of {layers} layers"))
    if facts.get("interrupted"):
        rows.append(("stopped", "before the end; this is what was measured until then"))
    return rows


def _map(dataset: xr.Dataset, statistic: str) -> np.ndarray:
    entry = VARIABLES.get(statistic)
    if entry is None or entry.dims != ("layer", "head"):
        names = ", ".join(name for name, v in VARIABLES.items() if v.dims == ("layer", "head"))
        raise OptionError(f"there is no statistic {statistic!r} of a head", allowed=names)
    return dataset[statistic].transpose("layer", "head").to_numpy()


def _range(values: np.ndarray, units: str) -> tuple[float, float]:
    """The ends of the scale: 0 to 1 for shares, else the smallest and the largest value."""
    finite = values[np.isfinite(values)]
    if not finite.size:
        return np.nan, np.nan
    low, high = float(finite.min()), float(finite.max())
    return (0.0, 1.0) if units == "1" and low >= 0 and high <= 1 + 1e-9 else (low, high)


def _share(value: float, low: float, high: float) -> float:
    """Where the value lies between low and high; 0.5 when they are equal."""
    return 0.5 if high == low else min(max((value - low) / (high - low), 0.0), 1.0)


def _colour(value: float, low: float, high: float) -> str:
    if not np.isfinite(value):
        return "none"
    place = _share(value, low, high) * (len(_RAMP) - 1)
    below = min(int(place), len(_RAMP) - 2)
    red, green, blue = _RAMP[below] + (place - below) * (_RAMP[below + 1] - _RAMP[below])
    return f"#{round(red):02x}{round(green):02x}{round(blue):02x}"


def _shade(value: float, low: float, high: float) -> str:
    if not np.isfinite(value):
        return "×"
    return _SHADES[round(_share(value, low, high) * (len(_SHADES) - 1))]


def _number(value: float) -> str:
    return f"{value:.3g}" if np.isfinite(value) else "not measured"


def _span(low: float, high: float, units: str) -> str:
    if not np.isfinite(low):
        return "nothing measured"
    return f"{low:.3g} to {high:.3g}" + ("" if units == "1" else f" {units}")


def _one_or_range(counts: np.ndarray) -> str:
    low, high = int(counts.min()), int(counts.max())
    return str(low) if low == high else f"{low}–{high}"
