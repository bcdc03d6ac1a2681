"""Imports point one way: only to a lower rank, and heavy libraries only where they belong."""

from __future__ import annotations

import ast

import pytest

from tests.architecture.source import files, imports, module_name

RANKS = {
    "axes": 0,
    "errors": 0,
    "files": 1,
    "gguf_header": 1,
    "attention": 1,
    "positions": 1,
    "models": 2,
    "cost": 2,
    "results": 3,
    "observation": 4,
    "circuits": 5,
    "monitoring": 6,
    "training": 7,
    "theorems": 8,
    "report": 9,
    "cli": 10,
}
XARRAY_FROM = 3
ONLY_HERE = {"transformers": "observation"}


def violations(source: str, module: str, is_package: bool = False) -> list[str]:
    """What the file imports and may not."""
    if module == "headwise":  # the public names point everywhere, lazily; test_cold_start guards it
        return []
    own = module.split(".")[1]
    found = []
    for name, line in imports(ast.parse(source), module, is_package):
        first, *rest = name.split(".")
        if first == "headwise" and rest and rest[0] in RANKS:
            if rest[0] != own and RANKS[rest[0]] >= RANKS[own]:
                found.append(f"{module}:{line}: rank {RANKS[own]} imports {name}")
        elif first == "headwise" and rest and rest[0] not in ("__version__", *RANKS):
            found.append(f"{module}:{line}: {name} has no rank")
        elif first in ONLY_HERE and own != ONLY_HERE[first]:
            found.append(f"{module}:{line}: only {ONLY_HERE[first]} imports {first}")
        elif first == "xarray" and RANKS[own] < XARRAY_FROM:
            found.append(f"{module}:{line}: xarray below rank {XARRAY_FROM}")
        elif first == "torch" and own == "cost":
            found.append(f"{module}:{line}: cost imports torch")
    return found


@pytest.mark.parametrize("path", files(), ids=module_name)
def test_imports_point_to_lower_ranks(path):
    source = path.read_text(encoding="utf-8")
    assert violations(source, module_name(path), path.name == "__init__.py") == []


def test_every_package_has_a_rank():
    names = {module_name(path).split(".")[1] for path in files() if module_name(path) != "headwise"}
    assert names <= set(RANKS)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("headwise.attention.masks", "import headwise.results.io"),
        ("headwise.attention.masks", "from headwise.results import io"),
        ("headwise.attention.masks", "from headwise import results"),
        ("headwise.attention.masks", "def f():\n    from ..cli.app import run"),
        ("headwise.observation.run", "from headwise.circuits import scores"),
        ("headwise.report.page", "from transformers import AutoModel"),
        ("headwise.models.block", "import xarray as xr"),
        ("headwise.cost.counting", "import torch.nn"),
        ("headwise.results.io", "from headwise.nowhere import x"),
    ],
)
def test_a_planted_violation_is_found(module, source):
    assert len(violations(source, module)) == 1


def test_allowed_imports_are_allowed():
    assert violations("from headwise.results.io import load\nimport xarray", "headwise.cli.x") == []
    assert violations("from .masks import Mask", "headwise.attention.heads") == []
    assert violations("from headwise.attention import masks", "headwise.attention.heads") == []
    assert violations("from headwise.observation.survey import survey", "headwise.circuits.x") == []
