"""Marian: the original encoder–decoder, with sinusoids whose sines all stand before the cosines.

Vaswani et al. 2017 (arXiv:1706.03762), section 3; Junczys-Dowmunt et al. 2018 (arXiv:1804.00344).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor

from headwise.errors import ModelError
from headwise.models.architecture import Architecture, Embedding, Stack, Unembedding, head_width
from headwise.models.checkpoints.family import ACTIVATION_WORDS, Family, Names, Source, linear
from headwise.models.checkpoints.heads import copied_head, is_tied
from headwise.models.checkpoints.settings import Settings
from headwise.positions import Layout, sinusoidal_table

__all__ = ["MARIAN"]

_PREFIX: Final = "model."
_HEADS: Final = ("lm_head.weight",)
_BIAS: Final = "final_logits_bias"
# One table, under whichever of its names it was stored.
_TABLES: Final = ("shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
_PROJECTIONS: Final = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "output": "out_proj"}


def _prefix(names: Names) -> str:
    return _PREFIX if any(name.startswith(_PREFIX) for name in names) else ""


def _table(names: Names) -> str:
    for name in _TABLES:
        if _prefix(names) + name in names:
            return _prefix(names) + name
    raise ModelError(
        f"the checkpoint lacks {_prefix(names)}{_TABLES[0]}", to_do="fetch the files again"
    )


def _architecture(settings: Settings, names: Names) -> Architecture:
    _refuse_variants(settings)
    width, vocab = settings.whole("d_model", 1024), settings.whole("vocab_size", 58101)
    settings.only("decoder_vocab_size", vocab)
    scale = math.sqrt(width) if settings.flag("scale_embedding", False) else 1.0
    return Architecture.checked(
        family="marian",
        vocab=vocab,
        d_model=width,
        context=settings.whole("max_position_embeddings", 1024),
        encoder=_stack(settings, "encoder", width),
        decoder=_stack(settings, "decoder", width),
        embedding=Embedding(positions="sinusoidal", layout=Layout.HALF, scale=scale),
        unembedding=Unembedding(
            tied=is_tied(settings, names, _HEADS, default=True), bias=_BIAS in names
        ),
        start_token=settings.get("decoder_start_token_id"),
    )


def _stack(settings: Settings, side: str, width: int) -> Stack:
    heads, layers = (
        settings.whole(f"{side}_attention_heads", 16),
        settings.whole(f"{side}_layers", 12),
    )
    if side == "encoder":
        settings.only("num_hidden_layers", layers)
    own: dict[str, Any] = {"causal": False} if side == "encoder" else {"cross": True}
    return Stack.checked(
        layers=layers,
        heads=heads,
        kv_heads=heads,
        d_head=head_width(width, heads),
        d_ff=settings.whole(f"{side}_ffn_dim", 4096),
        norm="layer",
        norm_eps=1e-5,
        placement="post",
        final_norm=False,
        activation=settings.word("activation_function", ACTIVATION_WORDS, "gelu"),
        gated=False,
        qkv_bias=True,
        output_bias=True,
        feed_forward_bias=True,
        dropout=settings.number("dropout", 0.1),
        attention_dropout=settings.number("attention_dropout", 0.0),
        **own,
    )


def _refuse_variants(settings: Settings) -> None:
    for key in ("is_encoder_decoder", "static_position_embeddings"):
        settings.only(key, True)
    for key in ("is_decoder", "normalize_before", "normalize_embedding", "add_final_layer_norm"):
        settings.only(key, False)
    settings.only("add_bias_logits", False)
    settings.only("share_encoder_decoder_embeddings", True)
    # They act in training only, or on the head of a classifier.
    settings.silent("activation_dropout", "encoder_layerdrop", "decoder_layerdrop", "init_std")
    settings.silent("classif_dropout", "num_labels")


def _sources(architecture: Architecture, names: Names) -> dict[str, Source]:
    prefix, unembedding = _prefix(names), architecture.unembedding
    assert architecture.encoder is not None
    assert unembedding is not None
    sources = {"embedding.tokens.weight": Source(_table(names))}
    if unembedding.bias:
        sources["unembedding.bias"] = Source(_BIAS, _row)
    if not unembedding.tied:
        sources["unembedding.weight"] = Source(_HEADS[0])
    for i in range(architecture.encoder.layers):
        sources |= _block(f"encoder.blocks.{i}", f"{prefix}encoder.layers.{i}")
    for i in range(architecture.stack.layers):
        ours, theirs = f"decoder.blocks.{i}", f"{prefix}decoder.layers.{i}"
        sources |= _block(ours, theirs)
        sources |= _attention(f"{ours}.cross", f"{theirs}.encoder_attn")
    return sources


def _block(ours: str, theirs: str) -> dict[str, Source]:
    network = f"{ours}.feed_forward"
    return {
        **_attention(f"{ours}.attention", f"{theirs}.self_attn"),
        **linear(f"{network}.branch.up", f"{theirs}.fc1", bias=True),
        **linear(f"{network}.branch.down", f"{theirs}.fc2", bias=True),
        **linear(f"{network}.norm", f"{theirs}.final_layer_norm", bias=True),
    }


def _attention(ours: str, stored: str) -> dict[str, Source]:
    sources = linear(f"{ours}.norm", f"{stored}_layer_norm", bias=True)
    for name, theirs in _PROJECTIONS.items():
        sources |= linear(f"{ours}.branch.{name}", f"{stored}.{theirs}", bias=True)
    return sources


def _row(bias: Tensor) -> Tensor:
    """``1 vocab`` -> ``vocab``."""
    return bias[0]


def _copies(settings: Settings, names: Names) -> Mapping[str, str]:
    table = _table(names)
    again = {_prefix(names) + name: table for name in _TABLES if _prefix(names) + name != table}
    return again | dict(copied_head(settings, names, table, _HEADS, True))


def _computed(architecture: Architecture, names: Names) -> Mapping[str, Tensor]:
    table = sinusoidal_table(
        architecture.context, architecture.d_model, dtype=torch.float64, layout=Layout.HALF
    )
    return {
        f"{_prefix(names)}{side}.embed_positions.weight": table for side in ("encoder", "decoder")
    }


MARIAN = Family(
    model_types=("marian",),
    architecture=_architecture,
    sources=_sources,
    copies=_copies,
    computed=_computed,
    prefix=_PREFIX,
    table=_TABLES[0],
)
