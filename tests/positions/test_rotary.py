"""Rotation: relativity, layouts, far positions, partial rotary, and what breaks them."""

from __future__ import annotations

import cmath
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from headwise.errors import OptionError, ShapeError
from headwise.positions import (
    Layout,
    Rotation,
    apply_rotation,
    frequencies,
    half_order,
    rotate,
    rotation,
    spread,
    turn,
)

F64 = torch.float64
LAYOUTS = list(Layout)


def rand(*shape: int, seed: int, dtype: torch.dtype = F64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64).to(dtype)


def by_complex_numbers(x: Tensor, positions: list[int], layout: Layout) -> Tensor:
    """Every pair as one complex number, times e^(i p θ)."""
    out = x.clone()
    w = x.shape[-1]
    for row, p in enumerate(positions):
        for i in range(w // 2):
            a, b = (i, i + w // 2) if layout is Layout.HALF else (2 * i, 2 * i + 1)
            z = complex(x[row, a], x[row, b]) * cmath.exp(1j * p * 10000.0 ** (-2 * i / w))
            out[row, a], out[row, b] = z.real, z.imag
    return out


# huggingface/transformers#25199, Dao-AILab/flash-attention#288, huggingface/transformers#39687,
# keras-team/keras-hub#1416, rasbt/LLMs-from-scratch#750
def test_layouts():
    q, k = rand(4, 6, seed=39), rand(4, 6, seed=40)
    positions = [0, 1, 5, 9]
    ids, inv_freq = torch.tensor(positions), frequencies(6).inv_freq
    scores = {}
    for layout in LAYOUTS:
        turned = [rotate(x, ids, inv_freq, layout=layout) for x in (q, k)]
        for x, got in zip((q, k), turned, strict=True):
            want = by_complex_numbers(x, positions, layout)
            assert torch.allclose(got, want, rtol=0, atol=1e-14)
        scores[layout] = turned[0] @ turned[1].T
    order = half_order(6)
    assert order.tolist() == [0, 2, 4, 1, 3, 5]
    moved = [rotate(x[:, order], ids, inv_freq) for x in (q, k)]
    assert torch.allclose(moved[0] @ moved[1].T, scores[Layout.INTERLEAVED], rtol=0, atol=1e-13)
    assert (scores[Layout.HALF] - scores[Layout.INTERLEAVED]).abs().max() > 0.1


# huggingface/transformers#25681, huggingface/transformers#29285, huggingface/candle#3520
@pytest.mark.parametrize("precision", [torch.float64, torch.float32])
def test_far_positions(precision):
    positions = [0, 257, 4095, 15962, 131071]
    inv_freq = frequencies(8).inv_freq
    turns = rotation(torch.tensor(positions), inv_freq.to(precision))
    for row, p in enumerate(positions):
        for i in range(4):
            angle = p * 10000.0 ** (-2 * i / 8)
            # Rounding of θ and of the angle, then of the result.
            u = 2.0**-53 if precision == F64 else 2.0**-24
            bound = 2 * angle * u + 2.0**-24
            assert abs(turns.cos[row, i].item() - math.cos(angle)) <= bound
            assert abs(turns.sin[row, i].item() - math.sin(angle)) <= bound
    assert turns.cos[3, 0] == pytest.approx(-0.9080, abs=1e-4)  # bfloat16 reads 15936: -0.2680


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_half_precision_vectors_are_rounded_once(dtype, layout):
    x = rand(2, 3, 5, 8, seed=1, dtype=dtype)
    ids = torch.tensor([0, 257, 4095, 15962, 131071])
    inv_freq = frequencies(8).inv_freq
    got = rotate(x, ids, inv_freq, layout=layout)
    assert got.dtype == dtype
    exact = rotate(x.double(), ids, inv_freq, layout=layout)
    half_unit = torch.finfo(dtype).eps / 2
    pair = 2 * x.double().abs().max()
    assert ((got.double() - exact).abs() <= half_unit * exact.abs() + 8 * 2.0**-24 * pair).all()


@given(
    p=st.integers(-100_000, 100_000),
    lag=st.integers(-5000, 5000),
    shift=st.integers(-50_000, 50_000),
    pairs=st.integers(1, 9),
    layout=st.sampled_from(LAYOUTS),
    seed=st.integers(0, 99),
)
def test_logits_depend_on_the_difference_of_positions(p, lag, shift, pairs, layout, seed):
    q, k = rand(2, 1, 2 * pairs, seed=seed)
    inv_freq = frequencies(2 * pairs).inv_freq

    def turned(x: Tensor, position: int) -> Tensor:
        return rotate(x, torch.tensor([position]), inv_freq, layout=layout)

    here = (turned(q, p) * turned(k, p + lag)).sum()
    bound = 1e-10 * q.norm() * k.norm()
    assert (here - (turned(q, p + shift) * turned(k, p + lag + shift)).sum()).abs() <= bound
    assert (here - (q * turned(k, lag)).sum()).abs() <= bound
    assert (turned(q, p).norm() - q.norm()).abs() <= 1e-13 * q.norm()


def test_mixed_layouts_and_stretched_positions_break_relativity():
    q, k = rand(2, 1, 8, seed=3)
    inv_freq = frequencies(8).inv_freq

    def logit(p: int, r: int, layout: Layout = Layout.HALF) -> float:
        left = rotate(q, torch.tensor([p]), inv_freq, layout=layout)
        return (left * rotate(k, torch.tensor([r]), inv_freq)).sum().item()

    assert logit(0, 3) == pytest.approx(logit(50, 53), abs=1e-12)
    mixed = Layout.INTERLEAVED
    assert abs(logit(1, 4, mixed) - logit(51, 54, mixed)) > 0.1
    assert abs(logit(0, 3) - logit(0, 6)) > 0.1


@given(width=st.sampled_from([4, 6, 10, 14]), seed=st.integers(0, 99))
def test_layouts_are_equal_after_permutation(width, seed):
    x = rand(2, 3, 5, width, seed=seed)
    ids = torch.tensor([3, 0, 100, 7, 7])
    inv_freq = frequencies(width).inv_freq
    order = half_order(width)
    interleaved = rotate(x, ids, inv_freq, layout=Layout.INTERLEAVED)
    assert torch.equal(rotate(x[..., order], ids, inv_freq), interleaved[..., order])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_partial_rotary_leaves_the_rest(layout):
    x = rand(2, 3, 5, 11, seed=5)
    ids, inv_freq = torch.arange(5), frequencies(6).inv_freq
    got = rotate(x, ids, inv_freq, layout=layout, factor=1.5)
    assert torch.equal(got[..., 6:], x[..., 6:])
    want = 1.5 * rotate(x[..., :6].contiguous(), ids, inv_freq, layout=layout)
    assert torch.allclose(got[..., :6], want, rtol=0, atol=1e-14)


def test_position_ids_of_a_batch():
    x = rand(2, 3, 5, 6, seed=6)
    ids = torch.tensor([[0, 0, 0, 1, 2], [4, 5, 6, 7, 8]])
    inv_freq = frequencies(6).inv_freq
    got = rotate(x, ids, inv_freq)
    for b in range(2):
        assert torch.equal(got[b], rotate(x[b], ids[b], inv_freq))
        assert torch.equal(got[b, 0], rotate(x[:, 0], ids, inv_freq)[b])
    assert torch.equal(rotate(x, ids[1:], inv_freq), rotate(x, ids[1], inv_freq))


def test_as_transformers_rotates():
    q, k = rand(2, 2, 3, 5, 8, seed=7, dtype=torch.float32)
    ids = torch.tensor([[0, 1, 2, 3, 4], [9, 10, 11, 12, 13]])
    turns = rotation(ids, frequencies(8).inv_freq, factor=1.2)
    doubled = [torch.cat((part, part), -1) for part in turns]
    theirs = apply_rotary_pos_emb(q, k, *doubled)
    for x, want in zip((q, k), theirs, strict=True):
        assert torch.allclose(apply_rotation(x, turns), want, rtol=0, atol=1e-6)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients(layout):
    x = rand(1, 2, 3, 6, seed=8).requires_grad_()
    inv_freq = frequencies(4).inv_freq
    assert torch.autograd.gradcheck(
        lambda x: rotate(x, torch.arange(3), inv_freq, layout=layout, factor=1.3), (x,)
    )


def test_bad_input_is_refused():
    x, ids, inv_freq = torch.zeros(2, 3, 5, 6), torch.arange(5), frequencies(6).inv_freq
    for half in (torch.bfloat16, torch.float16):
        with pytest.raises(
            OptionError, match=rf"frequencies of type {half}, .*; allowed: .*; keep"
        ):
            rotate(x, ids, inv_freq.to(half))
        with pytest.raises(
            OptionError, match=rf"ids of type {half}, .*; allowed: float64 or .*; k"
        ):
            rotate(x, ids.to(half), inv_freq)
    with pytest.raises(ShapeError, match=r"\(4, 3\) for .* \(2, 3, 5, 6\); allowed: .*; check"):
        rotate(x, torch.arange(4), inv_freq)
    with pytest.raises(
        ShapeError, match=r"\(5, 4\) for vectors .*; allowed: one position .*; check"
    ):
        rotate(x, ids, frequencies(8).inv_freq)
    with pytest.raises(ShapeError, match=r"\(3, 5, 3\) for vectors .*; allowed: .*; check"):
        rotate(x, ids.expand(3, 5), inv_freq)
    with pytest.raises(ShapeError, match=r"position ids of shape \(\); allowed: .*; take"):
        rotate(x, torch.tensor(3), inv_freq)
    with pytest.raises(OptionError, match=r"is 'pairs'; allowed: 'half' or 'interleaved'; take"):
        rotate(x, ids, inv_freq, layout="pairs")
    with pytest.raises(OptionError, match="layout of pairs is None"):
        apply_rotation(x, Rotation(torch.ones(5, 3), torch.ones(5, 3)), layout=None)  # type: ignore[arg-type]


@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("width", [6, 10])
def test_turning_by_a_spread_rotation_is_applying_it(layout, batched, width):
    x = torch.randn(2, 3, 5, 10, dtype=torch.float64, requires_grad=True)
    ids = torch.randint(0, 99, (2, 5) if batched else (5,))
    turns = rotation(ids, frequencies(width).inv_freq, factor=1.3, dtype=torch.float64)
    want = apply_rotation(x, turns, layout=layout)
    got = turn(x, spread(turns, layout=layout))
    bound = 4 * 2.0**-52 * 1.3 * float(x.detach().abs().max())
    assert float((got - want).detach().abs().max()) <= bound
    pull = torch.randn_like(x)
    (one,) = torch.autograd.grad(want, x, pull)
    (other,) = torch.autograd.grad(got, x, pull)
    assert float((one - other).abs().max()) <= 4 * 2.0**-52 * 1.3 * float(pull.abs().max())
    half = turn(x.detach().bfloat16(), spread(rotation(ids, frequencies(width).inv_freq)))
    assert half.dtype == torch.bfloat16
