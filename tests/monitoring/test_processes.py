"""Two processes that train one model are recorded as one that sees both their batches."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from headwise.monitoring.head_sums import HeadSums
from headwise.monitoring.monitor import Monitor
from headwise.monitoring.processes import of_all_processes, processes, speaks
from headwise.monitoring.record import read_run
from tests.monitoring.test_monitor import batches, small

PROGRAM = """
import json, math, sys, warnings
warnings.simplefilter("ignore")
from pathlib import Path
import torch
import torch.distributed as dist
from headwise.monitoring.head_sums import HeadSums
from headwise.monitoring.monitor import Monitor
from headwise.monitoring.processes import of_all_processes
from tests.monitoring.test_monitor import batches, small

folder = Path(sys.argv[1])
dist.init_process_group("gloo")
rank = dist.get_rank()

model = torch.nn.parallel.DistributedDataParallel(small())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with Monitor(model, every=1, out=folder) as monitor:
    for step in range(2):
        model(**batches(2)[rank]).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    poisoned = batches(2)[rank]
    if rank == 1:
        with torch.no_grad():
            next(model.parameters())[5] = math.nan  # a word of the second batch only, perhaps
    model(**poisoned).loss.backward()
    optimizer.step()
(folder / f"lines{rank}.json").write_text(json.dumps([r.to_json() for r in monitor.records]))

empty = HeadSums.empty(2)
part = HeadSums(empty.maxima + 1e9 * 0, empty.sums + rank + 1, empty.counts + 1)
part.maxima[:] = torch.tensor([[1.0 + rank, 3.0 - rank], [math.nan if rank else 2.0, 4.0]])
mine = {"both": part} if rank else {"both": part, "one": part}
heads, sums, said = of_all_processes(mine, [1.0, 10.0 * rank], "second" if rank else "")
found = {path: [h.maxima.tolist(), h.sums[0].tolist(), h.counts[0].tolist()]
         for path, h in heads.items()}
(folder / f"merged{rank}.json").write_text(json.dumps([found, sums, said]))
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("two")
    (made / "program.py").write_text(PROGRAM)
    root = Path(__file__).parents[2]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(root)}
    command = [
        sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone",
        "--nproc-per-node", "2", str(made / "program.py"), str(made),
    ]  # fmt: skip
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return made


@pytest.mark.slow
def test_two_processes_are_one(folder: Path) -> None:
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Monitor(model, every=1) as monitor:
        for _ in range(2):
            for batch in batches(2):
                (model(**batch).loss / 2).backward()
            optimizer.step()
            optimizer.zero_grad()
    two = read_run(folder).records
    assert len(two) == 3
    # Sums of gradients in another order, in float32, and two steps with them.
    near = {"rel": 1e-4, "abs": 1e-6}
    for got, want in zip(two, monitor.records, strict=False):
        assert got.step == want.step
        assert got.values["loss"] == pytest.approx(want.values["loss"], **near)
        assert [layer.module for layer in got.layers] == [layer.module for layer in want.layers]
        for a, b in zip(got.layers, want.layers, strict=True):
            assert a.figures.keys() == b.figures.keys()
            for name, values in b.figures.items():
                assert a.figures[name] == pytest.approx(values, **near), name
        for name, figures in want.weights.items():
            assert got.weights[name] == pytest.approx(figures, **near)
        for path, figures in want.stream.items():
            assert got.stream[path] == pytest.approx(figures, **near)


@pytest.mark.slow
def test_every_process_has_the_same_records_and_one_writes_them(folder: Path) -> None:
    first, second = (json.loads((folder / f"lines{rank}.json").read_text()) for rank in (0, 1))
    assert len((folder / "health.jsonl").read_text().splitlines()) == 3
    for a, b in zip(first[:2], second[:2], strict=True):
        one, two = json.loads(a), json.loads(b)
        for name in ("layers", "stream", "values", "weights", "non_finite"):
            assert one[name] == two[name], name


@pytest.mark.slow
def test_what_one_process_met_is_named_by_all(folder: Path) -> None:
    for rank in (0, 1):
        last = json.loads(json.loads((folder / f"lines{rank}.json").read_text())[2])
        assert last["non_finite"] != ""


@pytest.mark.slow
def test_modules_that_only_one_process_called_and_nan(folder: Path) -> None:
    for rank in (0, 1):
        found, sums, said = json.loads((folder / f"merged{rank}.json").read_text())
        assert sums == [2.0, 10.0]
        assert said == "second"
        maxima, added, counts = found["both"]
        assert maxima[0] == [2.0, 3.0]
        assert math.isnan(maxima[1][0])
        assert maxima[1][1] == 4.0
        assert added == [3.0, 3.0]
        assert counts == [2.0, 2.0]
        assert found["one"][1:] == [[1.0, 1.0], [1.0, 1.0]]


def test_one_process_is_left_as_it_is() -> None:
    heads = {"a": HeadSums.empty(3)}
    assert processes() == 1
    assert speaks()
    assert of_all_processes(heads, [1.0], "said") == (heads, [1.0], "said")
