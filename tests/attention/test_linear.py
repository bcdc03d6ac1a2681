"""Linear attention: four forms, one result; and the definition they are held to.

Bound of every comparison. Kernel values are sums of m products of non-negative numbers, numerators
and denominators sums of n of those, so rounding moves each by a relative (m + n + 16) u at most:
16 for φ itself, the rescaling of queries, the division and the last rounding. A weighted mean with
such weights moves by 2 (m + n + 16) u · max |v|. Two forms differ by twice that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from headwise.attention.feature_maps import FeatureMap, PositiveRandomFeatures, elu_plus_one
from headwise.attention.linear import (
    LinearState,
    linear_attention,
    linear_attention_chunked,
    linear_attention_parallel,
    linear_attention_recurrent,
)
from headwise.attention.linear_definition import kernel_attention, kernel_matrix
from headwise.attention.masks import Causal, KeyPadding
from headwise.errors import ShapeError
from tests.attention.problems import rand
from tests.tolerance import UNIT, assert_close

DOUBLE = torch.float64
Form = Callable[[Tensor, Tensor, Tensor, FeatureMap], Tensor]


def recurrent(q: Tensor, k: Tensor, v: Tensor, phi: FeatureMap) -> Tensor:
    return linear_attention_recurrent(q, k, v, phi)[0]


def chunked(q: Tensor, k: Tensor, v: Tensor, phi: FeatureMap) -> Tensor:
    return linear_attention_chunked(q, k, v, phi, chunk=5)[0]


CAUSAL: list[Form] = [linear_attention_parallel, recurrent, chunked]
causal_forms = pytest.mark.parametrize(
    "form", CAUSAL, ids=lambda f: f.__name__.removeprefix("linear_attention_")
)


@dataclass(frozen=True)
class Case:
    q: Tensor
    k: Tensor
    v: Tensor
    phi: FeatureMap

    @property
    def inputs(self) -> tuple[Tensor, Tensor, Tensor, FeatureMap]:
        return self.q, self.k, self.v, self.phi

    @property
    def bound(self) -> float:
        terms = self.phi(self.k).shape[-1] + self.k.shape[2] + 16
        return 4 * terms * UNIT[self.q.dtype] * float(self.v.abs().max())

    def gradient_bound(self, upstream: Tensor) -> float:
        """For dq, dk and dv alike, from |d ln φ / dx| <= slope.

        do_i/dq_i = (φ'ᵀW − (φ'·z) o_i) / φ·z with |φ'| <= slope · φ, so each of the two terms is
        known to ``bound`` · slope; the same holds for one key and one query, and as many queries
        as there are rows in a group add up. Values have weights below 1 in place of the slope.
        """
        slope = 1.0
        if isinstance(self.phi, PositiveRandomFeatures):
            reach = max(float(t.abs().max()) for t in (self.q, self.k))
            slope += float(self.phi.projection.abs().max()) + reach
        rows = self.q.shape[2] * self.q.shape[1] // self.k.shape[1]
        width = upstream.shape[-1] * float(upstream.abs().max())
        return 2 * slope * rows * width * self.bound * max(1.0, 1 / float(self.v.abs().max()))


def case(m: int, n: int, seed: int = 0, dtype: torch.dtype = DOUBLE) -> Case:
    """Two batches, six query heads on three kv heads."""
    q, k = rand(2, 6, m, 5, seed=seed, dtype=dtype), rand(2, 3, n, 5, seed=seed + 1, dtype=dtype)
    return Case(q, k, rand(2, 3, n, 7, seed=seed + 2, dtype=dtype), elu_plus_one)


@st.composite
def cases(draw: st.DrawFn, causal: bool = True) -> Case:
    batch, (kv_heads, group) = (
        draw(st.sampled_from([1, 2])),
        draw(st.sampled_from([(1, 1), (1, 3), (2, 1), (3, 2)])),
    )
    n = draw(st.sampled_from([1, 2, 3, 7, 13, 31]))
    m = n if causal else draw(st.sampled_from([1, 5, 11]))
    d, dv = draw(st.sampled_from([(1, 1), (3, 5), (5, 2)]))
    seed, spread = draw(st.integers(0, 999)), draw(st.sampled_from([0.0, 1.0, 3.0]))
    generator = torch.Generator().manual_seed(seed)
    phi = draw(
        st.sampled_from(
            [
                elu_plus_one,
                PositiveRandomFeatures.iid(d, 11, generator=generator),
                PositiveRandomFeatures.orthogonal(d, 7, generator=generator),
            ]
        )
    )
    return Case(
        spread * rand(batch, kv_heads * group, m, d, seed=seed, dtype=DOUBLE),
        spread * rand(batch, kv_heads, n, d, seed=seed + 1, dtype=DOUBLE),
        rand(batch, kv_heads, n, dv, seed=seed + 2, dtype=DOUBLE),
        phi,
    )


# ------------------------------------------------------------------ the definition, and the forms


def test_the_definition_is_the_loop() -> None:
    x = case(3, 7)
    keep = Causal().dense(0, 3, 7)
    for mask in (None, Causal()):
        want = torch.zeros(2, 6, 3, 7, dtype=DOUBLE)
        for b, h, i in torch.cartesian_prod(*(torch.arange(s) for s in (2, 6, 3))).tolist():
            seen = [j for j in range(7) if mask is None or keep[i, j]]
            w = [elu_plus_one(x.q[b, h, i]) @ elu_plus_one(x.k[b, h // 2, j]) for j in seen]
            want[b, h, i] = sum(a * x.v[b, h // 2, j] for a, j in zip(w, seen, strict=True))
            want[b, h, i] /= sum(w)
        assert_close(kernel_attention(*x.inputs, mask=mask), want, x.bound)


def test_the_kernel_matrix_is_the_product_of_features() -> None:
    x = case(3, 7)
    want = torch.einsum("bhif,bhjf->bhij", x.phi(x.q), x.phi(x.k).repeat_interleave(2, 1))
    assert_close(kernel_matrix(x.q, x.k, x.phi), want, 0.0, 8 * UNIT[DOUBLE])


def test_queries_without_a_visible_key_give_zero() -> None:
    x = case(3, 7)
    keep = torch.stack((torch.zeros(7, dtype=torch.bool), torch.ones(7, dtype=torch.bool)))
    got = kernel_attention(*x.inputs, mask=KeyPadding(keep))
    assert torch.equal(got[0], torch.zeros(6, 3, 7, dtype=DOUBLE))
    assert_close(got[1], kernel_attention(*x.inputs)[1], x.bound)


@given(cases(causal=False))
def test_the_whole_form_is_the_definition(x: Case) -> None:
    assert_close(linear_attention(*x.inputs), kernel_attention(*x.inputs), x.bound)


@given(cases(), st.sampled_from([1, 2, 3, 5, 13, 64]))
def test_the_causal_forms_are_the_definition(x: Case, chunk: int) -> None:
    want = kernel_attention(*x.inputs, mask=Causal())
    pieces, one = linear_attention_chunked(*x.inputs, chunk=chunk)
    steps, two = linear_attention_recurrent(*x.inputs)
    for got in (linear_attention_parallel(*x.inputs), steps, pieces):
        assert_close(got, want, x.bound)
    assert one.keys == two.keys == x.k.shape[2]
    scale = float(two.total.max()) * (1 + float(x.v.abs().max()))
    assert_close(one.total, two.total, x.bound * scale)
    assert_close(one.weighted, two.weighted, x.bound * scale)


@pytest.mark.parametrize("wrong", ["heads tiled", "sees the future", "blind to itself"])
def test_the_comparison_can_fail(wrong: str) -> None:
    x = case(13, 13)
    want = kernel_attention(*x.inputs, mask=Causal())
    shared = [t.repeat(1, 2, 1, 1) for t in (x.k, x.v)]
    got = {
        "heads tiled": lambda: recurrent(x.q, *shared, x.phi),
        "sees the future": lambda: linear_attention(*x.inputs),
        "blind to itself": lambda: recurrent(x.q, x.k.roll(1, 2), x.v.roll(1, 2), x.phi),
    }[wrong]()
    with pytest.raises(AssertionError, match="over the bound"):
        assert_close(got, want, x.bound)


@given(cases(), st.integers(0, 31), st.sampled_from([2, 64]))
def test_text_in_two_parts_is_the_whole(x: Case, cut: int, chunk: int) -> None:
    cut = min(cut, x.k.shape[2])
    want = linear_attention_parallel(*x.inputs)
    first, second = (
        [t[:, :, part] for t in (x.q, x.k, x.v)] for part in (slice(cut), slice(cut, None))
    )
    a, state = linear_attention_chunked(*first, x.phi, chunk=chunk)
    b, after = linear_attention_recurrent(*second, x.phi, state=state)
    assert_close(torch.cat((a, b), 2), want, x.bound)
    a, state = linear_attention_recurrent(*first, x.phi)
    b, _ = linear_attention_chunked(*second, x.phi, chunk=chunk, state=state)
    assert_close(torch.cat((a, b), 2), want, x.bound)
    assert (state.keys, after.keys) == (cut, x.k.shape[2])


@causal_forms
@pytest.mark.parametrize("late", [7.0, torch.nan, torch.inf])
def test_the_future_is_not_seen(form: Form, late: float) -> None:
    """Bit for bit, also when the later key or value is not a number."""
    x = case(13, 13)
    before = form(*x.inputs)
    k, v = x.k.clone(), x.v.clone()
    k[:, :, 8], v[:, :, 8] = (3.0 if late == torch.inf else late), late
    after = form(x.q, k, v, x.phi)
    assert torch.equal(after[:, :, :8], before[:, :, :8])
    assert (after[:, :, 8:] != before[:, :, 8:]).all()
    if late != 7.0:
        assert not after[:, :, 8:].isfinite().any()


# ------------------------------------------------------------------------------------- the state


@given(cases(), st.integers(0, 31), st.integers(0, 31))
def test_the_state_is_a_monoid(x: Case, a: int, b: int) -> None:
    a, b = sorted((min(a, x.k.shape[2]), min(b, x.k.shape[2])))
    f, q = x.phi(x.k), x.phi(x.q)
    empty = LinearState.empty(*f.shape[:2], f.shape[-1], x.v.shape[-1], DOUBLE)
    parts = [
        empty.absorb(f[:, :, s], x.v[:, :, s]) for s in (slice(a), slice(a, b), slice(b, None))
    ]
    one, two, three = parts
    want = empty.absorb(f, x.v).finish(q)
    assert_close(want, linear_attention(*x.inputs), x.bound)
    for state in (
        one.merge(two).merge(three),
        one.merge(two.merge(three)),
        three.merge(two).merge(one),
        empty.merge(one).merge(empty).merge(two).merge(three),
        one.absorb(f[:, :, a:b], x.v[:, :, a:b]).merge(three),
    ):
        assert state.keys == f.shape[2]
        assert_close(state.finish(q), want, x.bound)


def test_no_keys_give_zero() -> None:
    x = case(3, 7)
    nothing = linear_attention(x.q, x.k[:, :, :0], x.v[:, :, :0], x.phi)
    assert torch.equal(nothing, torch.zeros(2, 6, 3, 7, dtype=DOUBLE))
    q, k, v = (t[:, :, :0] for t in (x.q, x.k, x.v))
    for form in CAUSAL:
        assert form(q, k, v, x.phi).shape == (2, 6, 0, 7)


def test_the_state_does_not_grow() -> None:
    short, long = (linear_attention_chunked(*case(n, n).inputs)[1] for n in (3, 31))
    assert short.weighted.shape == long.weighted.shape == (2, 3, 5, 7)
    assert short.total.shape == long.total.shape == (2, 3, 5)


# ----------------------------------------------------------------------------------- precision


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_states_and_denominators_are_float32_or_better(dtype: torch.dtype) -> None:
    """1,000 equal keys: in bfloat16 the count stops at 256, and every later mean is wrong."""
    n = 1000
    q = k = torch.zeros(1, 1, n, 2, dtype=dtype)
    v = torch.ones(1, 1, n, 3, dtype=dtype)
    for form in (linear_attention, *CAUSAL[::2]):
        got = form(q, k, v, elu_plus_one)
        assert got.dtype == dtype
        assert torch.equal(got, torch.ones_like(v))
    _, state = linear_attention_recurrent(q[:, :, :3], k[:, :, :3], v[:, :, :3], elu_plus_one)
    assert state.total.dtype == state.weighted.dtype == torch.float32
    with pytest.raises(ShapeError, match=r"a state in torch\.bfloat16"):
        LinearState.empty(1, 1, 2, 3, torch.bfloat16)


def test_a_sum_in_half_precision_would_be_noticed() -> None:
    count = torch.zeros((), dtype=torch.bfloat16)
    for _ in range(1000):
        count = count + 1
    assert count == 256


@pytest.mark.parametrize("form", [linear_attention, *CAUSAL], ids=lambda f: f.__name__)
def test_float32_is_as_good_as_its_digits(form: Form) -> None:
    x, exact = case(31, 31, dtype=torch.float32), case(31, 31)
    mask = None if form is linear_attention else Causal()
    want = kernel_attention(*(t.double() for t in x.inputs[:3]), exact.phi, mask=mask)
    assert_close(form(*x.inputs), want, x.bound)


@pytest.mark.parametrize("form", [linear_attention, *CAUSAL], ids=lambda f: f.__name__)
def test_autocast_changes_nothing(form: Form) -> None:
    x = case(13, 13, dtype=torch.float32)
    phi = PositiveRandomFeatures.iid(5, 11, generator=torch.Generator().manual_seed(3))
    want = form(x.q, x.k, x.v, phi)
    with torch.autocast("cpu", torch.bfloat16):
        assert (x.q @ x.q.mT).dtype == torch.bfloat16
        assert torch.equal(form(x.q, x.k, x.v, phi), want)


@pytest.mark.parametrize("form", [linear_attention, *CAUSAL], ids=lambda f: f.__name__)
def test_shapes_can_be_asked_without_numbers(form: Form) -> None:
    x = case(13, 13)
    got = form(*(t.to("meta") for t in x.inputs[:3]), x.phi)
    assert got.shape == (2, 6, 13, 7)


@pytest.mark.parametrize("form", [linear_attention, *CAUSAL], ids=lambda f: f.__name__)
@pytest.mark.parametrize("at", [-8.0, -60.0])
def test_one_token_gives_its_value(form: Form, at: float) -> None:
    """elu+1 of very negative numbers keeps its digits; e^-60 · e^-60 alone would underflow.

    fla-org/flash-linear-attention#1261 and #1265, idiap/fast-transformers#32.
    """
    q = k = torch.full((1, 1, 1, 2), at, dtype=torch.bfloat16)
    v = torch.tensor([[[[1.0, -2.0]]]], dtype=torch.bfloat16)
    assert torch.equal(form(q, k, v, elu_plus_one), v)
    literal: FeatureMap = lambda x: torch.nn.functional.elu(x.bfloat16()) + 1  # noqa: E731
    assert form(q, k, v, literal).isnan().all()


# ---------------------------------------------------------------------------------- gradients


@given(cases())
def test_gradients_are_those_of_the_definition(x: Case) -> None:
    leaves = [t.clone().requires_grad_() for t in x.inputs[:3]]
    upstream = rand(*x.q.shape[:3], x.v.shape[-1], seed=5, dtype=DOUBLE)

    def gradients(output: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad((output * upstream).sum(), leaves)

    want = gradients(kernel_attention(*leaves, x.phi, mask=Causal()))
    for form in CAUSAL:
        for a, b in zip(gradients(form(*leaves, x.phi)), want, strict=True):
            assert_close(a, b, x.gradient_bound(upstream))


@pytest.mark.parametrize("form", [linear_attention, *CAUSAL], ids=lambda f: f.__name__)
@pytest.mark.parametrize("size", [0.0, 60.0, 200.0])
def test_gradients_are_finite(form: Form, size: float) -> None:
    """At 0 (the kink), for very negative and very large entries, in float32."""
    entries = torch.tensor([-min(size, 60.0), -1.0, 0.0, size])
    q, k = entries.repeat(5, 1)[None, None], entries.flip(0).repeat(5, 1)[None, None]
    leaves = [t.clone().requires_grad_() for t in (q, k, rand(1, 1, 5, 3))]
    for g in torch.autograd.grad(form(*leaves, elu_plus_one).square().sum(), leaves):
        assert g.isfinite().all()


# --------------------------------------------------------------------------------------- cost


def flops(run: Callable[[], object]) -> int:
    with FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops()


def test_cost_is_what_the_docstrings_say() -> None:
    """Multiply-adds: n m (d_v + 1) to read; n m d_v to absorb; n c (m + d_v) inside chunks."""
    n, c, m, dv = 48, 8, 5, 7
    q, k, v = (rand(1, 1, n, width) for width in (m, m, dv))
    whole = flops(lambda: linear_attention(q, k, v, elu_plus_one))
    assert whole == 2 * n * m * (2 * dv + 1)
    pieces = flops(lambda: linear_attention_chunked(q, k, v, elu_plus_one, chunk=c))
    assert pieces == whole + 2 * n * c * (m + dv)
    steps = flops(lambda: linear_attention_recurrent(q, k, v, elu_plus_one))
    assert steps == whole
    assert flops(lambda: kernel_attention(q, k, v, elu_plus_one)) > 3 * pieces
