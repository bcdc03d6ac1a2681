"""GPT-2: learned positions, LayerNorm, biases, and an unembedding that is the embedding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from headwise.cost.blocks import Block, FeedForward, blocks, norm
from headwise.cost.families.common import CAUSAL, causal_heads, class_of, shared, table
from headwise.cost.parts import Component, Parts, Stack
from headwise.cost.settings import Settings

__all__ = ["FAMILIES"]


def _gpt2(settings: Settings) -> Parts:
    d, layers = settings.size("n_embd", "hidden_size"), settings.size("n_layer")
    heads = settings.size("n_head")
    width = settings.divided("n_embd", heads, "another width")
    vocab, context = settings.size("vocab_size"), settings.size("n_positions", "n_ctx")
    d_ff = settings.size("n_inner", default=4 * d)
    name, head = class_of(settings, "GPT2LMHeadModel", CAUSAL)
    block = Block(
        d_model=d,
        heads=heads,
        kv_heads=heads,
        d_qk=width,
        d_value=width,
        feed_forward=FeedForward(d_ff=d_ff, bias=True),
        query_bias=True,
        key_bias=True,
        value_bias=True,
        output_bias=True,
        norm_bias=True,
    )
    stack = Stack(
        name="decoder",
        d_model=d,
        layers=blocks([block] * layers),
        matrices=(
            table("tokens", Component.EMBEDDING, vocab, d),
            table("positions", Component.POSITIONS, context, d),
            *causal_heads(settings, head, d, vocab, shared(settings, True)),
        ),
        vectors=(norm("final norm", d, bias=True),),
        context=context,
    )
    return Parts(family=settings.family, model_class=name, vocab=vocab, stacks=(stack,))


FAMILIES: Final[dict[str, Callable[[Settings], Parts]]] = {"gpt2": _gpt2}
