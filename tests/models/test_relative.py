"""Biases by distance as modules: arrays and functions of tiles, cached and not, and learning."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from headwise.models import Context, relative
from headwise.models.relative import AlibiBias, RelativeBias
from headwise.positions import slopes, t5_bucket
from tests.attention.problems import rand
from tests.tolerance import UNIT, assert_close, finite_max

F64 = torch.float64
HEADS = 3


def context(queries: int = 5, past: int = 0, dtype: torch.dtype = F64) -> Context:
    return Context(2, queries, past, torch.device("cpu"), dtype)


def table(**more: Any) -> RelativeBias:
    module = RelativeBias(8, HEADS, **{"max_distance": 9, "bidirectional": False, **more}).double()
    with torch.no_grad():
        module.weight.copy_(rand(8, HEADS, seed=1))
    return module


def alibi_by_hand(queries: int, past: int, heads: int = HEADS) -> Tensor:
    slope = slopes(heads, dtype=F64)
    rows = [[-abs(past + i - j) for j in range(past + queries)] for i in range(queries)]
    return slope[:, None, None] * torch.tensor(rows, dtype=F64)


def learned_by_hand(module: RelativeBias, queries: int, past: int) -> Tensor:
    out = torch.zeros(HEADS, queries, past + queries, dtype=F64)
    for i in range(queries):
        for j in range(past + queries):
            bucket = t5_bucket(
                torch.tensor(j - past - i), buckets=8, max_distance=9,
                bidirectional=module.bidirectional,
            )  # fmt: skip
            out[:, i, j] = module.weight[int(bucket)].detach()
    return out


def as_array(bias: Any, made: Context, heads: int = HEADS) -> Tensor:
    """Of an array itself, of a function all its tiles put together."""
    if isinstance(bias, Tensor):
        return bias[0]
    rows = torch.arange(made.queries)
    tiles = [
        torch.cat([bias(0, slice(h, h + 1), rows, range(a, min(a + 3, made.keys)))
                   for a in range(0, made.keys, 3)], -1)
        for h in range(heads)
    ]  # fmt: skip
    return torch.cat(tiles)


@pytest.mark.parametrize("limit", [1 << 24, 0], ids=["array", "function"])
@pytest.mark.parametrize(("queries", "past"), [(5, 0), (1, 6), (3, 4)])
def test_both_forms(queries: int, past: int, limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relative, "_ARRAY_LIMIT", limit)
    made = context(queries, past)
    bias = AlibiBias(HEADS)(made)
    assert isinstance(bias, Tensor) == bool(limit)
    want = alibi_by_hand(queries, past)
    assert_close(as_array(bias, made), want, 4 * UNIT[F64] * finite_max(want))
    for both_ways in (False, True):
        module = table(bidirectional=both_ways)
        want = learned_by_hand(module, queries, past)
        with torch.no_grad():
            bias = module(made)
        assert isinstance(bias, Tensor) == bool(limit)
        assert torch.equal(as_array(bias, made), want)
        assert not torch.equal(learned_by_hand(table(bidirectional=not both_ways), 3, 4),
                               learned_by_hand(module, 3, 4))  # fmt: skip


def test_a_learned_bias_stays_an_array_while_it_learns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relative, "_ARRAY_LIMIT", 0)
    module = table()
    bias = module(context())
    assert isinstance(bias, Tensor)
    up = rand(1, HEADS, 5, 5, seed=2, dtype=F64)
    (got,) = torch.autograd.grad((bias * up).sum(), module.weight)
    want = torch.zeros(8, HEADS, dtype=F64)
    for i in range(5):
        for j in range(5):
            bucket = t5_bucket(torch.tensor(j - i), buckets=8, max_distance=9, bidirectional=False)
            want[int(bucket)] += up[0, :, i, j]
    assert_close(got, want, 25 * UNIT[F64] * 4)
    module.weight.requires_grad_(False)
    assert callable(module(context()))


def test_slopes_of_a_float64_model_are_float64() -> None:
    """Of 16 heads, half have slopes that are no power of two."""
    made = context()
    exact = alibi_by_hand(5, 0, heads=16)
    assert_close(AlibiBias(16)(made)[0], exact, 4 * UNIT[F64] * 4)  # type: ignore[index]
    single = AlibiBias(16)(context(dtype=torch.float32))[0]  # type: ignore[index]
    assert single.dtype == torch.float32
    assert finite_max(single - exact) > 1e3 * UNIT[F64]
