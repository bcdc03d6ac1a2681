"""Calibration: what is measured, what is said of it, what it is used for. No time is asserted."""

from __future__ import annotations

import datetime
import math

import pytest
import torch

from headwise.cost.explicit import explicit
from headwise.cost.hardware import Shape, hardware_from, save_hardware
from headwise.cost.roofline import roofline
from headwise.cost.workload import Workload
from headwise.errors import OptionError
from headwise.observation import machine
from headwise.observation.machine import SHAPES, calibrate

FEW = [Shape(1, 7, 11, 13), Shape(3, 5, 11, 7), Shape(1, 1, 17, 19)]
QUICK = {"shapes": FEW, "dtypes": ["float32", "bfloat16"], "seconds": 0.1, "buffer_bytes": 2**14}


@pytest.fixture(scope="module")
def found():
    return calibrate(threads=1, **QUICK)


def test_every_shape_has_a_rate_of_every_dtype(found):
    assert {(rate.dtype, rate.shape) for rate in found.rates} == {
        (dtype, shape) for dtype in QUICK["dtypes"] for shape in FEW
    }
    for rate in found.rates:
        assert 0 < rate.low <= rate.flops_per_second <= rate.high
    for dtype, figure in found.peaks:
        rates = [rate.flops_per_second for rate in found.rates if rate.dtype == dtype]
        assert figure.value == max(rates)


def test_it_says_how_it_was_measured(found):
    assert found.kind == "CPU"
    assert found.bandwidth.value > 0
    assert found.bandwidth.source == f"measured with torch {torch.__version__}, CPU time, 1 thread"
    assert found.memory.value > 2**28
    age = datetime.date.today() - datetime.date.fromisoformat(found.bandwidth.date)
    assert age <= datetime.timedelta(days=1)


def test_what_is_saved_is_read_again(found, tmp_path):
    save_hardware(found, tmp_path / "mine.toml")
    assert hardware_from(tmp_path / "mine.toml") == found


def test_the_roofline_uses_it(found):
    parts = explicit(d_model=44, layers=3, heads=4, vocab=101)
    time = roofline(parts, Workload(length=11), found, dtype="float32")
    assert 0 < time.decode.seconds < time.training.seconds
    rates = [rate.flops_per_second for rate in found.rates if rate.dtype == "float32"]
    for each in time.prefill.components:
        if each.flops:
            slack = 1e-12  # of the sum of a few quotients
            low, high = each.flops / max(rates), each.flops / min(rates)
            assert low * (1 - slack) <= each.arithmetic_seconds <= high * (1 + slack)


def test_progress_counts_up_to_the_end():
    seen = []
    calibrate(lambda done, of: seen.append((done, of)), threads=1, **{**QUICK, "seconds": 0.01})
    assert seen == [(done, 8) for done in range(1, 9)]


def test_the_threads_are_put_back():
    before = torch.get_num_threads()
    several = calibrate(threads=before + 1, **{**QUICK, "seconds": 0.01})
    assert torch.get_num_threads() == before
    assert several.bandwidth.source.endswith(f"elapsed time, {before + 1} threads")


def test_a_shape_that_would_take_too_long_is_left_out():
    shapes = [Shape(1, 2**17, 2**17, 2**17), Shape(1, 7, 11, 13)]  # 64 GiB in float32
    found = calibrate(threads=1, **{**QUICK, "shapes": shapes, "dtypes": ["float32"]})
    assert [rate.shape for rate in found.rates] == [Shape(1, 7, 11, 13)]


def test_the_rate_is_flops_over_the_median_time(monkeypatch):
    times = iter([9.0, 2.0, 4.0, 8.0])  # the first call is not counted

    def clock(run, count):
        return next(times)

    rate = machine._measured("float32", Shape(1, 2, 3, 5), torch.device("cpu"), clock, share=6.0)
    assert (rate.flops_per_second, rate.low, rate.high) == (15, 8, 30)  # 60 over 4, 8, 2 seconds


def test_repeats_stay_within_the_share():
    calls = []

    def clock(run, count):
        calls.append(count)
        return 0.4e-3 * count

    times = machine._times(lambda: None, clock, share=5e-3)
    assert calls == [1, 1, 2, 4, 4, 4]  # warm-up, doubling to a millisecond, 5 / 1.6 = 3 repeats
    assert times == pytest.approx([0.4e-3] * 3)


def test_the_default_shapes_cover_what_a_model_multiplies():
    assert len(set(SHAPES)) == len(SHAPES)
    assert {1, 16} <= {shape.batch for shape in SHAPES}
    assert any(shape.m == 1 and shape.batch == 1 for shape in SHAPES)
    assert max(shape.flops for shape in SHAPES) < 5e10
    assert max(math.prod((s.batch, s.k, s.n)) for s in SHAPES) * 4 <= 2**27


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"shapes": []}, "no shape"),
        ({"shapes": [Shape(1, 0, 3, 5)]}, "a shape without entries"),
        ({"dtypes": ["int8"]}, "dtype is 'int8'; allowed: float64, float32"),
        ({"dtypes": []}, "no dtype"),
        ({"seconds": 0}, "seconds is 0"),
        ({"seconds": float("nan")}, "seconds is nan"),
        ({"buffer_bytes": 3}, "buffer_bytes is 3"),
        ({"threads": 0}, "threads is 0"),
        ({"device": "abacus"}, "device is 'abacus'"),
        ({"device": "meta"}, "there is no device 'meta' here"),
        ({"device": "cuda:99"}, "there is no device 'cuda:99' here"),
    ],
)
def test_wrong_options_are_refused(more, said):
    with pytest.raises(OptionError, match=said):
        calibrate(**{**QUICK, **more})
