"""GPT-NeoX and Pythia: partial rotary positions, attention and feed-forward side by side.

Queries, keys and values are stored in one matrix, head by head (head × three × d_head rows).
Black et al. 2022 (arXiv:2204.06745), section 2.1; Biderman et al. 2023 (arXiv:2304.01373).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

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

__all__ = ["GPT_NEOX"]

_PREFIX, _TABLE = "gpt_neox.", "embed_in.weight"
_HEADS = ("embed_out.weight", "lm_head.weight")


def _architecture(settings: Settings, names: Names) -> Architecture:
    width, heads = settings.whole("hidden_size"), settings.whole("num_attention_heads")
    context = settings.whole("max_position_embeddings", 2048)
    for key in ("is_encoder_decoder", "add_cross_attention"):
        settings.only(key, False)
    settings.silent("is_decoder")  # it is causal either way
    # Later files repeat the two under the names of other families.
    settings.only("rope_theta", settings.number("rotary_emb_base", 10000.0))
    settings.only("partial_rotary_factor", settings.number("rotary_pct", 0.25))
    d_head = head_width(width, heads)
    bias = settings.flag("attention_bias", True)
    stack = Stack.checked(
        layers=settings.whole("num_hidden_layers"),
        heads=heads,
        kv_heads=heads,
        d_head=d_head,
        d_ff=settings.whole("intermediate_size"),
        norm="layer",
        norm_eps=settings.positive("layer_norm_eps", 1e-5),
        placement="parallel" if settings.flag("use_parallel_residual", True) else "pre",
        activation=settings.word("hidden_act", ACTIVATION_WORDS, "gelu"),
        gated=False,
        qkv_bias=bias,
        output_bias=bias,
        feed_forward_bias=True,
        rotary=rotary(
            settings,
            d_head,
            context=context,
            base_key="rotary_emb_base",
            partial_key="rotary_pct",
            partial=0.25,
        ),
        dropout=settings.number("hidden_dropout", 0.0),
        attention_dropout=settings.number("attention_dropout", 0.0),
    )
    return Architecture.checked(
        family="gpt_neox",
        vocab=settings.whole("vocab_size"),
        d_model=width,
        context=context,
        decoder=stack,
        unembedding=Unembedding(tied=is_tied(settings, names, _HEADS, default=False)),
    )


def _sources(architecture: Architecture, names: Names) -> dict[str, Source]:
    prefix, stack = base_prefix(names, _PREFIX, _TABLE), architecture.stack
    sources = {
        "embedding.tokens.weight": Source(f"{prefix}{_TABLE}"),
        **linear("decoder.norm", f"{prefix}final_layer_norm", bias=True),
    }
    head = head_name(names, _HEADS)
    if head is not None:
        sources["unembedding.weight"] = Source(head)
    for i in range(stack.layers):
        ours, theirs = f"decoder.blocks.{i}", f"{prefix}layers.{i}"
        attention, network = f"{ours}.attention.branch", f"{ours}.feed_forward.branch"
        sources |= linear(f"{ours}.attention.norm", f"{theirs}.input_layernorm", bias=True)
        sources |= linear(
            f"{ours}.feed_forward.norm", f"{theirs}.post_attention_layernorm", bias=True
        )
        for third, name in enumerate(("query", "key", "value")):
            for part in ("weight", "bias") if stack.qkv_bias else ("weight",):
                stored = f"{theirs}.attention.query_key_value.{part}"
                sources[f"{attention}.{name}.{part}"] = Source(stored, _third(third, stack.heads))
        sources |= linear(
            f"{attention}.output", f"{theirs}.attention.dense", bias=stack.output_bias
        )
        sources |= linear(f"{network}.up", f"{theirs}.mlp.dense_h_to_4h", bias=True)
        sources |= linear(f"{network}.down", f"{theirs}.mlp.dense_4h_to_h", bias=True)
    return sources


def _third(number: int, heads: int) -> Callable[[Tensor], Tensor]:
    """Queries, keys or values of ``head·3·d_head …``: the rows of each head stand together."""

    def part(fused: Tensor) -> Tensor:
        return fused.unflatten(0, (heads, 3, -1))[:, number].flatten(0, 1)

    return part


def _copies(settings: Settings, names: Names) -> Mapping[str, str]:
    return copied_head(settings, names, base_prefix(names, _PREFIX, _TABLE) + _TABLE, _HEADS, False)


GPT_NEOX = Family(
    model_types=("gpt_neox",),
    architecture=_architecture,
    sources=_sources,
    # The causal mask, the number it put in the place of hidden logits, and rotary frequencies.
    derived=(r"\.attention\.(bias|masked_bias)$", r"rotary_emb\.inv_freq$"),
    copies=_copies,
    prefix=_PREFIX,
    table=_TABLE,
)
