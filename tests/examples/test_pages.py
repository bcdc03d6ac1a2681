"""Everything that README and docs tell a reader to type is run here, on tiny models.

The Python blocks of a page run in order in one namespace; the shell blocks run through the program.
Model names are replaced as ``models.py`` declares; nothing else is changed.
"""

from __future__ import annotations

import doctest
import re
import shlex

import pytest

from headwise.cli.app import run
from tests.examples.blocks import PAGES, ROOT, Block, blocks, commands, name
from tests.examples.models import substitute
from tests.parity.families import FAMILIES, REFUSED

TEXT = "It was the best of times, it was the worst of times, it was the age of wisdom.\n" * 30
LANGUAGES = {"python", "pycon", "sh", "text", "html", "json"}
# Shell lines that set up the machine; what they must say is checked by name below.
SET_UP = (
    "pip install ",
    "pytest",
    "python -m venv ",
    ". .venv/bin/activate",
    "python scripts/",
    "python examples/",
)
README_COMMANDS = (
    "pip install -c constraints.txt . && headwise report",
    "headwise report HuggingFaceTB/SmolLM2-135M-Instruct",
    "pip install -c constraints.txt -e '.[dev]' && pytest",
)


def run_python(page: str, block: Block, models: dict[str, str], names: dict) -> None:
    """Run one block; a failure shows the page and the line."""
    source = "\n" * (block.line - 1) + substitute(block.code, models)
    if block.language == "python":
        exec(compile(source, page, "exec"), names)
        return
    test = doctest.DocTestParser().get_doctest(source, names, page, page, 0)
    said: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    runner.run(test, out=said.append, clear_globs=False)
    assert said == []
    names.update(test.globs)


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A working folder with the text file that pages name."""
    monkeypatch.chdir(tmp_path)
    for file in ("book.txt", "chapter.txt"):
        (tmp_path / file).write_text(TEXT)
    return tmp_path


@pytest.mark.parametrize("path", PAGES, ids=name)
def test_blocks_run(path, here, models, capsys):
    names: dict = {"__name__": "page"}
    for block in blocks(path.read_text(encoding="utf-8")):
        assert block.language in LANGUAGES
        if block.language in ("python", "pycon"):
            run_python(str(path), block, models, names)
        if block.language == "sh":
            for command in commands(block):
                parts = [part.strip() for part in command.split("&&")]
                for part in parts:
                    if part.startswith(SET_UP):
                        continue
                    arguments = shlex.split(substitute(part, models))
                    assert arguments[0] == "headwise"
                    code = run(arguments[1:])
                    assert code == 0, (part, capsys.readouterr().err)


def test_the_first_commands_of_the_readme():
    found = [
        command
        for block in blocks((ROOT / "README.md").read_text(encoding="utf-8"))
        if block.language == "sh"
        for command in commands(block)
    ]
    assert found[:3] == list(README_COMMANDS)
    assert "pip install -q -c constraints.txt -e '.[dev]' && pytest" in (
        ROOT / ".ci" / "run"
    ).read_text(encoding="utf-8")


@pytest.mark.parametrize("path", PAGES, ids=name)
def test_links_lead_somewhere(path):
    text = re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)#][^)]*)\)", text):
        if "://" not in target:
            assert (path.parent / target.split("#")[0]).exists(), target


def test_a_block_that_fails_is_noticed(models):
    with pytest.raises(ZeroDivisionError):
        run_python("page", Block("python", "1 / 0\n", 1), models, {})
    with pytest.raises(AssertionError):
        run_python("page", Block("pycon", ">>> 1 + 1\n3\n", 1), models, {})


def test_blocks_are_found():
    text = "words\n```python\nx = 1\n```\nmore\n```sh\nheadwise show \\\n  s.nc  # why\n```\n"
    python, shell = blocks(text)
    assert (python.language, python.code, python.line) == ("python", "x = 1\n", 3)
    assert commands(shell) == ["headwise show    s.nc"]


def test_the_families_of_the_readme_are_those_that_are_tested():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    listed = text.split("those of the matrices.\n\n")[1].split("\n\n")[0]
    assert set(re.findall(r"\w+", listed)) == set(FAMILIES)
    refused = text.split("(among them ")[1].split(")")[0]
    assert {name.replace("-", "_") for name in re.split(r",\s+", refused)} == set(REFUSED)
