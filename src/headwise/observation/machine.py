"""Calibration: how fast this machine multiplies matrices of given shapes, and moves memory.

On one CPU thread the clock is CPU time, so that other processes do not count; on several threads it
is elapsed time; on CUDA it is that of the device's own events. Of the repeats of a shape the median
is the rate, and the slowest and the fastest are kept beside it.
"""

from __future__ import annotations

import datetime
import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from headwise.cost.hardware import BITS, Figure, Hardware, Rate, Shape
from headwise.errors import OptionError

__all__ = ["SHAPES", "calibrate"]

SHAPES: Final = (
    *(Shape(1, n, n, n) for n in (64, 256, 1024, 2048)),
    *(Shape(1, m, 1024, n) for m in (16, 128, 4096) for n in (256, 4096)),  # tall and wide
    *(Shape(1, 1, k, n) for k, n in ((1024, 1024), (4096, 4096), (1024, 32_768))),  # decode
    *(Shape(16, m, 64, n) for m, n in ((128, 128), (1024, 1024), (1, 1024), (1, 8192))),  # Q Kᵀ
    *(Shape(16, m, n, 64) for m, n in ((128, 128), (1024, 1024), (1, 1024), (1, 8192))),  # A V
)
_REPEATS: Final = 7
_LEAST_SECONDS: Final = 1e-3  # of one repeat, so that reading the clock is nothing beside it
_TORCH: Final = {
    "float64": torch.float64,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}


def calibrate(
    progress: Callable[[int, int], None] | None = None,
    threads: int | None = None,
    device: str = "cpu",
    *,
    shapes: Sequence[Shape] = SHAPES,
    dtypes: Sequence[str] = ("float32", "bfloat16"),
    seconds: float = 20.0,
    buffer_bytes: int = 2**27,
) -> Hardware:
    """Measure this machine's rate for each shape and dtype, and its bandwidth.

    A rate is 2 · batch · m · k · n over the median time of a product. The bandwidth is the faster
    of reading a buffer once and copying it, which moves it twice. ``roofline`` uses the rate of the
    nearest shape, as ``Hardware.rate`` says. The path of CUDA is written from its documentation.

    Args:
        progress: called with the measurements done and all of them.
        threads: of the CPU; None: as many as torch uses now.
        device: "cpu", or a CUDA device such as "cuda" or "cuda:0".
        shapes: products to measure, the small ones first.
        dtypes: "float64", "float32", "float16" or "bfloat16".
        seconds: about how long to measure. A shape whose time, at the best rate so far, would be
            longer than its share is left out, but never the first of a dtype.
        buffer_bytes: of the buffer that is read and copied; far more than the caches hold.

    Raises:
        OptionError: an option is out of its range, or there is no such device.

    Example:
        >>> found = calibrate(shapes=[Shape(1, 8, 8, 8)], dtypes=["float32"], seconds=0.01,
        ...                   buffer_bytes=2**12)
        >>> found.dtypes, found.rates[0].shape
        (('float32',), Shape(batch=1, m=8, k=8, n=8))
    """
    place = _device(device)
    _allowed(shapes, dtypes, seconds, buffer_bytes, threads)
    jobs = len(shapes) * len(dtypes) + 2
    share = seconds / jobs
    rates: list[Rate] = []
    done = 0

    def step() -> None:
        nonlocal done
        done += 1
        if progress is not None:
            progress(done, jobs)

    with _threads(threads) as used, torch.inference_mode():
        clock = _clock(place, used)
        bandwidth = 0
        for moved, run in _movers(buffer_bytes, place):
            bandwidth = max(bandwidth, round(moved / statistics.median(_times(run, clock, share))))
            step()
        for dtype in dtypes:
            best = math.inf
            for shape in sorted(shapes, key=lambda each: each.flops):
                if shape.flops / best <= share:
                    rates.append(_measured(dtype, shape, place, clock, share))
                    found = rates[-1].flops_per_second
                    best = found if best == math.inf else max(best, found)
                step()
    return _hardware(place, used, bandwidth, rates)


def _allowed(
    shapes: Sequence[Shape],
    dtypes: Sequence[str],
    seconds: float,
    buffer_bytes: int,
    threads: int | None,
) -> None:
    if not shapes or min(min(each.batch, each.m, each.k, each.n) for each in shapes) < 1:
        raise OptionError("there is a shape without entries, or no shape", allowed="1 or more each")
    for dtype in dtypes:
        if dtype not in _TORCH:
            raise OptionError(f"dtype is {dtype!r}", allowed=", ".join(_TORCH))
    if not dtypes:
        raise OptionError("no dtype is given", allowed=", ".join(_TORCH))
    if not 0 < seconds <= 3600:
        raise OptionError(f"seconds is {seconds}", allowed="above 0, up to 3600")
    if buffer_bytes < 4:
        raise OptionError(f"buffer_bytes is {buffer_bytes}", allowed="4 or more")
    if threads is not None and threads < 1:
        raise OptionError(f"threads is {threads}", allowed="1 or more")


