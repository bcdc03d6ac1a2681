"""Blocks of LayerNorms and linear maps with biases, as BERT, BART, Whisper, ViT and CLIP have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from headwise.cost.blocks import Block, FeedForward, norm
from headwise.cost.families.outside import linear
from headwise.cost.parts import Component, Layer, Matrix, Rows, Vector
from headwise.cost.settings import Settings

__all__ = ["Keys", "biased_block", "norms", "of_sequence", "vector", "without_source"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Keys:
    """The keys under which a family writes the sizes of its blocks."""

    width: str = "hidden_size"
    layers: str = "num_hidden_layers"
    heads: str = "num_attention_heads"
    d_ff: str = "intermediate_size"


def biased_block(
    settings: Settings,
    keys: Keys,
    *,
    causal: bool = False,
    source: int | None = None,
    qkv_bias: bool = True,
    key_bias: bool = True,
) -> Block:
    """One block: two LayerNorms, or three where it reads a ``source`` of that width."""
    d, heads = settings.size(keys.width), settings.size(keys.heads)
    width = settings.divided(keys.width, heads, "another width")
    return Block(
        d_model=d,
        heads=heads,
        kv_heads=heads,
        d_qk=width,
        d_value=width,
        feed_forward=FeedForward(d_ff=settings.size(keys.d_ff), bias=True),
        causal=causal,
        source=source,
        query_bias=qkv_bias,
        key_bias=qkv_bias and key_bias,
        value_bias=qkv_bias,
        output_bias=True,
        norms=2 if source is None else 3,
        norm_bias=True,
    )


def norms(d: int, *names: str) -> list[Vector]:
    """LayerNorms outside of the blocks."""
    return [norm(name, d, bias=True) for name in names]


def of_sequence(name: str, d_in: int, d_out: int, *, bias: bool = True) -> Matrix:
    """A linear map of one vector of each sequence: a pooler, a classifier, a projection."""
    return linear(name, d_in, d_out, bias=bias, rows=Rows.SEQUENCE)


def without_source(layers: Sequence[Layer]) -> tuple[Layer, ...]:
    """Layers whose cross-attention is stored, but has nothing to read and does no work."""
    return tuple(
        replace(
            layer,
            matrices=tuple(
                replace(matrix, rows=Rows.NONE) if matrix.role == "cross" else matrix
                for matrix in layer.matrices
            ),
            attentions=tuple(each for each in layer.attentions if each.role != "cross"),
        )
        for layer in layers
    )


def vector(name: str, component: Component, size: int) -> Vector:
    """Learned numbers that are added or that scale."""
    return Vector(name=name, component=component, size=size)
