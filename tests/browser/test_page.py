"""The page in a real browser: it draws, answers to mouse and keys, and asks the network nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from headwise.report.page import write_report
from headwise.results.label import to_dataset
from tests.results.synthetic import make_record

CHROMIUM = Path("/usr/bin/chromium")
pytestmark = pytest.mark.skipif(
    not CHROMIUM.exists(), reason=f"{CHROMIUM} is not installed (apt-get install chromium)"
)
playwright_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

PAGES = {
    "decoder": {"layers": 5, "heads": 6, "kv_heads": 2, "tokens": 149, "gradients": True},
    "one head": {"layers": 1, "heads": 1, "tokens": 11},
    "many heads": {"layers": 32, "heads": 32, "tokens": 11},
    "encoder-decoder": {"kind": "encoder-decoder", "layers": 2},
    "hostile": {"script": True, "nan_layer": 1, "sampled": 11},
    "no texts": {"texts": False, "blocks": False},
    "documents": {"documents": 3, "tokens": 53},
    "small model": {"layers": 30, "heads": 9, "kv_heads": 3, "tokens": 149, "sampled": 17},
}


# Tables whose rows have another number of cells than their head, by their first row.
RAGGED_TABLES = """[...document.querySelectorAll("table")].filter((table) => {
  const [head, ...rows] = [...table.rows];
  return rows.some((row) => row.cells.length !== head.cells.length);
}).map((table) => table.rows[0].innerText)"""


@pytest.fixture(scope="module")
def browser():
    with playwright_api.sync_playwright() as driver:
        found = driver.chromium.launch(executable_path=str(CHROMIUM), args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pages")
    return {
        name: write_report(to_dataset(make_record(**options)), folder / f"{name}.html")
        for name, options in PAGES.items()
    }


@pytest.fixture
def visit(browser, files):
    """Opens a page; at the end of the test, no complaint and no request may have been made."""
    opened, trouble = [], []

    def visit(name, width=1280, scheme="light"):
        page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        opened.append(page)
        page.on("console", lambda message: trouble.append(message.text))
        page.on("pageerror", lambda error: trouble.append(str(error)))
        page.on("request", lambda request: _note_request(request.url, trouble))
        page.on("dialog", lambda dialog: trouble.append("dialog"))
        page.goto(files[name].as_uri())
        page.wait_for_selector("html[data-ready]")
        return page

    yield visit
    for page in opened:
        page.close()
    assert trouble == []


def _note_request(url, trouble):
    if not url.startswith(("file:", "data:")):
        trouble.append(url)


def pinned(page):
    return [text.split("\n")[0].strip() for text in page.locator(".card h3").all_inner_texts()]


@pytest.mark.parametrize("name", list(PAGES))
@pytest.mark.parametrize("width", [1280, 390])
def test_draws_everything_within_the_width(visit, name, width):
    page = visit(name, width)
    options = PAGES[name]
    cells = page.locator("#plate-drawing [data-cell]").count()
    assert cells == options.get("layers", 5) * options.get("heads", 3)
    for statistic in range(page.locator("#statistic-select option").count()):
        page.locator("#statistic-select").evaluate(
            "(node, value) => { node.value = value; node.dispatchEvent(new Event('change')); }",
            str(statistic),
        )
        assert page.locator("#plate-drawing [data-cell]").count() > 0
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.evaluate("for (const d of document.querySelectorAll('details')) d.open = true")
    page.locator("#plate-drawing [data-cell]").last.dispatch_event("click")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate(RAGGED_TABLES) == []


def test_click_opens_a_head_page_and_escape_closes_it(visit):
    page = visit("decoder")
    page.click('[data-cell="2,3"]')
    assert pinned(page) == ["L2 · H3"]
    card = page.locator(".card")
    assert card.locator("canvas").count() == 2  # the pooled map and the strip
    for title in ("Attention map", "Entropy by position", "Weight by distance", "Numbers"):
        assert card.get_by_role("heading", name=title).count() == 1
    page.keyboard.press("Escape")
    assert not page.locator("#panel").is_visible()


def test_two_heads_side_by_side(visit):
    page = visit("decoder")
    page.click('[data-cell="0,0"]')
    page.click('[data-cell="4,5"]', modifiers=["Shift"])
    assert pinned(page) == ["L0 · H0", "L4 · H5"]
    boxes = [page.locator(".card").nth(i).bounding_box() for i in range(2)]
    assert boxes[0]["y"] == boxes[1]["y"]
    assert boxes[0]["x"] + boxes[0]["width"] <= boxes[1]["x"]


def test_arrows_move_the_pinned_head_and_stop_at_the_edge(visit):
    page = visit("decoder")
    page.click('[data-cell="1,1"]')
    for key, name in (
        ("ArrowRight", "L1 · H2"),
        ("ArrowDown", "L2 · H2"),
        ("ArrowLeft", "L2 · H1"),
        ("ArrowUp", "L1 · H1"),
        ("ArrowUp", "L0 · H1"),
        ("ArrowUp", "L0 · H1"),
    ):
        page.keyboard.press(key)
        assert pinned(page) == [name]


def test_keyboard_alone_reaches_a_head(visit):
    page = visit("decoder")
    page.focus("#plate-drawing")
    page.keyboard.press("Enter")
    page.keyboard.press("ArrowRight")
    assert pinned(page) == ["L0 · H1"]


def test_hover_says_number_and_rank(visit):
    page = visit("decoder")
    page.hover('[data-cell="3,1"]')
    text = page.inner_text("#plate-readout")
    assert text.startswith("L3 · H1")
    assert "of 30, largest first" in text


def test_numbers_in_the_map_are_those_of_the_data_set(visit):
    page = visit("decoder")
    page.evaluate("document.getElementById('plate-table').open = true")
    page.wait_for_selector("#plate-table table")
    shown = page.locator("#plate-table tbody tr").nth(3).locator("td").nth(1).inner_text()
    dataset = to_dataset(make_record(**PAGES["decoder"]))
    from headwise.report.numbers import three

    assert shown == three(float(dataset["entropy_fraction"][3, 1]))


def test_slash_finds_a_token(visit):
    page = visit("decoder")
    page.keyboard.press("/")
    page.keyboard.type("whale")
    first = page.locator("#text-body .found").get_attribute("data-i")
    assert page.inner_text("#text-body .found") == "whale"
    page.keyboard.press("Enter")
    assert page.locator("#text-body .found").get_attribute("data-i") != first
    page.keyboard.press("Escape")
    page.keyboard.press("/")
    page.keyboard.type("no such word")
    assert page.inner_text("#find-count") == "not in the text"


def test_a_word_in_several_tokens_is_found_whole(visit):
    page = visit("decoder")
    tokens = page.locator("#text-body .token").all_inner_texts()
    at = tokens.index("sea")
    page.keyboard.press("/")
    page.keyboard.type(", sea")
    assert page.locator("#text-body .found").all_inner_texts() == tokens[at - 1 : at + 1]


def test_places_in_findings_pin_heads(visit):
    page = visit("decoder")
    button = page.locator(".findings summary .place").first
    name = button.inner_text()
    button.click()
    assert pinned(page) == [name]
    assert page.locator("#plate-marks .mark-dot").count() >= 1


def test_a_role_shows_its_heads_on_the_map(visit):
    page = visit("decoder")
    buttons = page.locator(".role")
    counts = [int(buttons.nth(i).locator("b").inner_text()) for i in range(buttons.count())]
    assert sum(counts) == 30
    buttons.first.click()
    assert page.locator("#plate-marks .mark-dot").count() == counts[0]


def test_keyboard_goes_to_the_head_page_and_back(visit):
    page = visit("decoder")
    focused = "document.activeElement.id"
    page.focus("#plate-drawing")
    page.keyboard.press("Enter")
    page.keyboard.press("Enter")
    assert page.evaluate(focused) == "panel"
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")  # "Compare with another" keeps the focus when it is redrawn
    assert page.evaluate("document.activeElement.textContent").startswith("Click the second")
    page.keyboard.press("Escape")
    assert page.evaluate(focused) == "plate-drawing"


CONTRASTS = """() => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const rgb = (colour, under) => {
    canvas.fillStyle = under || "#fff"; canvas.fillRect(0, 0, 1, 1);
    canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3);
  };
  const light = (c) => {
    const [r, g, b] = c.map((v) => v / 255).map((v) =>
      v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ratio = (a, b) => {
    const [low, high] = [light(a), light(b)].sort((x, y) => x - y);
    return (high + 0.05) / (low + 0.05);
  };
  const page = getComputedStyle(document.body).backgroundColor;
  const found = [];
  for (const node of document.querySelectorAll("main *, #panel *")) {
    const own = [...node.childNodes].some((n) => n.nodeType === 3 && n.data.trim());
    if (!own || !node.getClientRects().length || node.disabled) continue;
    const style = getComputedStyle(node);
    let back = page;
    for (let up = node; up; up = up.parentElement) {
      const colour = getComputedStyle(up).backgroundColor;
      if (colour !== "rgba(0, 0, 0, 0)") { back = colour; break; }
    }
    let ink = style.color;
    if (node.namespaceURI.endsWith("svg")) {
      ink = style.fill;
      if (node.classList.contains("inside")) back = getComputedStyle(node.previousSibling).fill;
    }
    found.push([ratio(rgb(ink), rgb(back, page)), node.outerHTML.slice(0, 90)]);
  }
  return found.sort((a, b) => a[0] - b[0]);
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", ["decoder", "hostile"])
def test_every_text_has_the_contrast_of_wcag_aa(visit, name, scheme):
    page = visit(name, scheme=scheme)
    page.evaluate("for (const d of document.querySelectorAll('details')) d.open = true")
    page.locator("#plate-drawing [data-cell]").last.dispatch_event("click")
    found = page.evaluate(CONTRASTS)
    assert len(found) > 200
    assert [entry for entry in found if entry[0] < 4.5] == []


def test_findings_open_with_their_plot(visit):
    page = visit("decoder")
    page.locator(".findings summary .sentence").first.click()
    page.wait_for_selector(".findings details[open] .evidence svg")
    assert page.locator(".findings details[open] .threshold").count() == 1


def test_light_and_dark(visit):
    def background(scheme):
        page = visit("decoder", scheme=scheme)
        return page.evaluate("getComputedStyle(document.body).backgroundColor")

    assert background("light") == "rgb(255, 255, 255)"
    assert background("dark") == "rgb(18, 20, 23)"


def test_a_script_among_the_tokens_does_nothing(visit):
    page = visit("hostile")
    assert page.title().endswith("· Headwise")
    assert "<script>" in page.inner_text("#text-body")
    page.click('[data-cell="0,0"]')
    assert page.locator("body script:not([type])").count() == 1


def test_a_layer_with_nan_is_shown_as_missing(visit):
    page = visit("hostile")
    assert page.locator("#plate-drawing .missing").count() == 3
    page.locator('[data-cell="1,0"]').click()
    assert "Not measured" in page.inner_text(".card")


def test_stacks_of_an_encoder_decoder(visit):
    page = visit("encoder-decoder")
    assert page.locator("[data-role]").all_inner_texts() == [
        "encoder",
        "decoder",
        "cross-attention",
    ]
    page.click('[data-role="cross"]')
    page.locator("#plate-drawing [data-cell]").first.click()
    assert pinned(page) == ["cross L0 · H0"]
    assert page.get_by_role("heading", name="Weight by distance").count() == 0


def test_the_first_printed_page_holds_findings_and_map(visit):
    page = visit("small model", width=695)  # A4 less the margins, at 96 dpi
    page.emulate_media(media="print")
    assert page.locator(".findings li:visible").count() == 7
    box = page.locator("#plate-legend").bounding_box()
    assert box["y"] + box["height"] <= 1025
