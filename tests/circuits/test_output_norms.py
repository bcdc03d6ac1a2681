"""A norm of what attention writes: its gain is in W_OV, and what it divides by is one number."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

import headwise as hw
from headwise.circuits import reading
from headwise.circuits.head_weights import head_weights
from headwise.circuits.measures import ov_form
from headwise.circuits.norms import NormFold
from headwise.circuits.surgery import truncated
from headwise.errors import ModelError
from headwise.models import build, decoder_sizes
from tests.circuits.known_heads import shown, tiny
from tests.observation.own_models import shaken

F64 = torch.float64
FAMILIES = ("gemma2", "gemma3_text", "olmo2", "glm4")
OFFSET = ("gemma2", "gemma3_text")  # the gain is 1 + the weight
AFTER = {"glm4": "post_self_attn_layernorm"}


def model_of(name: str, auto: Any = None) -> Any:
    """With gains of both signs after attention."""
    model = tiny(name, auto)
    generator = torch.Generator().manual_seed(13)
    with torch.no_grad():
        for layer in layers_of(model):
            norm = after(layer, name)
            norm.weight.copy_(torch.randn(norm.weight.shape, generator=generator))
    return model


def layers_of(model: Any) -> Any:
    return getattr(model, "model", model).layers


def after(layer: Any, name: str) -> Any:
    return getattr(layer, AFTER.get(name, "post_attention_layernorm"))


def gain(norm: Any, name: str) -> Tensor:
    return norm.weight + (name in OFFSET)


def dense_ov(model: Any, name: str, number: int) -> Tensor:
    """diag(γ before) W_V W_O diag(γ after) of every head, from the modules: ``head d d``."""
    layer = layers_of(model)[number]
    attention = layer.self_attn
    d_head = attention.head_dim
    value = attention.v_proj.weight.T.unflatten(1, (-1, d_head)).transpose(0, 1)
    out = attention.o_proj.weight.T.unflatten(0, (-1, d_head))
    if name != "olmo2":
        value = gain(layer.input_layernorm, name)[:, None] * value
    shared = value.repeat_interleave(len(out) // len(value), 0)
    return shared @ out * gain(after(layer, name), name)


@pytest.fixture(scope="module", params=FAMILIES)
def case(request):
    model = model_of(request.param, AutoModelForCausalLM)
    return request.param, model, hw.circuits(model, behaviours=False).dataset


@torch.no_grad()
def test_the_fold_is_the_dense_product_of_the_modules(case):
    name, model, found = case
    for number, w in enumerate(head_weights(model).layers):
        dense = dense_ov(model, name, number)
        torch.testing.assert_close(w.ov(folded=True).dense(), dense, rtol=0, atol=1e-12)
        values = torch.linalg.svdvals(dense)[:, : w.value.shape[2]]
        held = found["ov_singular_values_folded"].values[number][:, : values.shape[1]]
        np.testing.assert_allclose(held, values.numpy(), rtol=1e-9, atol=1e-9 * float(values.max()))
        share = values / values.sum(-1, keepdim=True)
        rank = (-(share * share.log()).sum(-1)).exp()
        np.testing.assert_allclose(found["ov_effective_rank_folded"][number], rank, rtol=1e-6)
        stable = values.square().sum(-1) / values[:, 0].square()
        np.testing.assert_allclose(found["ov_stable_rank_folded"][number], stable, rtol=1e-9)
        assert "same for all heads of a layer" in found["ov_form"].values[number]


@torch.no_grad()
def test_copying_and_composition_are_those_of_the_folded_product(case):
    name, model, found = case
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    logits = torch.diag(gain(model.model.norm, name)) @ head.T
    first, second = (dense_ov(model, name, number) for number in range(2))
    for number, ov in enumerate((first, second)):
        values = torch.linalg.eigvals(embedding @ ov[3] @ logits)
        score = (values.real.sum() / values.abs().sum()).item()
        assert found["copying"].values[number, 3] == pytest.approx(score, abs=1e-6)
        assert np.isfinite(found["copying_z"].values[number]).all()
    norm = torch.linalg.matrix_norm
    value = norm(first[2] @ second[1]) / (norm(first[2]) * norm(second[1]))
    held = float(found["composition_v"].values[1, 1, 0, 2])
    assert held == pytest.approx(value.item(), rel=1e-5)
    qk = head_weights(model).layers[1].qk(folded=True).dense()[1]
    value = norm(first[2] @ qk) / (norm(first[2]) * norm(qk))
    held = float(found["composition_q"].values[1, 1, 0, 2])
    assert held == pytest.approx(value.item(), rel=1e-5)


def own_branch() -> Any:
    """Norms with centring and bias, before and after attention, and biases everywhere."""
    sizes = {"vocab": 131, "d_model": 24, "layers": 2, "heads": 4, "d_ff": 31, "context": 127}
    options = {"placement": "sandwich", "norm": "layer", "qkv_bias": True, "output_bias": True}
    return shaken(build(decoder_sizes(**sizes, **options), dtype=F64).eval())


@pytest.mark.parametrize("name", [*FAMILIES, "own"])
def test_the_branch_is_the_fold_over_one_number_of_each_token(name):
    """z W_O C diag(γ) + b_O C diag(γ) over the same positive number in every entry, plus β."""
    model = own_branch() if name == "own" else model_of(name)
    seen = shown(model)
    for w in head_weights(model).layers:
        heads = seen.calls[w.module].output.transpose(1, 2)
        path = next(p for p in seen.norms if p.startswith(w.module.rpartition(".")[0]) and (
            w.output_norm.gain.equal(gain(model.get_submodule(p), name))
        ))  # fmt: skip
        branch = seen.outputs[path]
        folded = w.folded()
        written = (heads @ folded.output).sum(1)
        if folded.output_bias is not None:
            written = written + folded.output_bias
        if folded.output_norm.bias is not None:
            branch = branch - folded.output_norm.bias
        number = written.norm(dim=-1, keepdim=True) / branch.norm(dim=-1, keepdim=True)
        # Norms of transformers' models are computed in float32.
        size = float(branch.abs().max())
        torch.testing.assert_close(written / number, branch, rtol=0, atol=2.0**-20 * size)
        assert (folded.output_norm.kind, folded.output_norm.gain) == ("rms", None)
        assert torch.equal(folded.folded().output, folded.output)


def planted(gains: Tensor) -> Any:
    """OLMo 2 with a head that writes what it reads, once the gain after attention is in it."""
    model = model_of("olmo2", AutoModelForCausalLM)
    layer = model.model.layers[1]
    attention, d_head = layer.self_attn, layer.self_attn.head_dim
    with torch.no_grad():
        layer.post_attention_layernorm.weight.copy_(gains)
        read = attention.v_proj.weight[:d_head]  # of query heads 0 and 1
        attention.o_proj.weight[:, :d_head] = read.T / gains[:, None]
        embedding = model.get_input_embeddings().weight
        model.get_output_embeddings().weight.copy_(embedding / model.model.norm.weight)
    return model


def unfolded(self: NormFold, weight: Tensor) -> Tensor:
    return weight


def test_a_planted_head_copies_and_does_not_where_the_gain_is_forgotten(monkeypatch):
    gains = torch.randn(64, generator=torch.Generator().manual_seed(17), dtype=F64)
    gains = gains.sign() * gains.abs().clamp_min(0.1)
    model = planted(gains)
    copying = hw.circuits(model, behaviours=False).dataset["copying"].values[1]
    assert copying[0] == pytest.approx(1.0, abs=1e-9)
    assert abs(copying[2:]).max() < 0.9
    monkeypatch.setattr(NormFold, "fold_output", unfolded)
    w = head_weights(model, validate=False).layers[1]
    assert "passes a norm" in ov_form(w)
    forgotten = w.ov(folded=True)
    table = model.get_input_embeddings().weight.detach()
    values = torch.linalg.eigvals(table @ forgotten[0].dense() @ table.T)
    assert float(values.real.sum() / values.abs().sum()) < 0.9
    with pytest.raises(ModelError, match="norm of what attention writes from the weights differs"):
        head_weights(model)


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("gain", lambda gain: gain * 1.001),
        ("bias", lambda bias: bias * 1.001),
        ("kind", lambda kind: "rms"),
        ("eps", lambda eps: 0.1),
    ],
)
def test_every_part_of_the_norm_is_checked(field, change, monkeypatch):
    model = own_branch()
    head_weights(model)

    def changed(*given: Any) -> reading.Reading:
        found = read(*given)
        norm = found.weights.output_norm
        norm = replace(norm, **{field: change(getattr(norm, field))})
        return replace(found, weights=replace(found.weights, output_norm=norm))

    read = reading.read_layer
    # By the module: the dotted name leads through hw.circuits, which is a function.
    monkeypatch.setattr(sys.modules[head_weights.__module__], "read_layer", changed)
    with pytest.raises(ModelError, match="norm of what attention writes"):
        head_weights(model)


def test_sandwiches_in_half_precision_validate():
    for name in FAMILIES:
        assert head_weights(tiny(name).to(torch.bfloat16)).validated
    assert head_weights(own_branch().float()).validated


@pytest.mark.parametrize("name", ["gemma2", "olmo2"])
def test_a_folded_cut_is_nearest_to_what_stands_before_the_norm_after(name):
    """W_O is cut before that norm: nearest to diag(γ before) W_V W_O, and all ranks change none."""
    model = model_of(name)

    def products() -> list[Tensor]:
        layers = head_weights(model, validate=False).layers
        return [replace(w, output_norm=None).ov(folded=True).dense() for w in layers]

    before = products()
    with truncated(model, 2, folded=True):
        for dense, cut in zip(before, products(), strict=True):
            u, s, v = torch.linalg.svd(dense)
            want = u[..., :2] * s[..., None, :2] @ v[..., :2, :]
            torch.testing.assert_close(cut, want, rtol=0, atol=1e-12 * float(s.max()))
