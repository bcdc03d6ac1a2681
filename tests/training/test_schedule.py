"""The learning rate rises, falls and stays by its formula."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from headwise.training.schedule import learning_rate


@given(st.integers(2, 300), st.integers(0, 99), st.floats(0, 1))
def test_warmup_then_cosine(steps, warmup, share):
    rates = [
        learning_rate(t, peak=3.0, steps=steps, warmup=warmup, final=3.0 * share)
        for t in range(steps + 1)
    ]
    rising = rates[: min(warmup, steps)]
    assert rising == sorted(rising)
    falling = rates[warmup:]
    assert falling == sorted(falling, reverse=True)
    assert max(rates) <= 3.0
    if warmup < steps:
        assert rates[warmup] == 3.0
        assert math.isclose(rates[steps], 3.0 * share, abs_tol=1e-12)


def test_the_middle_of_the_cosine_is_the_mean_of_its_ends():
    assert math.isclose(learning_rate(13, peak=5.0, steps=23, warmup=3, final=1.0), 3.0)


def test_constant_is_constant_after_the_warmup():
    rates = [learning_rate(t, peak=2.0, steps=11, warmup=4, shape="constant") for t in range(11)]
    assert rates == [0.5, 1.0, 1.5, *[2.0] * 8]


def test_past_the_end_the_rate_stays_at_its_last():
    assert learning_rate(99, peak=2.0, steps=11, final=0.5) == 0.5
