"""Layouts and circuits that broke other people's code, with values from plain loops.

lablup/mlxcel#928, vllm-project/vllm#53114, Lightning-AI/litgpt#1013, karpathy/nanoGPT#190,
huggingface/transformers#311 (fused projections); TransformerLensOrg/TransformerLens#1593, #104,
#385 (grouped keys, rotations and biases in circuits).
"""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    GPT2Config,
    GPT2Model,
    GPTNeoXConfig,
    GPTNeoXModel,
)

from headwise.circuits.head_weights import LayerWeights, RotaryUse, head_weights
from headwise.models.checkpoints import load
from headwise.positions import Layout
from tests.circuits.known_heads import dense_logits

F64 = torch.float64


def rand(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=F64)


def test_fused_heads_come_head_by_head():
    """GPT-NeoX: rows q, k, v of head 0, then of head 1."""
    sizes = {"hidden_size": 4, "num_attention_heads": 2, "num_hidden_layers": 1}
    model = GPTNeoXModel(GPTNeoXConfig(**sizes, intermediate_size=3, vocab_size=5, rotary_pct=1.0))
    weight = torch.arange(48.0).view(12, 4) / 48
    with torch.no_grad():
        model.layers[0].attention.query_key_value.weight.copy_(weight)
    w = head_weights(model.eval()).layers[0]
    for head in range(2):
        for part, found in enumerate((w.query, w.key, w.value)):
            for entry in range(2):
                row = weight[(3 * head + part) * 2 + entry]
                assert torch.equal(found[head, :, entry], row)


def test_conv1d_is_in_by_out_even_where_it_is_square():
    model = GPT2Model(GPT2Config(n_embd=4, n_head=2, n_layer=1, vocab_size=5, n_positions=11))
    fused, square = rand(4, 12, seed=60).float(), rand(4, 4, seed=61).float()
    with torch.no_grad():
        model.h[0].attn.c_attn.weight.copy_(fused)
        model.h[0].attn.c_proj.weight.copy_(square)
    w = head_weights(model.eval()).layers[0]
    x = rand(3, 4, seed=62).float()
    torch.testing.assert_close(torch.cat(tuple(x @ w.query), -1), x @ fused[:, :4])
    torch.testing.assert_close(torch.cat(tuple(x @ w.value), -1), x @ fused[:, 8:])
    torch.testing.assert_close((x.view(3, 2, 2).movedim(1, 0) @ w.output).sum(0), x @ square)


def turned(x: list[float], position: int) -> list[float]:
    """Four entries, pairs (0, 2) and (1, 3), by hand."""
    out = list(x)
    for pair, theta in enumerate((1.0, 0.01)):
        cos, sin = math.cos(position * theta), math.sin(position * theta)
        a, b = x[pair], x[pair + 2]
        out[pair], out[pair + 2] = a * cos - b * sin, a * sin + b * cos
    return out


def test_circuits_of_grouped_heads_under_rotation():
    """Loops over heads, queries and keys give the scores and writes of the two products."""
    names = ("query", "key", "value", "output")
    shapes = (4, 6, 4), (2, 6, 4), (2, 6, 4), (4, 4, 6)
    weights = {n: rand(*s, seed=70 + i) for i, (n, s) in enumerate(zip(names, shapes, strict=True))}
    biases = {f"{n}_bias": rand(h, 4, seed=74 + i) for i, (n, h) in
              enumerate((("query", 4), ("key", 2), ("value", 2)))}  # fmt: skip
    rotary = RotaryUse(torch.tensor([1.0, 0.01], dtype=F64), 4, Layout.HALF)
    w = LayerWeights(
        module="0", role="decoder", number=0, scale=0.5, rotary=rotary,
        output_bias=rand(6, seed=77), **weights, **biases,
    )  # fmt: skip
    x = rand(3, 6, seed=78)
    scores, writes = torch.zeros(4, 3, 3, dtype=F64), torch.zeros(4, 3, 6, dtype=F64)
    for h in range(4):
        g = h // 2
        for i in range(3):
            q = turned((x[i] @ w.query[h] + w.query_bias[h]).tolist(), i)
            for j in range(3):
                k = turned((x[j] @ w.key[g] + w.key_bias[g]).tolist(), j)
                scores[h, i, j] = 0.5 * sum(a * b for a, b in zip(q, k, strict=True))
            total = sum(math.exp(scores[h, i, j]) for j in range(i + 1))
            for j in range(i + 1):
                moved = (x[j] @ w.value[g] + w.value_bias[g]) @ w.output[h]
                writes[h, i] += math.exp(scores[h, i, j]) / total * moved
    got = dense_logits(w, x, x)
    torch.testing.assert_close(got, scores, rtol=1e-12, atol=1e-12)
    later = torch.ones(3, 3, dtype=torch.bool).triu(1)
    attention = got.masked_fill(later, -math.inf).softmax(-1)
    fixed = (w.shared(w.value_bias)[:, None] @ w.output)[:, 0]  # rows of weights sum to 1
    heads = attention @ (x @ w.ov().dense()) + fixed[:, None]
    torch.testing.assert_close(heads, writes, rtol=1e-12, atol=1e-12)


@pytest.mark.real_model
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_real_models():
    """The decoder by both libraries has the same heads; the encoder validates."""
    folder = Path(os.environ["HEADWISE_MODELS"])
    file = next((folder / "smollm2").glob("*.gguf"))
    ours = head_weights(load(file).model)
    theirs = head_weights(
        AutoModelForCausalLM.from_pretrained(
            folder / "smollm2", gguf_file=file.name, dtype=torch.float32
        ).eval()
    )
    assert len(ours.layers) == len(theirs.layers) == 30
    for a, b in zip(ours.layers, theirs.layers, strict=True):
        for name in ("query", "key", "value", "output"):
            assert torch.equal(getattr(a, name), getattr(b, name))
        assert torch.equal(a.norm.gain, b.norm.gain)
        assert a.scale == b.scale == 0.125
        assert a.rotary.layout == b.rotary.layout
        torch.testing.assert_close(a.rotary.inv_freq, b.rotary.inv_freq, rtol=2.0**-22, atol=0)
    assert torch.equal(ours.unembedding, theirs.unembedding)
    encoder = head_weights(AutoModel.from_pretrained(folder / "minilm"))
    assert {(w.role, w.heads) for w in encoder.layers} == {("encoder", 12)}
