"""Weights next to nothing, made by a bias that grows with distance, are 0; nothing else moves."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from headwise.attention import backward, definition, state
from headwise.attention.masks import Causal
from headwise.attention.state import State, negligible, weights_
from headwise.attention.streaming import attend
from headwise.positions.alibi import alibi, alibi_bias, slopes

# Long enough for whole tiles of 512 keys whose weights under the slope 1/4 are below 2^-149.
LENGTH = 1301


def problem(dtype: torch.dtype = torch.float32) -> tuple[list[Tensor], Tensor]:
    torch.manual_seed(0)
    q, k, v, up = (torch.randn(1, 2, LENGTH, 5, dtype=dtype) for _ in range(4))
    return [x.requires_grad_() for x in (q, k, v)], up


def both(inputs: list[Tensor], up: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Output and gradients of streaming attention with ALiBi, and of the definition in float64."""
    slope, every = slopes(2) * 4, torch.arange(LENGTH)
    out = attend(*inputs, mask=Causal(), bias=alibi_bias(slope))
    got = [out, *torch.autograd.grad(out, inputs, up)]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    bias = alibi(slope.double(), every, every)[None]
    whole = definition.attention(*exact, mask=Causal(), bias=bias)
    return got, [whole, *torch.autograd.grad(whole, exact, up.double())]


def test_output_and_gradients_are_those_of_the_definition() -> None:
    got, want = both(*problem())
    for a, b in zip(got, want, strict=True):
        assert torch.isfinite(a).all()
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5)


def test_tiles_of_negligible_weights_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def spy(logits: Tensor, origin: Tensor, flush: bool) -> Tensor:
        seen.append(logits.shape[1])
        return weights_(logits, origin, flush)

    monkeypatch.setattr(state, "weights_", spy)
    monkeypatch.setattr(backward, "weights_", spy)
    inputs, up = problem()
    counts = []
    for slope in (slopes(2) * 0, slopes(2) * 64):
        seen.clear()
        attend(*inputs, mask=Causal(), bias=alibi_bias(slope)).backward(up)
        counts.append(len(seen))
    assert counts[1] < counts[0]


def test_no_weight_is_subnormal() -> None:
    for dtype in (torch.float32, torch.float64):
        bottom = math.log2(torch.finfo(dtype).tiny)
        x = torch.linspace(bottom - 40, 0, 997, dtype=dtype)[None]
        e = weights_(x.clone(), torch.zeros(1, 1, dtype=dtype), True)
        assert ((e == 0) | (e * 2.0**-26 >= torch.finfo(dtype).tiny)).all()
        assert (e[x > bottom + 26.5] == torch.exp2(x[x > bottom + 26.5])).all()
        plain = weights_(x.clone(), torch.zeros(1, 1, dtype=dtype), False)
        assert ((plain > 0) & (plain < torch.finfo(dtype).tiny)).any()


def test_what_is_not_a_number_is_not_negligible() -> None:
    x = torch.tensor([[-500.0, math.nan, -600.0]])
    assert not negligible(x)
    assert negligible(torch.tensor([[-500.0, -math.inf]]))
    e = weights_(x.clone(), torch.zeros(1, 1), True)
    assert e.isnan().tolist() == [[False, True, False]]
    before = State.empty(1, 1).absorb(torch.zeros(1, 1), torch.ones(1, 1), None, True)
    after = before.absorb(x, torch.ones(3, 1), None, True)
    assert after.finish()[0].isnan().all()


def test_a_far_key_that_is_not_a_number_is_seen() -> None:
    (q, k, v), _ = problem()
    with torch.no_grad():
        k[0, :, 3] = math.nan
    out = attend(q, k, v, mask=Causal(), bias=alibi_bias(slopes(2) * 64))
    assert out[0, :, 3:].isnan().all()
    assert torch.isfinite(out[0, :, :3]).all()


def test_an_infinite_gradient_from_above_is_not_lost() -> None:
    inputs, up = problem()
    up[0, 0, -1, 0] = math.inf
    out = attend(*inputs, mask=Causal(), bias=alibi_bias(slopes(2) * 64))
    (dv,) = torch.autograd.grad(out, inputs[2:], up)
    assert not torch.isfinite(dv[0, 0, -1, 0])
    assert torch.isfinite(dv[0, 1]).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_tiles_of_alibi_are_exact(dtype: torch.dtype) -> None:
    slope = slopes(3, dtype=dtype)
    query, keys = torch.tensor([7, 0, 90_001]), range(80_000, 100_003)
    tile = alibi_bias(slope, offset=11)(0, slice(1, 3), query, keys)
    wide = torch.promote_types(dtype, torch.float32)
    want = alibi(slope.to(wide)[1:], query + 11, torch.arange(keys.start, keys.stop))
    assert torch.equal(tile, want)
