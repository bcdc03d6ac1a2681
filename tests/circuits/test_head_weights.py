"""Heads read from models: products give the model's own logits and writes, raw and folded."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM

from headwise.circuits.head_weights import head_weights
from headwise.circuits.norms import NormFold
from headwise.circuits.probe import Probe
from tests.circuits.known_heads import (
    DIRECTIONS,
    FIXED,
    NAMES,
    dense_logits,
    shown,
    tiny,
)
from tests.observation.own_models import KINDS, own

# Sums of 64 products and a rotation whose frequencies are float32 in transformers: u32 times the
# position (at most 17 patches or 11 tokens), relative to the largest logit.
ROTATED = 2.0**-24 * 64


def largest(x: Tensor) -> float:
    return float(x.abs().max())


def near(got: Tensor, want: Tensor, relative: float) -> None:
    assert got.shape == want.shape
    assert largest(got - want) <= relative * (1 + largest(want)), largest(got - want)


@pytest.mark.parametrize("name", FIXED)
@pytest.mark.parametrize("folded", [False, True], ids=["raw", "folded"])
def test_the_form_gives_the_models_logits(name, folded):
    model = tiny(name)
    seen, found = shown(model), head_weights(model)
    for w in found.layers:
        call = seen.calls[w.module]
        assert (w.fixed, w.why_not) == (True, "")
        q, k = call.call.q[0].double(), w.shared(call.call.k[0].double())
        x, source = call.stream[0], call.source[0]
        if folded:
            x, source = (
                _before(seen, x, norm) for x, norm in ((x, w.norm), (source, w.source_norm))
            )
        near(dense_logits(w, x, source, folded), call.call.scale * q @ k.mT, ROTATED)


def _before(seen: Probe, x: Tensor, norm: NormFold | None) -> Tensor:
    """What a norm was given, only centred and divided."""
    if norm is None:
        return x
    path = next(p for p in seen.norms if p in seen.outputs and torch.equal(seen.outputs[p][0], x))
    return norm.plain()(seen.inputs[path][0])


@pytest.mark.parametrize("name", NAMES)
def test_what_heads_write(name):
    """x W_V W_O, raw and folded, summed under the model's weights, is what attention writes."""
    model = tiny(name)
    seen, found = shown(model), head_weights(model)
    for w in found.layers:
        call = seen.calls[w.module]
        source = call.source[0]
        values = source @ w.ov().dense()
        content = call.call.v[0] - _row_of(w.value_bias)
        near(values, w.shared(content) @ w.output, 1e-12)
        plain = _before(seen, source, w.source_norm)
        folded = w.folded()
        content = call.call.v[0] - _row_of(folded.value_bias)
        near(plain @ w.ov(folded=True).dense(), w.shared(content) @ folded.output, ROTATED)


@pytest.mark.parametrize("name", DIRECTIONS)
def test_norms_of_queries_leave_the_direction(name):
    """The folded form divided by the model's logits is positive: one number per query and key."""
    model = tiny(name)
    seen, found = shown(model), head_weights(model)
    for w in found.layers:
        assert not w.fixed
        assert "norms of their own" in w.why_not
        call = seen.calls[w.module]
        x, source = (_before(seen, call.stream[0], n) for n in (w.norm, w.source_norm))
        k = w.shared(call.call.k[0].double())
        logits = call.call.scale * call.call.q[0].double() @ k.mT
        ratio = dense_logits(w, x, source, folded=True) / logits
        assert bool((ratio > 0).all())
        # an outer product of positive numbers: its logarithm has no interaction
        log = ratio.log()
        rest = log - log.mean(-1, keepdim=True) - log.mean(-2, keepdim=True)
        small = logits.abs() < 1e-3 * logits.abs().max()  # where dividing loses digits
        spread = rest + log.mean((-2, -1), keepdim=True)
        assert largest(spread[~small]) < 1e-3
        # raw weights (the norms' gains left out) do not have this property
        raw = dense_logits(w, call.stream[0], call.source[0]) / logits
        assert bool((raw < 0).any())


def test_what_the_table_says_of_each_family():
    """Scale, rotation, norms and roles, as the papers of the models give them."""
    found = {name: head_weights(tiny(name)) for name in ("gpt2", "gpt_oss", "cohere2", "gemma2")}
    first, second = found["gpt2"].layers
    assert (first.scale, second.scale) == (0.25, 0.125)  # divided by the layer's number
    assert first.rotary is None
    assert first.norm.kind == "layer"
    yarn = found["gpt_oss"].layers[0].rotary
    assert yarn.factor == pytest.approx(0.1 * math.log(32) + 1)
    sliding, full = (w.rotary for w in found["cohere2"].layers)
    assert sliding.layout == "interleaved" or full is None
    gemma = found["gemma2"]
    assert all(w.output_norm is not None for w in gemma.layers)
    assert not any(w.output_norm for name in ("gpt2", "gpt_oss") for w in found[name].layers)
    model = tiny("gemma2")
    raw = model.layers[0].input_layernorm.weight
    assert torch.equal(gemma.layers[0].norm.gain, 1 + raw)


def test_layers_without_rotation():
    model = tiny("cohere2", layer_types=["sliding_attention", "full_attention"])
    sliding, full = head_weights(model).layers
    assert sliding.rotary is not None
    assert full.rotary is None


def test_frequencies_of_sliding_and_full_layers():
    parameters = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 10000.0},
    }
    layers = head_weights(tiny("gemma3_text", rope_parameters=parameters)).layers
    slow = [float(w.rotary.inv_freq[0]) for w in layers]
    assert slow == [1.0, 0.125]


