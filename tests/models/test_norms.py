"""The norms: definitions against numbers by hand, modules against the definitions."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from headwise.models import AcrossHeads, LayerNorm, OffsetRMSNorm, RMSNorm, layer_norm, rms_norm
from tests.attention.problems import rand
from tests.tolerance import ROUNDING, UNIT, assert_close, finite_max

WIDTH = 7
F64 = torch.float64


def by_hand(row: list[float], gain: list[float], bias: list[float], eps: float) -> list[float]:
    mean = sum(row) / len(row)
    variance = sum((x - mean) ** 2 for x in row) / len(row)
    root = math.sqrt(variance + eps)
    return [(x - mean) / root * g + b for x, g, b in zip(row, gain, bias, strict=True)]


def rms_by_hand(row: list[float], gain: list[float], eps: float) -> list[float]:
    root = math.sqrt(sum(x * x for x in row) / len(row) + eps)
    return [x / root * g for x, g in zip(row, gain, strict=True)]


def bound(x: Tensor, gain: float, dtype: torch.dtype) -> float:
    """A few roundings and a sum of ``width`` terms, relative to the entries' size after the norm.

    A normed entry is at most √width; subtracting the mean errs by u times the largest entry, which
    the division by the deviation brings to the same scale.
    """
    spread = float((x - x.mean(-1, keepdim=True)).std(-1, unbiased=False).min())
    size = max(1.0, finite_max(x) / spread)
    return 4 * WIDTH * UNIT[dtype] * math.sqrt(WIDTH) * gain * size


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("offset", [0.0, 30.0])
@pytest.mark.parametrize("eps", [1e-5, 0.5])
def test_layer_norm(dtype: torch.dtype, offset: float, eps: float) -> None:
    x = rand(3, 2, WIDTH, dtype=dtype) + offset
    norm = LayerNorm(WIDTH, eps=eps).to(dtype)
    with torch.no_grad():
        norm.weight.copy_(rand(WIDTH, seed=1))
        norm.bias.copy_(rand(WIDTH, seed=2))  # type: ignore[union-attr]
    gain, bias = norm.weight.tolist(), norm.bias.tolist()  # type: ignore[union-attr]
    rows = [by_hand(row, gain, bias, eps) for row in x.double().view(-1, WIDTH).tolist()]
    want = torch.tensor(rows, dtype=F64).view(x.shape)
    limit = bound(x, finite_max(norm.weight) + finite_max(norm.bias), dtype)  # type: ignore[arg-type]
    assert_close(norm(x), want, limit)
    assert_close(layer_norm(x, norm.weight, norm.bias, eps=eps), want, limit)
    centred = x.double() - x.double().mean(-1, keepdim=True)
    bessel = centred / (x.double().var(-1, keepdim=True) + eps).sqrt()
    assert finite_max(bessel * norm.weight + norm.bias - want) > 10 * limit
    if eps == 0.5:  # an epsilon outside the root is another function
        outside = centred / (x.double().std(-1, unbiased=False, keepdim=True) + eps)
        assert finite_max(outside * norm.weight + norm.bias - want) > 10 * limit


@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_rms_norms(dtype: torch.dtype) -> None:
    x = rand(3, 2, WIDTH, dtype=dtype)
    norm, offset = RMSNorm(WIDTH, eps=0.1).to(dtype), OffsetRMSNorm(WIDTH, eps=0.1).to(dtype)
    with torch.no_grad():
        norm.weight.copy_(rand(WIDTH, seed=1))
        offset.weight.copy_(norm.weight - 1)
    rows = [rms_by_hand(row, norm.weight.tolist(), 0.1) for row in x.view(-1, WIDTH).tolist()]
    want = torch.tensor(rows, dtype=F64).view(x.shape)
    limit = 4 * WIDTH * UNIT[dtype] * math.sqrt(WIDTH) * (1 + finite_max(norm.weight))
    assert_close(norm(x), want, limit)
    assert_close(rms_norm(x, norm.weight, eps=0.1), want, limit)
    assert_close(offset(x), want, limit)
    assert finite_max(rms_norm(x, norm.weight, eps=0.0) - want) > 1e3 * limit
    assert finite_max(rms_norm(x, norm.weight + 1, eps=0.1) - want) > 1e3 * limit


def test_a_layer_norm_without_a_bias_has_none() -> None:
    norm = LayerNorm(WIDTH, bias=False)
    assert [name for name, _ in norm.named_parameters()] == ["weight"]
    x = rand(2, WIDTH)
    assert torch.equal(norm(x), LayerNorm(WIDTH)(x))


def test_fresh_norms_have_the_gain_of_the_identity() -> None:
    x = torch.tensor([[3.0, -3.0, 3.0]])
    for norm in (RMSNorm(3, eps=0.0), OffsetRMSNorm(3, eps=0.0)):
        assert norm(x).tolist() == [[1.0, -1.0, 1.0]]
    assert OffsetRMSNorm(3).weight.tolist() == [0.0] * 3
    assert RMSNorm(3).weight.tolist() == [1.0] * 3
    assert "3, eps=1e-06" in repr(OffsetRMSNorm(3))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", [LayerNorm, RMSNorm, OffsetRMSNorm])
def test_half_precision_is_normed_in_float32(kind: type[nn.Module], dtype: torch.dtype) -> None:
    """Squares of 1000 overflow float16; at most two roundings at the end (plain, then gain)."""
    x = (1000 * torch.tensor([1.0, -1.0, 1, -1, 1, -1, 2])).to(dtype)
    norm = kind(WIDTH).to(dtype)
    with torch.no_grad():
        norm.weight.add_(0.25 * rand(WIDTH, seed=3))  # type: ignore[operator,union-attr]
    want = kind(WIDTH).double()
    want.load_state_dict(norm.state_dict())
    exact = want(x.double())
    got = norm(x)
    assert got.dtype == dtype
    assert_close(got, exact, 0.0, 3 * ROUNDING[dtype])
    assert finite_max(exact * (1 - 4 * ROUNDING[dtype]) - got) > 3 * ROUNDING[dtype]


def test_gradients_are_those_of_the_definitions() -> None:
    x = rand(3, WIDTH, dtype=F64).requires_grad_()
    up = rand(3, WIDTH, seed=4, dtype=F64)
    limit = 16 * WIDTH**2 * UNIT[F64] * (1 + finite_max(up)) * 16
    for norm, plain in (
        (LayerNorm(WIDTH).double(), lambda n: layer_norm(x, n.weight, n.bias)),
        (RMSNorm(WIDTH).double(), lambda n: rms_norm(x, n.weight)),
        (OffsetRMSNorm(WIDTH).double(), lambda n: rms_norm(x, 1 + n.weight)),
    ):
        leaves = (x, *norm.parameters())
        got = torch.autograd.grad((norm(x) * up).sum(), leaves)
        want = torch.autograd.grad((plain(norm) * up).sum(), leaves)
        for a, b in zip(got, want, strict=True):
            assert_close(a, b, limit)


def test_across_heads_norms_all_heads_of_a_position_together() -> None:
    x = rand(2, 3, 5, 7, dtype=F64)
    norm = RMSNorm(21).double()
    with torch.no_grad():
        norm.weight.copy_(rand(21, seed=1))
    got = AcrossHeads(norm)(x)
    for b in range(2):
        for p in range(5):
            row = [float(t) for h in range(3) for t in x[b, h, p]]
            want = torch.tensor(rms_by_hand(row, norm.weight.tolist(), 1e-6), dtype=F64)
            assert_close(got[b, :, p].reshape(-1), want, 0.0, 4 * 21 * UNIT[F64])
    alone = RMSNorm(7).double()(x)
    assert finite_max(got - alone) > 0.1


def test_a_row_of_zeros_stays_zero() -> None:
    zeros = torch.zeros(2, WIDTH)
    for norm in (LayerNorm(WIDTH), RMSNorm(WIDTH), OffsetRMSNorm(WIDTH)):
        assert torch.equal(norm(zeros), zeros)