def _device(name: str) -> torch.device:
    try:
        place = torch.device(name)
    except RuntimeError as error:
        raise OptionError(f"device is {name!r}", allowed="cpu, cuda, cuda:N") from error
    if place.type == "cpu":
        return place
    if place.type != "cuda" or (place.index or 0) >= torch.cuda.device_count():
        raise OptionError(f"there is no device {name!r} here", allowed="cpu, cuda, cuda:N")
    return place


@contextmanager
def _threads(threads: int | None) -> Iterator[int]:
    before = torch.get_num_threads()
    try:
        if threads is not None:
            torch.set_num_threads(threads)
        yield torch.get_num_threads()
    finally:
        torch.set_num_threads(before)


_Clock = Callable[[Callable[[], object], int], float]


def _clock(place: torch.device, threads: int) -> _Clock:
    """Seconds that a call takes, repeated so many times."""
    if place.type == "cuda":
        return _events(place)
    now = time.process_time if threads == 1 else time.perf_counter

    def timed(run: Callable[[], object], times: int) -> float:
        start = now()
        for _ in range(times):
            run()
        return now() - start

    return timed


def _events(place: torch.device) -> _Clock:
    def timed(run: Callable[[], object], times: int) -> float:
        with torch.cuda.device(place):
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            first.record()
            for _ in range(times):
                run()
            last.record()
            last.synchronize()
        return first.elapsed_time(last) / 1000

    return timed


def _times(run: Callable[[], object], clock: _Clock, share: float) -> list[float]:
    """Seconds of single calls: up to seven repeats, at least one, within the share."""
    clock(run, 1)  # the first call pays for pages and for choosing a kernel
    inner, taken = 1, 0.0
    while (taken := clock(run, inner)) < _LEAST_SECONDS:
        inner *= 2
    repeats = min(_REPEATS, max(1, int(share / taken)))
    return [taken / inner, *(clock(run, inner) / inner for _ in range(repeats - 1))]


def _measured(dtype: str, shape: Shape, place: torch.device, clock: _Clock, share: float) -> Rate:
    left, right = (
        torch.ones(shape.batch, rows, columns, dtype=_TORCH[dtype], device=place)
        for rows, columns in ((shape.m, shape.k), (shape.k, shape.n))
    )
    if shape.batch == 1:
        left, right = left[0], right[0]
    out = left @ right
    times = _times(lambda: torch.matmul(left, right, out=out), clock, share)
    median, low, high = (
        max(1, round(shape.flops / each))
        for each in (statistics.median(times), max(times), min(times))
    )
    return Rate(dtype, shape, median, low, high)


def _movers(size: int, place: torch.device) -> Iterator[tuple[int, Callable[[], Tensor]]]:
    """Bytes moved by reading a buffer and by copying it, and how to do so."""
    buffer = torch.ones(size // 4, dtype=torch.float32, device=place)
    yield 4 * len(buffer), buffer.sum
    target = torch.zeros_like(buffer)
    yield 8 * len(buffer), lambda: target.copy_(buffer)


def _processor() -> str:
    """The name that the system has for the processor: on Linux, that of its first core."""
    cores = Path("/proc/cpuinfo")
    if cores.is_file():
        for line in cores.read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name" and value.strip():
                return value.strip()
    return platform.processor() or platform.machine() or "unknown processor"


def _hardware(place: torch.device, threads: int, bandwidth: int, rates: list[Rate]) -> Hardware:
    today = datetime.date.today().isoformat()
    if place.type == "cuda":
        properties = torch.cuda.get_device_properties(place)
        title, memory, clock = properties.name, properties.total_memory, "device events"
    else:
        title = _processor()
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        clock = "CPU time" if threads == 1 else "elapsed time"
        clock += f", {threads} thread{'s' * (threads > 1)}"
    source = f"measured with torch {torch.__version__}, {clock}"
    highest: dict[str, int] = {}
    for rate in rates:
        highest[rate.dtype] = max(highest.get(rate.dtype, 0), rate.flops_per_second)
    return Hardware(
        name="this-machine",
        title=title,
        kind="GPU" if place.type == "cuda" else "CPU",
        memory=Figure(memory, "reported by the device or the system", today),
        bandwidth=Figure(bandwidth, source, today),
        peaks=tuple(
            (dtype, Figure(highest[dtype], source, today)) for dtype in BITS if dtype in highest
        ),
        rates=tuple(rates),
    )
