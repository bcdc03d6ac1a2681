"""A truncation in words, and its page."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise

import pytest
import torch

from headwise.circuits.surgery import LossByRank
from headwise.circuits.truncation import truncate
from headwise.report.truncation_facts import alone_sentence, rank_rows, suggestion, to_json
from headwise.report.truncation_page import plot, truncation_page
from tests.observation.own_models import own

RANKS = (1, 2, 3, 5, 6)


@pytest.fixture(scope="module")
def found():
    ids = torch.arange(1, 24).tolist()
    made = truncate(own("alibi"), ids, ranks=RANKS, circuits=["qk", "ov"], each=2)
    return said(made, (4.0, 3.0, 2.5, 2.25, 2.0), suggested=5, tolerance=0.25)


def said(made, losses, *, suggested, tolerance):
    """The same with losses of our own."""
    known = LossByRank(RANKS, losses, 2.0)
    return replace(made, losses=known, suggested=suggested, tolerance=tolerance)


def test_the_sentence_names_the_rank_and_the_tolerance(found):
    assert suggestion(found) == (
        "Rank 5 of 6 is enough: from there on no measured rank costs more than 1% of the loss"
        " (0.250 nats per token); the loss is 2.2500 against 2.0000."
    )
    none = said(found, (4.0, 3.0, 2.5, 2.25, 2.5), suggested=None, tolerance=0.25)
    assert suggestion(none) == (
        "No measured rank is enough: at rank 6 the loss is 2.5000 against 2.0000, which is more"
        " than 1% of the loss (0.250 nats per token) above it."
    )


def test_heads_that_bear_it_are_counted_and_the_outermost_named(found):
    values = found.dataset["change_alone"].values
    sentence = alone_sentence(found)
    bear = int((values <= 0.25).sum())
    assert sentence.startswith(f"One at a time at rank 2, {bear} of 12 heads cost no more")
    layer, head = divmod(int(values.argmax()), 4)
    assert f"Most: L{layer} · H{head} (" in sentence
    layer, head = divmod(int(values.argmin()), 4)
    assert f"Least: L{layer} · H{head} (" in sentence
    assert alone_sentence(replace(found, dataset=found.dataset.drop_vars("change_alone"))) is None


def test_rows_hold_the_energies_of_all_heads(found):
    rows = rank_rows(found)
    energy = found.dataset["energy"]
    for row in rows:
        values = energy.sel(rank=row.rank).values
        assert row.energy_min == values.min()
        assert row.parameters == 24 * row.rank * (48 - row.rank)  # 2 matrices of 12 heads
        assert row.of_stored == row.parameters / (2 * 12 * 2 * 24 * 6)
    assert rows[-1].energy_min == 1


def test_json_has_a_row_for_every_rank_and_head(found):
    got = to_json(found)
    assert [row["rank"] for row in got["ranks"]] == list(RANKS)
    assert len(got["heads"]) == 12
    assert len(got["heads"][0]["energy"]["qk"]) == len(RANKS)
    assert got["suggested_rank"] == 5


def test_the_plot_has_the_losses_where_the_axis_says(found):
    drawn = plot(found)
    heights = [y for _, y in drawn.points]
    assert heights == sorted(heights)  # smaller losses stand lower
    assert heights[-1] == drawn.whole
    assert heights[3] == drawn.allowed  # 2.25, the whole and the tolerance
    assert [label for _, label in drawn.ticks] == ["2", "2.50", "3", "3.50", "4"]
    assert [rank for _, rank in drawn.ranks] == list(RANKS)
    across = [x for x, _ in drawn.points]
    assert across[1] - across[0] == pytest.approx(across[4] - across[2])  # 1 to 2, and 3 to 6


def test_a_tolerance_above_every_loss_is_inside_the_plot(found):
    wide = replace(found, losses=LossByRank((1, 2), (2.25, 2.0), 2.0), tolerance=0.5)
    drawn = plot(wide)
    assert 0 < drawn.allowed < min(y for _, y in drawn.points)


def test_labels_of_ranks_never_touch(found):
    ranks = (1, 2, 57, 58, 59, 60, 64)
    many = replace(found, losses=LossByRank(ranks, (3.0,) * 7, 2.0))
    shown = plot(many).ranks
    assert shown[-1][1] == 64
    assert len(shown) < len(ranks)
    assert all(b[0] - a[0] >= 26 for a, b in pairwise(shown))


def test_one_rank_and_losses_that_are_not_finite_are_drawn(found):
    one = replace(found, losses=LossByRank((4,), (2.0,), 2.0), tolerance=0.0)
    assert len(plot(one).points) == 1
    broken = replace(found, losses=LossByRank((1, 4), (float("nan"), 2.0), 2.0))
    assert len(plot(broken).points) == 1


class _Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag, attrs):
        if tag not in ("meta", "link"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        pass

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_page_is_whole_and_loads_nothing(found):
    page = truncation_page(found)
    tags = _Tags()
    tags.feed(page)
    assert tags.open == []
    assert "<script" not in page
    assert not re.search(r"(?:src|href)=\"(?!data:)", page)
    assert page.count("<circle") == len(RANKS)
    assert page.count("<tr>") == 1 + len(RANKS)
    assert suggestion(found) in page
