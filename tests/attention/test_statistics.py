"""``measure`` against the whole matrix in float64, and its laws."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from headwise.attention import statistics
from headwise.attention.masks import (
    Causal,
    Chunked,
    Documents,
    Everything,
    KeyPadding,
    Mask,
    Predicate,
    Prefix,
    Window,
)
from headwise.attention.plan import Form
from headwise.attention.plan import Problem as Plan
from headwise.attention.sharing import choose_form
from headwise.attention.statistics import Statistics, choose_rows, measure
from headwise.errors import OptionError, ShapeError
from tests.attention.oracle import PER_ROW, check, oracle
from tests.attention.problems import Problem, problems, rand
from tests.attention.test_attend import Largest
from tests.tolerance import Tolerance, assert_close


@pytest.fixture(params=[Form.WHOLE, Form.LOOPS, Form.TENSORS], autouse=True, ids=lambda f: f.name)
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Form:
    """Every form of the strip pass; float64 always takes the tensor operations."""

    def choose(problem: Plan) -> Form:
        chosen = choose_form(problem)
        if chosen is Form.TENSORS or request.param is Form.TENSORS:
            return Form.TENSORS
        return Form.LOOPS if request.param is Form.LOOPS else chosen

    monkeypatch.setattr(statistics, "choose_form", choose)
    return request.param


def run(p: Problem, **options) -> Statistics:  # type: ignore[no-untyped-def]
    return measure(p.q, p.k, p.v, **p.tiled_options, **options)


@st.composite
def questions(draw: st.DrawFn, dtype: torch.dtype = torch.float32) -> tuple[Problem, dict, dict]:
    """A problem, what is asked about it, and how it is computed."""
    p = draw(problems(dtype=dtype))
    batch, _, m, _ = p.q.shape
    asked = {
        "sink_keys": draw(st.sampled_from([1, 1, 0, 2, 5])),
        "pool": draw(st.sampled_from([None, 1, 3, 8])),
        "relative": draw(st.sampled_from([True, True, False])),
        "query_mask": None,
        "rows": None,
    }
    if draw(st.booleans()):
        asked["query_mask"] = rand(batch, m, seed=draw(st.integers(0, 99))) > -0.5
    if draw(st.sampled_from([False, False, True])):
        chosen = draw(st.sets(st.integers(0, m - 1), min_size=1))
        asked["rows"] = torch.tensor(sorted(chosen))
    how = {
        "workers": draw(st.sampled_from([1, 1, 3])),
        "memory": draw(st.sampled_from([1, 2**14, 96 * 2**20])),
    }
    return p, asked, how


def tile_option(width: int) -> dict:
    """Narrow key tiles, where ``measure`` lets us choose them."""
    import inspect

    return {"tile": width} if "tile" in inspect.signature(measure).parameters else {}


@settings(max_examples=150)
@given(questions(), st.sampled_from([2, 5, 2048]))
def test_every_statistic(question: tuple[Problem, dict, dict], width: int) -> None:
    p, asked, how = question
    check(run(p, **asked, **how, **tile_option(width)), oracle(p, **asked), p)


@settings(max_examples=50)
@given(questions(dtype=torch.float64), st.sampled_from([2, 5, 2048]))
def test_every_statistic_in_float64(question: tuple[Problem, dict, dict], width: int) -> None:
    p, asked, how = question
    check(run(p, **asked, **how, **tile_option(width)), oracle(p, **asked), p)


def long_problem(mask: Mask | None, m: int = 701, n: int = 701, **more) -> Problem:  # type: ignore[no-untyped-def]
    return Problem(
        2 * rand(1, 2, m, 8, seed=1),
        rand(1, 1, n, 8, seed=2),
        rand(1, 1, n, 5, seed=3),
        mask=mask,
        **more,
    )


IDS = (torch.arange(701) // 97)[None]
LONG: dict[str, Mask | None] = {
    "none": None,
    "causal": Causal(),
    "window": Causal() & Window(61),
    "band": Window(61) | Prefix(4),
    "packed": Causal() & Documents(IDS),
    "padded": Causal() & KeyPadding(torch.arange(701)[None] >= 43),
    "chunked": Causal() & Chunked(89),
    "prefix": Causal() | Prefix(101),
    "predicate": Predicate(lambda b, i, j: (7 * i + 3 * j) % 11 < 4),
    "holes": Causal() & KeyPadding(torch.arange(701)[None] % 5 != 0),
}


@pytest.mark.parametrize("name", LONG)
@pytest.mark.parametrize("pool", [None, 7, 300])
def test_several_strips_and_tiles(name: str, pool: int | None) -> None:
    p = long_problem(LONG[name])
    for options in ({}, tile_option(190)):
        check(run(p, pool=pool, sink_keys=2, **options), oracle(p, pool=pool, sink_keys=2), p)


@pytest.mark.parametrize(("m", "n"), [(401, 701), (701, 401), (1, 701), (701, 1)])
@pytest.mark.parametrize("mask", [Causal(), None, Causal() & Window(100)])
def test_queries_and_keys_of_different_number(m: int, n: int, mask: Mask | None) -> None:
    p = long_problem(mask, m, n)
    check(run(p, pool=64), oracle(p, pool=64), p)


def test_saturated_logits() -> None:
    """Rows that are nearly one-hot, a sink that takes all but 1e-30, and logits of hundreds."""
    p = long_problem(Causal())
    q, k = 10 * p.q, p.k.clone()
    k[:, :, 0] += q[:, :1].mean(2) * 0.3
    p = dataclasses.replace(p, q=q, k=k)
    check(run(p, sink_keys=1), oracle(p, sink_keys=1), p)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_measured_in_float32(dtype: torch.dtype) -> None:
    p = Problem(*(rand(1, 2, 41, 8, seed=s, dtype=dtype) for s in (1, 2, 3)), mask=Causal())
    got = run(p, pool=8)
    check(got, oracle(p, pool=8), p)
    assert got.entropy.dtype == torch.float32


def test_without_values_there_is_no_output() -> None:
    p = long_problem(Causal())
    got = measure(p.q, p.k, mask=p.mask)
    assert got.output is None
    check(got, {**oracle(p), "output": None}, p)


# Laws


def fields(x: Statistics) -> dict[str, Tensor]:
    named = {f.name: getattr(x, f.name) for f in dataclasses.fields(x)}
    return {name: value for name, value in named.items() if isinstance(value, Tensor)}


@pytest.mark.parametrize("workers", [2, 3])
def test_workers_do_not_change_a_bit(workers: int) -> None:
    p = long_problem(LONG["packed"])
    one, many = (fields(run(p, pool=50, workers=w)) for w in (1, workers))
    for name, x in one.items():
        assert_close(many[name], x, 0.0)
    assert torch.get_num_threads() == 1


def test_batch_mates_do_not_matter() -> None:
    keep = torch.ones(3, 37, dtype=torch.bool)
    keep[1, :9], keep[2, 20:] = False, False
    q, k, v = (rand(3, h, 37, 5, seed=h) for h in (4, 2, 2))
    ids = torch.arange(37).repeat(3, 1) // torch.tensor([5, 9, 40])[:, None]
    whole = fields(measure(q, k, v, mask=Causal() & KeyPadding(keep) & Documents(ids), pool=8))
    for b in range(3):
        one = slice(b, b + 1)
        mask = Causal() & KeyPadding(keep[one]) & Documents(ids[one])
        alone = fields(measure(q[one], k[one], v[one], mask=mask, pool=8))
        for name, x in alone.items():
            if name != "rows":
                bound = 64 * Tolerance.of(q, k).epsilon
                assert_close(whole[name][one], x, bound)


def test_a_padded_sequence_is_the_sequence() -> None:
    q, k, v = (rand(1, h, 29, 5, seed=h) for h in (4, 2, 2))
    alone = measure(q, k, v, mask=Causal())
    junk = 100 * rand(1, 4, 8, 5, seed=9)
    keep = torch.arange(37)[None] >= 8
    q, k, v = (torch.cat((junk[:, : x.shape[1]], x), 2) for x in (q, k, v))
    padded = measure(q, k, v, mask=Causal() & KeyPadding(keep), query_mask=keep, sink_keys=0)
    bound = 64 * Tolerance.of(q[:, :, 8:], k[:, :, 8:]).epsilon
    for name in ("entropy", "log_sum_exp", "sum_squares", "distance", "self_mass", "var_logit"):
        assert_close(getattr(padded, name)[:, :, 8:], getattr(alone, name), bound, bound)
        assert not torch.isfinite(getattr(padded, name)[:, :, :8]).any()
    assert_close(padded.received[:, :, 8:], alone.received, bound, bound)
    assert not padded.received[:, :, :8].any()


def test_decoding_with_a_cache_is_the_whole() -> None:
    q, k, v = (rand(1, h, 31, 5, seed=h) for h in (4, 2, 2))
    whole = measure(q, k, v, mask=Causal() & Window(9))
    bound = 64 * Tolerance.of(q, k).epsilon
    for i in (0, 7, 30):
        step = measure(q[:, :, i : i + 1], k[:, :, : i + 1], v[:, :, : i + 1],
                       mask=Causal() & Window(9))  # fmt: skip
        for name in (*PER_ROW, "output"):
            assert_close(getattr(step, name)[:, :, 0], getattr(whole, name)[:, :, i], bound)


def test_halves_of_the_queries_add_up_to_the_whole() -> None:
    p = long_problem(Causal())
    whole = run(p)
    parts = [
        measure(p.q[:, :, a:b], p.k, p.v, mask=p.mask, offset=a) for a, b in ((0, 300), (300, 701))
    ]
    bound = 64 * Tolerance.of(p.q, p.k).epsilon
    assert_close(parts[0].received + parts[1].received, whole.received, bound, bound)
    for name in PER_ROW:
        joined = torch.cat([getattr(x, name) for x in parts], 2)
        assert_close(joined, getattr(whole, name), 701 * bound)


def test_chosen_rows_are_the_rows_of_the_whole() -> None:
    p = long_problem(Causal() & Window(300))
    rows = torch.tensor([0, 3, 4, 255, 256, 500, 700])
    some = run(p, rows=rows, pool=50)
    check(some, oracle(p, rows=rows, pool=50), p)


def test_rows_as_a_number_is_a_stratified_sample() -> None:
    p = long_problem(Causal())
    got = run(p, rows=70)
    assert got.output is None
    assert torch.equal(got.rows, choose_rows(70, 701))
    check(got, oracle(p, rows=got.rows), p)
    assert run(p, rows=9999).output is not None


def test_the_sample_has_one_uniform_row_per_stratum() -> None:
    times = 2000
    count = torch.zeros(60)
    for seed in range(times):
        rows = choose_rows(12, 60, seed)
        assert torch.equal(rows // 5, torch.arange(12))
        count[rows] += 1
    z = (count / times - 1 / 5) / math.sqrt(1 / 5 * 4 / 5 / times)
    assert z.abs().max() < 4.5  # 60 draws; 4.5 standard deviations happen once in 2500 such tests


def test_nothing_of_size_n_squared_is_allocated() -> None:
    n = 4099
    q, k, v = (rand(1, 1, n, 4, seed=s) for s in (1, 2, 3))
    for mask in (Causal(), Everything(), Causal() & Window(100)):
        with Largest() as seen:
            measure(q, k, v, mask=mask, pool=64, workers=1, memory=8 * 2**20)
        assert seen.numel <= 2 * 2**20 < n**2 / 4


def test_hidden_nan_does_not_leak_and_visible_nan_does() -> None:
    p = long_problem(Causal() & KeyPadding(torch.arange(701)[None] != 5))
    clean = fields(run(p))
    k, v = p.k.clone(), p.v.clone()
    k[:, :, 5], v[:, :, 5] = math.nan, math.inf
    dirty = fields(run(dataclasses.replace(p, k=k, v=v)))
    for name, x in clean.items():
        assert_close(dirty[name], x, 0.0)
    v = p.v.clone()
    v[:, :, 400] = math.nan
    output = run(dataclasses.replace(p, v=v)).output
    assert output is not None
    assert torch.equal(output[0, 0, :, 0].isnan(), torch.arange(701) >= 400)


@pytest.mark.parametrize(
    "change",
    [
        {"rows": 0},
        {"rows": torch.tensor([701])},
        {"rows": torch.tensor([-1])},
        {"rows": torch.tensor([], dtype=torch.long)},
        {"sink_keys": -1},
        {"pool": 0},
        {"workers": 0},
        {"query_mask": torch.ones(1, 5, dtype=torch.bool)},
        {"query_mask": torch.ones(1, 701)},
        {"mask": KeyPadding(torch.ones(2, 701, dtype=torch.bool))},
    ],
)
def test_what_cannot_be_asked_is_refused_in_one_line(change: dict) -> None:
    p = long_problem(None)
    with pytest.raises((OptionError, ShapeError)) as caught:
        measure(p.q, p.k, p.v, **change)
    assert "\n" not in str(caught.value)


# The check can fail: every statistic is made slightly wrong, and the check must notice.

_EXACT = {"rows", "visible", "top_key"}


@pytest.mark.parametrize(
    "name", [*PER_ROW, "received", "pooled", "bands", "output", "visible", "rows", "top_key"]
)
def test_the_check_notices_a_wrong_number(name: str) -> None:
    p = dataclasses.replace(long_problem(Causal(), 29, 29), sinks=rand(2, seed=5))
    got, want = run(p, pool=4), oracle(p, pool=4)
    check(got, want, p)
    x = getattr(got, name).clone()
    flat = x.view(-1)
    flat[-1] += -1 if name in _EXACT else 1e-2 if name == "distance" else 1e-3
    with pytest.raises(AssertionError):
        check(dataclasses.replace(got, **{name: x}), want, p)
    if name not in _EXACT:
        flat[-1] = math.nan
        with pytest.raises(AssertionError):
            check(dataclasses.replace(got, **{name: x}), want, p)


@pytest.mark.parametrize(
    "change",
    [
        {"scale": 0.35},
        {"softcap": 60.0},
        {"mask": Causal() & Window(28)},
        {"mask": Causal(-1)},
        {"offset": 1},
        {"sinks": None},
        {"bias": None},
        {"sink_keys": 2},
    ],
)
def test_the_check_notices_another_question(change: dict) -> None:
    p = dataclasses.replace(
        long_problem(Causal(), 29, 29), sinks=rand(2, seed=5), bias=rand(1, 29, seed=6)
    )
    options = {**p.tiled_options, **change}
    with pytest.raises(AssertionError):
        check(measure(p.q, p.k, p.v, **options), oracle(p), p)