def test_post_norm_reads_the_norm_before():
    model = tiny("bert")
    first, second = head_weights(model).layers
    assert torch.equal(first.norm.gain, model.embeddings.LayerNorm.weight)
    assert torch.equal(second.norm.gain, model.encoder.layer[0].output.LayerNorm.weight)
    assert second.output_norm is None


def test_cross_attention_has_two_norms():
    model = tiny("t5")
    layers = head_weights(model).layers
    cross = [w for w in layers if w.role == "cross"]
    assert len(cross) == 2
    own = model.decoder.block[1].layer[1].layer_norm.weight
    assert torch.equal(cross[1].norm.gain, own)
    assert torch.equal(cross[1].source_norm.gain, model.encoder.final_layer_norm.weight)
    assert {w.role for w in layers} == {"encoder", "decoder", "cross"}


@pytest.mark.parametrize("kind", KINDS)
def test_own_models(kind):
    model = own(kind)
    seen, found = shown(model), head_weights(model)
    assert len(found.layers) == (9 if kind == "encoder-decoder" else 3)
    for w in found.layers:
        call = seen.calls[w.module]
        k = w.shared(call.call.k[0])
        logits = call.call.scale * call.call.q[0] @ k.mT
        got = dense_logits(w, call.stream[0], call.source[0])
        if w.fixed:
            near(got, logits, 1e-12)
            x, y = (
                _before(seen, x, norm)
                for x, norm in ((call.stream[0], w.norm), (call.source[0], w.source_norm))
            )
            near(dense_logits(w, x, y, folded=True), logits, 1e-12)
        else:
            assert kind in ("qk_norm", "branch")
            assert largest(got - logits) > 1e-3 * largest(logits)
        near(call.source[0] @ w.value + _row_of(w.value_bias), call.call.v[0], 1e-12)
    assert {w.output_norm is not None for w in found.layers} == {kind in ("sandwich", "branch")}


def _row_of(bias: Tensor | None) -> Tensor | int:
    return 0 if bias is None else bias[:, None]


def test_own_and_transformers_agree():
    """What is said of a head does not depend on the library (shared weights: the real model)."""
    ours, theirs = head_weights(own("grouped")).layers[0], head_weights(tiny("llama")).layers[0]
    assert ours.rotary.layout == theirs.rotary.layout == "half"
    assert ours.norm.kind == theirs.norm.kind == "rms"
    assert (ours.role, ours.number, ours.scale) == ("decoder", 0, 1 / math.sqrt(6))
    assert (theirs.role, theirs.number, theirs.scale) == ("decoder", 0, 0.25)


def test_tables_of_tokens():
    causal = head_weights(tiny("llama", AutoModelForCausalLM))
    assert causal.embedding.shape == (127, 64)
    assert causal.unembedding.shape == (64, 127)
    assert not torch.equal(causal.embedding, causal.unembedding.T)
    tied = head_weights(tiny("gemma", AutoModelForCausalLM))
    assert tied.embedding.data_ptr() == tied.unembedding.data_ptr()
    assert head_weights(tiny("llama")).unembedding is None
    for name in ("bert", "roberta", "distilbert", "electra"):
        masked = head_weights(tiny(name, AutoModelForMaskedLM))
        assert masked.unembedding is None
        assert "between the last norm and the table" in masked.notes[0]
    assert head_weights(tiny("vit")).embedding is None


def test_final_norm_and_context():
    model = tiny("llama", AutoModelForCausalLM)
    found = head_weights(model)
    assert torch.equal(found.final_norm.gain, model.model.norm.weight)
    assert (found.context, found.family, found.validated) == (256, "llama", True)
    assert not head_weights(model, validate=False).validated


def test_weights_are_the_models_own():
    model = tiny("llama")
    before = {module: module.training for module in model.train().modules()}
    w = head_weights(model).layers[0]
    attention = model.layers[0].self_attn
    assert w.query.data_ptr() == attention.q_proj.weight.data_ptr()
    assert w.output.data_ptr() == attention.o_proj.weight.data_ptr()
    assert not w.query.requires_grad
    assert before == {module: module.training for module in model.modules()}
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert model.config._attn_implementation != "headwise"


def test_gains_are_not_rounded_to_half_precision():
    model = tiny("gemma").to(torch.bfloat16)
    w = head_weights(model).layers[0]
    raw = model.layers[0].input_layernorm.weight
    assert torch.equal(w.norm.gain, 1 + raw.float())
    assert not torch.equal(w.norm.gain, (1 + raw).float())


def test_they_say_what_they_are():
    found = head_weights(tiny("llama"))
    assert repr(found) == "HeadWeights(llama: 2 attention modules)"
    assert repr(found.layers[1]) == (
        "LayerWeights(layers.1.self_attn: decoder 1, 4 heads over 2, d_head 16)"
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_products_hold_the_weights_themselves(dtype):
    """No copy where heads have keys and values of their own, and none of queries and outputs."""
    w = head_weights(tiny("gpt2").to(dtype)).layers[0]
    qk, ov = w.qk(), w.ov()
    for got, held in ((qk.left, w.query), (qk.right, w.key), (ov.left, w.value)):
        assert (got.data_ptr(), got.dtype) == (held.data_ptr(), dtype)
    assert ov.right.data_ptr() == w.output.data_ptr()
    grouped = head_weights(tiny("llama").to(dtype)).layers[0]
    assert grouped.qk().left.data_ptr() == grouped.query.data_ptr()
    assert grouped.ov().right.data_ptr() == grouped.output.data_ptr()


def test_half_precision_is_read_and_folded_in_float32():
    w = head_weights(tiny("llama").to(torch.bfloat16)).layers[0]
    assert w.query.dtype == torch.bfloat16
    assert w.folded().query.dtype == torch.float32
