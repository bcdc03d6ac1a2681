"""The names of GGUF: architectures, keys of the metadata, and tensors, beside those used here.

Source: ``gguf.constants`` of github.com/ggml-org/llama.cpp.
"""

from __future__ import annotations

from typing import Final

from headwise.cost.parts import Component

__all__ = ["BUFFERS", "FAMILIES", "GPT2_KEYS", "KEYS", "PARTS", "SHOWN"]

FAMILIES: Final = {
    "llama": "llama", "gpt2": "gpt2", "gptneox": "gpt_neox", "starcoder": "gpt_bigcode",
    "starcoder2": "starcoder2", "stablelm": "stablelm", "phi2": "phi", "phi3": "phi3",
    "qwen2": "qwen2", "qwen2moe": "qwen2_moe", "qwen3": "qwen3", "qwen3moe": "qwen3_moe",
    "gemma": "gemma", "gemma2": "gemma2", "gemma3": "gemma3_text", "olmo": "olmo",
    "olmo2": "olmo2", "olmoe": "olmoe", "granite": "granite", "command-r": "cohere",
    "cohere2": "cohere2", "smollm3": "smollm3", "glm4": "glm4", "seed_oss": "seed_oss",
    "arcee": "arcee", "nemotron": "nemotron", "gpt-oss": "gpt_oss", "deepseek2": "deepseek_v3",
}  # fmt: skip
# A key that is not there becomes null, which says that there is no such thing: the defaults of a
# family are those of its configurations, and a header leaves nothing to them.
KEYS: Final = {
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "intermediate_size": "feed_forward_length",
    "max_position_embeddings": "context_length",
    "sliding_window": "attention.sliding_window",
    "num_local_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "n_shared_experts": "expert_shared_count",
    "first_k_dense_replace": "leading_dense_block_count",
    "use_parallel_residual": "use_parallel_residual",
    "q_lora_rank": "attention.q_lora_rank",
    "kv_lora_rank": "attention.kv_lora_rank",
}
GPT2_KEYS: Final = {
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_inner": "intermediate_size",
    "n_positions": "max_position_embeddings",
}
# Flags that no key says, and the tensors whose presence shows them.
SHOWN: Final = {
    "attention_bias": ("attn_q.bias", "attn_qkv.bias"),
    "qkv_bias": ("attn_q.bias",),
    "use_qkv_bias": ("attn_q.bias",),
    "use_bias": ("attn_q.bias",),
    "attention_out_bias": ("attn_output.bias",),
    "mlp_bias": ("ffn_up.bias",),
    "use_qk_norm": ("attn_q_norm.weight",),
    "qk_layernorm": ("attn_q_norm.weight",),
}
# Tables of factors that are stored, but are no parameters.
BUFFERS: Final = frozenset(
    ("rope_freqs", "rope_factors_long", "rope_factors_short", "attn_rot_embd", "exp_probs_b")
)
PARTS: Final = {
    "token_embd": Component.EMBEDDING,
    "token_types": Component.EMBEDDING,
    "position_embd": Component.POSITIONS,
    "rope_freqs": Component.POSITIONS,
    "rope_factors_long": Component.POSITIONS,
    "rope_factors_short": Component.POSITIONS,
    "attn_rot_embd": Component.POSITIONS,
    "output": Component.UNEMBEDDING,
    "attn_q": Component.QUERY,
    "attn_q_a": Component.QUERY,
    "attn_q_b": Component.QUERY,
    "attn_qkv": Component.QUERY,  # queries, keys and values in one tensor
    "attn_k": Component.KEY,
    "attn_k_b": Component.KEY,
    "attn_v": Component.VALUE,
    "attn_v_b": Component.VALUE,
    "attn_kv_a_mqa": Component.LATENT,
    "attn_kv_b": Component.KEY,  # keys and values in one tensor
    "attn_output": Component.OUTPUT,
    "attn_sinks": Component.SCORES,
    "ffn_gate": Component.MLP,
    "ffn_up": Component.MLP,
    "ffn_down": Component.MLP,
    "ffn_gate_inp": Component.ROUTER,
    "exp_probs_b": Component.ROUTER,
    "ffn_gate_exps": Component.EXPERTS,
    "ffn_up_exps": Component.EXPERTS,
    "ffn_down_exps": Component.EXPERTS,
    "ffn_gate_shexp": Component.SHARED_EXPERTS,
    "ffn_up_shexp": Component.SHARED_EXPERTS,
    "ffn_down_shexp": Component.SHARED_EXPERTS,
    "ffn_gate_inp_shexp": Component.SHARED_EXPERTS,
}
