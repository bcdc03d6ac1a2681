"""Adapters that the peft library saved give the logits that it gives, attached and merged."""

from __future__ import annotations

import copy
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from headwise.errors import ModelError
from headwise.models.checkpoints.peft import load_peft
from headwise.models.low_rank import LowRankLinear, merge, unmerge
from tests.observation import tiny_models

IDS = torch.arange(5, 5 + 13)[None]
LLAMA = {"r": 3, "lora_alpha": 7, "target_modules": ["q_proj", "v_proj", "down_proj"]}
GPT2 = {"r": 2, "lora_alpha": 8, "target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}
CASES = {
    "llama": ("llama", LLAMA),
    "rslora": ("llama", {**LLAMA, "use_rslora": True}),
    "every linear": ("llama", {**LLAMA, "target_modules": "all-linear"}),
    "an expression": ("llama", {**LLAMA, "target_modules": r".*layers\.[02]\.mlp\.\w+_proj"}),
    "left out": ("llama", {**LLAMA, "exclude_modules": ["layers.1.self_attn.q_proj"]}),
    "some layers": ("llama", {**LLAMA, "layers_to_transform": [0, 2]}),
    "patterns": (
        "llama",
        {
            **LLAMA,
            "rank_pattern": {"v_proj": 5, r"layers\.0\.self_attn\.q_proj": 1},
            "alpha_pattern": {"q_proj": 2, r"^model\.layers\.2\.mlp\.down_proj": 11},
        },
    ),
    "Conv1D": ("gpt2", GPT2),
    "Conv1D with rslora": ("gpt2", {**GPT2, "use_rslora": True}),
}


def saved(folder: Path, architecture: str, options: dict[str, Any]) -> tuple[nn.Module, Any]:
    """The model without adapter, and the library's model with one that does something."""
    import peft

    model = tiny_models.build(architecture)
    torch.manual_seed(1)
    with warnings.catch_warnings():
        # The library reads a property of transformers under its old name.
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
        adapted = peft.get_peft_model(copy.deepcopy(model), peft.LoraConfig(**options)).eval()
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if ".lora_B." in name:
                parameter.normal_(0.0, 0.2)
    adapted.save_pretrained(folder)
    return model, adapted


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        out: Tensor = model(IDS).logits
    return out


def close(got: Tensor, want: Tensor) -> None:
    """fp32 logits within 1e-5 of the largest."""
    got, want = got.detach(), want.detach()
    assert float((got - want).abs().max()) <= 1e-5 * float(want.abs().max())


@pytest.mark.parametrize("case", CASES)
def test_the_logits_are_the_librarys(case: str, tmp_path: Path) -> None:
    model, adapted = saved(tmp_path, *CASES[case])
    before = logits(model)
    want = logits(adapted)
    assert float((want - before).abs().max()) > 1e-3 * float(before.abs().max())
    paths = load_peft(model, tmp_path)
    factors = [n for n, _ in adapted.named_modules() if n.endswith(".lora_A.default")]
    assert len(paths) == len(factors)
    close(logits(model), want)
    merge(model)
    close(logits(model), want)
    close(logits(model), logits(adapted.merge_and_unload()))
    unmerge(model)
    close(logits(model), want)


def test_a_wrong_scale_would_be_seen(tmp_path: Path) -> None:
    model, adapted = saved(tmp_path, *CASES["rslora"])
    edit(tmp_path, use_rslora=False)
    load_peft(model, tmp_path)
    with pytest.raises(AssertionError):
        close(logits(model), logits(adapted))


def edit(folder: Path, **changes: Any) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def edit_tensors(folder: Path, change: Any) -> None:
    tensors = load_file(folder / "adapter_model.safetensors")
    change(tensors)
    save_file(tensors, folder / "adapter_model.safetensors")


class Renamed(nn.Module):
    """Two projections of the llama under other names."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        attention: Any = block.self_attn
        self.query, self.value = attention.q_proj, attention.v_proj


def test_names_lead_to_another_model(tmp_path: Path) -> None:
    options = {**LLAMA, "target_modules": ["q_proj", "v_proj"], "layers_to_transform": [0]}
    model, adapted = saved(tmp_path, "llama", options)
    other = Renamed(model.model.layers[0])
    names = {f"model.layers.0.self_attn.{name[0]}_proj": name for name in ("query", "value")}
    assert load_peft(other, tmp_path, names=names) == ("query", "value")
    inner = adapted.base_model.model.model.layers[0].self_attn.q_proj
    x = torch.randn(3, inner.in_features)
    close(other.query(x), inner(x))


def test_a_fused_projection_goes_to_its_parts(tmp_path: Path) -> None:
    """GPT-2's c_attn (in, 3·out) as three projections: A is shared out whole, B by rows."""
    options = {**GPT2, "target_modules": ["c_attn"], "layers_to_transform": [0]}
    options["layers_pattern"] = "h"
    model, adapted = saved(tmp_path, "gpt2", options)
    fused = adapted.base_model.model.transformer.h[0].attn.c_attn
    width = fused.in_features
    parts = nn.ModuleDict({n: nn.Linear(width, width) for n in ("query", "key", "value")})
    base = model.transformer.h[0].attn.c_attn
    with torch.no_grad():
        for i, part in enumerate(parts.values()):
            rows = slice(i * width, (i + 1) * width)
            part.weight.copy_(base.weight[:, rows].T)
            part.bias.copy_(base.bias[rows])
    rows = [(name, slice(i * width, (i + 1) * width)) for i, name in enumerate(parts)]
    load_peft(parts, tmp_path, names={"transformer.h.0.attn.c_attn": rows})
    x = torch.randn(3, width)
    close(torch.cat([part(x) for part in parts.values()], -1), fused(x))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    saved(tmp_path, "llama", LLAMA)
    return tmp_path


def refused(folder: Path, architecture: str = "llama") -> str:
    model = tiny_models.build(architecture)
    with pytest.raises(ModelError) as caught:
        load_peft(model, folder)
    assert not any(isinstance(module, LowRankLinear) for module in model.modules())
    return str(caught.value)


Q = "base_model.model.model.layers.1.self_attn.q_proj"


def test_missing_and_left_over_factors_are_named(folder: Path) -> None:
    edit_tensors(folder, lambda t: t.pop(f"{Q}.lora_A.weight"))
    assert refused(folder) == f"the adapter {folder} lacks {Q}.lora_A.weight"
    edit_tensors(folder, lambda t: t.update({f"{Q}.lora_C.weight": torch.ones(2)}))
    assert f"has {Q}.lora_C.weight, which the model has no place for" in refused(folder)
    assert "and " in refused(folder, "gpt2")


def test_a_projection_that_should_have_an_adapter(folder: Path) -> None:
    edit(folder, target_modules=["q_proj", "v_proj", "down_proj", "o_proj"])
    assert refused(folder).startswith(
        f"the adapter {folder} lacks base_model.model.model.layers.0.self_attn.o_proj.lora_A.weight"
    )


def test_another_rank(folder: Path) -> None:
    edit(folder, r=4)
    assert "lora_A of model.layers.0.self_attn.q_proj has the shape (3, " in refused(folder)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"use_dora": True}, "DoRA"),
        ({"bias": "all"}, "trained biases"),
        ({"lora_bias": True}, "biases on the factors"),
        ({"modules_to_save": ["lm_head"]}, "modules trained as a whole"),
        ({"trainable_token_indices": [1]}, "token embeddings"),
        ({"init_lora_weights": "pissa"}, "pissa, which changes the weights of the model first"),
        ({"alora_invocation_tokens": [3]}, "alora_invocation_tokens, which is not known here"),
    ],
)
def test_other_mathematics(folder: Path, change: dict[str, Any], reason: str) -> None:
    edit(folder, **change)
    message = refused(folder)
    assert message.startswith(f"the adapter {folder} has {reason}")
    assert message.endswith("merge it with the peft library and load the merged model")


