"""The reference pages are what the script writes, and say what is true."""

from __future__ import annotations

import math
import re
import runpy

import numpy as np
import pytest

import headwise as hw
from headwise.results.records import VALUES
from tests.examples.blocks import PAGES, ROOT, name

SCRIPT = runpy.run_path(str(ROOT / "scripts" / "write_reference_docs.py"))
# Options in our pages that belong to other programs: ruff, pip, torchrun.
FOREIGN = {"--version", "--help", "--check", "--no-binary", "--no-deps"}
FOREIGN |= {"--no-python", "--nproc-per-node"}


@pytest.mark.parametrize("page", SCRIPT["PAGES"])
def test_pages_are_up_to_date(page):
    written = (ROOT / "docs" / "reference" / page).read_text(encoding="utf-8")
    assert written == SCRIPT["PAGES"][page](), "run: python scripts/write_reference_docs.py"


def options() -> dict[str, set[str]]:
    return {
        command: {
            option
            for parameter in parsed.params
            for option in (*parameter.opts, *parameter.secondary_opts)
        }
        for command, parsed in SCRIPT["commands"]().items()
    }


def test_every_option_is_documented():
    page = (ROOT / "docs" / "reference" / "cli.md").read_text(encoding="utf-8")
    for command, names in options().items():
        section = page.split(f"## headwise {command}\n")[1].split("\n## ")[0]
        documented = set(re.findall(r"`(--?[a-z][a-z-]*)`", section))
        assert documented == {option for option in names if option.startswith("-")}


def unknown_options(text: str) -> set[str]:
    known = {option for names in options().values() for option in names}
    found = re.findall(r"(?<![\w./-])--[a-z][a-z-]+", text)
    return set(found) - known - FOREIGN


@pytest.mark.parametrize("path", PAGES, ids=name)
def test_every_option_that_a_page_names_exists(path):
    assert unknown_options(path.read_text(encoding="utf-8")) == set()


def test_an_option_that_does_not_exist_is_noticed():
    assert unknown_options("use `--frobnicate` or --rows 3") == {"--frobnicate"}


def test_every_public_name_has_an_entry():
    page = (ROOT / "docs" / "reference" / "library.md").read_text(encoding="utf-8")
    for public in hw.__all__:
        assert f"hw.{public}" in page


@pytest.fixture(scope="module")
def measured(models):
    texts = ["It was the best of times, it was the worst of times.", "aaaaaaaaaaaa"]
    return hw.scan(models["HuggingFaceTB/SmolLM2-135M-Instruct"], texts).dataset


@pytest.mark.parametrize("statistic", VALUES)
def test_values_lie_in_the_range_that_the_page_states(measured, statistic):
    keys = measured.sizes["key"]
    words = {"−∞": -math.inf, "∞": math.inf, "n": keys, "ln n": math.log(keys), "tokens": keys}
    low, high = (words.get(w, w) for w in SCRIPT["RANGES"][statistic])
    values = measured[statistic].to_numpy()
    values = values[np.isfinite(values)]
    rounding = 1e-5
    assert values.size
    assert (values >= float(low) - rounding).all()
    assert (values <= float(high) + rounding).all()
