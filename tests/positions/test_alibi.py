"""ALiBi slopes and biases against loops, in streaming attention and in the definition."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.models.bloom.modeling_bloom import build_alibi_tensor

from headwise.attention import attend, attention
from headwise.attention.masks import Causal
from headwise.errors import OptionError, ShapeError
from headwise.positions import alibi, alibi_bias, slopes

F64 = torch.float64


# ml-explore/mlx#343, ofirpress/attention_with_linear_biases#17, baichuan-inc/Baichuan2#225,
# NVIDIA/TensorRT-LLM#1611
@pytest.mark.parametrize(
    ("heads", "want"),
    [
        (1, [8]),
        (4, [2, 4, 6, 8]),
        (6, [2, 4, 6, 8, 1, 3]),
        (8, [1, 2, 3, 4, 5, 6, 7, 8]),
        (12, [1, 2, 3, 4, 5, 6, 7, 8, 0.5, 1.5, 2.5, 3.5]),
    ],
)
def test_slopes(heads, want):
    assert slopes(heads, dtype=F64).tolist() == pytest.approx([2.0**-e for e in want], rel=1e-15)


@given(heads=st.integers(1, 130))
def test_slopes_are_those_of_bloom(heads):
    theirs = build_alibi_tensor(torch.ones(1, 2), heads, torch.float32)[:, 0, 1]
    assert torch.allclose(slopes(heads), theirs, rtol=1e-5)


def test_tiles_are_cut_from_the_whole():
    s = slopes(6, dtype=F64)
    whole = alibi(s, torch.arange(3, 10), torch.arange(11))
    for h in range(6):
        for i in range(7):
            for j in range(11):
                assert whole[h, i, j].item() == -s[h].item() * abs(i + 3 - j)
    tile = alibi_bias(s, offset=3)(0, slice(2, 5), torch.tensor([1, 6]), range(4, 9))
    assert torch.equal(tile, whole[2:5, [1, 6], 4:9])


def test_positions_may_differ_in_a_batch():
    positions = torch.tensor([[0, 0, 1, 2], [0, 1, 2, 3]])  # the first sequence is left-padded
    whole = alibi(slopes(5), positions, positions)
    assert whole.shape == (2, 5, 4, 4)
    assert torch.equal(whole[1], alibi(slopes(5), positions[1], positions[1]))
    assert torch.equal(whole[0, :, 1:, 1:], whole[1, :, :3, :3])


def test_six_heads_in_streaming_attention():
    q, k, v = torch.randn(3, 1, 6, 4, 4, generator=torch.Generator().manual_seed(24), dtype=F64)
    want = torch.zeros(6, 4, 4, dtype=F64)
    for h, slope in enumerate((2, 4, 6, 8, 1, 3)):
        for i in range(4):
            logits = [float(q[0, h, i] @ k[0, h, j]) / 2 for j in range(i + 1)]
            raw = [math.exp(s - 2.0**-slope * (i - j)) for j, s in enumerate(logits)]
            want[h, i] = sum(a * v[0, h, j] for j, a in enumerate(raw)) / sum(raw)
    s = slopes(6, dtype=F64)
    got = attend(q, k, v, mask=Causal(), bias=alibi_bias(s))
    assert torch.allclose(got[0], want, rtol=0, atol=1e-13)
    whole = alibi(s, torch.arange(4), torch.arange(4))
    assert torch.allclose(
        attention(q, k, v, mask=Causal(), bias=whole)[0], want, rtol=0, atol=1e-13
    )
    last = attend(q[:, :, 3:], k, v, mask=Causal(), bias=alibi_bias(s, offset=3))
    assert torch.allclose(last[0], want[:, 3:], rtol=0, atol=1e-13)


def test_bad_input_is_refused():
    with pytest.raises(
        OptionError, match=r"ALiBi for 0 heads; allowed: 1 or more; give the number"
    ):
        slopes(0)
    with pytest.raises(ShapeError, match=r"slopes of shape \(1, 3\) .*; allowed: one .*; take"):
        alibi_bias(torch.ones(1, 3))
    with pytest.raises(ShapeError, match=r"type torch.int64; allowed: one floating point number"):
        alibi(torch.ones(3, dtype=torch.long), torch.arange(2), torch.arange(2))
