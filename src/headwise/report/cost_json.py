"""What a model costs as plain data: JSON with exact integers, and one row of CSV for each part."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any, Final

from headwise.cost.counting import Counts, Line
from headwise.cost.layer_table import Row
from headwise.cost.memory import Memory
from headwise.cost.planner import Cost
from headwise.cost.roofline import PassTime
from headwise.report.cost_facts import CONVENTION, notes

__all__ = ["COLUMNS", "csv_rows", "to_json"]

COLUMNS: Final = (
    "model", "length", "batch", "stack", "layer", "role", "component", "name", "parameters",
    "active", "multiply_adds", "flops", "backward_multiply_adds", "recomputed_multiply_adds",
)  # fmt: skip


def to_json(cost: Cost) -> dict[str, Any]:
    """Every figure; integers are exact, and seconds are least times.

    Example:
        >>> from headwise.cost.explicit import explicit
        >>> from headwise.cost.planner import cost
        >>> found = to_json(cost(explicit(d_model=64, layers=2, heads=4, vocab=257), length=8))
        >>> found["forward"]["flops"], found["parameters"]["total"]
        (1868800, 131520)
    """
    return {
        "model": cost.name,
        "family": cost.parts.family,
        "class": cost.parts.model_class,
        "convention": CONVENTION,
        "workload": asdict(cost.workload),
        "parameters": {
            "total": cost.parameters,
            "active": cost.forward.active,
            "embedding": cost.forward.embedding,
            "by_component": _texts(cost.forward.by_component("parameters")),
        },
        "forward": _pass(cost.forward),
        "one_more_token": None if cost.decode is None else _pass(cost.decode),
        "one_more_token_absorbed": None if cost.absorbed is None else _pass(cost.absorbed),
        "training_step": {
            "flops": cost.training_flops,
            "backward_multiply_adds": cost.forward.backward,
            "recomputed_multiply_adds": cost.forward.recomputed,
        },
        "beside_the_products": cost.beside,
        "block": {name: [_row(row) for row in rows] for name, rows in cost.table.items()},
        "memory_bytes": {
            "forward": _memory(cost.inference),
            "training_step": None if cost.training is None else _memory(cost.training),
        },
        "keys_and_values_bytes": _cache(cost),
        "crossovers": [
            {**asdict(each), "value": None if each.value is None else float(each.value)}
            for each in cost.crossovers
        ],
        "other_counters": [{**asdict(each), "ratio": float(each.ratio)} for each in cost.others],
        "time": _time(cost),
        "fits": {name: asdict(fit) for name, fit in cost.fits.items()},
        "stored": _stored(cost),
        "notes": notes(cost),
    }


def csv_rows(costs: Iterable[Cost]) -> list[list[Any]]:
    """One row for each part of each layer, under ``COLUMNS``."""
    return [
        [cost.name, cost.workload.length, cost.workload.batch, *_line(line)]
        for cost in costs
        for line in cost.forward.lines
    ]


def _row(row: Row) -> dict[str, Any]:
    return {
        "name": row.name,
        "multiply_adds": row.macs,
        "flops": row.flops,
        "formula": row.macs_formula,
        "numbers": row.numbers,
        "numbers_formula": row.numbers_formula,
    }


def _line(line: Line) -> list[Any]:
    return [
        line.stack,
        "" if line.layer is None else line.layer,
        line.role,
        str(line.component),
        line.name,
        line.parameters,
        line.active,
        line.macs,
        2 * line.macs,
        line.backward,
        line.recomputed,
    ]


def _texts(found: dict[Any, int]) -> dict[str, int]:
    return {str(key): value for key, value in found.items()}


def _pass(counts: Counts) -> dict[str, Any]:
    return {
        "multiply_adds": counts.macs,
        "flops": counts.flops,
        "multiply_adds_by_component": _texts(counts.by_component()),
    }


def _memory(found: Memory) -> dict[str, Any]:
    return {
        **found.by_part(),
        "total": found.total,
        "transients": [asdict(each) for each in found.transients],
        "notes": list(found.notes),
    }


def _cache(cost: Cost) -> dict[str, Any]:
    cache = cost.inference.keys_and_values
    return {
        "per_token": cache.per_token,
        "per_token_when_windows_are_full": cache.per_token_later,
        "ideal": cache.ideal,
        "transformers": cache.transformers,
        "paged": cache.paged,
        "paged_hybrid": cache.paged_hybrid,
        "page_tokens": cache.page,
        "dtype": cache.dtype,
    }


def _stored(cost: Cost) -> dict[str, Any] | None:
    if cost.stored is None:
        return None
    whole = cost.stored.whole
    return {
        "bytes": whole.bytes,
        "bits_per_weight": whole.bits_per_weight,
        "bytes_by_type": {name: part.bytes for name, part in cost.stored.by_type.items()},
    }


def _time(cost: Cost) -> dict[str, Any] | None:
    time = cost.time
    if time is None:
        return None
    passes = {
        "forward": time.prefill,
        "one_more_token": time.decode,
        "training_step": time.training,
    }
    return {
        "machine": time.hardware.name,
        "dtype": time.dtype,
        "ridge_flops_per_byte": time.ridge,
        **{name: None if each is None else _pass_time(each) for name, each in passes.items()},
    }  # fmt: skip


def _pass_time(each: PassTime) -> dict[str, Any]:
    return {
        "seconds": each.seconds,
        "tokens_per_second": each.tokens_per_second,
        "bound": each.bound,
        "components": [
            {**asdict(part), "component": str(part.component), "bound": part.bound}
            for part in each.components
        ],
    }
