"""Tiny random models of many architectures, built from configs; no network, no weights on disk."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModel, PreTrainedModel

__all__ = ["FAMILIES", "PADDED", "REFUSED", "build", "hidden", "in_double", "inputs"]

WORDS = 127  # vocabulary
LENGTH, SHORT, TARGET = 43, 31, 19  # a batch of two: real tokens of each, and of the decoder

_SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
_TEXT = {
    **_SIZES,
    "vocab_size": WORDS,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GROUPED = {**_TEXT, "num_key_value_heads": 2, "head_dim": 16}
_NO_HEAD_DIM = {name: value for name, value in _GROUPED.items() if name != "head_dim"}
_GPT = {
    "n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": WORDS, "n_positions": 256,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_BART = {
    "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96,
    "vocab_size": WORDS, "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "decoder_start_token_id": 0, "forced_eos_token_id": 2,
}  # fmt: skip
_T5 = {
    "d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4, "vocab_size": WORDS,
    "decoder_start_token_id": 0,
}  # fmt: skip
_LATENT = {
    **_TEXT, "num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 24,
    "qk_rope_head_dim": 8, "v_head_dim": 12, "qk_nope_head_dim": 16, "n_routed_experts": 4,
    "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
}  # fmt: skip
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_MIXED = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}
_IMAGE = {**_SIZES, "image_size": 32, "patch_size": 8}
_SOUND = {
    **_SIZES, "vocab_size": WORDS, "conv_dim": (32, 32), "conv_stride": (5, 4),
    "conv_kernel": (10, 8), "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4,
    "num_feat_extract_layers": 2, "feat_extract_norm": "layer",
}  # fmt: skip

# name: (model type, sizes)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", {**_GPT, "scale_attn_by_inverse_layer_idx": True}),
    "gptj": ("gptj", {**_GPT, "rotary_dim": 8}),
    "codegen": ("codegen", {**_GPT, "rotary_dim": 8, "n_ctx": 256}),
    "gpt_bigcode": ("gpt_bigcode", _GPT),
    "gpt_neox": ("gpt_neox", _TEXT),
    "phi": ("phi", _TEXT),
    "biogpt": ("biogpt", _TEXT),
    "persimmon": ("persimmon", _TEXT),
    "opt": (
        "opt",
        {
            "hidden_size": 64,
            "ffn_dim": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "vocab_size": WORDS,
            "max_position_embeddings": 256,
            "word_embed_proj_dim": 64,
            "pad_token_id": 0,
        },
    ),
    **{
        name: (name, _GROUPED)
        for name in (
            "llama",
            "qwen2",
            "qwen3",
            "phi3",
            "olmo",
            "olmo2",
            "granite",
            "smollm3",
            "starcoder2",
            "glm",
            "glm4",
            "helium",
            "gemma",
            "stablelm",
            "cohere",
            "nemotron",
            "arcee",
            "seed_oss",
            "ernie4_5",
        )
    },
    "mixtral": ("mixtral", {**_GROUPED, "num_local_experts": 4}),
    "olmoe": ("olmoe", {**_NO_HEAD_DIM, "num_experts": 4, "num_experts_per_tok": 2}),
    "qwen3_moe": (
        "qwen3_moe",
        {**_GROUPED, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    ),
    "cohere2": ("cohere2", {**_GROUPED, "sliding_window": 16}),
    "mistral": ("mistral", {**_GROUPED, "sliding_window": 16}),
    "gemma2": (
        "gemma2",
        {
            **_GROUPED,
            "sliding_window": 16,
            "query_pre_attn_scalar": 16,
            "attn_logit_softcapping": 2.0,
        },
    ),
    "gemma3_text": ("gemma3_text", {**_GROUPED, **_MIXED, "query_pre_attn_scalar": 16}),
    "gpt_oss": ("gpt_oss", {**_GROUPED, **_EXPERTS, **_MIXED}),
    "llama4_text": (
        "llama4_text",
        {
            **_GROUPED,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "attention_chunk_size": 16,
            "intermediate_size_mlp": 64,
        },
    ),
    "deepseek_v2": ("deepseek_v2", _LATENT),
    "deepseek_v3": ("deepseek_v3", _LATENT),
    "deepseek_v32": (
        "deepseek_v32",
        {**_LATENT, "index_topk": 8, "index_n_heads": 2, "index_head_dim": 16},
    ),
    "jamba": (
        "jamba",
        {
            **_NO_HEAD_DIM,
            "num_hidden_layers": 4,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "num_experts": 2,
            "num_experts_per_tok": 1,
            "mamba_d_state": 8,
            "mamba_dt_rank": 8,
            "use_mamba_kernels": False,
        },
    ),
    "qwen3_next": (
        "qwen3_next",
        {
            **_GROUPED,
            "layer_types": ["linear_attention", "full_attention"],
            "linear_num_value_heads": 4,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
        },
    ),
    "recurrent_gemma": (
        "recurrent_gemma",
        {
            **_NO_HEAD_DIM,
            "lru_width": 64,
            "block_types": ["recurrent", "attention"],
            "attention_window_size": 16,
        },
    ),
    "bert": ("bert", _TEXT),
    "roberta": ("roberta", _TEXT),
    "electra": ("electra", {**_TEXT, "embedding_size": 64}),
    "albert": ("albert", {**_TEXT, "embedding_size": 32}),
    "distilbert": (
        "distilbert",
        {"dim": 64, "hidden_dim": 96, "n_layers": 2, "n_heads": 4, "vocab_size": WORDS},
    ),
    "modernbert": (
        "modernbert",
        {
            **_TEXT,
            "local_attention": 16,
            "global_attn_every_n_layers": 2,
            "cls_token_id": 1,
            "sep_token_id": 2,
        },
    ),
    "t5": ("t5", _T5),
    "mt5": ("mt5", _T5),
    "marian": ("marian", _BART),
    "bart": ("bart", _BART),
    "mbart": ("mbart", _BART),
    "whisper": (
        "whisper",
        {
            **{k: v for k, v in _BART.items() if k != "max_position_embeddings"},
            "num_mel_bins": 8,
            "max_source_positions": 50,
            "max_target_positions": 64,
        },
    ),
    "vit": ("vit", _IMAGE),
    "dinov2": ("dinov2", {**_IMAGE, "mlp_ratio": 2}),
    "siglip_vision_model": ("siglip_vision_model", _IMAGE),
    "clip": (
        "clip",
        {
            "text_config": {**_TEXT, "projection_dim": 32},
            "vision_config": _IMAGE,
            "projection_dim": 32,
        },
    ),
    "wav2vec2": ("wav2vec2", _SOUND),
    "hubert": ("hubert", _SOUND),
}

# What computes attention in its own code.
REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "bloom": ("bloom", {"hidden_size": 64, "n_layer": 2, "n_head": 4, "vocab_size": WORDS}),
    "mpt": (
        "mpt",
        {"d_model": 64, "n_heads": 4, "n_layers": 2, "vocab_size": WORDS, "max_seq_len": 256},
    ),
    "falcon": (
        "falcon",
        {
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "vocab_size": WORDS,
            "new_decoder_architecture": True,
            "num_kv_heads": 2,
            "alibi": False,
        },
    ),
    "gpt_neo": (
        "gpt_neo",
        {
            "hidden_size": 64,
            "num_layers": 2,
            "num_heads": 4,
            "vocab_size": WORDS,
            "attention_types": [[["global", "local"], 1]],
            "window_size": 8,
            "max_position_embeddings": 256,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
    "deberta_v2": ("deberta-v2", _TEXT),
}

_PAIRS = ("t5", "mt5", "marian", "bart", "mbart")
_UNPADDED = ("whisper", "vit", "dinov2", "siglip_vision_model", "wav2vec2", "hubert")
PADDED = tuple(name for name in FAMILIES if name not in _UNPADDED)


def build(name: str, auto: Any = AutoModel, **more: Any) -> PreTrainedModel:
    """A random model in evaluation mode; the same weights every time."""
    kind, sizes = (FAMILIES | REFUSED)[name]
    torch.manual_seed(7)
    return auto.from_config(AutoConfig.for_model(kind, **{**sizes, **more})).eval()


def in_double(model: PreTrainedModel) -> PreTrainedModel:
    """A copy in float64; the grouped product of experts only exists in lower precision."""
    model = copy.deepcopy(model).double()
    if model._can_set_experts_implementation():
        model.set_experts_implementation("eager")
    return model


def inputs(name: str) -> tuple[dict[str, Tensor], Tensor | None]:
    """A batch of two, the second padded on the right where there is text; and what is real."""
    generator = torch.Generator().manual_seed(11)
    ids = torch.randint(3, WORDS, (2, LENGTH), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, SHORT:] = 0
    text = {"input_ids": ids, "attention_mask": mask}
    pixels = torch.randn(2, 3, 32, 32, generator=generator)
    if name in ("vit", "dinov2", "siglip_vision_model"):
        return {"pixel_values": pixels}, None
    if name in ("wav2vec2", "hubert"):
        return {"input_values": torch.randn(2, 1100, generator=generator)}, None
    if name == "whisper":
        sound = torch.randn(2, 8, 100, generator=generator)
        return {"input_features": sound, "decoder_input_ids": ids[:, :TARGET]}, None
    if name in _PAIRS:
        return {**text, "decoder_input_ids": ids[:, :TARGET]}, None
    if name == "clip":
        return {**text, "pixel_values": pixels}, None
    return text, mask.bool()


def hidden(output: Any) -> Tensor:
    """The last hidden states, or what a two-tower model has instead."""
    last = getattr(output, "last_hidden_state", None)
    return output.text_embeds if last is None else last
