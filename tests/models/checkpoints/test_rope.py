"""Rotary settings in every spelling give the frequencies that transformers makes of them."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig
from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXRotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from headwise.models.architecture import Rotary
from headwise.models.checkpoints.rope import rotary
from headwise.models.checkpoints.settings import Settings
from headwise.positions import frequencies

SIZES = {"hidden_size": 64, "num_attention_heads": 4, "max_position_embeddings": 4096}
YARN = {"factor": 8.0, "original_max_position_embeddings": 512}
LONG = {"short_factor": [1.0 + i / 9 for i in range(8)], "long_factor": [2.0 + i for i in range(8)]}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}

SPELLINGS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "old": {"rope_theta": 500.0},
    "old, null": {"rope_theta": 500.0, "rope_scaling": None},
    "new": {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
    "new, base outside": {"rope_theta": 500.0, "rope_parameters": {"rope_type": "default"}},
    "new, both": {
        "rope_theta": 7.0, "rope_parameters": {"rope_type": "default", "rope_theta": 5.0}
    },
    "both": {
        "rope_scaling": {"type": "linear", "factor": 2.0},
        "rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 9.0},
    },
    "linear, type": {"rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 2.0}},
    "linear, rope_type": {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    "linear, new": {"rope_parameters": {"rope_type": "linear", "factor": 2.5, "rope_theta": 99.0}},
    "dynamic": {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
    "yarn": {"rope_theta": 500.0, "rope_scaling": {"type": "yarn", **YARN}},
    "yarn, finetuned": {"rope_scaling": {"type": "yarn", "finetuned": True, **YARN}},
    "yarn, trained outside": {
        "original_max_position_embeddings": 1024,
        "rope_scaling": {"type": "yarn", **YARN},
    },
    "yarn, no trained length": {"rope_scaling": {"type": "yarn", "factor": 8.0}},
    "yarn, settings": {
        "rope_parameters": {
            "rope_type": "yarn", **YARN, "beta_fast": 3.0, "beta_slow": 0.5, "truncate": False,
            "attention_factor": 1.5,
        }
    },
    "yarn, mscale": {
        "rope_scaling": {"type": "yarn", "mscale": 0.7, "mscale_all_dim": 1.1, **YARN}
    },
    "llama3": {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
    "llama3, new": {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}},
    "longrope": {
        "rope_scaling": {"type": "longrope", "original_max_position_embeddings": 512, **LONG}
    },
    "longrope, factor": {"rope_scaling": {"rope_type": "longrope", **YARN, **LONG}},
    "longrope, trained outside": {
        "original_max_position_embeddings": 256,
        "rope_scaling": {"rope_type": "longrope", "attention_factor": 1.25, **LONG},
    },
}  # fmt: skip


def theirs(kind: str, raw: dict[str, Any], place: Path) -> Any:
    """transformers' module, from the file as it reads it."""
    (place / "config.json").write_text(json.dumps({"model_type": kind, **SIZES, **raw}))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = AutoConfig.from_pretrained(place)
    module = LlamaRotaryEmbedding if kind == "llama" else GPTNeoXRotaryEmbedding
    return module(config)


def compare(found: Rotary, module: Any) -> None:
    inv_freq, factor = frequencies(found.width, base=found.base, scaling=found.scaling)
    assert inv_freq.shape == module.inv_freq.shape
    # transformers makes them in float32, by a power and a few more operations.
    allowed = 8 * torch.finfo(torch.float32).eps
    torch.testing.assert_close(inv_freq.float(), module.inv_freq, rtol=allowed, atol=0)
    assert factor == pytest.approx(module.attention_scaling, rel=1e-12)


@pytest.mark.parametrize("name", SPELLINGS)
def test_llama(name: str, tmp_path: Path) -> None:
    raw = SPELLINGS[name]
    settings = Settings({**SIZES, **raw})
    found = rotary(settings, 16, context=4096)
    for key in SIZES:
        settings.get(key)
    settings.finish()
    compare(found, theirs("llama", raw, tmp_path))


@pytest.mark.parametrize(
    "raw",
    [
        {},
        {"rotary_pct": 0.5, "rotary_emb_base": 500.0},
        {"rotary_pct": 0.5, "rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_parameters": {"rope_theta": 9.0, "partial_rotary_factor": 1.0}},
    ],
)
def test_gpt_neox(raw: dict[str, Any], tmp_path: Path) -> None:
    found = rotary(
        Settings({**SIZES, **raw}),
        16,
        context=4096,
        base_key="rotary_emb_base",
        partial_key="rotary_pct",
        partial=0.25,
    )
    compare(found, theirs("gpt_neox", raw, tmp_path))
