"""Tiny decoders of every family that is counted, and the classes of transformers they come in."""

from __future__ import annotations

from typing import Any

import transformers
from transformers import CONFIG_MAPPING

from headwise.cost.families import deepseek, gpt2, llama
from headwise.cost.families.outside import CAUSAL

SIZES: dict[str, Any] = {
    "hidden_size": 40, "intermediate_size": 67, "num_hidden_layers": 5, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 257, "max_position_embeddings": 61, "num_labels": 3,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "sliding_window": 7,
}  # fmt: skip
_N_SIZES: dict[str, Any] = {
    "n_embd": 40, "n_layer": 3, "n_head": 4, "n_positions": 61, "n_inner": 67, "vocab_size": 257,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "num_labels": 3,
}  # fmt: skip
_NONE = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
_EXPERTS = {
    "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 19,
    "shared_expert_intermediate_size": 29,
}  # fmt: skip
_LATENT = {
    "num_key_value_heads": 4, "n_routed_experts": 6, "num_experts_per_tok": 3,
    "n_shared_experts": 2, "moe_intermediate_size": 23, "first_k_dense_replace": 1,
    "kv_lora_rank": 22, "q_lora_rank": 26, "qk_rope_head_dim": 6, "qk_nope_head_dim": 8,
    "v_head_dim": 7, "n_group": 2, "topk_group": 1,
}  # fmt: skip
_OPT = {
    "hidden_size": 40, "ffn_dim": 67, "num_hidden_layers": 3, "num_attention_heads": 4,
    "vocab_size": 257, "max_position_embeddings": 61, "num_labels": 3, "pad_token_id": 0,
    "dropout": 0.0,
}  # fmt: skip
_TURNED = {"hidden_size": 64, "num_attention_heads": 4}  # half or a quarter of a head is turned
_SPARSE = {"mlp_only_layers": [1], "decoder_sparse_step": 2}

# family, and what differs from the sizes above: one line for each way to write a configuration
CASES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"head_dim": 6, "attention_bias": True, "mlp_bias": True}),
    ("llama", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    ("mistral", {}),
    ("mistral", {"sliding_window": None, "head_dim": 14}),
    ("ministral", {"head_dim": 14}),
    ("ministral3", {"head_dim": 14}),
    ("mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2}),
    ("qwen2", {}),
    ("qwen2", {"use_sliding_window": True, "max_window_layers": 3}),
    ("qwen2_moe", _EXPERTS),
    ("qwen2_moe", {**_EXPERTS, **_SPARSE, "qkv_bias": False}),
    ("qwen2_moe", {**_EXPERTS, "use_sliding_window": True, "max_window_layers": 3}),
    ("qwen3", {"head_dim": 6}),
    ("qwen3", {"attention_bias": True, "use_sliding_window": True, "max_window_layers": 2}),
    ("qwen3_moe", {**_EXPERTS, "head_dim": 6}),
    ("qwen3_moe", {**_EXPERTS, **_SPARSE, "use_sliding_window": True}),
    ("gemma", {"head_dim": 14}),
    ("gemma2", {"head_dim": 14, "attention_bias": True}),
    ("gemma3_text", {"head_dim": 14, "num_hidden_layers": 7}),
    ("gemma3_text", {"head_dim": 14, "sliding_window_pattern": 3}),
    ("gemma3_text", {"head_dim": 14, "use_bidirectional_attention": True}),
    ("phi", _TURNED),
    ("phi", {**_TURNED, "qk_layernorm": True}),
    ("phi3", {}),
    ("granite", {"attention_bias": True, "mlp_bias": True}),
    ("olmo", {}),
    ("olmo2", {"attention_bias": True}),
    ("olmo3", {}),
    ("olmoe", _EXPERTS),
    ("smollm3", {}),
    ("smollm3", {"use_sliding_window": True, "no_rope_layer_interval": 2}),
    ("smollm3", {"use_sliding_window": True, "no_rope_layers": [1, 0, 0, 1, 1]}),
    ("gpt_oss", {"num_local_experts": 5, "num_experts_per_tok": 2, "head_dim": 6}),
    ("gpt_oss", {"num_local_experts": 5, "attention_bias": False, "head_dim": 6}),
    ("gpt_neox", {"num_key_value_heads": None}),
    ("gpt_neox", {"num_key_value_heads": None, "attention_bias": False}),
    ("gpt_neox", {"num_key_value_heads": None, "tie_word_embeddings": True}),
    ("starcoder2", {}),
    ("starcoder2", {"use_bias": False}),
    ("stablelm", _TURNED),
    ("stablelm", {**_TURNED, "use_qkv_bias": True, "qk_layernorm": True}),
    ("stablelm", {**_TURNED, "use_parallel_residual": True}),
    ("cohere", {}),
    ("cohere", {"use_qk_norm": True, "attention_bias": True}),
    ("cohere2", {}),
    ("glm", {"head_dim": 12}),
    ("glm4", {"head_dim": 12, "attention_bias": False}),
    ("seed_oss", {"head_dim": 6, "attention_out_bias": True}),
    ("arcee", {"mlp_bias": True}),
    ("nemotron", {}),
    ("gpt2", {}),
    ("gpt2", {"n_inner": None, "tie_word_embeddings": False}),
    ("gpt_bigcode", {}),
    ("gpt_bigcode", {"multi_query": False}),
    ("gptj", {"rotary_dim": 4}),
    ("opt", {}),
    ("opt", {"word_embed_proj_dim": 23}),
    ("opt", {"enable_bias": False, "do_layer_norm_before": False}),
    ("opt", {"layer_norm_elementwise_affine": False}),
    ("opt", {"_remove_final_layer_norm": True, "tie_word_embeddings": False}),
    ("deepseek_v2", _LATENT),
    ("deepseek_v2", {**_LATENT, "q_lora_rank": None, "mlp_bias": True, "attention_bias": True}),
    ("deepseek_v3", _LATENT),
    ("deepseek_v3", {**_LATENT, "q_lora_rank": None, "first_k_dense_replace": 3}),
    ("deepseek_v3", {**_LATENT, "attention_bias": True, "n_shared_experts": 1}),
]  # fmt: skip


def base_of(family: str) -> dict[str, Any]:
    """The sizes that a family starts from."""
    if family == "opt":
        return _OPT
    return {**_N_SIZES, **_NONE} if family in gpt2.MANNERS else SIZES


def config_of(family: str, more: dict[str, Any]) -> Any:
    """A configuration of transformers, with experts in the form that torch's counter sees."""
    config = CONFIG_MAPPING[family](**{**base_of(family), **more})
    config._experts_implementation = "batched_mm"
    return config


def class_names(family: str) -> list[str]:
    """Every class of a family that transformers has and the planner counts."""
    if family == "opt":
        start = "OPT"
    else:
        start = {**llama.MANNERS, **deepseek.MANNERS, **gpt2.MANNERS}[family].name
    text = "Gemma3Text" if family == "gemma3_text" else start
    names = [(start if end == "ForCausalLM" else text) + end for end in CAUSAL]
    return [name for name in names if hasattr(transformers, name)]
