"""The public names: sorted, resolvable, the same for people and for type checkers."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys

import pytest

import headwise
from tests.architecture.source import PACKAGE, files, module_name

EXPORTING = [
    path
    for path in files()
    if path.parent != PACKAGE or path.stem != "__init__"
    if "__all__" in path.read_text(encoding="utf-8")
]


def test_the_names_are_sorted_and_are_the_table():
    assert list(headwise.__all__) == sorted(set(headwise.__all__))
    assert set(headwise.__all__) == set(headwise._WHERE)
    assert set(headwise.__all__) <= set(dir(headwise))


@pytest.mark.parametrize("name", headwise.__all__)
def test_every_name_resolves(name):
    assert getattr(headwise, name) is not None


def test_an_unknown_name_is_refused():
    with pytest.raises(AttributeError, match="module 'headwise' has no attribute 'nothing'"):
        _ = headwise.nothing


def test_type_checkers_see_the_same_names():
    tree = ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8"))
    block = next(
        node
        for node in tree.body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    )
    seen = {}
    for node in block.body:
        assert isinstance(node, ast.ImportFrom)
        for name in node.names:
            seen[name.asname or name.name] = f"{node.module}:{name.name}"
    assert set(seen) == set(headwise.__all__)
    for name, where in headwise._WHERE.items():
        assert seen[name] == (where if ":" in where else ":".join(where.rsplit(".", 1)))


@pytest.mark.parametrize("path", EXPORTING, ids=module_name)
def test_module_names_are_sorted_and_there(path):
    module = importlib.import_module(module_name(path))
    assert len(set(module.__all__)) == len(module.__all__)
    # Constants, then classes, then functions: the order that the linter keeps.
    assert sorted(module.__all__, key=_kind_then_name) == list(module.__all__)
    missing = [name for name in module.__all__ if not hasattr(module, name)]
    assert missing == []


def _kind_then_name(name: str) -> tuple[int, str]:
    return (0 if name.isupper() else 1 if name[0].isupper() else 2, name)


@pytest.mark.parametrize(
    "first",
    [
        "",
        "import headwise.report.findings",
        "from headwise.report import page",
        "import headwise.report",
        "headwise.report",
    ],
)
def test_report_is_the_function_whatever_was_imported_first(first):
    code = f"""
import headwise
{first}
from headwise.report.page import write_report
assert headwise.report is write_report
import headwise.report
assert headwise.report is write_report
from headwise.report import page
assert page.write_report is write_report
from headwise import report
assert report is write_report
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
