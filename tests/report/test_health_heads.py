"""Curves of single heads: the ones that stand out, and only what was recorded."""

from __future__ import annotations

import math

from headwise.report.health_facts import health_of
from headwise.report.health_heads import head_plots
from headwise.report.health_page import health_page
from tests.report.health_runs import run


def captions(made):
    return [plot.caption for plot in made]


def test_the_heads_with_the_largest_logits():
    # Logits rise with the layer and the head: of 3 × 7 heads those of the last layer.
    (logits, entropy, *others) = head_plots([health_of(run(heads=7))])
    assert logits.caption == "Largest attention logit, the heads that stand out"
    assert [f"L2 · H{head}" in logits.drawing for head in range(7)] == [False] * 2 + [True] * 5
    assert "L1" not in logits.drawing
    # Entropy stands out where it is least: the first heads.
    assert "L0 · H0" in entropy.drawing
    assert "H6" not in entropy.drawing
    # No row is dead, and no spectral norm was recorded.
    assert others == []


def test_a_head_that_is_planted_stands_out():
    made = run(heads=3)
    made.records[5].layers[0].figures["max_logit"][1] = 900.0
    (logits, *_) = head_plots([health_of(made)])
    assert "L0 · H1: 900" in logits.drawing


def test_spectral_norms_are_there_now_and_then():
    made = run(heads=2)
    for record in made.records[::4]:
        for layer in record.layers:
            layer.figures["qk_norm"] = [3.0, 4.0 + record.step / 100]
    found = captions(head_plots([health_of(made)]))
    assert "Spectral norm of W_QK, the heads that stand out" in found


def test_nothing_known_is_not_drawn():
    assert captions(head_plots([health_of(run(count=1))])) == []
    nan = run()
    for record in nan.records:
        for layer in record.layers:
            layer.figures["max_logit"] = [math.nan] * 5
    assert "Largest attention logit, the heads that stand out" not in captions(
        head_plots([health_of(nan)])
    )


def test_two_runs_have_their_own_plots():
    page = health_page(run(name="one"), run(name="two"))
    assert "one: Largest attention logit, the heads that stand out" in page
    assert "two: Largest attention logit, the heads that stand out" in page
