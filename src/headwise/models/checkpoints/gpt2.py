"""GPT-2: learned positions, LayerNorm before each sublayer, queries, keys and values in one matrix.

Its linear layers are stored transposed (input × output). Radford et al. 2019, section 2.3; the
scale divided by the layer's number: Stanford's Mistral GPT-2 models.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from headwise.errors import ModelError
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

__all__ = ["GPT2"]

_PREFIX, _TABLE, _HEADS = "transformer.", "wte.weight", ("lm_head.weight",)


def _architecture(settings: Settings, names: Names) -> Architecture:
    width, heads = settings.whole("n_embd"), settings.whole("n_head")
    layers = settings.whole("n_layer")
    for key in ("is_encoder_decoder", "add_cross_attention"):
        settings.only(key, False)
    # Another summation order, dtype and head of a classifier: the same logits.
    settings.silent("reorder_and_upcast_attn", "n_ctx", "summary_type", "summary_use_proj")
    settings.silent("summary_activation", "summary_proj_to_labels", "summary_first_dropout")
    settings.silent("is_decoder")
    d_head = head_width(width, heads)
    stack = Stack.checked(
        layers=layers,
        heads=heads,
        kv_heads=heads,
        d_head=d_head,
        d_ff=settings.whole("n_inner", 4 * width),
        norm="layer",
        norm_eps=settings.positive("layer_norm_epsilon", 1e-5),
        activation=settings.word("activation_function", ACTIVATION_WORDS, "gelu_new"),
        gated=False,
        qkv_bias=True,
        output_bias=True,
        feed_forward_bias=True,
        scales=_scales(settings, d_head, layers),
        dropout=_dropout(settings),
        attention_dropout=settings.number("attn_pdrop", 0.1),
    )
    return Architecture.checked(
        family="gpt2",
        vocab=settings.whole("vocab_size"),
        d_model=width,
        context=settings.whole("n_positions", 1024),
        decoder=stack,
        embedding=Embedding(positions="learned"),
        unembedding=Unembedding(tied=is_tied(settings, names, _HEADS, default=True)),
    )


def _scales(settings: Settings, d_head: int, layers: int) -> tuple[float | None, ...]:
    scaled = settings.flag("scale_attn_weights", True)
    if not settings.flag("scale_attn_by_inverse_layer_idx", False):
        return (None if scaled else 1.0,)
    scale = d_head**-0.5 if scaled else 1.0
    return tuple(scale / (layer + 1) for layer in range(layers))


def _dropout(settings: Settings) -> float:
    """One share for the embedding and the residual stream; they only act in training."""
    residual, embedding = (settings.number(k, 0.1) for k in ("resid_pdrop", "embd_pdrop"))
    if residual != embedding:
        raise ModelError(
            f"{settings.source} has resid_pdrop = {residual:g} and embd_pdrop = {embedding:g}",
            allowed="one share for both",
            to_do="set them to the same number: neither acts outside training",
        )
    return residual


def _sources(architecture: Architecture, names: Names) -> dict[str, Source]:
    prefix, stack = base_prefix(names, _PREFIX, _TABLE), architecture.stack
    sources = {
        "embedding.tokens.weight": Source(f"{prefix}wte.weight"),
        "embedding.positions.weight": Source(f"{prefix}wpe.weight"),
        **linear("decoder.norm", f"{prefix}ln_f", bias=True),
    }
    assert architecture.unembedding is not None
    if not architecture.unembedding.tied:
        sources["unembedding.weight"] = Source(_HEADS[0])
    for i in range(stack.layers):
        ours, theirs = f"decoder.blocks.{i}", f"{prefix}h.{i}"
        attention, network = f"{ours}.attention.branch", f"{ours}.feed_forward.branch"
        sources |= linear(f"{ours}.attention.norm", f"{theirs}.ln_1", bias=True)
        sources |= linear(f"{ours}.feed_forward.norm", f"{theirs}.ln_2", bias=True)
        for third, name in enumerate(("query", "key", "value")):
            for part in ("weight", "bias"):
                stored = f"{theirs}.attn.c_attn.{part}"
                sources[f"{attention}.{name}.{part}"] = Source(stored, _third(third))
        sources |= _conv1d(f"{attention}.output", f"{theirs}.attn.c_proj")
        sources |= _conv1d(f"{network}.up", f"{theirs}.mlp.c_fc")
        sources |= _conv1d(f"{network}.down", f"{theirs}.mlp.c_proj")
    return sources


def _third(number: int) -> Callable[[Tensor], Tensor]:
    """Queries, keys or values of a fused, transposed projection: ``d_model 3·d_model``."""

    def part(fused: Tensor) -> Tensor:
        return fused.tensor_split(3, dim=-1)[number].t()

    return part


def _conv1d(ours: str, stored: str) -> dict[str, Source]:
    return {
        f"{ours}.weight": Source(f"{stored}.weight", Tensor.t),
        f"{ours}.bias": Source(f"{stored}.bias"),
    }


def _copies(settings: Settings, names: Names) -> Mapping[str, str]:
    return copied_head(settings, names, base_prefix(names, _PREFIX, _TABLE) + _TABLE, _HEADS, True)


GPT2 = Family(
    model_types=("gpt2",),
    architecture=_architecture,
    sources=_sources,
    # The causal mask, and the number it put in the place of hidden logits.
    derived=(r"(^|\.)h\.\d+\.attn\.(bias|masked_bias)$",),
    copies=_copies,
    prefix=_PREFIX,
    table=_TABLE,
)
