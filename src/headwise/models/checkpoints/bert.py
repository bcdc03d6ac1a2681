"""BERT: learned positions and segments, LayerNorm after each sublayer, and heads on top.

Read are the bare encoder, with and without its pooler, the head of masked tokens, and a class of
the whole sequence (next-sentence prediction, or what a classifier was trained for). Devlin et al.
2019 (arXiv:1810.04805), sections 3 and 3.1.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from headwise.models.architecture import Architecture, Embedding, Stack, Unembedding, head_width
from headwise.models.checkpoints.family import (
    ACTIVATION_WORDS,
    Family,
    Names,
    Source,
    base_prefix,
    linear,
)
from headwise.models.checkpoints.heads import copied_head, is_tied
from headwise.models.checkpoints.settings import Settings

__all__ = ["BERT"]

_PREFIX, _TABLE = "bert.", "embeddings.word_embeddings.weight"
_MASKED, _HEADS = "cls.predictions", ("cls.predictions.decoder.weight",)
# The linear layer's own bias counts; the other is the same one, or nobody's.
_BIASES = (f"{_MASKED}.decoder.bias", f"{_MASKED}.bias")
_CLASSIFIERS = ("cls.seq_relationship", "classifier")


def _architecture(settings: Settings, names: Names) -> Architecture:
    prefix = base_prefix(names, _PREFIX, _TABLE)
    width, heads = settings.whole("hidden_size", 768), settings.whole("num_attention_heads", 12)
    _refuse_variants(settings)
    pooler = f"{prefix}pooler.dense.weight" in names
    stack = Stack.checked(
        layers=settings.whole("num_hidden_layers", 12),
        heads=heads,
        kv_heads=heads,
        d_head=head_width(width, heads),
        d_ff=settings.whole("intermediate_size", 3072),
        causal=False,
        norm="layer",
        norm_eps=settings.number("layer_norm_eps", 1e-12),
        placement="post",
        final_norm=False,
        activation=settings.word("hidden_act", ACTIVATION_WORDS, "gelu"),
        gated=False,
        qkv_bias=True,
        output_bias=True,
        feed_forward_bias=True,
        dropout=settings.number("hidden_dropout_prob", 0.1),
        attention_dropout=settings.number("attention_probs_dropout_prob", 0.1),
    )
    return Architecture.checked(
        family="bert",
        vocab=settings.whole("vocab_size", 30522),
        d_model=width,
        context=settings.whole("max_position_embeddings", 512),
        encoder=stack,
        embedding=Embedding(
            positions="learned", segments=settings.whole("type_vocab_size", 2), norm=True
        ),
        unembedding=_unembedding(settings, names),
        pooler=pooler,
        classes=_classes(settings, names) if pooler else 0,
    )


def _refuse_variants(settings: Settings) -> None:
    for key in ("is_decoder", "add_cross_attention", "is_encoder_decoder"):
        settings.only(key, False)
    settings.only("position_embedding_type", "absolute")
    settings.only("pooler_type", "first_token_transform")
    # Sizes of a pooler that no implementation builds from them, and the number of classes.
    settings.silent("pooler_fc_size", "pooler_num_attention_heads", "pooler_num_fc_layers")
    settings.silent("pooler_size_per_head", "directionality", "num_labels", "output_past")
    # What is done with the logits of classes, outside the model.
    settings.silent("tie_word_embeddings", "sentence_transformers")
    settings.silent("sbert_ce_default_activation_function")


def _unembedding(settings: Settings, names: Names) -> Unembedding | None:
    if f"{_MASKED}.transform.dense.weight" not in names:
        return None
    tied = is_tied(settings, names, _HEADS, default=True)
    return Unembedding(tied=tied, bias=True, transform=True)


def _classifier(names: Names) -> str | None:
    return next((each for each in _CLASSIFIERS if f"{each}.weight" in names), None)


def _classes(settings: Settings, names: Names) -> int:
    """How many classes the head of the sequence has; the shapes are checked against it."""
    found = _classifier(names)
    if found is None:
        return 0
    labels = settings.get("id2label")
    if found == "classifier" and labels:
        return len(labels)
    return settings.whole("num_labels", 2)


def _sources(architecture: Architecture, names: Names) -> dict[str, Source]:
    prefix = base_prefix(names, _PREFIX, _TABLE)
    table = f"{prefix}embeddings"
    sources = {
        "embedding.tokens.weight": Source(f"{prefix}{_TABLE}"),
        "embedding.positions.weight": Source(f"{table}.position_embeddings.weight"),
        "embedding.segments.weight": Source(f"{table}.token_type_embeddings.weight"),
        **_norm("embedding.norm", f"{table}.LayerNorm", names),
    }
    for i in range(architecture.stack.layers):
        sources |= _block(f"encoder.blocks.{i}", f"{prefix}encoder.layer.{i}", names)
    if architecture.pooler:
        sources |= linear("pooler.dense", f"{prefix}pooler.dense", bias=True)
    if architecture.classes:
        sources |= linear("classifier", _classifier(names) or "classifier", bias=True)
    if architecture.unembedding is not None:
        transform = f"{_MASKED}.transform"
        sources |= linear("unembedding.transform.dense", f"{transform}.dense", bias=True)
        sources |= _norm("unembedding.transform.norm", f"{transform}.LayerNorm", names)
        sources["unembedding.bias"] = Source(_BIASES[0] if _BIASES[0] in names else _BIASES[1])
        if not architecture.unembedding.tied:
            sources["unembedding.weight"] = Source(_HEADS[0])
    return sources


def _block(ours: str, theirs: str, names: Names) -> dict[str, Source]:
    sources: dict[str, Source] = {}
    for name in ("query", "key", "value"):
        sources |= linear(
            f"{ours}.attention.branch.{name}", f"{theirs}.attention.self.{name}", bias=True
        )
    for branch, stored in (
        ("attention.branch.output", "attention.output.dense"),
        ("feed_forward.branch.up", "intermediate.dense"),
        ("feed_forward.branch.down", "output.dense"),
    ):
        sources |= linear(f"{ours}.{branch}", f"{theirs}.{stored}", bias=True)
    sources |= _norm(f"{ours}.attention.norm", f"{theirs}.attention.output.LayerNorm", names)
    return sources | _norm(f"{ours}.feed_forward.norm", f"{theirs}.output.LayerNorm", names)


def _norm(ours: str, stored: str, names: Names) -> dict[str, Source]:
    """A norm, under today's names or those of the first release."""
    if f"{stored}.gamma" in names:
        return {
            f"{ours}.weight": Source(f"{stored}.gamma"),
            f"{ours}.bias": Source(f"{stored}.beta"),
        }
    return linear(ours, stored, bias=True)


def _copies(settings: Settings, names: Names) -> Mapping[str, str]:
    table = base_prefix(names, _PREFIX, _TABLE) + _TABLE
    return {_BIASES[1]: _BIASES[0], **copied_head(settings, names, table, _HEADS, True)}


def _computed(architecture: Architecture, names: Names) -> Mapping[str, Tensor]:
    stored = base_prefix(names, _PREFIX, _TABLE) + "embeddings.position_ids"
    return {stored: torch.arange(architecture.context)[None]}


BERT = Family(
    model_types=("bert",),
    architecture=_architecture,
    sources=_sources,
    derived=(rf"^{re.escape(_BIASES[1])}$",),
    copies=_copies,
    computed=_computed,
    prefix=_PREFIX,
    table=_TABLE,
)
