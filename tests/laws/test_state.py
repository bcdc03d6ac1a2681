"""Law: the state of a softmax-weighted sum is a monoid, and reading in pieces is reading whole."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from headwise.attention.state import LN2, LOG2E, State
from tests.attention.problems import rand
from tests.tolerance import assert_close

ROWS, KEYS, WIDTH = 3, 13, 2
UNIT = 2.0**-53


@st.composite
def readings(draw: st.DrawFn) -> tuple[Tensor, Tensor, list[int]]:
    """Logits with hidden pairs, values, and where the keys are cut into three parts."""
    seed = draw(st.integers(0, 999))
    logits = draw(st.sampled_from([1.0, 30.0, 700.0])) * rand(ROWS, KEYS, seed=seed).double()
    hidden = draw(st.sampled_from([0.0, 0.5, 0.9, 1.0]))
    noise = torch.rand(ROWS, KEYS, generator=torch.Generator().manual_seed(seed))
    logits = logits.masked_fill(noise < hidden, -math.inf)
    cuts = sorted(draw(st.lists(st.integers(1, KEYS - 1), min_size=2, max_size=2, unique=True)))
    return logits, rand(KEYS, WIDTH, seed=seed + 1).double(), cuts


def read(logits: Tensor, values: Tensor) -> State:
    return State.empty(ROWS, WIDTH, torch.float64).absorb(logits.clone() * LOG2E, values)


def same(a: State, b: State, logits: Tensor, values: Tensor) -> None:
    """Equal results: weights move by the rounding of a few exponentials."""
    reach = logits[torch.isfinite(logits)].abs().max().item() if logits.isfinite().any() else 0.0
    bound = 32 * UNIT * (1 + reach)
    for x, y in zip(a.finish(), b.finish(), strict=True):
        assert_close(x, y, bound * (1 + values.abs().max().item()))


def whole(logits: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    a = torch.softmax(logits, -1).nan_to_num(0.0)
    return a @ values, torch.logsumexp(logits, -1)


@given(readings())
def test_parts_merged_are_the_whole(reading: tuple[Tensor, Tensor, list[int]]) -> None:
    logits, values, (a, b) = reading
    parts = [read(logits[:, x:y], values[x:y]) for x, y in ((0, a), (a, b), (b, KEYS))]
    one, two, three = parts
    together = one.merge(two).merge(three)
    same(together, read(logits, values), logits, values)
    same(together, one.merge(two.merge(three)), logits, values)
    same(one.merge(two), two.merge(one), logits, values)
    in_turn = read(logits[:, :a], values[:a])
    in_turn = in_turn.absorb(logits[:, a:].clone() * LOG2E, values[a:])
    same(in_turn, together, logits, values)
    reach = logits[torch.isfinite(logits)].abs().max().item() if logits.isfinite().any() else 0.0
    for got, want in zip(together.finish(), whole(logits, values), strict=True):
        assert_close(got, want, 64 * UNIT * (1 + reach) * (1 + values.abs().max().item()))


@given(readings())
def test_no_keys_change_nothing(reading: tuple[Tensor, Tensor, list[int]]) -> None:
    logits, values, _ = reading
    state, nothing = read(logits, values), State.empty(ROWS, WIDTH, torch.float64)
    for x in (state.merge(nothing), nothing.merge(state)):
        for got, want in zip(x.finish(), state.finish(), strict=True):
            assert_close(got, want, 0.0)
    output, lse = nothing.merge(nothing).finish()
    assert torch.equal(output, torch.zeros(ROWS, WIDTH, dtype=torch.float64))
    assert torch.equal(lse, torch.full((ROWS,), -math.inf, dtype=torch.float64))


def test_a_sink_is_a_key_without_a_value() -> None:
    logits, values = rand(ROWS, KEYS).double(), rand(KEYS, WIDTH, seed=1).double()
    sink = torch.tensor([[0.5], [-1.0], [2.0]], dtype=torch.float64)
    got = State.sink(sink * LOG2E, WIDTH).merge(read(logits, values)).finish()
    more = torch.cat((logits, sink), 1)
    want = whole(more, torch.cat((values, torch.zeros(1, WIDTH).double())))
    for x, y in zip(got, want, strict=True):
        assert_close(x, y, 64 * UNIT)


def test_log_sum_exp_is_natural() -> None:
    lse = read(torch.zeros(ROWS, KEYS).double(), rand(KEYS, WIDTH).double()).finish()[1]
    assert lse[0].item() == pytest.approx(math.log(KEYS), abs=4 * UNIT * math.log2(KEYS))
    assert pytest.approx(1.0, abs=2 * UNIT) == LN2 * LOG2E


def test_the_law_can_fail() -> None:
    """Merging without rescaling, the classic mistake, is seen."""
    logits, values = 3 * rand(ROWS, KEYS).double(), rand(KEYS, WIDTH, seed=1).double()
    one, two = read(logits[:, :5], values[:5]), read(logits[:, 5:], values[5:])
    wrong = State(
        torch.maximum(one.top, two.top), one.total + two.total, one.weighted + two.weighted
    )
    with pytest.raises(AssertionError):
        same(wrong, read(logits, values), logits, values)
