"""Files of one idea, functions of one screen: 400 lines and 50, docstrings not counted."""

from __future__ import annotations

import ast

import pytest

from tests.architecture.source import PACKAGE, files, module_name

MOST_FILE_LINES = 400
MOST_BODY_LINES = 50

# path or path::function -> why it is longer
EXCEPTIONS: dict[str, str] = {}


def body_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of the body, without the docstring."""
    body = function.body[1:] if ast.get_docstring(function) is not None else function.body
    return (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0


def long_functions(source: str) -> list[str]:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return [
        node.name
        for node in ast.walk(ast.parse(source))
        if isinstance(node, kinds) and body_lines(node) > MOST_BODY_LINES
    ]


@pytest.mark.parametrize("path", files(), ids=module_name)
def test_sizes(path):
    name = str(path.relative_to(PACKAGE))
    source = path.read_text(encoding="utf-8")
    lines = source.count("\n")
    assert lines <= MOST_FILE_LINES or name in EXCEPTIONS
    too_long = [f for f in long_functions(source) if f"{name}::{f}" not in EXCEPTIONS]
    assert too_long == []


def test_no_file_is_called_utils():
    assert [path for path in files() if path.stem in ("utils", "helpers", "common", "misc")] == []


def test_exceptions_are_still_needed():
    for name in EXCEPTIONS:
        path, _, function = name.partition("::")
        source = (PACKAGE / path).read_text(encoding="utf-8")
        if function:
            assert function in long_functions(source)
        else:
            assert len(source.splitlines()) > MOST_FILE_LINES


def test_a_long_function_is_noticed():
    body = "    x = 1\n" * 51
    assert long_functions(f"def f():\n{body}") == ["f"]
    assert long_functions(f'def f():\n    """{"word " * 9}"""\n{body[10:]}') == []
