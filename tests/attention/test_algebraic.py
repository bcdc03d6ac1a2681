"""The algebraic route against the whole matrix, and ``measure`` against the algebraic route."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from headwise.attention import algebraic
from headwise.attention.algebraic import identities, maximum_bounds
from headwise.attention.masks import Causal, Documents, Everything, Mask, Window
from headwise.attention.statistics import measure
from tests.attention.oracle import oracle
from tests.attention.problems import Problem, masks, rand
from tests.tolerance import Tolerance, assert_close

DOUBLE = torch.float64


@st.composite
def bilinear(draw: st.DrawFn) -> Problem:
    """What the identities are for: no cap, no bias; float64."""
    batch, (kv_heads, group) = (
        draw(st.sampled_from([1, 2])),
        draw(st.sampled_from([(1, 2), (2, 1)])),
    )
    m, n = draw(st.sampled_from([1, 7, 13])), draw(st.sampled_from([3, 13, 17]))
    seed, spread = draw(st.integers(0, 999)), draw(st.sampled_from([0.0, 1.0, 3.0]))
    offset = draw(st.sampled_from([None, 0, 4]))
    heads = kv_heads * group
    return Problem(
        spread * rand(batch, heads, m, 3, seed=seed, dtype=DOUBLE),
        rand(batch, kv_heads, n, 3, seed=seed + 1, dtype=DOUBLE),
        rand(batch, kv_heads, n, 5, seed=seed + 2, dtype=DOUBLE),
        mask=draw(masks(batch, n, m, n - m if offset is None else offset)),
        scale=draw(st.sampled_from([None, 0.4])),
        sinks=draw(st.sampled_from([None, rand(heads, seed=seed + 3, dtype=DOUBLE)])),
        offset=offset,
    )


def bound(p: Problem, name: str) -> tuple[float, float]:
    """Absolute and relative; identities take differences of a few log-sum-exps or of positions."""
    t = Tolerance.of(p.q, p.k, p.scale, None, p.sinks)
    places = p.k.shape[2] + p.q.shape[2] + abs(p.offset or 0)
    special = {
        "distance": (2 * t.distance(places), 0.0),
        "var_logit": (2 * t.variance, 0.0),
        "entropy": (2 * t.entropy, 0.0),
        "entropy_without_sink": (2 * t.entropy, 0.0),
        "output": (t.output(p.v), 0.0),
    }
    return special.get(name, (4 * t.weight, 4 * t.weight))


def by_algebra(p: Problem, **asked: int) -> dict[str, Tensor]:
    options = {name: x for name, x in p.options.items() if name not in ("softcap", "bias")}
    return identities(p.q, p.k, p.v, **options, **asked)


def compare(p: Problem, got: dict, want: dict) -> None:
    names = {n for n, x in got.items() if x is not None} & set(want)
    assert len(names) >= 15, sorted(names)
    for name in names:
        a, b = got[name], want[name]
        if name == "bands":
            width = min(a.shape[-1], b.shape[-1])
            assert not a[..., width:].nan_to_num(0.0).any()
            assert not b[..., width:].nan_to_num(0.0).any()
            a, b = a[..., :width], b[..., :width]
        try:
            assert_close(a, b, *bound(p, name))
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from None


@settings(max_examples=60)
@given(bilinear(), st.sampled_from([0, 1, 3]))
def test_identities_hold_for_the_whole_matrix(p: Problem, sink_keys: int) -> None:
    want = oracle(p, sink_keys=sink_keys, pool=4)
    compare(p, by_algebra(p, sink_keys=sink_keys, pool=4), want)


@settings(max_examples=60)
@given(bilinear(), st.sampled_from([0, 1, 3]))
def test_measure_agrees_with_algebra(p: Problem, sink_keys: int) -> None:
    got = measure(p.q, p.k, p.v, **p.options, sink_keys=sink_keys, pool=4)
    compare(p, dict(vars(got)), by_algebra(p, sink_keys=sink_keys, pool=4))


LONG: list[Mask] = [
    Everything(),
    Causal(),
    Causal() & Window(100),
    Causal() & Documents((torch.arange(601) // 83)[None]),
]


@pytest.mark.parametrize("mask", LONG)
def test_measure_agrees_with_algebra_over_several_strips(mask: Mask) -> None:
    q, k, v = (rand(1, h, 601, 5, seed=h, dtype=DOUBLE) for h in (4, 2, 2))
    p = Problem(2 * q, k, v, mask=mask)
    got = measure(p.q, p.k, p.v, mask=mask, pool=50)
    compare(p, dict(vars(got)), by_algebra(p, pool=50))


def test_the_largest_and_smallest_logit_are_between_their_bounds() -> None:
    q, k = rand(1, 2, 37, 5, seed=1, dtype=DOUBLE), rand(1, 1, 41, 5, seed=2, dtype=DOUBLE)
    got = measure(q, k, mask=Causal())
    slack = Tolerance.of(q, k).logit
    low, high = maximum_bounds(q, k, mask=Causal())
    assert bool(((low - slack <= got.max_logit) & (got.max_logit <= high + slack)).all())
    assert float((high - low).max()) < 1e-5
    low, high = maximum_bounds(-q, k, mask=Causal())
    assert bool(((low - slack <= -got.min_logit) & (-got.min_logit <= high + slack)).all())


def test_the_algebra_is_independent() -> None:
    """It imports neither the strip pass nor the definition."""
    tree = ast.parse(Path(algebraic.__file__).read_text())
    modules = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert not {
        m for m in modules if m and m.split(".")[-1] in ("statistics", "strips", "definition")
    }


@pytest.mark.parametrize("wrong", ["scale", "mask", "offset", "sink_keys"])
def test_the_comparison_can_fail(wrong: str) -> None:
    q, k, v = (rand(1, 1, 13, 3, seed=s, dtype=DOUBLE) for s in (1, 2, 3))
    p = Problem(q, k, v, mask=Causal())
    changed: dict = {"mask": Causal(), "sink_keys": 1}
    changed |= {"scale": 0.6} if wrong == "scale" else {}
    changed |= {"mask": Causal() & Window(12)} if wrong == "mask" else {}
    changed |= {"offset": 1} if wrong == "offset" else {}
    changed |= {"sink_keys": 2} if wrong == "sink_keys" else {}
    compare(p, dict(vars(measure(q, k, v, mask=Causal()))), by_algebra(p))
    with pytest.raises(AssertionError):
        compare(p, dict(vars(measure(q, k, v, **changed))), by_algebra(p))
