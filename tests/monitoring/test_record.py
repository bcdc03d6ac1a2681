"""A run's folder: what is written is what is read, also after a crash, and on a full disk."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from headwise.errors import FileError
from headwise.monitoring.monitor import Monitor
from headwise.monitoring.record import ABOUT, RECORDS, LayerRecord, StepRecord, read_run
from headwise.monitoring.writer import RunWriter
from tests.monitoring.dense import one_step
from tests.monitoring.test_monitor import batches, small


def record(step: int, loss: float = 2.5) -> StepRecord:
    figures = {"max_logit": [1.5, math.nan], "entropy": [math.inf, 0.25]}
    layer = LayerRecord(module="a.0", number=0, role="self", figures=figures)
    return StepRecord(
        step=step, time=7.0, layers=(layer,), stream={"b": {"rms": 0.5, "gradient": math.nan}},
        weights={"w": {"gradient": -math.inf, "weight": 1.0, "update": 0.0}}, non_finite="",
        values={"loss": loss},
    )  # fmt: skip


def test_a_line_is_a_record() -> None:
    line = record(3).to_json()
    assert "\n" not in line
    assert json.loads(line)["layers"][0]["figures"]["max_logit"] == [1.5, None]
    assert repr(StepRecord.from_json(line)) == repr(record(3))


def test_a_run_is_read_as_it_was_made(tmp_path: Path) -> None:
    model = small()
    with Monitor(model, every=2, out=tmp_path / "run") as monitor:
        for _ in range(4):
            one_step(model, *batches(1))
    run = read_run(tmp_path / "run")
    assert repr(run.records) == repr(tuple(monitor.records))
    assert not run.cut
    assert run.about["architecture"] == "llama"
    assert run.about["every"] == 2
    assert run.about["layers"] == ["model.layers.0.self_attn", "model.layers.1.self_attn"]


def test_a_run_that_crashed_is_read_as_far_as_it_is_whole(tmp_path: Path) -> None:
    lines = [record(step).to_json() for step in (1, 2, 3)]
    (tmp_path / RECORDS).write_text("\n".join(lines)[:-40], encoding="utf-8")
    run = read_run(tmp_path)
    assert [r.step for r in run.records] == [1, 2]
    assert run.cut
    assert run.about == {}
    writer = RunWriter(tmp_path, {"model": "m"}, step=2)
    writer.write(record(3))
    writer.close()
    again = read_run(tmp_path)
    assert [r.step for r in again.records] == [1, 2, 3]  # the rest of a line spoils no other
    assert not again.cut


def test_a_step_that_was_done_again_counts_once(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path, {})
    for step, loss in ((1, 3.0), (2, 2.9), (3, 2.8), (2, 2.7), (3, 2.6)):
        writer.write(record(step, loss))
    writer.close()
    assert [r.values["loss"] for r in read_run(tmp_path).records] == [3.0, 2.7, 2.6]


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="is no folder"):
        read_run(tmp_path / "nothing")
    with pytest.raises(FileError, match=f"has no {RECORDS}"):
        read_run(tmp_path)
    (tmp_path / RECORDS).write_text("", encoding="utf-8")
    with pytest.raises(FileError, match="holds no whole record"):
        read_run(tmp_path)
    (tmp_path / RECORDS).write_text('{"step": 1}\nnoise\n', encoding="utf-8")
    with pytest.raises(FileError, match="holds no whole record"):
        read_run(tmp_path)


def test_a_broken_description_does_not_hide_the_records(tmp_path: Path) -> None:
    (tmp_path / RECORDS).write_text(record(1).to_json() + "\n", encoding="utf-8")
    (tmp_path / ABOUT).write_text("{", encoding="utf-8")
    assert read_run(tmp_path).about == {}


def test_a_full_disk_stops_nothing(tmp_path: Path) -> None:
    class Full:
        def write(self, _: str) -> None:
            raise OSError(28, "No space left on device")

        def flush(self) -> None: ...

        def close(self) -> None:
            raise OSError(28, "No space left on device")

    model = small()
    with Monitor(model, every=1, spectra=0, out=tmp_path) as monitor:
        assert monitor._writer is not None
        monitor._writer.close()
        full: Any = Full()
        monitor._writer._file = full
        with pytest.warns(UserWarning, match="no longer written .*: No space left on device"):
            one_step(model, *batches(1))
        one_step(model, *batches(1))  # one warning; another would be an error here
    assert len(monitor.records) == 2
