"""Everything public says what it is, and the examples in docstrings run."""

from __future__ import annotations

import ast
import doctest
import importlib

import pytest

from tests.architecture.source import files, module_name


def undocumented(source: str) -> list[str]:
    """Public functions and classes of a module (those in __all__) without a docstring."""
    tree = ast.parse(source)
    public: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            public = set(ast.literal_eval(node.value))
    kinds = (ast.FunctionDef, ast.ClassDef)
    out = [] if ast.get_docstring(tree) else ["the module"]
    return out + [
        node.name
        for node in tree.body
        if isinstance(node, kinds) and node.name in public and not ast.get_docstring(node)
    ]


@pytest.mark.parametrize("path", files(), ids=module_name)
def test_public_names_are_documented(path):
    assert undocumented(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("path", files(), ids=module_name)
def test_examples_run(path):
    if ">>> " not in path.read_text(encoding="utf-8"):
        return
    module = importlib.import_module(module_name(path))
    result = doctest.testmod(module, optionflags=doctest.ELLIPSIS)
    assert result.attempted > 0
    assert result.failed == 0


def test_a_missing_docstring_is_noticed():
    assert undocumented('"""M."""\n__all__ = ["f"]\ndef f(): pass\ndef g(): pass') == ["f"]
