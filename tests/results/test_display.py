"""What a scan looks like in a notebook and in a terminal."""

from __future__ import annotations

from dataclasses import replace
from html.parser import HTMLParser

import pytest

from headwise.errors import OptionError
from headwise.results.display import html, text
from headwise.results.label import to_dataset
from tests.results.synthetic import make_record


class Reader(HTMLParser):
    """Counts elements and refuses tags that do not close in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.open.append(tag)
        self.seen.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def read(page: str) -> Reader:
    reader = Reader()
    reader.feed(page)
    assert reader.open == []
    return reader


def test_html_shows_every_head(record, dataset):
    page = html(dataset)
    assert read(page).seen.count("rect") == sum(layer.heads for layer in record.layers)
    assert "http" not in page
    assert html(dataset.transpose(*reversed(list(dataset.sizes)))) == page


def test_html_escapes_names():
    record = make_record()
    about = {**record.about, "model": "<script>alert(1)</script>"}
    page = html(to_dataset(replace(record, about=about)))
    assert "script" not in read(page).seen
    assert "&lt;script&gt;" in page


def test_text():
    dataset = to_dataset(make_record(layers=3, heads=6, kv_heads=2, nan_layer=1))
    lines = text(dataset).splitlines()
    assert lines[:4] == [
        "model          synthetic-decoder",
        "layers × heads 3 × 6 (2 key-value heads)",
        "tokens         37",
        "mask           causal",
    ]
    assert "not finite     1 of 3 layers" in lines
    assert lines[-2] == "layer 1 |××××××|"
    assert len(lines[-1]) == len(lines[-3]) == len("layer 0 |xxxxxx|")
    assert "█" in lines[-3] + lines[-1]


def test_text_of_a_large_model_is_short():
    assert len(text(to_dataset(make_record(layers=67, heads=1))).splitlines()) < 12


def test_another_statistic_can_be_shown():
    dataset = to_dataset(make_record())
    assert "weight on the sink" in text(dataset, "sink_mass")
    assert "weight on the sink" in html(dataset, "sink_mass")
    with pytest.raises(OptionError, match=r"no statistic 'mood' of a head; allowed: entropy, "):
        text(dataset, "mood")
