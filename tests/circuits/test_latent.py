"""Latent attention: products through the narrow vectors, up to a positive number of each token."""

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
from headwise.circuits import latent, reading
from headwise.circuits.difference import difference
from headwise.circuits.head_weights import LayerWeights, NormFold, head_weights
from headwise.circuits.layouts import FAMILIES
from headwise.circuits.surgery import truncated
from headwise.errors import ModelError, NonFiniteError, OptionError
from tests.circuits.known_heads import shown, tiny

# name -> family, settings
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "v2": ("deepseek_v2", {}),
    "v2 lite": ("deepseek_v2", {"q_lora_rank": None}),
    "v3": ("deepseek_v3", {}),
    "v3 without latent queries": ("deepseek_v3", {"q_lora_rank": None}),
    "v3.2": ("deepseek_v32", {}),
}
PLAIN, ROTARY, VALUE, NARROW, HEADS = 16, 8, 12, 16, 4
# What transformers' norms and rotations, computed in float32, may move.
SINGLE = 2.0**-18
YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "mscale": 1.0,
    "mscale_all_dim": 0.7, "original_max_position_embeddings": 64,
}  # fmt: skip


def model_of(name: str, auto: Any = None, **more: Any) -> Any:
    """With gains of both signs in the norms of latent vectors."""
    family, settings = MODELS[name]
    model = tiny(family, auto, **settings, **more)
    generator = torch.Generator().manual_seed(13)
    with torch.no_grad():
        for path, module in model.named_modules():
            if path.endswith(("kv_a_layernorm", "q_a_layernorm")):
                module.weight.copy_(torch.randn(module.weight.shape, generator=generator))
    return model


def heads(weight: Tensor, width: int) -> Tensor:
    """A torch weight ``out in`` as ``head in width``."""
    return weight.T.unflatten(1, (HEADS, width)).transpose(0, 1)


def dense(layer: Any) -> tuple[Tensor, Tensor]:
    """W_QK of the entries that do not turn, and W_OV, with every gain: ``head d d``."""
    attention = layer.self_attn
    gain = torch.diag(layer.input_layernorm.weight)
    up = heads(attention.kv_b_proj.weight, PLAIN + VALUE)
    down = gain @ attention.kv_a_proj_with_mqa.weight[:NARROW].T
    source = down @ torch.diag(attention.kv_a_layernorm.weight) @ up
    if getattr(attention, "q_proj", None) is not None:
        query = gain @ heads(attention.q_proj.weight, PLAIN + ROTARY)
    else:
        query = gain @ attention.q_a_proj.weight.T @ torch.diag(attention.q_a_layernorm.weight)
        query = query @ heads(attention.q_b_proj.weight, PLAIN + ROTARY)
    out = attention.o_proj.weight.T.unflatten(0, (HEADS, VALUE))
    return query[..., :PLAIN] @ source[..., :PLAIN].mT, source[..., PLAIN:] @ out


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_the_products_are_those_of_the_modules(name):
    model = model_of(name)
    for layer, w in zip(model.layers, head_weights(model).layers, strict=True):
        qk, ov = dense(layer)
        assert (w.query.shape[2], w.value.shape[2], w.rotary) == (PLAIN, VALUE, None)
        for got, want in ((w.qk(folded=True), qk), (w.ov(folded=True), ov)):
            torch.testing.assert_close(got.dense(), want, rtol=0, atol=1e-12)
        gain = torch.diag(1 / layer.input_layernorm.weight)
        torch.testing.assert_close(w.ov().dense(), gain @ ov, rtol=0, atol=1e-11)
        lite = w.latent.query is None
        assert ("queries and keys come" in w.why_not) != lite
        assert ("number of each key;" in w.why_not) == lite
        assert f"{ROTARY} rotary entries" in w.why_not


@pytest.mark.parametrize("name", MODELS)
def test_what_is_left_is_one_positive_number_of_each_token(name):
    """Values, keys and queries over the products are the same number in every head and entry."""
    model = model_of(name)
    seen = shown(model)
    for w in head_weights(model).layers:
        call, x = seen.calls[w.module].call, seen.calls[w.module].stream[0].double()
        numbers = []
        for weight, got in (
            (w.value, call.v[0]),
            (w.key, call.k[0, ..., :PLAIN]),
            (w.query, call.q[0, ..., :PLAIN]),
        ):
            form = x @ weight
            number = (form * got).sum((0, 2)) / got.double().square().sum((0, 2))
            torch.testing.assert_close(
                form / number[:, None], got.double(), rtol=0, atol=SINGLE * float(got.abs().max())
            )
            assert bool((number > 0).all())
            numbers.append(number)
        torch.testing.assert_close(numbers[0], numbers[1], rtol=SINGLE, atol=0)
        same = torch.ones_like(numbers[2])
        assert torch.allclose(numbers[2], same, rtol=1e-12) == (w.latent.query is None)


@pytest.mark.parametrize("name", MODELS)
def test_a_scaled_rotation_and_half_precision_validate(name):
    w = head_weights(model_of(name, rope_parameters=YARN)).layers[0]
    assert w.latent.rotary.factor > 1
    assert w.scale > (PLAIN + ROTARY) ** -0.5
    for dtype in (torch.float32, torch.bfloat16):
        found = head_weights(model_of(name).to(dtype))
        assert found.validated
        assert found.layers[0].value.dtype == torch.float32


def off(x: Tensor) -> Tensor:
    """The largest entry, a hundredth larger."""
    x = x.contiguous().clone()
    x.view(-1)[x.abs().argmax()] *= 1.01
    return x


def without_gain(norm: NormFold) -> NormFold:
    return replace(norm, gain=norm.gain.sign())


