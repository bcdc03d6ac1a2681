"""T5 in its first and its second form, and mT5 and FLAN-T5, which are of the second.

No vector of a position: each stack learns one table of biases by distance, which all of its layers
share. RMSNorm before each sublayer, no biases, dot products that are not scaled.

    first (v1.0)    ReLU, the token table as unembedding, with the factor d_model^(-1/2)
    second (v1.1)   gated GELU, an unembedding of its own, without a factor

Raffel et al. 2020 (arXiv:1910.10683), section 2.1; Shazeer 2020 (arXiv:2002.05202); mT5: Xue et al.
2021 (arXiv:2010.11934). The context is the length of pretraining; the biases go on beyond it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from headwise.errors import ModelError
from headwise.models.architecture import Architecture, Relative, Stack, Unembedding
from headwise.models.checkpoints.family import ACTIVATION_WORDS, Family, Names, Source
from headwise.models.checkpoints.heads import copied_head, is_tied
from headwise.models.checkpoints.settings import Settings

__all__ = ["T5"]

_HEADS: Final = ("lm_head.weight",)
# One table, under whichever of its names it was stored.
_TABLES: Final = ("shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
# Tokens of a sequence in pretraining: Raffel et al., section 3.1.2; Xue et al., section 3.2.
_PRETRAINED: Final = {"t5": 512, "mt5": 1024}
_PROJECTIONS: Final = {"query": "q", "key": "k", "value": "v", "output": "o"}


def _table(names: Names) -> str:
    for name in _TABLES:
        if name in names:
            return name
    raise ModelError(f"the checkpoint lacks {_TABLES[0]}", to_do="fetch the files again")


def _architecture(settings: Settings, names: Names) -> Architecture:
    kind = settings.word("model_type", {"t5": "t5", "mt5": "mt5"}, "t5")
    decodes = any(name.startswith("decoder.block.") for name in names)
    for key in ("is_decoder", "tie_encoder_decoder"):
        settings.only(key, False)
    settings.silent("is_encoder_decoder", "output_past", "num_labels")
    width, layers = settings.whole("d_model", 512), settings.whole("num_layers", _layers(kind))
    common = _common(settings, kind)
    decoder_layers = settings.whole("num_decoder_layers", layers)
    return Architecture.checked(
        family="t5",
        vocab=settings.whole("vocab_size", 250112 if kind == "mt5" else 32128),
        d_model=width,
        context=settings.whole("n_positions", _PRETRAINED[kind]),
        encoder=Stack.checked(layers=layers, causal=False, **common),
        decoder=Stack.checked(layers=decoder_layers, cross=True, **common) if decodes else None,
        unembedding=_unembedding(settings, names, kind, width, decodes),
        start_token=settings.get("decoder_start_token_id") if decodes else None,
    )


def _common(settings: Settings, kind: str) -> dict[str, Any]:
    """What the stacks of encoder and decoder share."""
    heads = settings.whole("num_heads", 6 if kind == "mt5" else 8)
    gated, activation = _feed_forward(settings, "gated-gelu" if kind == "mt5" else "relu")
    dropout = settings.number("dropout_rate", 0.1)
    return {
        "heads": heads,
        "kv_heads": heads,
        "d_head": settings.whole("d_kv", 64),
        "d_ff": settings.whole("d_ff", 1024 if kind == "mt5" else 2048),
        "norm": "rms",
        "norm_eps": settings.number("layer_norm_epsilon", 1e-6),
        "activation": activation,
        "gated": gated,
        "relative": Relative(
            buckets=settings.whole("relative_attention_num_buckets", 32),
            max_distance=settings.whole("relative_attention_max_distance", 128),
        ),
        "scales": (1.0,),
        "dropout": dropout,
        "attention_dropout": dropout,
    }


def _layers(kind: str) -> int:
    return 8 if kind == "mt5" else 6


def _feed_forward(settings: Settings, default: str) -> tuple[bool, str]:
    """Whether the network is gated, and its activation. "gated-gelu" means the tanh form."""
    words = {"gated-gelu": (True, "gelu_tanh")}
    for word, activation in ACTIVATION_WORDS.items():
        words[word] = (False, activation)
        words.setdefault(f"gated-{word}", (True, activation))
    gated, activation = settings.word("feed_forward_proj", words, default)
    # What newer configurations derive from it, and write down as well.
    settings.only("is_gated_act", gated)
    settings.only("dense_act_fn", *(w for w, a in ACTIVATION_WORDS.items() if a == activation))
    return gated, activation


def _unembedding(
    settings: Settings, names: Names, kind: str, width: int, decodes: bool
) -> Unembedding | None:
    said = settings.flag("tie_word_embeddings", True)
    scaled = settings.flag("scale_decoder_outputs", said) and kind == "t5"
    if not decodes:
        return None
    tied = is_tied(settings, names, _HEADS, default=True)
    return Unembedding(tied=tied, scale=width**-0.5 if scaled else 1.0)


def _sources(architecture: Architecture, names: Names) -> dict[str, Source]:
    sources = {"embedding.tokens.weight": Source(_table(names))}
    for side, stack in (("encoder", architecture.encoder), ("decoder", architecture.decoder)):
        if stack is None:
            continue
        biases = f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        sources[f"{side}.bias.weight"] = Source(biases)
        sources[f"{side}.norm.weight"] = Source(f"{side}.final_layer_norm.weight")
        for i in range(stack.layers):
            sources |= _block(f"{side}.blocks.{i}", f"{side}.block.{i}.layer", stack)
    unembedding = architecture.unembedding
    if unembedding is not None and not unembedding.tied:
        sources["unembedding.weight"] = Source(_HEADS[0])
    return sources


def _block(ours: str, theirs: str, stack: Stack) -> dict[str, Source]:
    """The sublayers of a block, which are numbered: attention, cross-attention if any, network."""
    attentions = {"attention": "SelfAttention"} | (
        {"cross": "EncDecAttention"} if stack.cross else {}
    )
    sources = {}
    for number, (part, stored) in enumerate(attentions.items()):
        sources[f"{ours}.{part}.norm.weight"] = Source(f"{theirs}.{number}.layer_norm.weight")
        for name, letter in _PROJECTIONS.items():
            weight = f"{theirs}.{number}.{stored}.{letter}.weight"
            sources[f"{ours}.{part}.branch.{name}.weight"] = Source(weight)
    last = f"{theirs}.{len(attentions)}"
    network = {"gate": "wi_0", "up": "wi_1"} if stack.gated else {"up": "wi"}
    for name, stored in {**network, "down": "wo"}.items():
        weight = f"{last}.DenseReluDense.{stored}.weight"
        sources[f"{ours}.feed_forward.branch.{name}.weight"] = Source(weight)
    sources[f"{ours}.feed_forward.norm.weight"] = Source(f"{last}.layer_norm.weight")
    return sources


def _copies(settings: Settings, names: Names) -> Mapping[str, str]:
    table = _table(names)
    again = {name: table for name in _TABLES if name != table}
    return again | dict(copied_head(settings, names, table, _HEADS, True))


T5 = Family(
    model_types=("t5", "mt5"),
    architecture=_architecture,
    sources=_sources,
    # The first conversions stored biases of cross-attention too, which no implementation reads.
    derived=(r"^decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight$",),
    copies=_copies,
    table=_TABLES[0],
)
