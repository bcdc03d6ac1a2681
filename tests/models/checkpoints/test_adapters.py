"""Adapters that the peft library trained on transformers' models, on the same models as ours."""

from __future__ import annotations

import copy
import json
import warnings
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
)

import headwise as hw
from headwise.errors import ModelError
from headwise.models.checkpoints import Checkpoint
from headwise.models.checkpoints.adapters import load_adapter, places
from headwise.models.checkpoints.loading import FAMILIES
from headwise.models.low_rank import merge, remove_low_rank, unmerge
from tests.parity.loaded_checks import saved
from tests.parity.loaded_models import shaken

VOCAB = 127
IDS = torch.arange(5, 5 + 13)[None]
_WORDS = {"vocab_size": VOCAB, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_TEXT = {
    **_WORDS, "hidden_size": 24, "intermediate_size": 31, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 61,
}  # fmt: skip
_GROUPED = {**_TEXT, "num_key_value_heads": 2, "head_dim": 10}


@dataclass(frozen=True)
class Case:
    kind: str
    sizes: dict[str, Any]
    targets: Any
    auto: Any = AutoModelForCausalLM
    base: Any = None  # what the checkpoint is a model of, where the adapter is of another
    options: dict[str, Any] = field(default_factory=dict)


_GPT2 = {**_WORDS, "n_embd": 24, "n_layer": 2, "n_head": 4, "n_positions": 61}
_NEOX = {**_TEXT, "num_attention_heads": 3, "rotary_pct": 0.5}
_T5 = {**_WORDS, "d_model": 24, "d_kv": 5, "d_ff": 31, "num_layers": 2, "num_heads": 4,
       "decoder_start_token_id": 0}  # fmt: skip
_MARIAN = {
    **_WORDS, "d_model": 24, "encoder_layers": 2, "decoder_layers": 3, "encoder_ffn_dim": 31,
    "decoder_ffn_dim": 29, "encoder_attention_heads": 4, "decoder_attention_heads": 3,
    "max_position_embeddings": 61, "decoder_start_token_id": 0,
}  # fmt: skip
_QKV = ["q_proj", "v_proj", "down_proj"]
CASES = {
    "gpt2": Case("gpt2", _GPT2, ["c_attn", "c_proj", "c_fc"], options={"fan_in_fan_out": True}),
    "gpt2, without a head": Case(
        "gpt2", _GPT2, ["c_attn"], AutoModel, AutoModelForCausalLM, {"fan_in_fan_out": True}
    ),
    "gpt_neox": Case("gpt_neox", _NEOX, ["query_key_value", "dense", "dense_4h_to_h"]),
    "llama": Case("llama", _GROUPED, _QKV, options={"use_rslora": True, "lora_dropout": 0.5}),
    "llama, every linear": Case("llama", _GROUPED, "all-linear"),
    "llama, by names": Case("llama", _GROUPED, r"model\.layers\.1\.(self_attn|mlp)\..*_proj"),
    "llama, without a head": Case("llama", _GROUPED, _QKV, AutoModel, AutoModelForCausalLM),
    "mistral": Case("mistral", {**_GROUPED, "sliding_window": 7}, _QKV),
    "qwen2": Case("qwen2", {**_TEXT, "num_key_value_heads": 2}, _QKV),
    "qwen3": Case("qwen3", _GROUPED, ["k_proj", "o_proj", "gate_proj"]),
    "gemma2": Case("gemma2", _GROUPED, ["q_proj", "o_proj", "up_proj"]),
    "bert": Case("bert", _TEXT, ["query", "value", "dense"], AutoModelForMaskedLM),
    "bert, a bare one": Case("bert", _TEXT, ["key", "dense"], AutoModel),
    "marian": Case("marian", _MARIAN, ["q_proj", "out_proj", "fc1"], AutoModelForSeq2SeqLM),
    "t5": Case("t5", _T5, ["q", "v", "o", "wo"], AutoModelForSeq2SeqLM),
    "t5, gated": Case(
        "t5", {**_T5, "feed_forward_proj": "gated-gelu"}, ["k", "wi_1"], AutoModelForSeq2SeqLM
    ),
}  # fmt: skip
NAMED = ("gpt2", "gpt_neox", "llama", "bert", "t5")


@dataclass(frozen=True)
class Trained:
    """A checkpoint of a base model, and an adapter on it that does something."""

    base: Path
    adapter: Path
    adapted: Any

    def load(self) -> Checkpoint:
        return hw.load(self.base)


def _shaken(model: Any) -> Any:
    """Every parameter random, besides the sinusoids, which are computed and not stored."""
    fixed = {n: p.clone() for n, p in model.named_parameters() if n.endswith("_positions.weight")}
    shaken(model)
    with torch.no_grad():
        for name, table in fixed.items():
            model.get_parameter(name).copy_(table)
    return model


def trained(case: Case, place: Path) -> Trained:
    import peft

    config = AutoConfig.for_model(case.kind, **case.sizes)
    whole: Any = _shaken((case.base or case.auto).from_config(config)).eval()
    base = saved(whole, place / "base")
    model = whole if case.base is None else whole.base_model
    options = {"r": 3, "lora_alpha": 7, "target_modules": case.targets, **case.options}
    with warnings.catch_warnings():
        # The library reads a property of transformers under its old name.
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
        adapted = peft.get_peft_model(copy.deepcopy(model), peft.LoraConfig(**options)).eval()
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if ".lora_" in name:
                parameter.normal_(0.0, 0.3)
    adapted.save_pretrained(place / "adapter")
    return Trained(base, place / "adapter", adapted)


@torch.no_grad()
def theirs(model: Any, kind: str) -> Tensor:
    more = {"decoder_input_ids": IDS[:, :7]} if kind in ("t5", "marian") else {}
    out = model(input_ids=IDS, **more)
    found: Tensor = out.logits if "logits" in out else out.last_hidden_state
    return found


@torch.no_grad()
def ours(model: Any, kind: str, hidden: bool) -> Tensor:
    if kind in ("t5", "marian"):
        found: Tensor = model(IDS, IDS[:, :7])
        return found
    return model.hidden(IDS) if hidden else model(IDS)  # type: ignore[no-any-return]


def error(got: Tensor, want: Tensor) -> float:
    return float((got - want).abs().max() / want.abs().max())


def agree(got: Tensor, want: Tensor) -> bool:
    """fp32 within 2e-5 of the largest: a few roundings for each of a few layers."""
    return error(got, want) <= 2e-5


@pytest.mark.parametrize("name", CASES)
def test_the_logits_are_the_librarys(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    made = trained(case, tmp_path)
    model = made.load().model
    hidden = case.auto is AutoModel
    before, want = ours(model, case.kind, hidden), theirs(made.adapted, case.kind)
    assert error(before, want) > 1e-3
    load_adapter(model, made.adapter)
    assert agree(ours(model, case.kind, hidden), want)
    merge(model)
    assert agree(ours(model, case.kind, hidden), want)
    assert agree(ours(model, case.kind, hidden), theirs(made.adapted.merge_and_unload(), case.kind))
    unmerge(model)
    assert agree(ours(model, case.kind, hidden), want)
    remove_low_rank(model)
    assert torch.equal(ours(model, case.kind, hidden), before)


@pytest.mark.parametrize("name", NAMED)
def test_all_linear_layers_have_a_place(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    config = AutoConfig.for_model(case.kind, **case.sizes)
    model = hw.load(saved(case.auto.from_config(config), tmp_path / "base")).model
    family = next(each for each in FAMILIES if case.kind in each.model_types)
    found = places(model, family, [f"{family.prefix}x"])
    paths = [[p] if isinstance(p, str) else [path for path, _ in p] for p in found.values()]
    blocks = {
        path
        for path, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and ".blocks." in path
    }
    assert sorted(path for each in paths for path in each) == sorted(blocks)


def test_a_wrong_cut_would_be_seen(tmp_path: Path) -> None:
    """GPT-NeoX's rows cut as GPT-2's are: the same shapes, other logits."""
    made = trained(CASES["gpt_neox"], tmp_path)
    model = made.load().model
    file = made.adapter / "adapter_model.safetensors"
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if name.endswith("query_key_value.lora_B.weight"):
            tensors[name] = tensor.unflatten(0, (3, 3, 8)).transpose(0, 1).flatten(0, 2).clone()
    save_file(tensors, file)
    load_adapter(model, made.adapter)
    assert not agree(ours(model, "gpt_neox", False), theirs(made.adapted, "gpt_neox"))


def refused(model: Any, folder: Path) -> str:
    before = {name: p.requires_grad for name, p in model.named_parameters()}
    with pytest.raises(ModelError) as caught:
        load_adapter(model, folder)
    assert before == {name: p.requires_grad for name, p in model.named_parameters()}
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_an_adapter_for_something_else(tmp_path: Path) -> None:
    made = {name: trained(CASES[name], tmp_path / name) for name in NAMED}
    names = {
        "gpt2": "base_model.model.transformer.h.0.attn.c_attn.lora_A.weight",
        "gpt_neox": "base_model.model.gpt_neox.layers.0.attention.dense.lora_A.weight",
        "t5": "base_model.model.decoder.block.0.layer.0.SelfAttention.o.lora_A.weight",
    }
    model = made["llama"].load().model
    for name, first in names.items():
        assert first in refused(model, made[name].adapter)
        assert "it belongs to another model" in refused(model, made[name].adapter)
    assert "self_attn.q_proj" in refused(made["bert"].load().model, made["llama"].adapter)


@pytest.mark.parametrize(("name", "key"), [("gpt2", "n_embd"), ("llama", "hidden_size")])
def test_an_adapter_for_another_size(name: str, key: str, tmp_path: Path) -> None:
    case = CASES[name]
    small = trained(case, tmp_path / "small")
    other = replace(case, sizes={**case.sizes, key: 48})
    large = trained(other, tmp_path / "large")
    assert "belongs to a model of another size" in refused(large.load().model, small.adapter)
    assert "belongs to a model of another size" in refused(small.load().model, large.adapter)


def test_fused_rows_that_are_not_there(tmp_path: Path) -> None:
    """A has the right width and B the wrong height: a cut would leave rows over."""
    made = trained(CASES["gpt2"], tmp_path)
    file = made.adapter / "adapter_model.safetensors"
    tensors = load_file(file)
    name = "base_model.model.transformer.h.0.attn.c_attn.lora_B.weight"
    save_file({**tensors, name: torch.ones(96, 3)}, file)
    assert refused(made.load().model, made.adapter) == (
        "lora_B of transformer.h.0.attn.c_attn has the shape (96, 3) where the model has 72 rows; "
        "the adapter belongs to a model of another size"
    )


def test_a_missing_factor_inside_a_block(tmp_path: Path) -> None:
    made = trained(CASES["t5"], tmp_path)
    file = made.adapter / "adapter_model.safetensors"
    tensors = load_file(file)
    name = "base_model.model.encoder.block.1.layer.0.SelfAttention.v.lora_B.weight"
    tensors.pop(name)
    save_file(tensors, file)
    assert f"lacks {name}" in refused(made.load().model, made.adapter)


def test_a_second_adapter_and_a_folder_without_one(tmp_path: Path) -> None:
    made = trained(CASES["gpt2"], tmp_path)
    model = made.load().model
    assert "has no adapter_config.json" in refused(model, made.base)
    load_adapter(model, made.adapter)
    assert "without an adapter" in refused(model, made.adapter)


def test_a_model_that_was_saved_in_our_own_format(tmp_path: Path) -> None:
    made = trained(CASES["gpt_neox"], tmp_path)
    model = hw.load(hw.save(made.load().model, tmp_path / "own")).model
    assert hw.models.load_adapter(model, made.adapter)
    assert agree(ours(model, "gpt_neox", False), theirs(made.adapted, "gpt_neox"))


def test_a_model_of_no_family_has_its_own_names(tmp_path: Path) -> None:
    model = hw.models.build(hw.models.preset("tiny"))
    path = "decoder.blocks.0.feed_forward.branch.down"
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["down"],
              "layers_to_transform": [0]}  # fmt: skip
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    factors = {"A": torch.ones(2, 96), "B": torch.ones(32, 2)}
    save_file(
        {f"base_model.model.{path}.lora_{side}.weight": t for side, t in factors.items()},
        tmp_path / "adapter_model.safetensors",
    )
    assert load_adapter(model, tmp_path) == (path,)
