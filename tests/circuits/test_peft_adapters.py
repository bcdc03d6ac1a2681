"""Adapters as the peft library saves them: the changes of heads are those of its own merge."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from headwise.circuits.dataset import circuits
from headwise.circuits.difference import LayerChange, adapter_difference
from headwise.models.checkpoints import load
from tests.circuits.known_heads import shaken, tiny
from tests.parity import families

UNIT = 2.0**-53
# Sums of at most 64 products of float64 numbers and their differences, relative to the largest.
ROUNDING = 16 * 64 * UNIT

LLAMA = {"r": 3, "lora_alpha": 7, "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]}
GPT2 = {"r": 3, "lora_alpha": 7, "target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}
LATE = r".*\.1\.(self_attn|attn)\.(q_proj|c_attn)"
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, plain": ("llama", LLAMA),
    "llama, rslora": ("llama", {**LLAMA, "use_rslora": True}),
    "llama, alphas": ("llama", {**LLAMA, "alpha_pattern": {"q_proj": 2, "layers.1.*o_proj": 11}}),
    "llama, ranks": ("llama", {**LLAMA, "rank_pattern": {"k_proj": 1, r"layers\.0\..*v_proj": 5}}),
    "llama, q and v": ("llama", {**LLAMA, "target_modules": ["q_proj", "v_proj"]}),
    "llama, one matrix": ("llama", {**LLAMA, "target_modules": LATE}),
    "gpt2, plain": ("gpt2", GPT2),
    "gpt2, rslora": ("gpt2", {**GPT2, "use_rslora": True}),
    "gpt2, alphas": ("gpt2", {**GPT2, "alpha_pattern": {"h.0.attn.c_attn": 2}}),
    "gpt2, q, k and v": ("gpt2", {**GPT2, "target_modules": ["c_attn"]}),
    "gpt2, one matrix": ("gpt2", {**GPT2, "target_modules": LATE}),
}


def tuned(base: Any, folder: Path, options: dict[str, Any], seed: int = 1) -> Any:
    """Save an adapter that does something; the model with it merged by the library."""
    with warnings.catch_warnings():
        # The library reads a property of transformers under its old name.
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
        adapted = peft.get_peft_model(copy.deepcopy(base), peft.LoraConfig(**options))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if ".lora_" in name:  # drawn in float32: B of a new adapter is 0
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    adapted.save_pretrained(folder)
    return adapted.merge_and_unload()


def heads_of(model: Any) -> Iterator[dict[str, Tensor]]:
    """W_QK and W_OV of every head, dense, by this file's own reading of the two families."""
    config = model.config
    heads = config.num_attention_heads
    body = getattr(model, "model", getattr(model, "transformer", model))
    for block in getattr(body, "layers", getattr(body, "h", None)):
        if config.model_type == "gpt2":
            query, key, value = block.attn.c_attn.weight.detach().chunk(3, dim=1)
            output = block.attn.c_proj.weight.detach()
        else:
            at = block.self_attn
            query, key, value, output = (
                part.weight.detach().T for part in (at.q_proj, at.k_proj, at.v_proj, at.o_proj)
            )
        width = query.shape[1] // heads
        group = query.shape[1] // key.shape[1]
        found: dict[str, list[Tensor]] = {"qk": [], "ov": []}
        for h in range(heads):
            own = slice(h * width, (h + 1) * width)
            shared = slice(h // group * width, (h // group + 1) * width)
            found["qk"].append(query[:, own] @ key[:, shared].T)
            found["ov"].append(value[:, shared] @ output[own])
        yield {name: torch.stack(each) for name, each in found.items()}


def same(found: tuple[LayerChange, ...], base: Any, merged: Any) -> None:
    layers = list(zip(heads_of(base), heads_of(merged), strict=True))
    assert len(found) == len(layers)
    for change, (before, after) in zip(found, layers, strict=True):
        for circuit in ("qk", "ov"):
            want, got = after[circuit] - before[circuit], getattr(change, circuit)
            size = float(after[circuit].abs().max())
            atol = ROUNDING * size
            torch.testing.assert_close(got.product.dense(), want, rtol=0, atol=atol)
            relative = torch.linalg.matrix_norm(want) / torch.linalg.matrix_norm(before[circuit])
            torch.testing.assert_close(got.relative(), relative, rtol=1e3 * ROUNDING, atol=ROUNDING)
            values = torch.linalg.svdvals(want)
            assert got.rank().tolist() == (values > 1e3 * atol).sum(-1).tolist()


@pytest.mark.parametrize("case", CASES)
def test_the_change_is_that_of_the_librarys_merge(case: str, tmp_path: Path) -> None:
    name, options = CASES[case]
    base = tiny(name)
    merged = tuned(base, tmp_path, options)
    before = copy.deepcopy(base.state_dict())
    found = adapter_difference(base, tmp_path)
    assert all(torch.equal(before[key], value) for key, value in base.state_dict().items())
    same(found, base, merged)
    if options["target_modules"] == LATE:
        assert all(part.norm().max() == 0 for part in (found[0].qk, found[0].ov))
        assert found[1].qk.norm().min() > 0


@pytest.mark.parametrize("case", ["llama, plain", "llama, rslora", "llama, alphas", "gpt2, plain"])
def test_another_adapter_is_another_change(case: str, tmp_path: Path) -> None:
    """What the comparison cannot miss: another scale, and other factors."""
    name, options = CASES[case]
    base = tiny(name)
    others = ({**options, "lora_alpha": 8}, {**options, "use_rslora": "rslora" not in case})
    for i, (other, seed) in enumerate([*((other, 1) for other in others), (options, 2)]):
        tuned(base, tmp_path / "saved", options)
        merged = tuned(base, tmp_path / f"{i}", other, seed)
        with pytest.raises(AssertionError):
            same(adapter_difference(base, tmp_path / "saved"), base, merged)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_the_same_change_in_our_own_model_of_the_same_checkpoint(name: str, tmp_path: Path) -> None:
    """Our own GPT-2 holds queries, keys and values apart, where the adapter has them as one."""
    sizes = {"scale_attn_by_inverse_layer_idx": False} if name == "gpt2" else {}  # as ours
    base = shaken(families.build(name, auto=AutoModelForCausalLM, **sizes))
    base.save_pretrained(tmp_path / "base")
    merged = tuned(base.double(), tmp_path / "adapter", CASES[f"{name}, plain"][1])
    own = load(tmp_path / "base").model.double()
    same(adapter_difference(own, tmp_path / "adapter"), base, merged)


@pytest.mark.parametrize("case", ["llama, q and v", "gpt2, plain"])
def test_the_data_set_has_the_norms_of_the_merge(case: str, tmp_path: Path) -> None:
    name, options = CASES[case]
    base = tiny(name)
    merged = tuned(base, tmp_path, options)
    found = circuits(base, adapter=tmp_path, behaviours=False).dataset
    for layer, (before, after) in enumerate(zip(heads_of(base), heads_of(merged), strict=True)):
        for circuit in ("qk", "ov"):
            want = torch.linalg.matrix_norm(after[circuit] - before[circuit])
            got = torch.from_numpy(found[f"{circuit}_change_norm"].isel(layer=layer).values)
            torch.testing.assert_close(got.double(), want, rtol=1e3 * ROUNDING, atol=0)
    assert found.attrs["about"].count(str(tmp_path)) == 1
