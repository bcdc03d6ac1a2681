"""A model from sizes alone, for one that has no configuration yet."""

from __future__ import annotations

from typing import Final

from headwise.cost.blocks import Block, Experts, FeedForward, blocks, norm
from headwise.cost.families.outside import table, unembedding
from headwise.cost.parts import Component, Parts, Stack
from headwise.cost.settings import brief
from headwise.errors import OptionError

__all__ = ["explicit"]

_MOST: Final = 10**9
_MOST_LAYERS: Final = 10_000  # each is listed


def explicit(
    *,
    d_model: int,
    layers: int,
    heads: int,
    vocab: int,
    kv_heads: int | None = None,
    d_head: int | None = None,
    d_ff: int | None = None,
    gated: bool = False,
    bias: bool = False,
    tied: bool = False,
    causal: bool = True,
    window: int | None = None,
    context: int | None = None,
    experts: int | None = None,
    experts_used: int = 1,
    shared_experts: int = 0,
) -> Parts:
    """A model of equal blocks, from its sizes: d_ff is 4 · d_model unless it is given.

    Parameters: norms are two RMSNorms in each block and one at the end (LayerNorms with ``bias``),
    and positions are rotary. ``causal=False`` makes it an encoder. With ``experts``, each has d_ff.

    Raises:
        OptionError: sizes that do not fit together.

    Example:
        >>> from headwise.cost.explicit import explicit
        >>> parts = explicit(d_model=4096, layers=32, heads=32, kv_heads=8, vocab=32_000)
        >>> len(parts.stacks[0].layers), parts.stacks[0].layers[0].attentions[0].d_qk
        (32, 128)
    """
    kv = heads if kv_heads is None else kv_heads
    sizes = {
        "d_model": d_model, "layers": layers, "heads": heads, "vocab": vocab, "kv_heads": kv,
        "d_head": d_head, "d_ff": d_ff, "window": window, "context": context, "experts": experts,
        "experts_used": experts_used,
    }  # fmt: skip
    for name, value in sizes.items():
        if value is not None:
            _in_bounds(name, value, 1, _MOST_LAYERS if name == "layers" else _MOST)
    _in_bounds("shared_experts", shared_experts, 0, _MOST)
    _fits(d_model, heads, kv, d_head, experts, experts_used)
    width = d_model // heads if d_head is None else d_head
    plain = FeedForward(d_ff=4 * d_model if d_ff is None else d_ff, gated=gated, bias=bias)
    mixture = plain if experts is None else _mixture(plain, experts, experts_used, shared_experts)
    block = Block(
        d_model=d_model,
        heads=heads,
        kv_heads=kv,
        d_qk=width,
        d_value=width,
        feed_forward=mixture,
        causal=causal,
        window=window if causal else None,
        query_bias=bias,
        key_bias=bias,
        value_bias=bias,
        output_bias=bias,
        norm_bias=bias,
    )
    stack = Stack(
        name="decoder" if causal else "encoder",
        d_model=d_model,
        layers=blocks([block] * layers),
        matrices=(
            table("tokens", Component.EMBEDDING, vocab, d_model),
            *unembedding(d_model, vocab, tied=tied),
        ),
        vectors=(norm("final norm", d_model, bias),),
        context=context,
        decodes=causal,
    )
    return Parts(family="explicit sizes", model_class="", vocab=vocab, stacks=(stack,))


def _in_bounds(name: str, value: int, least: int, most: int) -> None:
    if type(value) is not int or not least <= value <= most:
        raise OptionError(
            f"{name} is {brief(value)}", allowed=f"a whole number, {least} to {most:,}"
        )


def _fits(
    d_model: int, heads: int, kv: int, d_head: int | None, experts: int | None, used: int
) -> None:
    if d_head is None and d_model % heads:
        raise OptionError(
            f"{heads} heads do not divide d_model {d_model}",
            allowed="a number of heads that divides it, or d_head",
        )
    if heads % kv:
        raise OptionError(
            f"{heads} query heads cannot share {kv} key-value heads",
            allowed="a number of key-value heads that divides the query heads",
        )
    if experts is not None and used > experts:
        raise OptionError(f"{used} experts of {experts} are used", allowed=f"1 to {experts}")


def _mixture(each: FeedForward, experts: int, used: int, shared: int) -> Experts:
    beside = FeedForward(d_ff=shared * each.d_ff, gated=each.gated, bias=each.bias)
    return Experts(count=experts, used=used, each=each, shared=beside if shared else None)
