"""What fits: the longest context and the largest batch in given memory.

The need is a function of length and batch that never falls; it is asked a few dozen times, and the
answer is exact: what is found fits, and one more does not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from headwise.errors import OptionError

__all__ = ["Fit", "Need", "largest_batch", "longest_context"]

Need = Callable[[int, int], int]  # (length, batch) -> bytes
_MOST: Final = 2**40


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """The largest number that fits.

    Attributes:
        what: "length" or "batch".
        largest: 0 where not even one fits.
        need: bytes at ``largest``; None where that is 0.
        next_need: bytes at one more, which does not fit; None at the upper limit.
        memory_bytes: what there is.
        limit: the upper limit of the search: ``largest`` may be more where it is equal to it.
    """

    what: str
    largest: int
    need: int | None
    next_need: int | None
    memory_bytes: int
    limit: int

    @property
    def fits(self) -> bool:
        """Whether at least one fits."""
        return self.largest > 0

    @property
    def limited(self) -> bool:
        """Whether the search ended at its upper limit, where there is still room."""
        return self.largest == self.limit


def longest_context(need: Need, memory_bytes: int, *, batch: int = 1, most: int = _MOST) -> Fit:
    """The most tokens of each sequence whose need is at most ``memory_bytes``.

    Args:
        need: bytes by length and batch; it may not fall where either rises.
        batch: sequences.
        most: the upper limit of the search, the context that was trained for, say.

    Raises:
        OptionError: a number is below 1, or the need falls where the length rises.

    Example:
        >>> longest_context(lambda length, batch: 100 + 7 * length * batch, 1000, batch=3).largest
        42
    """
    if batch < 1:
        raise OptionError(f"batch is {batch}", allowed="1 or more")
    return _largest("length", lambda length: need(length, batch), memory_bytes, most)


def largest_batch(need: Need, memory_bytes: int, *, length: int, most: int = _MOST) -> Fit:
    """The most sequences of ``length`` tokens whose need is at most ``memory_bytes``.

    Args:
        need: bytes by length and batch; it may not fall where either rises.
        length: tokens of each sequence.
        most: the upper limit of the search.

    Raises:
        OptionError: a number is below 1, or the need falls where the batch rises.

    Example:
        >>> found = largest_batch(lambda length, batch: 100 + 7 * length * batch, 90, length=5)
        >>> found.largest, found.fits, found.next_need
        (0, False, 135)
    """
    if length < 1:
        raise OptionError(f"length is {length}", allowed="1 or more")
    return _largest("batch", lambda batch: need(length, batch), memory_bytes, most)


def _largest(what: str, need: Callable[[int], int], memory: int, most: int) -> Fit:
    for name, value in (("memory_bytes", memory), ("most", most)):
        if value < 1:
            raise OptionError(f"{name} is {value}", allowed="1 or more")
    asked: dict[int, int] = {}

    def fits(n: int) -> bool:
        asked[n] = need(n)
        return asked[n] <= memory

    low, high = 0, 1  # low fits, or is 0; beyond the doubling, high does not fit
    while fits(high) and high < most:
        low, high = high, min(2 * high, most)
    if asked[high] <= memory:
        low = high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    _rises(what, asked)
    return Fit(
        what=what,
        largest=low,
        need=asked.get(low),
        next_need=None if low == most else asked[low + 1],
        memory_bytes=memory,
        limit=most,
    )


def _rises(what: str, asked: dict[int, int]) -> None:
    ordered = sorted(asked)
    for less, more in pairwise(ordered):
        if asked[more] < asked[less]:
            raise OptionError(
                f"the need falls from {asked[less]:,} bytes at {what} {less:,}"
                f" to {asked[more]:,} at {more:,}",
                allowed="a need that never falls",
            )
