"""What is wrong is refused, by name: layouts, weights, families; and every check can fail."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from headwise.circuits import reading
from headwise.circuits.head_weights import LayerWeights, head_weights
from headwise.circuits.layouts import FAMILIES
from headwise.errors import ModelError, NonFiniteError
from headwise.models import build, preset
from tests.circuits.known_heads import shaken, tiny
from tests.observation.own_models import own
from tests.parity import families

# family -> a change of its layout, and what the refusal says
WRONG: dict[str, tuple[str, dict[str, Any], str]] = {
    "heads in another order": ("gpt_neox", {"order": "blocks"}, "V from the weights"),
    "blocks as heads": ("gpt2", {"order": "heads"}, "V from the weights"),
    "keys and values exchanged": (
        "llama",
        {"key": "{attention}.v_proj", "value": "{attention}.k_proj"},
        "V from the weights",
    ),
    "queries and keys exchanged": (
        "bert",
        {"query": "{attention}.key", "key": "{attention}.query"},
        "Q from the weights",
    ),
    "the other layout of pairs": ("gptj", {"rotary": FAMILIES["llama"].rotary}, "Q from"),
    "no rotation": ("phi", {"rotary": None}, "Q from"),
    "a gain that is its distance from one": ("llama", {"kind": "rms+1"}, "norm before attention"),
    "a gain that is not": ("gemma", {"kind": "rms"}, "norm before attention"),
    "the norm of the feed-forward layer": (
        "llama",
        {"norm": "{block}.post_attention_layernorm"},
        "does not give what attention reads",
    ),
    "no norm": ("llama", {"norm": None}, "none is known, but"),
    "the norm of this block": ("bert", {"norm": "{block}.output.LayerNorm"}, "does not give"),
    "no norm after attention": ("gemma2", {"output_norm": None}, "norms what attention writes"),
    "a norm after attention": (
        "llama",
        {"output_norm": "{block}.post_attention_layernorm"},
        "does not norm what attention writes",
    ),
    "norms of queries left out": ("qwen3", {"query_norm": "{attention}.none"}, "Q from"),
    "another output projection": ("bart", {"output": "{attention}.q_proj"}, "O from the"),
    "the norm of the encoder": ("t5", {"source_norm": ("{parent}.layer_norm",)}, "other sequence"),
    "another last norm": (
        "opt",
        {"final": ("{last}.final_layer_norm",)},
        "does not give what the stack ends with",
    ),
    "no last norm": ("llama", {"final": ()}, "norm gives what the stack ends with"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_layout_is_refused(what, monkeypatch):
    name, change, said = WRONG[what]
    model = tiny(name)
    head_weights(model)
    monkeypatch.setitem(reading.FAMILIES, name, replace(FAMILIES[name], **change))
    with pytest.raises(ModelError) as refused:
        head_weights(model)
    message = str(refused.value)
    assert said in message
    assert message.startswith(f"{name}: the weights of ") or "no module" in message
    head_weights(model, validate=False)  # nobody looked


@pytest.mark.parametrize("what", ["heads in another order", "keys and values exchanged"])
def test_a_wrong_layout_is_refused_in_half_precision(what, monkeypatch):
    name, change, said = WRONG[what]
    model = tiny(name).to(torch.bfloat16)
    head_weights(model)
    monkeypatch.setitem(reading.FAMILIES, name, replace(FAMILIES[name], **change))
    with pytest.raises(ModelError, match=said):
        head_weights(model)


def test_tiled_keys_are_refused(monkeypatch):
    """Query head h reads key head h // group; h % kv_heads is another model."""

    def tiled(self: LayerWeights, x: torch.Tensor) -> torch.Tensor:
        return x.repeat(self.heads // x.shape[0], *[1] * (x.dim() - 1))

    models = tiny("llama"), own("grouped")
    monkeypatch.setattr(LayerWeights, "shared", tiled)
    for model in models:
        with pytest.raises(ModelError, match="heads \\(their groups\\)"):
            head_weights(model)


@pytest.mark.parametrize("field", ["scale", "query", "key", "value", "output", "output_bias"])
def test_a_wrong_number_is_refused(field, monkeypatch):
    """One entry of one weight, off by a hundredth of its size."""
    model = tiny("gpt2").float()

    def changed(*given: Any) -> reading.Reading:
        found = read(*given)
        value = getattr(found.weights, field)
        if isinstance(value, float):
            value = value * 1.01
        else:
            value = value.contiguous().clone()
            value.view(-1)[value.abs().argmax()] *= 1.01
        return replace(found, weights=replace(found.weights, **{field: value}))

    read = reading.read_layer
    # By the module: the dotted name leads through hw.circuits, which is a function.
    monkeypatch.setattr(sys.modules[head_weights.__module__], "read_layer", changed)
    with pytest.raises(ModelError, match="do not validate"):
        head_weights(model)


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("layers.1.self_attn.k_proj.weight", "layers.1.self_attn (key)"),
        ("layers.0.self_attn.v_proj.bias", "layers.0.self_attn (value_bias)"),
        ("layers.1.input_layernorm.weight", "layers.1.input_layernorm (gain)"),
        ("norm.weight", "norm (gain)"),
        ("embed_tokens.weight", "the embedding"),
    ],
)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_that_are_none_are_named(name, place, value):
    model = tiny("qwen2")
    with torch.no_grad():
        model.get_parameter(name).view(-1)[5] = value
    with pytest.raises(NonFiniteError) as refused:
        head_weights(model)
    assert str(refused.value).startswith(f"{place} holds {value} at [")


