"""The sample of query rows is unbiased whatever the number of rows."""

from __future__ import annotations

import math

import torch

from headwise.attention.statistics import choose_rows

QUERIES, ROWS, DRAWS = 11, 4, 4000


def test_every_row_is_equally_likely() -> None:
    """Expected visits are ROWS / QUERIES per draw, also for rows on the edge of two strata."""
    visits = torch.zeros(QUERIES)
    for seed in range(DRAWS):
        visits += torch.bincount(choose_rows(ROWS, QUERIES, seed), minlength=QUERIES)
    expected = DRAWS * ROWS / QUERIES
    assert (visits - expected).abs().max() < 5 * math.sqrt(expected)


def test_a_sample_has_as_many_rows_as_asked() -> None:
    assert all(len(choose_rows(ROWS, QUERIES, seed)) == ROWS for seed in range(50))
