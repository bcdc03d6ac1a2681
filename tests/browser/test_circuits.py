"""The section on circuits in a real browser, on a real page."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import headwise as hw
from headwise.circuits.dataset import add_circuits
from headwise.observation.loading import wrap_model
from headwise.observation.run import opened
from headwise.report.page import write_report
from tests.browser.test_page import CHROMIUM, _note_request, playwright_api

pytestmark = pytest.mark.skipif(
    not CHROMIUM.exists(), reason=f"{CHROMIUM} is not installed (apt-get install chromium)"
)


@pytest.fixture(scope="module")
def datasets():
    torch.manual_seed(0)
    one = GPT2LMHeadModel(
        GPT2Config(n_embd=10, n_head=1, n_layer=1, vocab_size=31, bos_token_id=0, eos_token_id=0)
    ).eval()
    found = {}
    for name, loaded, text in (
        ("embedded", opened(), "To be, or not to be, that is the question. " * 5),
        ("one head", wrap_model(one), [1, 2, 3, 4, 5, 6, 7]),
    ):
        found[name] = add_circuits(hw.scan(loaded, text).dataset, loaded)
    return found


@pytest.fixture(scope="module")
def files(datasets, tmp_path_factory):
    folder = tmp_path_factory.mktemp("circuits")
    alone = {
        "alone": hw.circuits(layers=[1, 2, 3]).dataset,
        "on a text": hw.circuits(layers=[1, 2, 3], tokens=200).dataset,
    }
    return {
        name: write_report(d, folder / f"{name}.html") for name, d in {**datasets, **alone}.items()
    }


@pytest.fixture(scope="module")
def browser():
    with playwright_api.sync_playwright() as driver:
        found = driver.chromium.launch(executable_path=str(CHROMIUM), args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture
def visit(browser, files):
    opened_pages, trouble = [], []

    def visit(name, width=1280):
        page = browser.new_page(viewport={"width": width, "height": 900})
        opened_pages.append(page)
        page.on("console", lambda message: trouble.append(message.text))
        page.on("pageerror", lambda error: trouble.append(str(error)))
        page.on("request", lambda request: _note_request(request.url, trouble))
        page.goto(files[name].as_uri())
        page.wait_for_selector("html[data-ready=true]")
        page.wait_for_selector("#circuit-maps svg")
        return page

    yield visit
    for page in opened_pages:
        page.close()
    assert trouble == []


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("name", ["embedded", "one head"])
def test_maps_are_drawn_within_the_width(visit, datasets, name, width):
    page = visit(name, width)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    cells = page.locator("#circuit-maps figure").first.locator("[data-at]").count()
    assert cells == datasets[name]["copying"].size


def test_a_head_is_told_and_its_spectra_are_on_its_page(visit, datasets):
    page = visit("embedded")
    cell = page.locator("[data-map=copying] [data-at='2,4']")
    cell.hover()
    told = page.locator("#circuit-readout").inner_text()
    value = float(datasets["embedded"]["copying"].values[2, 4])
    assert told.startswith(f"L2 · H4 · copying {value:.3f}")
    assert "induction" in told
    cell.click()
    page.wait_for_selector("#panel .card")
    assert page.locator("#panel h4", has_text="Spectra of W_QK and W_OV").count() == 1
    curves = page.locator("#panel svg[aria-label^='singular values'] path.curve")
    assert curves.count() == 2


def test_only_significant_pairs_are_drawn_and_counted(visit, datasets):
    z = np.stack([datasets["embedded"][f"composition_{k}_z"].values for k in "qkv"])
    above = int((z > 8).sum())
    page = visit("embedded")
    words = page.locator("#composition .definition").inner_text()
    assert words.startswith(f"{above} of 750 pairs")
    drawn = page.locator("#composition .scroll path.curve").count()
    assert drawn == min(40, above)
    page.locator("#composition summary").click()
    page.locator("#composition tbody .place").first.click()
    page.wait_for_selector("#panel .card")


def test_behaviours_name_their_heads(visit):
    page = visit("embedded")
    page.locator("table.behaviours .place", has_text="L2 · H4").click()
    assert page.locator("#panel .card h3").inner_text() == "L2 · H4"


@pytest.mark.parametrize("width", [1280, 390])
def test_behaviours_on_a_text_stand_beside_the_others(visit, width):
    page = visit("on a text", width)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    columns = page.locator("table.behaviours thead th").all_inner_texts()
    assert columns == ["behaviour", "on both", "only on repeated tokens", "only on the text"]
    row = page.locator("table.behaviours tbody tr", has_text="Previous token")
    place = row.locator("td").first.locator(".place").first
    name = place.inner_text()
    place.click()
    assert page.locator("#panel .card h3").inner_text() == name
    words = page.locator("#panel .caption", has_text="Singular values").inner_text()
    assert words.startswith("Previous token on repeated random tokens; previous token")


@pytest.mark.parametrize("width", [1280, 390])
def test_circuits_alone_are_a_page(visit, width):
    page = visit("alone", width)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.locator("section").count() == 3
    page.locator("#plate-drawing rect.cell").nth(4).click()
    page.wait_for_selector("#panel .card")
    assert page.locator("#panel h3").inner_text() == "L1 · H4"
    assert page.locator("#panel h4").all_inner_texts() == ["Spectra of W_QK and W_OV", "Numbers"]
    page.keyboard.press("/")
    page.keyboard.press("ArrowDown")
    assert page.locator("#panel h3").inner_text() == "L2 · H4"


def test_one_layer_has_no_composition(visit):
    page = visit("one head")
    assert page.locator("#composition svg").count() == 0
    assert page.locator("#circuits svg").count() > 0


def test_a_scan_without_circuits_has_no_section(browser, datasets, tmp_path):
    scan = hw.scan(text=[1, 2, 3, 4, 5]).dataset
    page = browser.new_page()
    page.goto(write_report(scan, tmp_path / "plain.html").as_uri())
    page.wait_for_selector("html[data-ready=true]")
    assert page.locator("#circuits").count() == 0
    page.close()
