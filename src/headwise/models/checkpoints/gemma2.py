"""Gemma 2: norms before and after each sublayer, soft caps, every other layer with a window.

Gains are stored as their distance from one, and token vectors are multiplied by √d_model. Gemma
Team 2024 (arXiv:2408.00118), section 2.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from headwise.models.architecture import Architecture, Embedding, Stack, Unembedding
from headwise.models.checkpoints.family import (
    ACTIVATION_WORDS,
    Family,
    Names,
    Source,
    base_prefix,
)
from headwise.models.checkpoints.heads import copied_head, is_tied
from headwise.models.checkpoints.llama import FULL, SLIDING, decoder_sources, windows_of
from headwise.models.checkpoints.rope import rotary
from headwise.models.checkpoints.settings import Settings

__all__ = ["GEMMA2"]

_PREFIX, _TABLE, _HEADS = "model.", "embed_tokens.weight", ("lm_head.weight",)


def _architecture(settings: Settings, names: Names) -> Architecture:
    width, layers = settings.whole("hidden_size"), settings.whole("num_hidden_layers")
    context = settings.whole("max_position_embeddings", 8192)
    for key in ("is_encoder_decoder", "add_cross_attention", "use_bidirectional_attention"):
        settings.only(key, False)
    settings.silent("is_decoder", "hidden_act")  # hidden_activation is the one that is used
    window = settings.whole_or_none("sliding_window", 4096)
    settings.only("sliding_window_size", window)  # the first files repeat it
    d_head = settings.whole("head_dim", 256)
    bias = settings.flag("attention_bias", False)
    alternating = [FULL if i % 2 else SLIDING for i in range(layers)]
    stack = Stack.checked(
        layers=layers,
        heads=settings.whole("num_attention_heads", 8),
        kv_heads=settings.whole("num_key_value_heads", 4),
        d_head=d_head,
        d_ff=settings.whole("intermediate_size"),
        norm="rms+1",
        norm_eps=settings.positive("rms_norm_eps", 1e-6),
        placement="sandwich",
        activation=settings.word("hidden_activation", ACTIVATION_WORDS, "gelu_pytorch_tanh"),
        qkv_bias=bias,
        output_bias=bias,
        rotary=rotary(settings, d_head, context=context),
        windows=windows_of(settings, alternating, window),
        softcap=settings.positive_or_none("attn_logit_softcapping", 50.0),
        scales=(settings.positive("query_pre_attn_scalar", 256.0) ** -0.5,),
        attention_dropout=settings.number("attention_dropout", 0.0),
    )
    return Architecture.checked(
        family="gemma2",
        vocab=settings.whole("vocab_size"),
        d_model=width,
        context=context,
        decoder=stack,
        embedding=Embedding(scale=math.sqrt(width)),
        unembedding=Unembedding(
            tied=is_tied(settings, names, _HEADS, default=True),
            softcap=settings.positive_or_none("final_logit_softcapping", 30.0),
        ),
    )


def _sources(architecture: Architecture, names: Names) -> dict[str, Source]:
    return decoder_sources(
        architecture,
        names,
        {
            "attention.norm": "input_layernorm",
            "attention.norm_after": "post_attention_layernorm",
            "feed_forward.norm": "pre_feedforward_layernorm",
            "feed_forward.norm_after": "post_feedforward_layernorm",
        },
    )


def _copies(settings: Settings, names: Names) -> Mapping[str, str]:
    return copied_head(settings, names, base_prefix(names, _PREFIX, _TABLE) + _TABLE, _HEADS, True)


GEMMA2 = Family(
    model_types=("gemma2",),
    architecture=_architecture,
    sources=_sources,
    derived=(r"rotary_emb\.inv_freq$",),  # rotary frequencies
    copies=_copies,
    prefix=_PREFIX,
    table=_TABLE,
)