CHANGES: dict[str, tuple[Any, str]] = {
    "query": (lambda w: replace(w, query=off(w.query)), "Q from the weights"),
    "key": (lambda w: replace(w, key=off(w.key)), "K from the weights"),
    "value": (lambda w: replace(w, value=off(w.value)), "V from the weights"),
    "output": (lambda w: replace(w, output=off(w.output)), "O from the weights"),
    "scale": (lambda w: replace(w, scale=1.01 * w.scale), "Q from the weights"),
    "what divides": (
        lambda w: replace(w, latent=replace(w.latent, source=_no_division(w.latent.source))),
        "V from the weights",
    ),
    "the shared key": (
        lambda w: replace(w, latent=replace(w.latent, rotary_key=off(w.latent.rotary_key))),
        "the part of K that turns",
    ),
    "frequencies": (
        lambda w: replace(w, latent=replace(w.latent, rotary=_faster(w.latent.rotary))),
        "the part of Q that turns",
    ),
    "the gain of latent queries": (lambda w: _other_queries(w), "the part of Q that turns"),
}


def _no_division(latent: Any) -> Any:
    return replace(latent, norm=replace(latent.norm, eps=1.0))


def _faster(rotary: Any) -> Any:
    return replace(rotary, inv_freq=1.01 * rotary.inv_freq)


def _other_queries(w: LayerWeights) -> LayerWeights:
    query = w.latent.query
    return replace(w, latent=replace(w.latent, query=replace(query, norm=without_gain(query.norm))))


@pytest.mark.parametrize("what", CHANGES)
def test_every_part_is_checked(what, monkeypatch):
    change, said = CHANGES[what]
    model = model_of("v3")
    head_weights(model)

    def changed(*given: Any) -> reading.Reading:
        found = read(*given)
        return replace(found, weights=change(found.weights))

    read = reading.read_layer
    # By the module: the dotted name leads through hw.circuits, which is a function.
    monkeypatch.setattr(sys.modules[head_weights.__module__], "read_layer", changed)
    with pytest.raises(ModelError, match=said):
        head_weights(model)


@pytest.mark.parametrize(("name", "other"), [("deepseek_v2", "sorted"), ("deepseek_v3", "kept")])
def test_the_order_of_what_turns_is_checked(name, other, monkeypatch):
    layout = replace(FAMILIES[name], latent=other)
    monkeypatch.setitem(reading.FAMILIES, name, layout)
    with pytest.raises(ModelError, match="the part of Q that turns"):
        head_weights(tiny(name))


def test_a_forgotten_gain_is_refused(monkeypatch):
    """The norm of the latent vector without its gain: other keys and values."""
    model = model_of("v2 lite")
    head_weights(model)
    norm = latent._norm
    monkeypatch.setattr(latent, "_norm", lambda *at: without_gain(norm(*at)))
    with pytest.raises(ModelError, match="V from the weights differs"):
        head_weights(model)


def test_what_is_not_known_is_refused():
    with pytest.raises(ModelError, match=r"kv_a_proj_with_mqa has a bias.*without biases"):
        head_weights(tiny("deepseek_v2", attention_bias=True))
    with pytest.raises(ModelError, match="rope_interleave = False is not known"):
        head_weights(tiny("deepseek_v3", rope_interleave=False))
    model = tiny("deepseek_v3")
    with torch.no_grad():
        model.layers[1].self_attn.kv_b_proj.weight[3, 2] = torch.nan
    with pytest.raises(NonFiniteError, match=r"layers\.1\.self_attn\.kv_b_proj holds nan"):
        head_weights(model)


def test_changes_are_refused_and_cuts_are_made_in_the_output():
    model = model_of("v3")
    found = head_weights(model)
    with pytest.raises(ModelError, match="products of two matrices and a norm"):
        difference(found, found)
    refused = pytest.raises(OptionError, match="is no fixed product")
    with refused, truncated(model, 1, circuits=["qk"]):
        pass
    before = [w.ov().dense() for w in found.layers]
    with truncated(model, 2):
        for dense_ov, w in zip(before, head_weights(model).layers, strict=True):
            u, s, v = torch.linalg.svd(dense_ov)
            want = u[..., :2] * s[..., None, :2] @ v[..., :2, :]
            torch.testing.assert_close(w.ov().dense(), want, rtol=0, atol=1e-12 * float(s.max()))


@torch.no_grad()
def test_the_data_set_has_what_is_exact():
    model = model_of("v2", AutoModelForCausalLM)
    found = hw.circuits(model, behaviours=False).dataset
    assert "qk_norm_folded" not in found
    assert "qk_logit_bound" not in found
    assert "rotary_share" not in found
    assert found["qk_form"].values[0].endswith("that is not in it")
    assert found["ov_form"].values[1].startswith("values come out of the norm")
    (qk, ov), (_, first) = dense(model.model.layers[1]), dense(model.model.layers[0])
    values = torch.linalg.svdvals(qk)[:, :PLAIN].numpy()
    held = found["qk_relative_singular_values_folded"].values[1]
    np.testing.assert_allclose(held, values / values[:, :1], atol=1e-9)
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    logits = torch.diag(model.model.norm.weight) @ head.T
    values = torch.linalg.eigvals(embedding @ ov[2] @ logits)
    score = (values.real.sum() / values.abs().sum()).item()
    assert found["copying"].values[1, 2] == pytest.approx(score, abs=1e-6)
    norm = torch.linalg.matrix_norm
    value = norm(first[3] @ qk[1]) / (norm(first[3]) * norm(qk[1]))
    held = float(found["composition_q"].values[1, 1, 0, 3])
    assert held == pytest.approx(value.item(), rel=1e-5)
