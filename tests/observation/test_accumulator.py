"""The accumulator against plain reductions of every row's statistics."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from headwise.observation.attach import observe
from headwise.observation.growing import Growing
from headwise.observation.histogram import BINS, bins, quantiles
from headwise.observation.positions import MOST_BINS, PooledMap, Profile
from headwise.results.records import PROFILED, QUANTILES, LayerRecord
from tests.observation.test_laws_of_observation import ids
from tests.parity.families import build, in_double
from tests.parity.watching import captured_calls, run

SIZES = (151, 43)  # two documents; the longer one needs bins of two positions


@pytest.fixture(scope="module")
def measured() -> tuple[LayerRecord, list[Tensor]]:
    """A layer with every row kept, and the dense matrices of its calls, one per document."""
    model = in_double(build("llama"))
    with captured_calls() as calls, observe(model, keep_rows=True) as scan:
        for words in ids(*SIZES):
            run(model, {"input_ids": words})
    dense = []
    for call in calls[1::2]:
        k = call.k.repeat_interleave(call.q.shape[1] // call.k.shape[1], 1)
        s = call.scale * call.q @ k.transpose(-1, -2)
        hidden = torch.ones(s.shape[-2:], dtype=torch.bool).triu(1)
        dense.append(torch.softmax(s.masked_fill(hidden, -math.inf), -1)[0])
    return scan.record.layers[1], dense


def close(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b, rtol=1e-11, atol=1e-11, equal_nan=True)


def test_means_are_means_of_rows(measured: tuple[LayerRecord, list[Tensor]]) -> None:
    layer, _ = measured
    for name, rows in layer.row_values.items():
        if name in layer.values and "logit" not in name.removesuffix("_std"):
            assert close(layer.values[name], rows.nanmean(-1)), name
    rows = layer.row_values
    assert close(layer.values["max_logit"], rows["max_logit"].amax(-1))
    assert close(layer.values["min_logit"], rows["min_logit"].amin(-1))
    query = layer.values["max_logit_query"].long()
    assert torch.equal(query, rows["max_logit"].argmax(-1))
    key = rows["top_key"].gather(1, query[:, None])[:, 0]
    assert torch.equal(layer.values["max_logit_key"], key)


def test_profiles_are_means_by_position(measured: tuple[LayerRecord, list[Tensor]]) -> None:
    layer, _ = measured
    assert layer.bin_width == 2
    position = torch.cat([torch.arange(n) for n in SIZES])
    for name in PROFILED:
        for b in range(layer.profile_rows.numel()):
            inside = position // layer.bin_width == b
            want = layer.row_values[name][:, inside].nanmean(-1)
            assert close(layer.profiles[name][:, b], want), (name, b)
            assert int(layer.profile_rows[b]) == int(inside.sum())


def test_quantiles_are_within_a_bin(measured: tuple[LayerRecord, list[Tensor]]) -> None:
    layer, _ = measured
    widths = {"entropy": 16 / BINS, "entropy_without_sink": 16 / BINS}
    for name in PROFILED:
        rows = layer.row_values[name]
        for h in range(rows.shape[0]):
            row = rows[h][~rows[h].isnan()].sort().values
            got = layer.quantiles[name][h]
            assert float(got[0]) == float(row[0])
            assert float(got[-1]) == float(row[-1])
            for p, value in zip(QUANTILES[1:-1], got[1:-1], strict=True):
                # The value of the rank just below and just above, one bin wider on each side.
                low = row[max(0, math.floor(p * row.numel()) - 1)]
                high = row[min(row.numel() - 1, math.ceil(p * row.numel()))]
                relative = {"effective_keys": 17 / BINS, "distance": 17 / BINS}
                width = widths.get(name, relative.get(name, 22 / BINS) * (1 + abs(float(high))))
                assert low - width <= value <= high + width, (name, h, p)


def test_columns_and_maps_are_sums_of_the_matrix(
    measured: tuple[LayerRecord, list[Tensor]],
) -> None:
    layer, dense = measured
    assert close(layer.received, torch.cat([a.sum(1) for a in dense], -1))
    seen = torch.cat([torch.arange(n, 0, -1) for n in SIZES])
    assert torch.equal(layer.received_visible, seen)
    width, blocks = layer.pool_width, layer.pool_rows.numel()
    pooled = torch.zeros_like(layer.pooled)
    for a in dense:
        for i in range(a.shape[1]):
            for j in range(a.shape[2]):
                pooled[:, i // width, j // width] += a[:, i, j]
    assert blocks == math.ceil(SIZES[0] / width)
    assert close(layer.pooled, pooled / layer.pool_rows[:, None])
    assert close(layer.pooled.sum(-1), torch.ones(layer.heads, blocks, dtype=torch.float64))
    edges = [0, 1, 2, 4, 8, 16, 32, 64, 128, 256]
    for band in range(layer.bands.shape[1]):
        low, high = edges[band], max(edges[band], edges[band + 1] - 1)
        total = torch.zeros(layer.heads, dtype=torch.float64)
        for a in dense:
            i, j = torch.arange(a.shape[1])[:, None], torch.arange(a.shape[2])[None]
            total += torch.where(((i - j) >= low) & ((i - j) <= high), a, 0.0).sum((1, 2))
        assert close(layer.bands[:, band], total / sum(SIZES))


@given(cuts=st.lists(st.integers(1, 700), min_size=1, max_size=5), seed=st.integers(0, 99))
def test_profiles_do_not_depend_on_where_a_run_is_cut(cuts: list[int], seed: int) -> None:
    total = sum(cuts)
    x = torch.rand(3, 1, 2, total, generator=torch.Generator().manual_seed(seed)).double()
    missing = x < 0.1
    whole, parts, other = Profile(3, 2), Profile(3, 2), Profile(3, 2)
    x = x.masked_fill(missing, 0.0)
    whole.add(x, missing, torch.arange(total), slice(None))
    start = 0
    for i, cut in enumerate(cuts):
        run = slice(start, start + cut)
        position = torch.arange(start, start + cut)
        (parts if i % 2 else other).add(x[..., run], missing[..., run], position, slice(None))
        start += cut
    parts.merge(other)
    for a, b in zip(parts.finish(), whole.finish(), strict=True):
        assert a == b if isinstance(a, int) else close(a.double(), b.double())
    assert whole.bins <= MOST_BINS


def test_a_map_that_grows_keeps_its_sums() -> None:
    small, large = PooledMap(1), PooledMap(1)
    small.fit(3)
    small.add(
        torch.ones(1, 3, 3, dtype=torch.float64), (0, 0), torch.arange(3),
        torch.ones(3, dtype=torch.long), slice(None),
    )  # fmt: skip
    large.fit(1000)
    large.merge(small)
    assert large.width == 8
    assert float(large.cells.dense().sum()) == 9.0
    assert int(large.rows.sum()) == 3


@given(st.lists(st.floats(0, 1), min_size=1, max_size=50))
def test_quantiles_lie_between_the_extremes(values: list[float]) -> None:
    x = torch.tensor(values, dtype=torch.float64).expand(len(PROFILED), 1, -1)
    counts = torch.stack([row.bincount(minlength=BINS) for row in bins(x)[:, 0]])[:, None]
    q = quantiles(counts, x.amin(-1), x.amax(-1))
    assert bool((q.diff(dim=-1) >= 0).all())
    assert torch.equal(q[..., 0], x.amin(-1))
    assert torch.equal(q[..., -1], x.amax(-1))


def test_growing_forgets_what_is_cut_off() -> None:
    growing = Growing((2,), torch.long, fill=-1)
    growing.append(torch.arange(6).view(2, 3))
    growing.resize(1)
    growing.resize(3)
    assert growing.view().tolist() == [[0, -1, -1], [3, -1, -1]]
