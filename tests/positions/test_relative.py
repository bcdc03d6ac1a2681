"""T5's buckets and biases against transformers', whole and tile by tile."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import T5Config
from transformers.models.t5.modeling_t5 import T5Attention

from headwise.attention import attend, attention
from headwise.attention.masks import Causal
from headwise.errors import OptionError, ShapeError
from headwise.positions import t5_bias, t5_bias_function, t5_bucket


@given(
    buckets=st.integers(4, 70),
    stretch=st.integers(1, 300),
    bidirectional=st.booleans(),
)
def test_buckets_are_transformers(buckets, stretch, bidirectional):
    exact = (buckets // 2 if bidirectional else buckets) // 2
    relative = torch.arange(-1500, 1500)
    more = {"max_distance": exact + stretch, "bidirectional": bidirectional}
    theirs = T5Attention._relative_position_bucket(relative, num_buckets=buckets, **more)
    assert torch.equal(t5_bucket(relative, buckets=buckets, **more), theirs)


@pytest.mark.parametrize("bidirectional", [True, False])
def test_published_edges(bidirectional):
    # 16 (or 32) buckets in a direction: one each below 8 (16), then a factor of 16 (8) to 128.
    first = {True: [8, 12, 16, 23, 32, 46, 64, 91], False: [16, 19, 21, 24, 27, 31, 35, 40]}
    bucket = t5_bucket(-torch.arange(200), bidirectional=bidirectional)
    exact = 8 if bidirectional else 16
    for step, edge in enumerate(first[bidirectional]):
        assert bucket[edge] == exact + step
        assert bucket[edge - 1] == exact + step - 1
    ahead = t5_bucket(torch.arange(1, 200), bidirectional=bidirectional)
    assert torch.equal(ahead, bucket[1:] + 16 if bidirectional else torch.zeros_like(ahead))


@pytest.mark.parametrize("decoder", [True, False])
def test_bias_is_transformers(decoder):
    config = T5Config(
        d_model=12,
        d_kv=4,
        num_heads=3,
        relative_attention_num_buckets=12,
        relative_attention_max_distance=19,
        is_decoder=decoder,
    )
    theirs = T5Attention(config, has_relative_attention_bias=True, layer_idx=0)
    table = theirs.relative_attention_bias.weight
    want = theirs.compute_bias(5, 41, past_seen_tokens=31)[0]
    more = {"max_distance": 19, "bidirectional": not decoder}
    whole = t5_bias(table, torch.arange(31, 36), torch.arange(41), **more)
    assert torch.equal(whole, want)
    tile = t5_bias_function(table, 31, **more)(0, slice(1, 3), torch.tensor([0, 4]), range(2, 40))
    assert torch.equal(tile, want[1:3, [0, 4], 2:40])
    assert not tile.requires_grad
    whole.sum().backward()
    assert table.grad is not None
    assert table.grad.sum() == want.numel()


def test_positions_may_differ_in_a_batch():
    table = torch.randn(8, 3, generator=torch.Generator().manual_seed(1))
    positions = torch.tensor([[0, 0, 1, 2], [0, 1, 2, 3]])
    whole = t5_bias(table, positions, positions, max_distance=11)
    assert whole.shape == (2, 3, 4, 4)
    assert torch.equal(whole[0, :, 1:, 1:], whole[1, :, :3, :3])


def test_in_streaming_attention():
    generator = torch.Generator().manual_seed(7)
    q, k, v = torch.randn(3, 2, 3, 29, 5, generator=generator, dtype=torch.float64)
    table = torch.randn(12, 3, generator=generator, dtype=torch.float64)
    positions = torch.arange(29)
    more = {"max_distance": 13, "bidirectional": False}
    whole = t5_bias(table, positions, positions, **more)
    want = attention(q, k, v, mask=Causal(), bias=whole)
    got = attend(q, k, v, mask=Causal(), bias=t5_bias_function(table, **more))
    assert torch.allclose(got, want, rtol=0, atol=1e-13)
    plain = attend(q, k, v, mask=Causal())
    assert (plain - want).abs().max() > 0.1


def test_bad_input_is_refused():
    relative = torch.arange(3)
    with pytest.raises(
        OptionError, match=r"3 buckets up to distance 128; allowed: at least 4 .*; t"
    ):
        t5_bucket(relative, buckets=3)
    with pytest.raises(OptionError, match=r"distance 8; allowed: .* a distance above 8; take"):
        t5_bucket(relative, max_distance=8)
    with pytest.raises(ShapeError, match=r"type torch.float32; allowed: whole numbers; subtract"):
        t5_bucket(relative.float())
    with pytest.raises(
        ShapeError, match=r"shape \(8,\) .*; allowed: .*\(bucket, head\); transpose"
    ):
        t5_bias_function(torch.ones(8))
