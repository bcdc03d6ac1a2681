"""GPT-2 and its kin: keys that begin with ``n_``, LayerNorm, and a feed-forward of 4 · d_model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from headwise.cost.blocks import Block, FeedForward, norm
from headwise.cost.families.decoder import decoder
from headwise.cost.families.outside import shared, table
from headwise.cost.parts import Component, Parts
from headwise.cost.settings import Settings
from headwise.errors import ModelError

__all__ = ["FAMILIES"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Manner:
    """How a family differs from GPT-2.

    Attributes:
        name: the start of its class names.
        head: the end of the name of its class with an unembedding.
        tied: whether the unembedding is the embedding, unless said otherwise.
        table: whether positions are learned vectors (else they turn queries and keys).
        attention_bias: of all four projections.
        norms: of each block; one where attention and feed-forward read the same.
        head_bias: whether the unembedding has a bias.
        one_kv_head: whether ``multi_query`` is on unless said otherwise.
    """

    name: str
    head: str = "ForCausalLM"
    tied: bool = True
    table: bool = True
    attention_bias: bool = True
    norms: int = 2
    head_bias: bool = False
    one_kv_head: bool = False


def _read(settings: Settings, manner: Manner) -> Parts:
    _check(settings)
    d, layers = settings.size("n_embd", "hidden_size"), settings.layers("n_layer")
    heads, vocab = settings.size("n_head"), settings.size("vocab_size")
    width = settings.divided("n_embd", heads, "another width")
    context = settings.size("n_positions", "n_ctx")
    d_ff = settings.size("n_inner", default=4 * d)
    one = manner.one_kv_head and settings.flag("multi_query", True)
    block = Block(
        d_model=d,
        heads=heads,
        kv_heads=1 if one else heads,
        d_qk=width,
        d_value=width,
        feed_forward=FeedForward(d_ff=d_ff, bias=True),
        query_bias=manner.attention_bias,
        key_bias=manner.attention_bias,
        value_bias=manner.attention_bias,
        output_bias=manner.attention_bias,
        norms=manner.norms,
        norm_bias=True,
    )
    tables = (table("positions", Component.POSITIONS, context, d),) if manner.table else ()
    return decoder(
        settings,
        [block] * layers,
        default=manner.name + manner.head,
        vocab=vocab,
        tied=shared(settings, manner.tied),
        final=(norm("final norm", d, bias=True),),
        context=context,
        tables=tables,
        head_bias=manner.head_bias,
    )


def _check(settings: Settings) -> None:
    if settings.flag("add_cross_attention", False):
        raise ModelError(
            f"add_cross_attention is true in {settings.where}", allowed="a decoder by itself"
        )
    if any("DoubleHeads" in str(name) for name in settings.sequence("architectures") or ()):
        raise ModelError(
            f"two heads (GPT2DoubleHeadsModel) in {settings.where}",
            allowed="one head, such as GPT2LMHeadModel",
            to_do="name one class under architectures",
        )


def _reader(manner: Manner) -> Callable[[Settings], Parts]:
    return lambda settings: _read(settings, manner)


MANNERS: Final[dict[str, Manner]] = {
    "gpt2": Manner(name="GPT2", head="LMHeadModel"),
    "gpt_bigcode": Manner(name="GPTBigCode", one_kv_head=True),
    "gptj": Manner(
        name="GPTJ", tied=False, table=False, attention_bias=False, norms=1, head_bias=True
    ),
}
FAMILIES: Final[dict[str, Callable[[Settings], Parts]]] = {
    family: _reader(manner) for family, manner in MANNERS.items()
}
