"""What every decoder ends in: its blocks, tables, last norm and head put together."""

from __future__ import annotations

from collections.abc import Sequence

from headwise.cost.blocks import Block, blocks
from headwise.cost.families.outside import CAUSAL, causal_heads, class_of, table
from headwise.cost.parts import Component, Matrix, Parts, Stack, Vector
from headwise.cost.settings import Settings
from headwise.errors import ModelError

__all__ = ["decoder", "kv_heads_of"]


def decoder(
    settings: Settings,
    each: Sequence[Block],
    *,
    default: str,
    vocab: int,
    tied: bool,
    final: Sequence[Vector],
    context: int | None,
    width: int | None = None,
    tables: Sequence[Matrix] = (),
    last: Sequence[Matrix] = (),
    head_bias: bool = False,
    notes: Sequence[str] = (),
) -> Parts:
    """The parts of a model that is one decoder.

    Args:
        settings: its configuration.
        each: its blocks.
        default: the class that is counted where the configuration names none.
        vocab: tokens that it knows.
        tied: whether the unembedding is the embedding.
        final: the norm after the last block.
        context: the most tokens it was trained for; None: not said.
        width: of the embedding and of what the head reads; None: that of the blocks.
        tables, last: what stands between the embedding and the blocks, and before the head.
        head_bias: whether the unembedding has a bias.
        notes: what a reader has to know.
    """
    class_name, head = class_of(settings, default, CAUSAL)
    d, e = each[0].d_model, each[0].d_model if width is None else width
    stack = Stack(
        name="decoder",
        d_model=d,
        layers=blocks(each),
        matrices=(
            table("tokens", Component.EMBEDDING, vocab, e),
            *tables,
            *last,
            *causal_heads(settings, head, e, vocab, tied, bias=head_bias),
        ),
        vectors=tuple(final),
        context=context,
        decodes=each[0].causal,
    )
    return Parts(
        family=settings.family,
        model_class=class_name,
        vocab=vocab,
        stacks=(stack,),
        notes=tuple(notes),
    )


def kv_heads_of(settings: Settings, heads: int) -> int:
    """Heads of keys and values: as many as of queries, unless the configuration says fewer."""
    kv_heads = settings.size("num_key_value_heads", default=heads)
    if heads % kv_heads:
        raise ModelError(
            f"{heads} query heads cannot share {kv_heads} key-value heads in {settings.where}",
            allowed="a number of key-value heads that divides the query heads",
        )
    return kv_heads
