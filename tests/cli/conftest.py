from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from headwise.cli.app import run
from headwise.results.label import to_dataset
from tests.results.synthetic import make_record


class Stage:
    """A place to run command lines in: an empty folder, and a scan that is made up."""

    def __init__(self, folder, capsys):
        self.folder = folder
        self._capsys = capsys
        self.calls: list[tuple[str, dict]] = []
        self.record = make_record(layers=3, heads=5, tokens=37)
        self.error: BaseException | None = None
        self.loading: dict = {}
        self.circuits: list[str] = []
        self.theorems: list[tuple] = []

    def opened(self, model, dtype, device, trust_remote_code):
        self.loading = {
            "dtype": dtype, "device": device, "trust_remote_code": trust_remote_code
        }  # fmt: skip
        return model

    def add_circuits(self, dataset, loaded, *, on_text, progress):
        self.circuits.append(loaded)
        return dataset

    def add_theorems(self, dataset, loaded, *, text, tokens, progress):
        self.theorems.append((loaded, text, tokens))
        return dataset

    def scan(self, model, **arguments):
        self.calls.append((model, {**arguments, **self.loading}))
        if self.error is not None:
            raise self.error
        return FakeScan(to_dataset(self.record))

    def run(self, *arguments: str) -> tuple[int, str, str]:
        code = run(arguments)
        captured = self._capsys.readouterr()
        return code, captured.out, captured.err

    def files(self) -> list[str]:
        return sorted(path.name for path in self.folder.iterdir())


class FakeScan:
    def __init__(self, dataset):
        self.dataset = dataset

    def __str__(self) -> str:
        return "the scan in words"


@pytest.fixture
def stage(tmp_path, monkeypatch, capsys):
    stage = Stage(tmp_path, capsys)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HEADWISE_TRACEBACK", raising=False)
    run_module = SimpleNamespace(scan=stage.scan, opened=stage.opened)
    monkeypatch.setitem(sys.modules, "headwise.observation.run", run_module)
    circuits = SimpleNamespace(
        add_circuits=stage.add_circuits, text_reader=lambda loaded, heads: None
    )
    monkeypatch.setitem(sys.modules, "headwise.circuits.dataset", circuits)
    cost = SimpleNamespace(add_cost=lambda dataset, loaded: dataset)
    monkeypatch.setitem(sys.modules, "headwise.observation.costed", cost)
    theorems = SimpleNamespace(add_theorems=stage.add_theorems)
    monkeypatch.setitem(sys.modules, "headwise.theorems.reported", theorems)
    return stage
