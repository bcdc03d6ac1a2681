"""What a model costs in rows of words: the same for the terminal, the page and JSON.

Nothing here loads a heavy library: ``headwise cost`` answers at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Final

from headwise.cost.counting import Counts
from headwise.cost.crossovers import Crossover
from headwise.cost.parts import Component
from headwise.cost.planner import Cost, main_stack
from headwise.cost.roofline import PassTime
from headwise.cost.utilisation import hardware_flops, mfu, model_flops, palm_flops
from headwise.report.numbers import counted, duration, memory, three

__all__ = [
    "CONVENTION",
    "LABELS",
    "cache_rows",
    "compared_rows",
    "component_rows",
    "crossover_rows",
    "fit_rows",
    "in_words",
    "memory_rows",
    "moment",
    "notes",
    "other_rows",
    "pass_rows",
    "percent_of",
    "short_name",
    "si",
    "time_rows",
    "title",
    "utilisation_rows",
    "within",
]

CONVENTION: Final = (
    "Matrix products only; 1 multiply-add = 2 FLOPs. A table whose rows are picked costs nothing,"
    " a tied unembedding is stored once and multiplied every time."
)
_PAIRS: Final = {
    "all": "all n² pairs of tokens, as dense kernels and counters have it",
    "visible": "the pairs that the mask shows",
}
LABELS: Final = {
    "query": "Q projection", "key": "K projection", "value": "V projection",
    "latent": "latent projection", "scores": "Q Kᵀ", "mix": "A V", "output": "output projection",
    "mlp": "MLP",
}  # fmt: skip
_UNITS: Final = ("", " k", " M", " G", " T", " P", " E", " Z", " Y")
_OTHERS: Final = {
    "MLP": "the MLP",
    "all linear layers": "all linear layers",
    "projections": "the projections of attention",
    "MLP activation": "the MLP's activations, in memory",
}
_KINDS: Final = {"all": "all pairs", "causal": "causal mask", "visible": "with the windows"}


def si(value: float) -> str:
    """A number with four significant digits and a prefix of a thousand each.

    Example:
        >>> si(79), si(1234), si(79_070_347_919_360), si(0)
        ('79', '1.234 k', '79.07 T', '0')
    """
    if value < 1000:
        return f"{value:,.4g}"
    power = min(int(math.log10(value) / 3 + 1e-12), len(_UNITS) - 1)
    scaled = float(f"{value / 1000**power:.4g}")
    if scaled >= 1000 and power + 1 < len(_UNITS):
        scaled, power = scaled / 1000, power + 1
    return f"{scaled:.{max(0, 3 - int(math.log10(scaled)))}f}{_UNITS[power]}"


def percent_of(part: int, whole: int) -> str:
    """A share with one digit after the point; empty of nothing.

    Example:
        >>> percent_of(1, 3), percent_of(0, 3), percent_of(1, 0)
        ('33.3%', '0.0%', '')
    """
    return f"{100 * part / whole:.1f}%" if whole else ""


def title(cost: Cost) -> tuple[str, list[str]]:
    """The name, and the facts beside it."""
    parts, stack = cost.parts, main_stack(cost.parts)
    attention = stack.layers[0].attentions[0] if stack.layers else None
    kind = parts.model_class or parts.family
    facts = [] if kind == cost.name else [kind]
    for each in parts.stacks:
        label = "" if len(parts.stacks) == 1 else f"{each.name}: "
        facts.append(f"{label}{counted(len(each.layers), 'layer')}, d_model {each.d_model:,}")
    if attention is not None:
        shared = attention.kv_heads != attention.heads
        groups = f" over {attention.kv_heads}" if shared else ""
        latent = ", latent keys and values" if attention.latent else ""
        facts.append(f"{counted(attention.heads, 'head')}{groups} of {attention.d_qk}{latent}")
    if stack.context:
        facts.append(f"trained for {stack.context:,} tokens")
    return _printable(cost.name), facts


def _printable(text: str) -> str:
    """Names of files can hold what a terminal would obey."""
    return "".join(c if c.isprintable() else "\ufffd" for c in text)


def short_name(cost: Cost) -> str:
    """The name without folders and suffix: that of the folder where the file has a usual name."""
    path, name = Path(cost.name), cost.name
    if path.name in ("config.json", "architecture.json"):
        name = path.absolute().parent.name or name
    elif path.suffix in (".json", ".gguf"):
        name = path.stem
    return _printable(name)


def in_words(cost: Cost) -> list[str]:
    """What was counted: lengths, pairs, logits, and how the backward pass is made."""
    work = cost.workload
    stack = main_stack(cost.parts)
    length = stack.tokens or work.length
    said = [f"{work.batch:,} × {length:,} tokens"]
    if cost.parts.stack("encoder") is not None and cost.parts.stack("decoder") is not None:
        encoder = cost.parts.stack("encoder")
        assert encoder is not None
        said.append(f"{encoder.tokens or work.encoded:,} tokens read by the encoder")
    if work.cached:
        said.append(f"{work.cached:,} cached before")
    if work.documents:
        said.append(f"{len(work.documents)} documents packed")
    said.append(_PAIRS[work.pairs])
    said.append("logits of all positions" if work.logits == "all" else "logits of the last one")
    if stack.context is not None and stack.tokens is None and length + work.cached > stack.context:
        said.append(f"beyond the {stack.context:,} tokens it was trained for")
    return said


def component_rows(counts: Counts) -> list[tuple[str, int, int, int]]:
    """Component, parameters, multiply-adds of the forward pass, and those of a training step."""
    forward, stored = counts.by_component(), counts.by_component("parameters")
    backward, again = counts.by_component("backward"), counts.by_component("recomputed")
    rows = [
        (
            LABELS.get(str(component), str(component)),
            stored.get(component, 0),
            forward.get(component, 0),
            sum(found.get(component, 0) for found in (forward, backward, again)),
        )
        for component in Component
        if component in stored
    ]
    return [row for row in rows if any(row[1:])]


def pass_rows(cost: Cost) -> list[tuple[str, int, str]]:
    """The passes: name, FLOPs, and a word about them."""
    work, forward = cost.workload, cost.forward
    tokens = work.batch * (main_stack(cost.parts).tokens or work.length)
    rows = [("forward", forward.flops, "2 · multiply-adds")]
    if cost.decode is not None:
        after = work.cached + work.length
        again = ", keys and values made of the latents again" if cost.absorbed else ""
        rows.append(("one more token", cost.decode.flops, f"each, after {after:,} cached{again}"))
    if cost.absorbed is not None:
        words = "W_UK and W_UV on the side of the query, as engines decode"
        rows.append(("  absorbed", cost.absorbed.flops, words))
    if not work.cached:
        how = {"none": "", "selective": ", products of attention twice", "full": ", blocks twice"}
        rows.append(
            (
                "training step",
                forward.training_flops,
                f"{work.attention} attention{how[work.recompute]};"
                f" {si(forward.training_flops / tokens)} per token",
            )
        )
    beside = sum(cost.beside.values())
    rows.append(("beside the products", beside, "softmax, norms, …: by convention, not exact"))
    return rows


def memory_rows(cost: Cost) -> list[tuple[str, int, int | None]]:
    """Part, bytes of a forward pass, bytes of a training step; None where there is none."""
    inside = cost.inference.by_part()
    trained = None if cost.training is None else cost.training.by_part()
    rows = [(name, size, None if trained is None else trained[name]) for name, size in
            inside.items()]  # fmt: skip
    whole = None if cost.training is None else cost.training.total
    return [*(row for row in rows if row[1] or row[2]), ("total", cost.inference.total, whole)]


def cache_rows(cost: Cost) -> list[tuple[str, int, str]]:
    """The three figures of the cache, with what each means."""
    cache = cost.inference.keys_and_values
    if not cache.layers:
        return []
    rows = [
        ("one token", cache.per_token, "of one sequence, all layers"),
        ("ideal", cache.ideal, "what later tokens can see"),
        ("transformers", cache.transformers, "as its cache keeps it"),
        ("paged", cache.paged, f"pages of {cache.page} tokens, all layers alike"),
    ]
    if cache.paged_hybrid != cache.paged:
        rows.append(("paged, hybrid", cache.paged_hybrid, "pages before a window are freed"))
    return rows


def crossover_rows(crossovers: Iterable[Crossover]) -> list[tuple[str, str, str, str, str]]:
    """What attention is held against, which pairs, from which length; formula and numbers."""
    found = list(crossovers)
    several = len({each.stack for each in found}) > 1
    rows = []
    for each in found:
        name = f"{each.stack}: {_OTHERS[each.other]}" if several else _OTHERS[each.other]
        first = "never" if each.first is None else f"{each.first:,}"
        rows.append((name, _KINDS[each.pairs], first, each.formula, each.numbers))
    return rows


def other_rows(cost: Cost) -> list[tuple[str, str, str, str]]:
    """Counters that agree with each other, what they would count, how much of it, and why."""
    tools: dict[tuple[str, str, str], list[str]] = {}
    for each in cost.others:
        key = (each.what, _of_it(float(each.ratio)), each.why)
        tools.setdefault(key, []).append(each.tool)
    return [(", ".join(dict.fromkeys(names)), *key) for key, names in tools.items()]


def _of_it(ratio: float) -> str:
    return f"{100 * ratio:.1f}%" if ratio < 2 else f"{ratio:.1f} ×"


def moment(seconds: float) -> str:
    """A short time in the unit that suits it.

    Example:
        >>> moment(0.0048), moment(2.5e-5), moment(1.25)
        ('4.80 ms', '25 µs', '1.25 s')
    """
    for factor, unit in ((1e6, "µs"), (1e3, "ms")):
        if seconds * factor < 999.5:
            return f"{three(seconds * factor)} {unit}"
    return duration(seconds)


def time_rows(cost: Cost) -> list[tuple[str, str, str, str, str]]:
    """Pass, least time, tokens per second, what holds it back, FLOPs per byte."""
    if cost.time is None:
        return []
    time = cost.time
    passes: tuple[tuple[str, PassTime | None], ...] = (
        ("forward", time.prefill),
        ("one more token", time.decode),
        ("training step", time.training),
    )
    return [
        (
            name,
            moment(each.seconds),
            f"{si(each.tokens_per_second)}/s",
            each.bound,
            f"{each.intensity:,.1f}",
        )
        for name, each in passes
        if each is not None
    ]


def fit_rows(cost: Cost) -> list[tuple[str, str]]:
    """The longest context and the largest batch that fit, in words."""
    rows = []
    for name, fit in cost.fits.items():
        use, what = name.split(" ")
        beside = (
            f"batch {cost.workload.batch:,}"
            if what == "context"
            else f"{main_stack(cost.parts).tokens or cost.workload.length:,} tokens"
        )
        unit = "token" if what == "context" else "sequence"
        label = f"{'longest context' if what == 'context' else 'largest batch'}, {use}"
        found = counted(fit.largest, unit) if fit.fits else "does not fit"
        rows.append((f"{label}, {beside}, in {memory(fit.memory_bytes)}", found))
    return rows


def within(cost: Cost) -> list[tuple[str, int]]:
    """Parts of the parameters that people ask for: those that work on a token, the tables."""
    found = []
    if cost.forward.active != cost.parameters:
        found.append(("active on a token", cost.forward.active))
    if cost.forward.embedding:
        found.append(("without the tables", cost.parameters - cost.forward.embedding))
    return found


def notes(cost: Cost) -> list[str]:
    """What a reader has to know about the figures."""
    found = list(cost.parts.notes)
    largest = cost.inference.transients[0]
    found.append(f"transient of the forward pass: {largest.name} ({largest.why})")
    if cost.training is not None:
        largest = cost.training.transients[0]
        found.append(f"transient of the training step: {largest.name} ({largest.why})")
        found += [note for note in cost.training.notes if note not in found]
    else:
        found += [note for note in cost.inference.notes if note not in found]
    if cost.time is not None:
        found += cost.time.notes
    return [_printable(note.rstrip(".")) for note in dict.fromkeys(found)]


def compared_rows(costs: Sequence[Cost]) -> tuple[list[str], list[tuple[str, list[str]]]]:
    """A column for each model and length; rows of the figures that are compared."""
    names = [short_name(cost) for cost in costs]
    lines: tuple[tuple[str, Callable[[Cost], str]], ...] = (
        ("tokens", lambda c: f"{c.workload.batch:,} × {c.workload.length:,}"),
        ("parameters", lambda c: si(c.parameters)),
        ("active on a token", lambda c: si(c.forward.active)),
        ("FLOPs forward", lambda c: si(c.flops)),
        ("  products of attention", lambda c: percent_of(_products(c), c.forward.macs)),
        ("  MLP, experts", lambda c: percent_of(_mlp(c), c.forward.macs)),
        ("FLOPs of one more token", lambda c: "" if c.decode is None else si(c.decode.flops)),
        ("FLOPs of a training step", lambda c: si(c.training_flops)),
        ("weights", lambda c: memory(c.inference.weights)),
        ("keys and values, ideal", lambda c: memory(c.inference.keys_and_values.ideal)),
        ("keys and values of a token", lambda c: memory(c.inference.keys_and_values.per_token)),
        ("memory of a forward pass", lambda c: memory(c.inference.total)),
        (
            "memory of a training step",
            lambda c: "" if c.training is None else memory(c.training.total),
        ),
        ("attention outweighs the MLP from", lambda c: _first(c, "MLP")),
        ("… all linear layers from", lambda c: _first(c, "all linear layers")),
    )
    rows = [(name, [cell(cost) for cost in costs]) for name, cell in lines]
    timed = [cost.time for cost in costs]
    if all(time is not None for time in timed):
        rows.append(
            ("least time, forward", [moment(t.prefill.seconds) for t in timed if t is not None])
        )
        rows.append(
            (
                "least time, one more token",
                ["" if t.decode is None else moment(t.decode.seconds) for t in timed if t],
            )
        )
    return names, rows


def _products(cost: Cost) -> int:
    found = cost.forward.by_component()
    return found.get(Component.SCORES, 0) + found.get(Component.MIX, 0)


def _mlp(cost: Cost) -> int:
    found = cost.forward.by_component()
    names = (Component.MLP, Component.ROUTER, Component.EXPERTS, Component.SHARED_EXPERTS)
    return sum(found.get(name, 0) for name in names)


def _first(cost: Cost, other: str) -> str:
    stack = main_stack(cost.parts).name
    found = next(
        (e for e in cost.crossovers if (e.stack, e.other, e.pairs) == (stack, other, "all")), None
    )
    return "" if found is None else "never" if found.first is None else f"{found.first:,}"


def utilisation_rows(
    cost: Cost, tokens_per_second: float, devices: int
) -> list[tuple[str, str, str, str]]:
    """Convention, FLOPs of a token, share of the peak, what is in it."""
    assert cost.time is not None
    peak = cost.time.hardware.peak(cost.time.dtype)
    length = main_stack(cost.parts).tokens or cost.workload.length
    rows: tuple[tuple[str, Fraction | int, str], ...] = (
        ("MFU, PaLM", palm_flops(cost.parts, length), "6 N + 12 L H Q T, nothing halved"),
        ("MFU, exact", model_flops(cost.parts, cost.workload), "every product, forward and back"),
        ("HFU", hardware_flops(cost.parts, cost.workload), "with what is computed again"),
    )
    return [
        (name, si(float(flops)), f"{mfu(flops, tokens_per_second, peak, devices):.1%}", words)
        for name, flops, words in rows
    ]