def test_what_is_no_lora_folder(folder: Path) -> None:
    edit(folder, peft_type="IA3")
    assert refused(folder).endswith("is an adapter of the type IA3; allowed: LORA")
    edit(folder, peft_type="LORA", r=None)
    assert "adapter_config.json has r = None, which cannot be used; save the ada" in refused(folder)
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    edit(folder, r=3)
    assert "its .bin can run code when it is opened" in refused(folder)
    (folder / "adapter_config.json").unlink()
    assert "has no adapter_config.json, so it is not a PEFT adapter folder" in refused(folder)


@pytest.mark.parametrize(
    "change",
    [
        {"r": 0},
        {"lora_alpha": "8"},
        {"target_modules": 3},
        {"target_modules": "("},
        {"rank_pattern": ["q_proj"]},
        {"alpha_pattern": {"(": 1}},
        {"layers_to_transform": ["0"]},
        {"layers_pattern": ["("]},
    ],
)
def test_values_that_cannot_be_used(folder: Path, change: dict[str, Any]) -> None:
    edit(folder, **change)
    (key, value), *_ = change.items()
    assert f"has {key} = {value!r}, which cannot be used" in refused(folder)


def test_an_adapter_stored_in_bfloat16_is_taken_as_it_is(folder: Path) -> None:
    half = {n: t.bfloat16() for n, t in load_file(folder / "adapter_model.safetensors").items()}
    save_file(half, folder / "adapter_model.safetensors")
    model = tiny_models.build("llama").bfloat16()
    load_peft(model, folder)
    layer = model.model.layers[1].self_attn.q_proj
    assert layer.A.dtype == torch.float32
    assert torch.equal(layer.A, half[f"{Q}.lora_A.weight"].float())
    assert layer(torch.ones(2, layer.in_features, dtype=torch.bfloat16)).dtype == torch.bfloat16
