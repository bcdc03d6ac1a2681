"""Two processes under torchrun train as one does with the same global batch."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from headwise.monitoring.record import RECORDS, read_run
from headwise.training.checkpoint import STATE, read_state
from headwise.training.log import read_log
from headwise.training.loop import train
from tests.training.small import losses, settings, text_file

PROGRAM = (sys.executable, "-W", "ignore", "-c", "from headwise.cli.app import main; main()")


def torchrun(*arguments: str, **options) -> subprocess.Popen[str]:
    command = [
        sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone",
        "--nproc-per-node", "2", "--no-python", *PROGRAM, *arguments,
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
        **options,
    )  # fmt: skip


@pytest.fixture
def run(tmp_path):
    """Arguments of a training run, and the settings they come from."""
    text, config = text_file(tmp_path), settings(batch=4, accumulate=2)
    (tmp_path / "config.json").write_text(json.dumps(config))
    arguments = ("train", str(text), "--config", str(tmp_path / "config.json"))
    return text, config, arguments


@pytest.mark.slow
def test_the_losses_are_those_of_one_process(run, tmp_path):
    text, config, arguments = run
    train(text, config, out=tmp_path / "one")
    process = torchrun(*arguments, "--out", str(tmp_path / "two"))
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert out.count("the model is in") == 1  # one process speaks
    mine, theirs = losses(tmp_path / "two"), losses(tmp_path / "one")
    assert len(mine) == len(theirs) == 7
    for two, one in zip(mine, theirs, strict=True):
        assert two.keys() == one.keys()
        # Seven steps from sums in another order: float32 rounding, far from what a wrong share
        # of the batch would give (the losses of two steps differ by more than 1e-3).
        for name in two:
            assert two[name] == pytest.approx(one[name], rel=1e-4)


@pytest.mark.slow
def test_the_records_are_those_of_one_process(run, tmp_path):
    text, config, arguments = run
    given = {**config, "accumulate": 1}
    train(text, given, out=tmp_path / "one", monitor=True, monitor_every=3)
    options = ("--accumulate", "1", "--monitor-every", "3")
    process = torchrun(*arguments, "--out", str(tmp_path / "two"), *options)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    mine, theirs = (read_run(tmp_path / name).records for name in ("two", "one"))
    assert [record.step for record in mine] == [1, 3, 6]
    lines = (tmp_path / "two" / RECORDS).read_text().splitlines()
    assert len(lines) == 3  # one process writes
    for two, one in zip(mine, theirs, strict=True):
        assert two.values == pytest.approx(one.values, rel=1e-4)
        for layer, same in zip(two.layers, one.layers, strict=True):
            for name, values in layer.figures.items():
                # As above: float32 rounding; one process' share alone is off by far more.
                assert values == pytest.approx(same.figures[name], rel=1e-3, abs=1e-5), name
        for path, figures in two.stream.items():
            assert figures["rms"] == pytest.approx(one.stream[path]["rms"], rel=1e-4)
        for name, norms in two.weights.items():
            assert norms["gradient"] == pytest.approx(one.weights[name]["gradient"], rel=1e-3)


@pytest.mark.slow
def test_ctrl_c_saves_and_the_run_goes_on(run, tmp_path):
    text, _, arguments = run
    folder = tmp_path / "two"
    process = torchrun(
        *arguments, "--out", str(folder), "--steps", "100000", "--save-every", "100000",
        start_new_session=True,
    )  # fmt: skip
    while len(read_log(folder)) < 3:
        assert process.poll() is None
        time.sleep(0.2)
    os.kill(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=300)
    assert err.count("headwise: stopped at step") == 1
    assert read_state(folder).about["step"] >= 3
    done = train(text, out=folder, resume=True, steps=read_state(folder).about["step"] + 2)
    assert not done.interrupted
    assert (folder / STATE).exists()