class _Packed(nn.Module):
    """A projection whose weight is kept in whole numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(32, 64, dtype=torch.int8), requires_grad=False)


def test_quantised_weights_are_refused():
    model = tiny("llama")
    model.layers[1].self_attn.k_proj = _Packed()
    with pytest.raises(ModelError, match=r"layers.1.self_attn.k_proj \(_Packed\) holds .*int8"):
        head_weights(model)
    model.layers[1].self_attn.k_proj = nn.Identity()
    with pytest.raises(ModelError, match=r"k_proj \(Identity\) holds no weight"):
        head_weights(model)


def test_missing_modules_are_refused():
    model = tiny("llama")
    del model.layers[0].self_attn.o_proj
    with pytest.raises(ModelError, match=r"has no module layers\.0\.self_attn\.o_proj"):
        head_weights(model)


def test_weights_that_are_not_in_memory_are_refused():
    model = tiny("llama").to("meta")
    with pytest.raises(ModelError, match="not in memory"):
        head_weights(model)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # peft's use of transformers
def test_an_adapter_beside_a_weight_is_refused():
    peft = pytest.importorskip("peft")
    model = tiny("llama").float()
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"]))
    with pytest.raises(ModelError, match=r"q_proj has a peft adapter beside it; model\.merge"):
        head_weights(adapted.get_base_model())
    merged = adapted.merge_and_unload()
    assert head_weights(merged).layers[0].query.shape == (4, 64, 16)


def test_families_that_are_not_known():
    with pytest.raises(ModelError) as refused:
        head_weights(families.build("biogpt"))
    message = str(refused.value)
    assert message.startswith("where biogpt keeps the weights of its heads is not known; allowed: ")
    assert all(name in message for name in FAMILIES)
    with pytest.raises(ModelError, match="no heads in this sense: what its heads give is gated"):
        head_weights(families.build("qwen3_next"))
    with pytest.raises(ModelError, match="computes attention in its own code"):
        head_weights(families.build("bloom"))
    with pytest.raises(ModelError, match="do_layer_norm_before = False is not known"):
        head_weights(families.build("opt", do_layer_norm_before=False))


def test_own_parts_that_no_model_runs():
    part = own("grouped").decoder
    with pytest.raises(ModelError, match=r"cannot be run by itself.*validate=False"):
        head_weights(part)
    assert len(head_weights(part, validate=False).layers) == 3


def test_clipping_is_said_and_checked():
    model = shaken(families.in_double(families.build("olmo", clip_qkv=0.5)))
    w = head_weights(model).layers[0]
    assert not w.fixed
    assert "clipped to ±0.5" in w.why_not


@pytest.mark.parametrize("positions", [8, 5, 1])
def test_a_table_of_few_positions_is_read_within(positions):
    assert head_weights(families.build("gpt2", n_positions=positions)).validated
    short = build(preset("tiny").model_copy(update={"context": positions}))
    assert head_weights(short).validated
