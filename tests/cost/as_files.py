"""Configurations as files: a tiny one of each kind, and one of a trillion parameters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.cost.pair_sizes import BART, T5, WHISPER

_OFF = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_SIZES = {
    "hidden_size": 40, "intermediate_size": 53, "num_hidden_layers": 3, "num_attention_heads": 4,
    "vocab_size": 97, "max_position_embeddings": 61,
}  # fmt: skip
_LATENT = {
    "num_key_value_heads": 4, "n_routed_experts": 6, "num_experts_per_tok": 3,
    "n_shared_experts": 2, "moe_intermediate_size": 23, "first_k_dense_replace": 1,
    "kv_lora_rank": 22, "q_lora_rank": 26, "qk_rope_head_dim": 6, "qk_nope_head_dim": 8,
    "v_head_dim": 7, "n_group": 2, "topk_group": 1,
}  # fmt: skip
_PICTURES = {"image_size": 12, "patch_size": 4, "num_channels": 3, "num_labels": 7}
_TEXT_TOWER = {key: value for key, value in _SIZES.items() if key != "vocab_size"}

TINY: dict[str, dict[str, Any]] = {
    "gpt2": {
        "n_embd": 24, "n_layer": 5, "n_head": 3, "vocab_size": 53, "n_positions": 61,
        "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
    },
    "llama": {**_SIZES, "num_key_value_heads": 2},
    "mistral": {**_SIZES, "num_key_value_heads": 2, "sliding_window": 7},
    "mixtral": {
        **_SIZES, "num_key_value_heads": 2, "num_local_experts": 5, "num_experts_per_tok": 2,
    },
    "gemma3_text": {
        **_SIZES, "num_hidden_layers": 7, "num_key_value_heads": 2, "head_dim": 14,
        "sliding_window": 7,
    },
    "deepseek_v3": {**_SIZES, **_LATENT},
    "opt": {**_SIZES, "ffn_dim": 53, "dropout": 0.0, "word_embed_proj_dim": 23},
    "bert": {**_SIZES, **_OFF, "type_vocab_size": 2},
    "t5": T5,
    "bart": BART,
    "whisper": WHISPER,
    "vit": {**_TEXT_TOWER, **_OFF, **_PICTURES, "architectures": ["ViTForImageClassification"]},
    "clip": {
        "projection_dim": 19,
        "text_config": {**_SIZES, "hidden_size": 28, "eos_token_id": 2, "projection_dim": 19},
        "vision_config": {**_TEXT_TOWER, **_PICTURES, "projection_dim": 19},
    },
}  # fmt: skip
# The published sizes of Llama 3 8B.
BIG: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14_336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "vocab_size": 128_256, "max_position_embeddings": 8192,
}  # fmt: skip
# The published sizes of Kimi K2, whose blocks are those of DeepSeek-V3.
TRILLION: dict[str, Any] = {
    "model_type": "deepseek_v3", "vocab_size": 163_840, "hidden_size": 7168,
    "intermediate_size": 18_432, "moe_intermediate_size": 2048, "num_hidden_layers": 61,
    "num_attention_heads": 64, "num_key_value_heads": 64, "n_shared_experts": 1,
    "n_routed_experts": 384, "num_experts_per_tok": 8, "kv_lora_rank": 512, "q_lora_rank": 1536,
    "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
    "first_k_dense_replace": 1, "max_position_embeddings": 131_072, "tie_word_embeddings": False,
}  # fmt: skip


def config(kind: str, **more: Any) -> dict[str, Any]:
    """A tiny configuration with its model type."""
    return {"model_type": kind, **TINY[kind], **more}


def write(folder: Path, **configs: dict[str, Any]) -> None:
    """Each as ``NAME.json``."""
    for name, values in configs.items():
        (folder / f"{name}.json").write_text(json.dumps(values), encoding="utf-8")
