"""Tiny models of transformers, by family, and the parts that the planner sees of each."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import nn

from headwise.cost.config import parts_of
from headwise.cost.parts import Parts

VOCAB, D, FF, HEADS, LAYERS = 97, 28, 44, 4, 2
_SIZES: dict[str, Any] = {
    "hidden_size": D, "num_attention_heads": HEADS, "vocab_size": VOCAB, "intermediate_size": FF,
    "max_position_embeddings": 31, "num_hidden_layers": LAYERS,
}  # fmt: skip
_IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_GROUPED = {"num_key_value_heads": 2, "head_dim": 6}
_EVEN = {"num_key_value_heads": 2, "hidden_size": 24}
_OFF = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}

# family -> class of the model without and with its head, and its sizes
TINY: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gpt2": ("GPT2Model", "GPT2LMHeadModel", {
        "n_embd": D, "n_layer": LAYERS, "n_head": HEADS, "vocab_size": VOCAB, "n_positions": 31,
        "n_inner": FF, "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
    }),
    "llama": ("LlamaModel", "LlamaForCausalLM", _SIZES | _GROUPED),
    "mistral": ("MistralModel", "MistralForCausalLM", _SIZES | _GROUPED | {"sliding_window": 5}),
    "qwen2": ("Qwen2Model", "Qwen2ForCausalLM", _SIZES | _GROUPED),
    "qwen3": ("Qwen3Model", "Qwen3ForCausalLM", _SIZES | _GROUPED),
    "ministral": ("MinistralModel", "MinistralForCausalLM", _SIZES | _GROUPED | {
        "sliding_window": 5,
    }),
    "granite": ("GraniteModel", "GraniteForCausalLM", _SIZES | _EVEN),
    "smollm3": ("SmolLM3Model", "SmolLM3ForCausalLM", _SIZES | _EVEN),
    "seed_oss": ("SeedOssModel", "SeedOssForCausalLM", _SIZES | _GROUPED | {
        "attention_dropout": 0.0, "residual_dropout": 0.0,
    }),
    "arcee": ("ArceeModel", "ArceeForCausalLM", _SIZES | _GROUPED),
    "olmo2": ("Olmo2Model", "Olmo2ForCausalLM", _SIZES | _EVEN),
    "phi3": ("Phi3Model", "Phi3ForCausalLM", _SIZES | _EVEN),
    "phi": ("PhiModel", "PhiForCausalLM", _SIZES | {"hidden_size": 48}),
    "starcoder2": ("Starcoder2Model", "Starcoder2ForCausalLM", _SIZES | _EVEN | {
        "residual_dropout": 0.0, "embedding_dropout": 0.0,
    }),
    "stablelm": ("StableLmModel", "StableLmForCausalLM", _SIZES | {
        "hidden_size": 64, "num_key_value_heads": 2,
    }),
    "roberta": ("RobertaModel", "RobertaForMaskedLM", _SIZES | _OFF | {
        "max_position_embeddings": 40,
    }),
    "electra": ("ElectraModel", "ElectraForMaskedLM", _SIZES | _OFF | {"embedding_size": D}),
    "distilbert": ("DistilBertModel", "DistilBertForMaskedLM", {
        "dim": D, "n_layers": LAYERS, "n_heads": HEADS, "hidden_dim": FF, "vocab_size": VOCAB,
        "max_position_embeddings": 31, "dropout": 0.0, "attention_dropout": 0.0,
    }),
    "clip_text_model": ("CLIPTextModel", "CLIPTextModel", _SIZES),
    "gemma": ("GemmaModel", "GemmaForCausalLM", _SIZES | _GROUPED),
    "gpt_neox": ("GPTNeoXModel", "GPTNeoXForCausalLM", _SIZES | {
        "hidden_size": 48, "hidden_dropout": 0.0, "attention_dropout": 0.0,
    }),
    "opt": ("OPTModel", "OPTForCausalLM", {
        "hidden_size": D, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "ffn_dim": FF,
        "vocab_size": VOCAB, "max_position_embeddings": 31, "word_embed_proj_dim": D,
        "dropout": 0.0, "attention_dropout": 0.0,
    }),
    "bert": ("BertModel", "BertForMaskedLM", _SIZES | _OFF),
    "vit": ("ViTModel", "ViTForImageClassification", {
        "hidden_size": D, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
        "intermediate_size": FF, "image_size": 12, "patch_size": 4, **_OFF,
    }),
    "gemma3_text": ("Gemma3TextModel", "Gemma3ForCausalLM", _SIZES | _GROUPED | {
        "num_hidden_layers": 6, "sliding_window": 16,
    }),
    "gpt_oss": ("GptOssModel", "GptOssForCausalLM", _SIZES | {
        "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 7, "num_local_experts": 3,
        "num_experts_per_tok": 2,
    }),
    "mixtral": ("MixtralModel", "MixtralForCausalLM", _SIZES | {
        "num_key_value_heads": 2, "head_dim": 6, "num_local_experts": 3,
    }),
    "deepseek_v3": ("DeepseekV3Model", "DeepseekV3ForCausalLM", _SIZES | {
        "q_lora_rank": 22, "kv_lora_rank": 14, "qk_rope_head_dim": 6, "qk_nope_head_dim": 10,
        "v_head_dim": 11, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2,
        "topk_group": 1, "n_shared_experts": 1, "moe_intermediate_size": 26,
        "first_k_dense_replace": 1, "num_key_value_heads": HEADS,
    }),
    "deepseek_v2": ("DeepseekV2Model", "DeepseekV2ForCausalLM", _SIZES | {
        "q_lora_rank": 22, "kv_lora_rank": 14, "qk_rope_head_dim": 6, "qk_nope_head_dim": 10,
        "v_head_dim": 11, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2,
        "topk_group": 1, "n_shared_experts": 1, "moe_intermediate_size": 26,
        "first_k_dense_replace": 1, "num_key_value_heads": HEADS,
    }),
    "t5": ("T5Model", "T5ForConditionalGeneration", {
        "d_model": D, "d_kv": 6, "d_ff": FF, "num_layers": LAYERS, "num_decoder_layers": 3,
        "num_heads": HEADS, "vocab_size": VOCAB, "decoder_start_token_id": 0,
    }),
    "bart": ("BartModel", "BartForConditionalGeneration", {
        "d_model": D, "encoder_layers": LAYERS, "decoder_layers": 3, "encoder_attention_heads": 4,
        "decoder_attention_heads": 2, "encoder_ffn_dim": FF, "decoder_ffn_dim": 46,
        "vocab_size": VOCAB, "max_position_embeddings": 61,
    }),
}  # fmt: skip


def config_of(family: str, **more: Any) -> Any:
    """The configuration of a tiny model."""
    name, _, sizes = TINY[family]
    form = getattr(transformers, name).config_class
    return form(**{**_IDS, **sizes, **more})


def model_of(
    family: str, *, head: bool = False, implementation: str = "eager", **more: Any
) -> nn.Module:
    """The model, with random weights."""
    config = config_of(family, **more)
    config._experts_implementation = "batched_mm"  # the grouped kernel wants widths of 16 bytes
    kind = getattr(transformers, TINY[family][1 if head else 0])
    extra = {} if head or family not in ("bert", "vit", "roberta") else {"add_pooling_layer": False}
    torch.manual_seed(0)
    built: nn.Module = kind._from_config(config, attn_implementation=implementation, **extra)
    return built


def parts(family: str, *, head: bool = False, **more: Any) -> Parts:
    """What the planner reads from the same configuration."""
    given = config_of(family, **more).to_dict()
    given["architectures"] = [TINY[family][1 if head else 0]]
    return parts_of(given)
