"""The family W_Q R_Δ W_Kᵀ against rotated queries and keys, and against sums over distances."""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from headwise.circuits.rotary import (
    at_offset,
    band_shares,
    band_shares_of_data,
    constant_part,
    incomplete,
    spectra,
)
from headwise.errors import OptionError, ShapeError
from headwise.positions.layout import Layout
from headwise.positions.rotary import rotate
from tests.circuits.test_factored import draw

HEADS, KV, D = 6, 2, 13
CLOSE = {"rtol": 1e-9, "atol": 1e-9}


class Turn(NamedTuple):
    inv_freq: Tensor
    width: int
    layout: Layout
    factor: float = 1.0


CASES = [
    (Turn(torch.tensor([1.0, 0.3, 0.01]).double(), 6, layout, factor), d_head)
    for layout in Layout
    for factor, d_head in ((1.0, 6), (1.3, 11))
]


def heads(d_head: int) -> tuple[Tensor, Tensor]:
    return draw(HEADS, D, d_head), draw(KV, D, d_head, seed=1)


def family(turn: Turn, d_head: int, offsets: list[int]) -> Tensor:
    """x W(Δ) x'ᵀ from queries and keys rotated where they stand, for x, x' = all unit vectors."""
    query, key = heads(d_head)
    key = key.repeat_interleave(HEADS // KV, 0)
    out = []
    for offset in offsets:
        at_query, at_key = torch.full((D,), 50), torch.full((D,), 50 + offset)
        options = {"layout": turn.layout, "factor": turn.factor}
        q = rotate(query[None], at_query, turn.inv_freq, **options)
        k = rotate(key[None], at_key, turn.inv_freq, **options)
        out.append((q @ k.mT)[0])
    return torch.stack(out)


@pytest.mark.parametrize(("turn", "d_head"), CASES)
def test_the_family_and_its_spectra(turn: Turn, d_head: int) -> None:
    offsets = [0, -1, -17, 4]
    want = family(turn, d_head, offsets)
    for i, offset in enumerate(offsets):
        got = at_offset(*heads(d_head), turn, offset)
        torch.testing.assert_close(got.dense(), want[i], **CLOSE)
    values = spectra(*heads(d_head), turn, torch.tensor(offsets))
    torch.testing.assert_close(values, torch.linalg.svdvals(want)[..., :d_head], **CLOSE)
    assert (want[0] - want[1]).abs().max() > 0.1
    other = turn._replace(layout=next(x for x in Layout if x is not turn.layout))
    assert (at_offset(*heads(d_head), other, -1).dense() - want[1]).abs().max() > 0.1


@pytest.mark.parametrize(("turn", "d_head"), CASES)
@pytest.mark.parametrize("length", [1, 2, 101])
def test_constant_part_is_the_mean_over_distances(turn: Turn, d_head: int, length: int) -> None:
    whole = family(turn, d_head, [-i for i in range(length)])
    product, share = constant_part(*heads(d_head), turn, length)
    mean = whole.mean(0)
    torch.testing.assert_close(product.dense(), mean, **CLOSE)
    want = mean.square().sum((-2, -1)) / whole.square().sum((-2, -1)).mean(0)
    torch.testing.assert_close(share, want, **CLOSE)
    assert length > 1 or bool((share > 1 - 1e-9).all())


@pytest.mark.parametrize(("turn", "d_head"), CASES)
def test_over_all_distances_only_what_never_turns_is_left(turn: Turn, d_head: int) -> None:
    query, key = heads(d_head)
    product, share = constant_part(query, key, turn)
    rest = query[..., 6:] @ key.repeat_interleave(3, 0)[..., 6:].mT
    torch.testing.assert_close(product.dense(), rest, **CLOSE)
    assert bool((share == 0).all()) == (d_head == 6)
    long = constant_part(query, key, turn, 10**7)
    torch.testing.assert_close(long.share, share, rtol=0, atol=1e-3)
    still = turn._replace(inv_freq=turn.inv_freq * torch.tensor([1.0, 1.0, 0.0]))
    assert (constant_part(query, key, still).share > share).all()


@pytest.mark.parametrize(("turn", "d_head"), CASES)
def test_shares_of_bands(turn: Turn, d_head: int) -> None:
    q, k = draw(2, HEADS, 5, d_head), draw(2, KV, 5, d_head, seed=1)
    keep = torch.tensor([[True] * 5, [False, True, True, True, False]])
    pairs = [(m, m + 3) if turn.layout is Layout.HALF else (2 * m, 2 * m + 1) for m in range(3)]
    bands = [*map(list, pairs), list(range(6, d_head))]
    for causal in (True, False):
        want = torch.zeros(HEADS, 4, dtype=torch.float64)
        for b in range(2):
            for i in range(5):
                for j in range(i + 1 if causal else 5):
                    for h in range(HEADS):
                        for m, band in enumerate(bands):
                            size = q[b, h, i, band].norm() * k[b, h // 3, j, band].norm()
                            gain = turn.factor**2 if m < 3 else 1.0
                            want[h, m] += size * gain * keep[b, i] * keep[b, j]
        got = band_shares_of_data(q, k, turn, causal=causal, keep=keep)
        torch.testing.assert_close(got, want / want.sum(-1, keepdim=True))
    query, key = heads(d_head)
    sizes = [[query[h][:, b].norm() * key[h // 3][:, b].norm() for b in bands] for h in range(6)]
    want = torch.tensor(sizes) * torch.tensor([turn.factor**2] * 3 + [1.0])
    want = (want / want.sum(-1, keepdim=True)).double()
    torch.testing.assert_close(band_shares(query, key, turn), want, rtol=1e-6, atol=1e-6)


def test_pairs_that_never_complete_a_turn() -> None:
    """Published counts of 64 pairs: base 10⁴ 18 and 14, base 5·10⁵ 32 and 29."""
    for base, want in ((1e4, (18, 14)), (5e5, (32, 29))):
        theta = base ** -(torch.arange(64, dtype=torch.float64) / 64)
        turn = Turn(theta, 128, Layout.HALF)
        assert tuple(int(incomplete(turn, n).sum()) for n in (4096, 8192)) == want
    edge = Turn(torch.tensor([2 * math.pi / 7]).double(), 2, Layout.HALF)
    assert [bool(incomplete(edge, n)[0]) for n in (6, 8)] == [True, False]


def test_what_does_not_fit() -> None:
    turn, d_head = CASES[0]
    query, key = heads(d_head)
    with pytest.raises(ShapeError, match="rotary width of 8"):
        at_offset(query, key, turn._replace(width=8), 0)
    with pytest.raises(ShapeError, match="query heads"):
        at_offset(query[:5], key, turn, 0)
    for wrong in (lambda: incomplete(turn, 0), lambda: constant_part(query, key, turn, 0)):
        with pytest.raises(OptionError):
            wrong()
