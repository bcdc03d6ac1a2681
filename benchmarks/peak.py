"""Time and memory of a piece of work in this process (Linux), as all benchmarks measure them."""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["growth", "measured"]


def measured(run: Callable[[], object], clock: Callable[[], float]) -> tuple[float, float]:
    """Time of one run, and by how many MiB the peak memory exceeds what was held before it."""
    with open("/proc/self/clear_refs", "w") as handle:
        handle.write("5")  # forget the peak so far
    before, start = _line("VmRSS"), clock()
    run()
    return clock() - start, _line("VmHWM") - before


def growth(run: Callable[[], object]) -> float:
    """The second of the two alone."""
    return measured(run, time.perf_counter)[1]


def _line(name: str) -> float:
    """A line of /proc/self/status in MiB."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith(name)) / 1024
