"""What a monitored run says: figures by step and layer, alarms, and the sentences about them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from headwise.monitoring.alarms import Alarm, alarms
from headwise.monitoring.history import block_of
from headwise.monitoring.record import Run, StepRecord
from headwise.report.numbers import counted

__all__ = ["FIGURES", "Figure", "Health", "Table", "health_of", "verdict", "when_the_loss_shows"]

Numbers = NDArray[np.float64]
Worst = Literal["most", "least"]

_RISE: Final = 1.2  # the loss shows it when its median of three is this many times its least


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure of a layer: its words, which end of it is the worrying one, and its axis.

    ``of_heads`` says how heads become one number of their layer; None: it is one already.
    """

    key: str
    label: str
    unit: str
    meaning: str
    worst: Worst
    log: bool
    of_heads: Literal["largest", "mean"] | None = None
    mapped: bool = False  # whether the page draws a map of steps and layers


FIGURES: Final = (
    Figure("max_logit", "max logit", "", "Largest attention logit of any head, after scaling",
           "most", log=True, of_heads="largest", mapped=True),
    Figure("entropy", "entropy", "nats", "Entropy of attention, mean over heads and rows",
           "least", log=False, of_heads="mean"),
    Figure("entropy_without_sink_fraction", "entropy, no sink", "of most",
           "Entropy outside the first token as a share of the greatest, mean over heads", "least",
           log=False, of_heads="mean", mapped=True),
    Figure("dead_rows", "dead rows", "of rows",
           "Share of rows with over 0.999 of their weight on one key, mean over heads", "most",
           log=False, of_heads="mean"),
    Figure("gradient", "gradient norm", "", "Norm of the gradient of all weights of a block,"
           " before clipping", "most", log=True, mapped=True),
    Figure("update", "update / weight", "", "Norm of a step's update of a block over that of its"
           " weights", "most", log=True, mapped=True),
    Figure("rms", "stream rms", "", "Root mean square of the residual stream after a block, first"
           " tokens left out", "most", log=True),
)  # fmt: skip


@dataclass(frozen=True, eq=False, slots=True)
class Table:
    """A figure of a run: ``values`` are ``record layer``, NaN where nothing is known."""

    figure: Figure
    layers: tuple[str, ...]
    modules: tuple[str, ...]
    values: Numbers


@dataclass(frozen=True, eq=False, slots=True)
class Health:
    """A run, read: everything that the terminal and the page show."""

    run: Run
    name: str
    facts: tuple[str, ...]
    notes: tuple[str, ...]
    steps: tuple[int, ...]
    loss: Numbers
    tables: dict[str, Table]
    alarms: tuple[Alarm, ...]

    def to_json(self) -> dict[str, Any]:
        """Facts, alarms and every figure by step and layer; what is not finite is null."""
        return {
            "run": str(self.run.folder),
            "about": self.run.about,
            "cut": self.run.cut,
            "notes": list(self.notes),
            "steps": list(self.steps),
            "loss": _plain(self.loss.tolist()),
            "loss_shows_from": when_the_loss_shows(self),
            "alarms": [_plain(alarm.to_json()) for alarm in self.alarms],
            "figures": {
                key: {
                    "meaning": table.figure.meaning,
                    "layers": list(table.modules),
                    "by_step": _plain(table.values.tolist()),
                }
                for key, table in self.tables.items()
            },
        }


def health_of(run: Run) -> Health:
    """Everything about a run, from its records.

    Where a run went back, to a checkpoint or to its beginning, records that were overtaken are left
    out, and a note says so.

    Example:
        >>> from pathlib import Path
        >>> record = StepRecord(step=1, time=0.0, layers=(), stream={}, weights={},
        ...                     non_finite="", values={"loss": 5.5})
        >>> found = health_of(Run(Path("first"), {}, (record,)))
        >>> found.name, found.facts, found.loss.tolist()
        ('first', ('1 record', 'step 1'), [5.5])
    """
    records, overtaken = _current(run.records)
    run = replace(run, records=records)
    notes = []
    if run.cut:
        notes.append("A line of the file was not whole and is left out: the run stopped while it"
                     " was written.")  # fmt: skip
    if overtaken:
        notes.append(f"The run went back and wrote some steps again: {counted(overtaken, 'record')}"
                     " from before that are left out.")  # fmt: skip
    return Health(
        run=run,
        name=run.folder.name or str(run.folder),
        facts=tuple(_facts(run)),
        notes=tuple(notes),
        steps=tuple(record.step for record in records),
        loss=np.array([record.values.get("loss", math.nan) for record in records]),
        tables=_tables(records),
        alarms=alarms(run),
    )


def _current(records: Sequence[StepRecord]) -> tuple[tuple[StepRecord, ...], int]:
    """The records that stand, and how many were overtaken by later ones."""
    kept: list[StepRecord] = []
    for record in sorted(records, key=lambda each: each.time):
        while kept and kept[-1].step >= record.step:
            kept.pop()
        kept.append(record)
    return tuple(kept), len(records) - len(kept)


