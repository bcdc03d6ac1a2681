"""Take the pictures of the docs: ``python scripts/take_pictures.py MODEL``.

Measures MODEL over 2,048 tokens of the text of the package, opens its page in Chromium and writes
docs/images/. Needs what ``pip install -e '.[dev]' pillow`` and Debian's chromium bring.
"""

from __future__ import annotations

import io
import sys
import tempfile
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import sync_playwright

import headwise as hw

FOLDER = Path(__file__).parents[1] / "docs" / "images"
HEAD = (11, 1)  # the head of the second picture: a local one in SmolLM2


def main(model: str) -> None:
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as driver:
        address = hw.report(hw.scan(model, tokens=2048), Path(folder) / "page.html").as_uri()
        browser = driver.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        page = opened(browser, address, 1280, 900)
        hint = page.locator("#plate-hint").bounding_box()
        clip = {"x": 0, "y": 0, "width": 1280, "height": hint["y"] - 8}
        keep(page.screenshot(full_page=True, clip=clip), "report.png")
        page = opened(browser, address, 1600, 1100)
        layer, head = HEAD
        place = f'.findings summary button.place[data-layer="{layer}"][data-head="{head}"]'
        page.locator(place).first.click()
        page.wait_for_selector("#panel:not([hidden])")
        page.wait_for_timeout(500)
        keep(page.screenshot(), "head.png")
        browser.close()


def opened(browser: Any, address: str, width: int, height: int) -> Any:
    page = browser.new_page(viewport={"width": width, "height": height}, color_scheme="light")
    page.goto(address)
    page.wait_for_selector("html[data-ready]")
    return page


def keep(png: bytes, name: str) -> None:
    """Save with a palette of 255 colours, a third of the size."""
    image = Image.open(io.BytesIO(png)).convert("RGB")
    method, dither = Image.Quantize.FASTOCTREE, Image.Dither.NONE
    image.quantize(255, method=method, dither=dither).save(FOLDER / name, optimize=True)
    print(f"wrote docs/images/{name}, {(FOLDER / name).stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    main(sys.argv[1])
