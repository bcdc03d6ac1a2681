"""Importing Headwise and asking for help load nothing heavy and cost under 0.4 s of CPU."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("torch", "transformers", "xarray", "numpy", "pandas", "rich")
CPU_SECONDS = 0.4

MEASURE = """
import resource, sys
{body}
usage = resource.getrusage(resource.RUSAGE_SELF)
loaded = [name for name in {heavy!r} if name in sys.modules]
print("\\nRESULT", usage.ru_utime + usage.ru_stime, ",".join(loaded))
"""


def measure(body: str) -> tuple[float, list[str]]:
    """CPU seconds of the whole process, and the heavy modules it loaded."""
    code = MEASURE.format(body=body, heavy=HEAVY)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    _, seconds, *loaded = done.stdout.splitlines()[-1].split(" ")
    return float(seconds), [name for name in "".join(loaded).split(",") if name]


@pytest.mark.parametrize(
    "body",
    [
        "import headwise",
        "from headwise.cli.app import run; run(['--help'])",
        "from headwise.cli.app import run; run(['report', '--help'])",
        "from headwise.cli.app import run; run(['--version'])",
        "from headwise.cli.app import run; assert run(['report', '--tokens', '1']) == 2",
    ],
)
def test_nothing_heavy_is_loaded(body):
    # The best of three: another process on the machine can only add.
    results = [measure(body) for _ in range(3)]
    assert results[0][1] == []
    assert min(seconds for seconds, _ in results) < CPU_SECONDS


def test_a_heavy_import_is_noticed():
    assert measure("import numpy")[1] == ["numpy"]
