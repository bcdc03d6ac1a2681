"""Runs that are made up: records of any size, healthy unless told otherwise."""

from __future__ import annotations

import json
import math
from pathlib import Path

from headwise.monitoring.record import ABOUT, RECORDS, LayerRecord, Run, StepRecord


def record(step, *, layers=3, heads=5, logit=7.0, loss=None, non_finite="", time=None):
    """A record whose numbers differ by layer and head; NaN where the logit is."""
    every = []
    for layer in range(layers):
        logits = [logit + layer / 10 + head / 100 for head in range(heads)]
        share = [0.5 + head / 100 for head in range(heads)]
        every.append(
            LayerRecord(
                module=f"blocks.{layer}.attention", number=layer, role="self",
                figures={
                    "max_logit": logits, "entropy": share, "dead_rows": [0.0] * heads,
                    "entropy_without_sink_fraction": share, "dead_rows_not_sink": [0.0] * heads,
                },
            )
        )  # fmt: skip
    blocks = [f"blocks.{layer}" for layer in range(layers)]
    return StepRecord(
        step=step,
        time=float(step) if time is None else time,
        layers=tuple(every),
        stream={
            block: {"rms_first": 2.0, "rms": 1.0 + i, "gradient": 0.1}
            for i, block in enumerate(blocks)
        },
        weights={f"{b}.query.weight": {"gradient": 0.3, "weight": 2.0, "update": 0.002}
                 for b in blocks},
        non_finite=non_finite,
        values={"loss": 5.0 / step**0.1 if loss is None else loss},
    )  # fmt: skip


def run(count=11, *, name="made-up", cut=False, **options):
    """A run of records 10 steps apart, its logits growing."""
    steps = [1, *range(10, 10 * count, 10)]
    records = [record(step, logit=7.0 + step / 1000, **options) for step in steps[:count]]
    return Run(Path(name), {"model": "Decoder", "parameters": 1013}, tuple(records), cut)


def failing(count=23):
    """Logits grow tenfold and more, the loss rises after that, and the last record is NaN."""
    records = [
        record(
            10 * i + 1,
            logit=2.0 * 1.5**i,
            loss=3.0 if i < 17 else 4.5,
        )
        for i in range(count - 1)
    ]
    last = record(
        10 * count, logit=math.nan, loss=math.nan, non_finite="the keys of blocks.1.attention"
    )
    return Run(Path("failing"), {}, (*records, last))


def write(folder, made, *, ending=""):
    """The folder of a run, as a monitor leaves it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ABOUT).write_text(json.dumps(made.about))
    lines = "".join(each.to_json() + "\n" for each in made.records)
    (folder / RECORDS).write_text(lines + ending)
    return folder
