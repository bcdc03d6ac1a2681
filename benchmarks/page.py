"""Time and size of the page, from a saved scan to the HTML file.

    python benchmarks/page.py SCAN.nc [--repeats 5]

Prints the median, smallest and largest wall time of ``headwise.report(dataset, path)`` with the
data set in memory, and the size of the file.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import tempfile
import time
from pathlib import Path

import headwise as hw


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("scan", type=Path)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    dataset = hw.load_scan(options.scan).load()
    sizes = dict(dataset.sizes)
    print(f"headwise {hw.__version__}, Python {platform.python_version()}, {platform.machine()}")
    print(f"{sizes['layer']} layers, {sizes['head']} heads, {sizes['key']} tokens")
    times = []
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(options.repeats):
            start = time.perf_counter()
            path = hw.report(dataset, Path(folder) / "report.html")
            times.append(time.perf_counter() - start)
        size = path.stat().st_size
    print(
        f"{statistics.median(times):.2f} s ({min(times):.2f} to {max(times):.2f}, "
        f"{options.repeats} repeats), {size / 1e6:.2f} MB"
    )


if __name__ == "__main__":
    main()
