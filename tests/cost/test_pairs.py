"""Pairs that a mask shows, against the mask itself."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwise.cost.pairs import all_pairs, visible_pairs


def brute(queries, keys, causal, window):
    def sees(i, j):
        behind = i + keys - queries - j
        return not causal or (behind >= 0 and (window is None or behind < window))

    return sum(sees(i, j) for i in range(queries) for j in range(keys))


@given(
    queries=st.integers(0, 13),
    keys=st.integers(0, 17),
    causal=st.booleans(),
    window=st.none() | st.integers(1, 19),
)
def test_against_the_mask(queries, keys, causal, window):
    window = window if causal else None
    found = visible_pairs(queries, keys, causal=causal, window=window)
    assert found == brute(queries, keys, causal, window)


@pytest.mark.parametrize("n", [1, 2, 7, 10**12])
def test_closed_forms(n):
    assert visible_pairs(n, n, causal=True) == n * (n + 1) // 2
    w = min(5, n)
    assert visible_pairs(n, n, causal=True, window=w) == n * w - w * (w - 1) // 2
    assert visible_pairs(1, n, causal=True) == n
    assert all_pairs(n, n) == n * n
