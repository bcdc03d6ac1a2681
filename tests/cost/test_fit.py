"""What fits: exact for every need that never falls."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwise.cost.explicit import explicit
from headwise.cost.fit import largest_batch, longest_context
from headwise.errors import OptionError

NEEDS = st.tuples(st.integers(0, 10**6), st.integers(1, 10**4), st.integers(0, 50))


@given(
    need=NEEDS, memory=st.integers(1, 10**12), batch=st.integers(1, 7), most=st.integers(1, 10**7)
)
def test_what_is_found_fits_and_one_more_does_not(need, memory, batch, most):
    fixed, each, square = need

    def bytes_of(length: int, sequences: int) -> int:
        return fixed + sequences * (each * length + square * length * length)

    found = longest_context(bytes_of, memory, batch=batch, most=most)
    assert found.memory_bytes == memory
    assert found.limit == most
    assert 0 <= found.largest <= most
    if found.fits:
        assert found.need == bytes_of(found.largest, batch) <= memory
    else:
        assert found.need is None
    if found.limited:
        assert found.next_need is None
    else:
        assert found.next_need == bytes_of(found.largest + 1, batch) > memory


@given(steps=st.lists(st.integers(0, 9), min_size=1, max_size=200), memory=st.integers(1, 900))
def test_any_need_that_never_falls(steps, memory):
    # Flat stretches and jumps, as block-wise caches have them; beyond the list it stays flat.
    totals = [sum(steps[: at + 1]) for at in range(len(steps))]

    def bytes_of(length: int, batch: int) -> int:
        return totals[min(length, len(totals)) - 1] + batch

    found = longest_context(bytes_of, memory, batch=1, most=len(totals))
    assert found.largest == sum(1 for total in totals if total + 1 <= memory)


@given(memory=st.integers(1, 10**9), length=st.integers(1, 10**5))
def test_the_batch_is_found_by_the_same_rule(memory, length):
    def bytes_of(n: int, batch: int) -> int:
        return 1009 + batch * n

    found = largest_batch(bytes_of, memory, length=length)
    assert found.what == "batch"
    assert found.largest == max((memory - 1009) // length, 0)


def test_a_context_that_fits_with_a_batch_fits_the_batch():
    parts = explicit(d_model=44, layers=3, heads=4, vocab=101)
    numbers = sum(each.cached for _, _, each in parts.attentions())

    def bytes_of(length: int, batch: int) -> int:
        return 100_003 + 2 * numbers * length * batch

    found = longest_context(bytes_of, 10**6, batch=5)
    assert largest_batch(bytes_of, 10**6, length=found.largest).largest >= 5
    assert largest_batch(bytes_of, 10**6, length=found.largest + 1).largest < 5


def test_nothing_fits_is_an_answer():
    found = longest_context(lambda length, batch: 10 + length, 10)
    assert (found.largest, found.fits, found.need, found.next_need) == (0, False, None, 11)


def test_room_that_never_ends_stops_at_the_limit():
    found = longest_context(lambda length, batch: 7, 10)
    assert found.limited
    assert found.largest == found.limit == 2**40
    assert found.next_need is None


def test_the_need_is_asked_a_few_dozen_times():
    asked = []

    def bytes_of(length: int, batch: int) -> int:
        asked.append(length)
        return length

    assert longest_context(bytes_of, 123_456_789).largest == 123_456_789
    assert len(asked) <= 2 * 28


def test_a_need_that_falls_is_noticed():
    with pytest.raises(OptionError, match="the need falls from 8 bytes at length 2 to 1 at 4"):
        longest_context(lambda length, batch: 1 if length >= 4 else 4 * length, 10)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: longest_context(max, 0), "memory_bytes is 0"),
        (lambda: longest_context(max, 9, batch=0), "batch is 0"),
        (lambda: longest_context(max, 9, most=0), "most is 0"),
        (lambda: largest_batch(max, 9, length=0), "length is 0"),
    ],
)
def test_numbers_below_1_are_refused(call, said):
    with pytest.raises(OptionError, match=said):
        call()