def _facts(run: Run) -> list[str]:
    about, first, last = run.about, run.records[0], run.records[-1]
    found = [str(about[name]) for name in ("model", "family") if isinstance(about.get(name), str)]
    modules = {layer.module: layer for layer in last.layers}
    if modules:
        heads = sorted({len(next(iter(each.figures.values()), [])) for each in modules.values()})
        counts = f"{heads[0]}" if len(heads) == 1 else f"{heads[0]} to {heads[-1]}"
        found.append(f"{counted(len(modules), 'layer')} × {counts} heads")
    if isinstance(about.get("parameters"), int):
        found.append(f"{about['parameters']:,} parameters")
    if isinstance(about.get("rows"), int):
        found.append(f"{counted(about['rows'], 'sampled row')} of each sequence")
    several = len(run.records) > 1
    found.append(counted(len(run.records), "record"))
    found.append(f"steps {first.step:,} to {last.step:,}" if several else f"step {first.step:,}")
    return found


def _tables(records: Sequence[StepRecord]) -> dict[str, Table]:
    modules, names = _modules(records)
    blocks = list(dict.fromkeys(path for record in records for path in record.stream))
    if not blocks:
        weights = dict.fromkeys(name for record in records for name in record.weights)
        blocks = list(dict.fromkeys(block_of(n) for n in weights if block_of(n) != n))
    labels = _numbered(blocks)
    found = {}
    for figure in FIGURES:
        rows, words = (modules, names) if figure.of_heads else (blocks, labels)
        values = np.full((len(records), len(rows)), math.nan)
        for i, record in enumerate(records):
            row = _of_heads(record, figure) if figure.of_heads else _of_blocks(record, figure.key)
            values[i] = [row.get(path, math.nan) for path in rows]
        if np.isfinite(values).any():
            found[figure.key] = Table(figure, tuple(words), tuple(rows), values)
    return found


def _modules(records: Sequence[StepRecord]) -> tuple[list[str], list[str]]:
    """Attention modules of the run, and a short name for each."""
    seen = {layer.module: layer for record in records for layer in record.layers}
    words = []
    for path, layer in seen.items():
        stack = next((name for name in ("encoder", "decoder") if name in path), "")
        words.append((layer.role if layer.role == "cross" else stack, layer.number))
    several = len({stack for stack, _ in words}) > 1
    return list(seen), [f"{s} {n}".strip() if several else str(n) for s, n in words]


def _numbered(blocks: Sequence[str]) -> list[str]:
    """The number of every block, after the name of its stack where there are several."""
    stacks = {path.rsplit(".", 1)[0] for path in blocks}
    short = {stack: next((n for n in ("encoder", "decoder") if n in stack), "") for stack in stacks}
    several = len(set(short.values())) > 1
    words = [(short[path.rsplit(".", 1)[0]], path.rsplit(".", 1)[-1]) for path in blocks]
    return [f"{stack} {number}".strip() if several else number for stack, number in words]


def _of_heads(record: StepRecord, figure: Figure) -> dict[str, float]:
    reduce: Callable[[Numbers], Any] = np.max if figure.of_heads == "largest" else np.mean
    found = {}
    for layer in record.layers:
        heads = np.array(layer.figures.get(figure.key, ()), dtype=np.float64)
        heads = heads[~np.isnan(heads)]
        if heads.size:
            found[layer.module] = float(reduce(heads))
    return found


def _of_blocks(record: StepRecord, key: str) -> dict[str, float]:
    if key == "rms":
        return {path: each.get("rms", math.nan) for path, each in record.stream.items()}
    squares: dict[str, dict[str, float]] = {}
    for name, each in record.weights.items():
        of_block = squares.setdefault(block_of(name), {})
        for figure in ("gradient", "weight", "update"):
            value = each.get(figure, math.nan)
            if not math.isnan(value):
                of_block[figure] = of_block.get(figure, 0.0) + value**2
    if key == "gradient":
        return {b: math.sqrt(s["gradient"]) for b, s in squares.items() if "gradient" in s}
    return {
        block: math.sqrt(sums["update"] / sums["weight"])
        for block, sums in squares.items()
        if sums.get("weight", 0.0) > 0 and "update" in sums
    }


def when_the_loss_shows(health: Health) -> int | None:
    """The first step whose loss is not finite, or whose median of three records is 20 % above the
    least such median before; None where there is none. The number is ours."""
    least = math.inf
    for i, step in enumerate(health.steps):
        if not math.isfinite(health.loss[i]):
            if np.isfinite(health.loss[:i]).any():
                return step
            continue
        if i < 2:
            continue
        middle = float(np.median(health.loss[i - 2 : i + 1]))
        if least > 0 and middle > _RISE * least:
            return step
        least = min(least, middle) if math.isfinite(middle) else least
    return None


def verdict(health: Health) -> str:
    """One or two sentences: the worst alarms, the first of them, and what the loss shows."""
    worse = [alarm for alarm in health.alarms if alarm.severity != "note"]
    shown = when_the_loss_shows(health)
    if not worse:
        told = "No alarm." if not health.alarms else "Nothing to act on."
        if shown is not None:
            told += f" The loss rises at step {shown:,} without one."
        return told
    first = worse[0]
    told = f"{counted(len(worse), 'alarm')}, the first at step {first.step:,}: {first.title}."
    if not np.isfinite(health.loss).any():
        return told
    if shown is None:
        return told + " The loss of this run does not show it."
    if shown > first.step:
        early = counted(shown - first.step, "step")
        return told + f" The loss shows it from step {shown:,} on, {early} later."
    return told + f" The loss rises from step {shown:,} on."


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, list) else value
