"""Random small decoders for the laws: every word of ``Architecture`` that a decoder may use."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from hypothesis import strategies as st

from headwise.models import (
    Architecture,
    Decoder,
    Embedding,
    Relative,
    Rotary,
    Stack,
    Unembedding,
    build,
)
from headwise.positions import Layout, scalings
from tests.models.oracle import decoder_of, spread

VOCAB, CONTEXT = 17, 13

SCALINGS: dict[str, Any] = {
    "linear": scalings.Linear(factor=4.0),
    "dynamic": scalings.DynamicNTK(factor=2.0, trained=CONTEXT),
    "yarn": scalings.YaRN(factor=4.0, trained=32, attention_factor=1.1),
    "llama3": scalings.Llama3(factor=8.0, trained=64),
    "longrope": scalings.LongRope(short=(1.0, 1.5), long=(2.0, 7.0), factor=2.0, trained=CONTEXT),
    "proportional": scalings.Proportional(share=0.5),
}


@st.composite
def rotaries(draw: st.DrawFn, d_head: int) -> Rotary:
    width = draw(st.sampled_from([w for w in (2, 4) if w <= d_head]))
    small = ("linear", "yarn", "llama3")  # the others need two pairs or more
    fitting = [s for word, s in SCALINGS.items() if word in small or width == 4]
    return Rotary(
        width=width,
        base=draw(st.sampled_from([10.0, 10000.0])),
        layout=draw(st.sampled_from(list(Layout))),
        scaling=draw(st.sampled_from([None, None, *fitting])),
    )


@st.composite
def decoders(draw: st.DrawFn, rotary_only: bool = False) -> Architecture:
    """A decoder of one or two layers; ``rotary_only``: no other kind of position."""
    layers = draw(st.sampled_from([1, 2]))
    heads, kv_heads = draw(st.sampled_from([(1, 1), (3, 3), (4, 2), (3, 1)]))
    d_head = draw(st.sampled_from([3, 4, 5]))
    kind = "rotary" if rotary_only else draw(
        st.sampled_from(["rotary", "learned", "sinusoidal", "alibi", "relative", "none", "both"])
    )  # fmt: skip
    one = st.sampled_from([None, None, 1, 3, 5, CONTEXT + 1])
    every = [st.tuples(one), *([st.tuples(one, one)] if layers == 2 else [])]
    number = st.sampled_from([None, 0.7])
    stack = Stack(
        layers=layers, heads=heads, kv_heads=kv_heads, d_head=d_head, d_ff=7,
        norm=draw(st.sampled_from(["layer", "rms", "rms+1"])),
        norm_eps=draw(st.sampled_from([1e-6, 1e-3])),
        placement=draw(st.sampled_from(["pre", "post", "sandwich", "branch", "parallel"])),
        final_norm=draw(st.booleans()),
        activation=draw(st.sampled_from(["relu", "gelu", "gelu_tanh", "silu"])),
        gated=draw(st.booleans()), qkv_bias=draw(st.booleans()), output_bias=draw(st.booleans()),
        feed_forward_bias=draw(st.booleans()),
        rotary=draw(rotaries(d_head)) if kind in ("rotary", "both") else None,
        relative=Relative(buckets=8, max_distance=9) if kind == "relative" else None,
        alibi=kind == "alibi",
        windows=draw(st.one_of(every)),
        qk_norm=draw(st.sampled_from([None, "head", "all"])),
        softcap=draw(st.sampled_from([None, None, 2.0])),
        sinks=draw(st.booleans()),
        scales=(draw(number), draw(number))[:layers],
        dropout=draw(st.sampled_from([0.0, 0.3])),
        attention_dropout=draw(st.sampled_from([0.0, 0.3])),
    )  # fmt: skip
    words = {"learned": "learned", "both": "learned", "sinusoidal": "sinusoidal"}
    return Architecture(
        vocab=VOCAB, d_model=draw(st.sampled_from([10, 12])), context=CONTEXT, decoder=stack,
        embedding=Embedding(
            positions=words.get(kind),  # type: ignore[arg-type]
            scale=draw(st.sampled_from([1.0, 3.0])), norm=draw(st.booleans()),
        ),
        unembedding=Unembedding(
            tied=draw(st.booleans()), bias=draw(st.booleans()),
            scale=draw(st.sampled_from([1.0, 0.5])), softcap=draw(st.sampled_from([None, 5.0])),
        ),
    )  # fmt: skip


@cache
def sharp(architecture: Architecture, seed: int = 0) -> Decoder:
    """A float64 decoder whose weights are large enough that every rule shows, in evaluation."""
    return decoder_of(spread(build(architecture, dtype=torch.float64), seed)).eval()


def some_ids(batch: int, length: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCAB, (batch, length), generator=generator)
