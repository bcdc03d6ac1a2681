"""The page is one file, small, closed to the network, escaped, and written whole or not at all."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest
import torch

from headwise.errors import FileError
from headwise.report.figures import figures
from headwise.report.page import render, write_report
from headwise.results.label import to_dataset
from tests.results.conftest import SHAPES
from tests.results.synthetic import make_record

LIMIT = 8_000_000


class Elements(HTMLParser):
    """Every start tag with its attributes, and the scripts that would run."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.running = [], 0
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag == "script" and "type" not in dict(attrs):
            self.running += 1


@pytest.mark.parametrize("shape", list(SHAPES))
def test_every_shape_of_scan_gives_a_page(shape):
    dataset = to_dataset(make_record(**SHAPES[shape]))
    page = render(dataset)
    elements = Elements(page)
    assert elements.running == 1
    sections = [attrs["id"] for tag, attrs in elements.tags if tag == "section"]
    assert sections[:3] == ["findings", "plate", "text"]
    assert ("depth" in sections) == ("stream_out_rms" in dataset)
    assert "undefined" not in page.split("<script>")[0]


def test_nothing_is_loaded_from_elsewhere():
    elements = Elements(render(to_dataset(make_record(script=True))))
    for tag, attrs in elements.tags:
        for name in ("src", "href", "action", "poster", "data", "srcset"):
            value = attrs.get(name, "")
            assert value is None or value.startswith(("#", "data:")) or not value, (tag, value)
    assert not re.search(r"url\(|@import", render(to_dataset(make_record())).split("</style>")[0])


@pytest.mark.parametrize("word", ["</script><script>alert(1)</script>", "<img src=x onerror=a()>"])
def test_words_of_others_are_escaped(word):
    record = make_record(script=True)
    record = replace(
        record,
        about={**record.about, "model": word, "command": word, "notes": [word]},
        layers=tuple(replace(layer, module=word, mask=word) for layer in record.layers),
    )
    page = render(to_dataset(record))
    assert word not in page
    assert "&lt;img" in page or "&lt;/script" in page
    assert Elements(page).running == 1


def test_size_at_270_heads_and_32768_tokens():
    tokens = 32768
    record = make_record(30, 9, 37, kv_heads=3)
    noise = torch.Generator().manual_seed(3)
    layers = tuple(
        replace(
            layer,
            received=torch.rand(9, tokens, generator=noise),
            received_visible=torch.arange(tokens, 0, -1),
            pooled=torch.rand(9, 64, 64, generator=noise).tril(),
            pool_rows=torch.full((64,), 512),
            pool_width=512,
        )
        for layer in record.layers
    )
    stream = replace(
        record.tokens[0],
        texts=tuple(f" word{i % 997}" for i in range(tokens)),
        ids=torch.arange(tokens),
        document=torch.zeros(tokens, dtype=torch.int64),
        position=torch.arange(tokens),
    )
    page = render(to_dataset(replace(record, layers=layers, tokens=(stream,))))
    assert len(page.encode()) < LIMIT


def test_received_shares_sum_to_one_whatever_was_sampled():
    for options in ({}, {"sampled": 11}, {"documents": 3, "tokens": 53}):
        dataset = to_dataset(make_record(unhealthy=False, **options))
        # Read the array before it is packed, through the same function.
        from headwise.report import figures as module

        streams = module._streams(dataset)
        arrays, widths = module._received(dataset, streams)
        assert widths == {"receivedHead": 1, "receivedLayer": 1, "receivedModel": 1}
        from tests.report.test_embed import decoded

        share = decoded(arrays["receivedLayer"])
        np.testing.assert_allclose(share.sum(-1), 1, rtol=2e-3)


def test_maps_joined_to_fit_keep_their_rows():
    dataset = to_dataset(make_record(2, 3, 37, unhealthy=False))
    from headwise.report import figures as module

    maps = dataset["pooled"].values
    joined, rows = module._halved(maps, dataset["pool_rows"].values.astype(float))
    there = rows[0] > 0
    np.testing.assert_allclose(joined.sum(-1)[:, :, there], 1, rtol=1e-5)
    assert rows.sum() == dataset["pool_rows"].values.sum()


def test_facts_name_only_statistics_that_exist():
    names = [s["name"] for s in figures(to_dataset(make_record())).facts["statistics"]]
    assert "null_mass" not in names
    assert "entropy_fraction" in names
    with_sink = figures(to_dataset(make_record(null_sink=True))).facts["statistics"]
    assert "null_mass" in [s["name"] for s in with_sink]


def test_written_whole_or_not_at_all(tmp_path, monkeypatch):
    dataset = to_dataset(make_record(2, 3, 11))
    target = tmp_path / "report.html"
    assert write_report(dataset, target) == target
    before = target.read_text(encoding="utf-8")
    assert before.startswith("<!doctype html>")
    assert before.rstrip().endswith("</html>")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(FileError, match=r"cannot write .*report\.html: no space left on device"):
        write_report(dataset, target)
    assert target.read_text(encoding="utf-8") == before
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]


def test_bad_targets_are_said(tmp_path):
    dataset = to_dataset(make_record(2, 3, 11))
    with pytest.raises(FileError, match="is a folder; allowed: the name of a file"):
        write_report(dataset, tmp_path)
    with pytest.raises(FileError, match=r"there is no folder .*nowhere; make it or name another"):
        write_report(dataset, tmp_path / "nowhere" / "report.html")
