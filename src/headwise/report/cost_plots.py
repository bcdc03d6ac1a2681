"""The plots of what a model costs: shares, memory and caches against the length; the roofline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from headwise.cost.activations import activations
from headwise.cost.counting import Counts, count
from headwise.cost.kv_cache import kv_cache
from headwise.cost.parts import Component
from headwise.cost.planner import Cost, main_stack
from headwise.cost.roofline import ComponentTime
from headwise.cost.transients import transients
from headwise.report.cost_facts import LABELS, si
from headwise.report.line_plot import Curve, Marker, Plot, curves, stacked
from headwise.report.numbers import memory as in_bytes

__all__ = ["plots", "roofline_plot"]

_SHORTEST: Final = 2**7
_LONGEST: Final = 2**20
_GROUPS: Final = (
    ("Q Kᵀ and A V", (Component.SCORES, Component.MIX)),
    (
        "projections of attention",
        (Component.QUERY, Component.KEY, Component.VALUE, Component.LATENT, Component.OUTPUT),
    ),
    (
        "MLP, experts",
        (Component.MLP, Component.ROUTER, Component.EXPERTS, Component.SHARED_EXPERTS),
    ),
    ("unembedding, heads", (Component.UNEMBEDDING, Component.HEAD, Component.PATCHES)),
)


def plots(cost: Cost) -> list[Plot]:
    """What depends on the length: nothing of a model whose length is fixed."""
    if main_stack(cost.parts).tokens is not None:
        return []
    places = _places(cost)
    found = [_shares(cost, places), _memory(cost, places)]
    if cost.inference.keys_and_values.layers:
        found.append(_caches(cost, places))
    return found


def _places(cost: Cost) -> list[int]:
    """Powers of two, as far as twice the trained context and the farthest crossover reach."""
    stack = main_stack(cost.parts).name
    firsts = [e.first for e in cost.crossovers if e.stack == stack and e.first is not None]
    farthest = max(2 * cost.workload.length, 2 * (main_stack(cost.parts).context or 0), *firsts)
    places = [_SHORTEST]
    while places[-1] < min(farthest, _LONGEST):
        places.append(2 * places[-1])
    return places


def _tokens(value: float) -> str:
    """A length in the letters that people use: 8k is 8,192.

    Example:
        >>> _tokens(512), _tokens(8192), _tokens(2**20)
        ('512', '8k', '1M')
    """
    number = int(value)
    if number >= 2**20 and number % 2**20 == 0:
        return f"{number // 2**20}M"
    return f"{number // 1024}k" if number >= 1024 and number % 1024 == 0 else f"{number:,}"


def _at(cost: Cost, length: int) -> Counts:
    """Forward FLOPs of a sequence of another length."""
    work = replace(cost.workload, length=length, documents=(), cached=0)
    return count(cost.parts, work)


def _shares(cost: Cost, places: Sequence[int]) -> Plot:
    sums = [_at(cost, n).by_component() for n in places]
    lines = []
    for name, components in _GROUPS:
        values = [sum(s.get(c, 0) for c in components) / sum(s.values()) for s in sums]
        if any(values):
            lines.append(Curve(name, values))
    stack = main_stack(cost.parts).name
    kinds = ("all",) if cost.workload.pairs == "all" else ("causal", "visible")
    markers = [
        Marker(float(each.value), f"= {each.other}")
        for each in cost.crossovers
        if each.stack == stack and each.pairs in kinds and each.value is not None
        if each.other in ("MLP", "all linear layers")
    ]
    pairs = "all pairs" if cost.workload.pairs == "all" else "the pairs that the mask shows"
    if len(cost.parts.stacks) > 1:  # a crossover is that of one stack, the shares are of all
        markers = []
    drawing = stacked(
        places,
        lines,
        label="Share of the forward FLOPs by component against the length",
        across="tokens of a sequence",
        across_words=_tokens,
        markers=markers,
    )
    equal = "; dashed: where Q Kᵀ and A V equal it" if markers else ""
    return Plot(f"Share of the forward FLOPs, {pairs}{equal}", drawing)


def _memory(cost: Cost, places: Sequence[int]) -> Plot:
    trains = cost.training is not None
    fused: list[int] = []
    kept: list[int] = []
    cache: list[int] = []
    for n in places:
        work = replace(cost.workload, length=n, documents=(), cached=0)
        cache.append(kv_cache(cost.parts, tokens=n, batch=work.batch, source=work.source).ideal)
        for found, attention in ((fused, "fused"), (kept, "materialised")):
            each = replace(work, attention=attention)
            found.append(
                activations(cost.parts, each).bytes
                if trains
                else transients(cost.parts, each)[0].bytes
            )
    what = "activations of training" if trains else "largest transient"
    weights = [cost.inference.weights] * len(places)
    lines = [
        Curve(f"{what}, fused attention", fused),
        Curve(f"{what}, materialised", kept),
        Curve("keys and values, ideal", cache),
        Curve("weights", weights),
    ]
    drawing = curves(
        places,
        [line for line in lines if any(line.values)],
        label="Memory against the length",
        across="tokens of a sequence",
        words=in_bytes,
        across_words=_tokens,
        ticks=32.0,
    )
    return Plot(f"Memory at batch {cost.workload.batch:,}", drawing)


def _caches(cost: Cost, places: Sequence[int]) -> Plot:
    found = [
        kv_cache(
            cost.parts,
            tokens=n,
            batch=cost.workload.batch,
            source=cost.workload.source,
            dtype=cost.inference.keys_and_values.dtype,
        )
        for n in places
    ]
    lines = [
        Curve("ideal", [each.ideal for each in found]),
        Curve("as transformers keeps it", [each.transformers for each in found]),
        Curve("paged, all layers alike", [each.paged for each in found]),
    ]
    drawing = curves(
        places,
        lines,
        label="Keys and values against the length",
        across="tokens of a sequence",
        words=in_bytes,
        across_words=_tokens,
        ticks=32.0,
    )
    return Plot(f"Keys and values at batch {cost.workload.batch:,}", drawing)


def _rate(value: float) -> str:
    """FLOP/s with three digits and a prefix.

    Example:
        >>> _rate(1e15), _rate(3.35e12)
        ('1 PFLOP/s', '3.35 TFLOP/s')
    """
    number, _, unit = si(value).partition(" ")
    return f"{float(number):.3g} {unit}FLOP/s"


def _titles(
    points: Sequence[tuple[str, str, ComponentTime]],
) -> dict[tuple[str, float], str]:
    """Words for the dot of a pass at an intensity: every component that stands there."""
    labels: dict[tuple[str, float], list[str]] = {}
    bounds: dict[tuple[str, float], str] = {}
    for name, label, part in points:
        labels.setdefault((name, part.intensity), []).append(label)
        bounds[name, part.intensity] = part.bound
    return {key: f"{', '.join(labels[key])}, {key[0]}: {bounds[key]}" for key in labels}


def roofline_plot(cost: Cost) -> Plot | None:
    """Attainable FLOP/s against FLOPs per byte, with every component of the three passes."""
    time = cost.time
    if time is None:
        return None
    passes = (("forward", time.prefill), ("one more token", time.decode),
              ("training step", time.training))  # fmt: skip
    points = [
        (name, LABELS.get(str(part.component), str(part.component)), part)
        for name, each in passes
        if each is not None
        for part in each.components
        if part.flops and part.seconds
    ]
    if not points:
        return None
    found = sorted({part.intensity for _, _, part in points})
    low, high = min(found[0], time.ridge) / 2, max(found[-1], time.ridge) * 2
    peak = float(time.hardware.peak(time.dtype))
    bandwidth = peak / time.ridge
    places = sorted({low, high, time.ridge, *found})
    lines = [Curve("roof", [min(peak, bandwidth * x) for x in places])]
    for name, each in passes:
        if each is None:
            continue
        at: dict[float, float] = {}
        for owner, _, part in points:
            if owner == name:
                at[part.intensity] = part.flops / part.seconds
        lines.append(Curve(name, [at.get(x) for x in places]))
    drawing = curves(
        places,
        lines,
        label="Roofline: attainable FLOP/s against FLOPs per byte",
        across="FLOPs per byte",
        words=_rate,
        across_words=lambda value: f"{value:,.0f}" if value >= 10 else f"{value:.3g}",
        joined=1,
        across_ticks=[10.0**power for power in range(-2, 7)],
        titles=_titles(points),
    )
    return Plot(f"Roofline of {time.hardware.title}, {time.dtype}: a dot is a component", drawing)
