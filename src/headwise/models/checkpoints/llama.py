"""Llama, Mistral, Qwen 2, Qwen 3 and SmolLM: RMSNorm, rotary positions, SwiGLU, shared key heads.

They differ in biases, norms of queries and keys, windows and defaults. Touvron et al. 2023
(arXiv:2302.13971); Jiang et al. 2023 (arXiv:2310.06825); Yang et al. 2024 (arXiv:2407.10671);
Yang et al. 2025 (arXiv:2505.09388); Allal et al. 2025 (arXiv:2502.02737).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headwise.errors import ModelError
from headwise.models.architecture import Architecture, Stack, Unembedding, head_width
from headwise.models.checkpoints.family import (
    ACTIVATION_WORDS,
    Family,
    Names,
    Source,
    base_prefix,
    linear,
)
from headwise.models.checkpoints.heads import copied_head, head_name, is_tied
from headwise.models.checkpoints.rope import rotary
from headwise.models.checkpoints.settings import Settings

__all__ = ["FULL", "LLAMA", "SLIDING", "decoder_sources", "windows_of"]

FULL, SLIDING = "full_attention", "sliding_attention"
_PREFIX, _TABLE, _HEADS = "model.", "embed_tokens.weight", ("lm_head.weight",)
_CONTEXTS = {"llama": 2048, "mistral": 131072, "qwen2": 32768, "qwen3": 32768}


def _architecture(settings: Settings, names: Names) -> Architecture:
    kind = settings.get("model_type")
    width, heads = settings.whole("hidden_size"), settings.whole("num_attention_heads")
    layers = settings.whole("num_hidden_layers")
    context = settings.whole("max_position_embeddings", _CONTEXTS[kind])
    for key in ("is_encoder_decoder", "add_cross_attention"):
        settings.only(key, False)
    settings.silent("is_decoder", "is_llama_config")
    head_dim = settings.whole_or_none("head_dim", 128 if kind == "qwen3" else None)
    d_head = head_width(width, heads) if head_dim is None else head_dim
    stack = Stack.checked(
        layers=layers,
        heads=heads,
        kv_heads=_kv_heads(settings, kind, heads),
        d_head=d_head,
        d_ff=settings.whole("intermediate_size"),
        norm_eps=settings.positive("rms_norm_eps", 1e-6),
        activation=settings.word("hidden_act", ACTIVATION_WORDS, "silu"),
        feed_forward_bias=kind == "llama" and settings.flag("mlp_bias", False),
        **_biases(settings, kind),
        rotary=rotary(settings, d_head, context=context),
        windows=_windows(settings, kind, layers),
        qk_norm="head" if kind == "qwen3" else None,
        attention_dropout=settings.number("attention_dropout", 0.0),
    )
    return Architecture.checked(
        family=kind,
        vocab=settings.whole("vocab_size"),
        d_model=width,
        context=context,
        decoder=stack,
        unembedding=Unembedding(tied=is_tied(settings, names, _HEADS, default=False)),
    )


def _kv_heads(settings: Settings, kind: str, heads: int) -> int:
    """Where the key is missing, the default of the kind; null is one for each query head."""
    missing = {"mistral": 8, "qwen2": 32, "qwen3": 32}.get(kind)
    return settings.whole_or_none("num_key_value_heads", missing) or heads


def _biases(settings: Settings, kind: str) -> dict[str, bool]:
    if kind == "qwen2":
        return {"qkv_bias": True, "output_bias": False}
    given = kind in ("llama", "qwen3") and settings.flag("attention_bias", False)
    return {"qkv_bias": given, "output_bias": given}


def _windows(settings: Settings, kind: str, layers: int) -> tuple[int | None, ...]:
    if kind == "llama":
        return (None,)
    if kind == "mistral":
        return (settings.whole_or_none("sliding_window", 4096),)
    used = settings.flag("use_sliding_window", False)
    window = settings.whole_or_none("sliding_window", 4096)
    first = settings.get("max_window_layers", 28)
    if isinstance(first, bool) or not isinstance(first, int):
        raise settings.refusal("max_window_layers", "a whole number")
    kinds = [SLIDING if used and window and i >= first else FULL for i in range(layers)]
    return windows_of(settings, kinds, window if used else None)


def windows_of(
    settings: Settings, default: list[str], window: int | None
) -> tuple[int | None, ...]:
    """The window of each layer from ``layer_types``, or from ``default`` where that is missing."""
    kinds = settings.words("layer_types", (FULL, SLIDING)) or default
    if len(kinds) != len(default):
        raise ModelError(
            f"{settings.source} has {len(kinds)} layer_types",
            allowed=f"{len(default)}, one a layer",
        )
    if SLIDING in kinds and window is None:
        raise ModelError(
            f"{settings.source} has {SLIDING} layers and no window",
            to_do="set sliding_window (and use_sliding_window, where the family has it)",
        )
    return tuple(window if kind == SLIDING else None for kind in kinds)


def decoder_sources(
    architecture: Architecture, names: Names, norms: Mapping[str, str]
) -> dict[str, Source]:
    """The sources of a decoder with Llama's names; ``norms``: those of a block, ours -> stored."""
    prefix, stack = base_prefix(names, _PREFIX, _TABLE), architecture.stack
    sources = {
        "embedding.tokens.weight": Source(f"{prefix}{_TABLE}"),
        **linear("decoder.norm", f"{prefix}norm", bias=False),
    }
    if head_name(names, _HEADS) is not None:
        sources["unembedding.weight"] = Source(_HEADS[0])
    for i in range(stack.layers):
        ours, theirs = f"decoder.blocks.{i}", f"{prefix}layers.{i}"
        for norm, stored in norms.items():
            sources |= linear(f"{ours}.{norm}", f"{theirs}.{stored}", bias=False)
        attention, network = f"{ours}.attention.branch", f"{ours}.feed_forward.branch"
        parts: dict[str, Any] = {
            f"{attention}.query": ("self_attn.q_proj", stack.qkv_bias),
            f"{attention}.key": ("self_attn.k_proj", stack.qkv_bias),
            f"{attention}.value": ("self_attn.v_proj", stack.qkv_bias),
            f"{attention}.output": ("self_attn.o_proj", stack.output_bias),
            f"{network}.gate": ("mlp.gate_proj", stack.feed_forward_bias),
            f"{network}.up": ("mlp.up_proj", stack.feed_forward_bias),
            f"{network}.down": ("mlp.down_proj", stack.feed_forward_bias),
        }
        if stack.qk_norm is not None:
            parts[f"{attention}.query_norm"] = ("self_attn.q_norm", False)
            parts[f"{attention}.key_norm"] = ("self_attn.k_norm", False)
        for part, (stored, bias) in parts.items():
            sources |= linear(part, f"{theirs}.{stored}", bias=bias)
    return sources


def _sources(architecture: Architecture, names: Names) -> dict[str, Source]:
    return decoder_sources(
        architecture,
        names,
        {
            "attention.norm": "input_layernorm",
            "feed_forward.norm": "post_attention_layernorm",
        },
    )


def _copies(settings: Settings, names: Names) -> Mapping[str, str]:
    return copied_head(settings, names, base_prefix(names, _PREFIX, _TABLE) + _TABLE, _HEADS, False)


LLAMA = Family(
    model_types=tuple(_CONTEXTS),
    architecture=_architecture,
    sources=_sources,
    derived=(r"rotary_emb\.inv_freq$",),  # rotary frequencies
    copies=_copies,
    prefix=_PREFIX,
    table=_TABLE,
)
