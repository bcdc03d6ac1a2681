"""Importing Headwise, asking for help and for a cost load nothing heavy and take little CPU."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.cost.as_files import TRILLION, config, write

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
        "from headwise.cli.app import run; run(['theorems', '--help'])",
        "from headwise.cli.app import run; assert run(['theorems', '--tokens', '9']) == 2",
        "from headwise.cli.app import run; run(['--version'])",
        "from headwise.cli.app import run; assert run(['report', '--tokens', '1']) == 2",
    ],
)
def test_nothing_heavy_is_loaded(body):
    # The best of three: another process on the machine can only add.
    results = [measure(body) for _ in range(3)]
    assert results[0][1] == []
    assert min(seconds for seconds, _ in results) < CPU_SECONDS


COST_SECONDS = 0.5
RUN = "from headwise.cli.app import run"


@pytest.mark.parametrize("name", ["small", "trillion"])
@pytest.mark.parametrize(
    ("body", "allowed"),
    [
        (f"{RUN}; assert run(['cost', {{file!r}}]) == 0", ["rich"]),
        (f"{RUN}; assert run(['cost', {{file!r}}, '--json', '-q']) == 0", []),
        ("import headwise as hw; assert hw.cost({file!r}).parameters", []),
    ],
)
def test_a_cost_is_answered_at_once(tmp_path, name, body, allowed):
    write(tmp_path, small=config("llama"), trillion=TRILLION)
    results = [measure(body.format(file=str(tmp_path / f"{name}.json"))) for _ in range(3)]
    assert set(results[0][1]) <= set(allowed)
    assert min(seconds for seconds, _ in results) < COST_SECONDS


def test_a_heavy_import_is_noticed():
    assert measure("import numpy")[1] == ["numpy"]
