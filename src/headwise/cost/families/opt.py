"""OPT: GPT-2's make with ReLU, two more rows of positions, and a narrower embedding in OPT-350M.

Source: Zhang et al. 2022 (arXiv:2205.01068), and the released configurations.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from headwise.cost.blocks import Block, FeedForward, norm
from headwise.cost.families.decoder import decoder
from headwise.cost.families.outside import linear, shared, table
from headwise.cost.parts import Component, Parts
from headwise.cost.settings import Settings

__all__ = ["FAMILIES"]

_OFFSET: Final = 2  # rows before that of position 0


def _opt(settings: Settings) -> Parts:
    d, heads = settings.size("hidden_size"), settings.size("num_attention_heads")
    width = settings.divided("hidden_size", heads, "another width")
    bias = settings.flag("enable_bias", True)
    gains = settings.flag("layer_norm_elementwise_affine", True)
    before = settings.flag("do_layer_norm_before", True)
    context = settings.size("max_position_embeddings")
    e = settings.size("word_embed_proj_dim", default=d)
    block = Block(
        d_model=d,
        heads=heads,
        kv_heads=heads,
        d_qk=width,
        d_value=width,
        feed_forward=FeedForward(d_ff=settings.size("ffn_dim"), bias=bias),
        query_bias=bias,
        key_bias=bias,
        value_bias=bias,
        output_bias=bias,
        norm_gain=gains,
        norm_bias=gains,
    )
    final = before and gains and not settings.flag("_remove_final_layer_norm", False)
    narrow = e != d
    return decoder(
        settings,
        [block] * settings.layers("num_hidden_layers"),
        default="OPTForCausalLM",
        vocab=settings.size("vocab_size"),
        tied=shared(settings, True),
        width=e,
        tables=(
            table("positions", Component.POSITIONS, context + _OFFSET, d),
            *([linear("into the blocks", e, d, bias=False)] if narrow else ()),
        ),
        last=[linear("out of the blocks", d, e, bias=False)] if narrow else (),
        final=(norm("final norm", d, bias=True),) if final else (),
        context=context,
    )


FAMILIES: Final[dict[str, Callable[[Settings], Parts]]] = {"opt": _opt}
