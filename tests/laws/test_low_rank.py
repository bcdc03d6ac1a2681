"""Law: merging an adapter and unmerging it is the identity, bit for bit, in every dtype."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from headwise.models.low_rank import LowRankLinear

IN, OUT = 5, 3
BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}
SIZES = st.sampled_from([1e-30, 1e-3, 1.0, 3.0, 1e4])


@st.composite
def layers(draw: st.DrawFn) -> LowRankLinear:
    """Weights and changes of every size, from far below to far above each other."""
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 9999)))
    base = nn.Linear(IN, OUT, dtype=dtype)
    layer = LowRankLinear(
        base, rank=draw(st.integers(1, 4)), alpha=draw(SIZES), rslora=draw(st.booleans())
    )
    with torch.no_grad():
        size = draw(SIZES)
        base.weight.copy_(size * torch.randn(OUT, IN, generator=generator))
        layer.B.copy_(draw(SIZES) * torch.randn(layer.B.shape, generator=generator))
    return layer


def bits(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().view(BITS[tensor.dtype])


@given(layers())
def test_merge_then_unmerge_is_the_identity(layer: LowRankLinear) -> None:
    parameter, before = layer.base.weight, bits(layer.base.weight)
    x = torch.ones(2, IN, dtype=parameter.dtype)
    y = layer(x)
    for _ in range(3):
        layer.merge()
        assert layer.base.weight.dtype == parameter.dtype
        assert torch.equal(bits(parameter), before)  # the stored weight is never written to
        layer.unmerge()
        assert layer.base.weight is parameter
        assert torch.equal(bits(layer.base.weight), before)
    assert torch.equal(layer(x), y)


@pytest.mark.parametrize("dtype", list(BITS))
def test_taking_the_change_away_again_is_not_the_identity(dtype: torch.dtype) -> None:
    """The usual way, W' − s·B·A, which the law has to be able to tell from the exact one."""
    generator = torch.Generator().manual_seed(0)
    base = nn.Linear(IN, OUT, dtype=dtype)
    layer = LowRankLinear(base, rank=2, alpha=3.0, generator=generator)
    nn.init.normal_(layer.B, generator=generator)
    before = bits(base.weight)
    change = layer.scale * (layer.B @ layer.A)
    layer.merge()
    again = (base.weight.float() - change).to(dtype)
    assert not torch.equal(bits(again), before)
