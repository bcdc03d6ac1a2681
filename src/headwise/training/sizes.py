"""The sizes of a decoder to train, and the architecture that they mean."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from headwise.models.architecture import (
    Architecture,
    Embedding,
    Rotary,
    Stack,
    Unembedding,
    head_width,
)
from headwise.models.presets import PRESETS, preset

__all__ = ["Sizes", "published"]


class Sizes(BaseModel):
    """A decoder in a few numbers. None: kv_heads = heads, d_head = d_model / heads, and d_ff =
    8/3 d_model (gated) or 4 d_model, rounded up to a multiple of 32.

    Example:
        >>> a = Sizes(d_model=96, layers=2, heads=3).architecture(vocab=257, context=64)
        >>> a.stack.d_head, a.stack.d_ff, a.stack.rotary.width
        (32, 256, 32)
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    d_model: int = Field(default=256, ge=1)
    layers: int = Field(default=4, ge=1)
    heads: int = Field(default=4, ge=1)
    kv_heads: int | None = Field(default=None, ge=1)
    d_head: int | None = Field(default=None, ge=1)
    d_ff: int | None = Field(default=None, ge=1)
    positions: Literal["rotary", "learned", "sinusoidal", "alibi"] = "rotary"
    rotary_base: float = Field(default=10000.0, gt=0)
    norm: Literal["rms", "layer"] = "rms"
    placement: Literal["pre", "post", "sandwich", "branch", "parallel"] = "pre"
    activation: Literal["silu", "gelu", "gelu_tanh", "relu"] = "silu"
    gated: bool = True
    tied: bool = True
    dropout: float = Field(default=0.0, ge=0, lt=1)

    def architecture(self, *, vocab: int, context: int) -> Architecture:
        """The architecture of these sizes, for a vocabulary and a context."""
        d_head = self.d_head or head_width(self.d_model, self.heads)
        wide = (8 * self.d_model + 2) // 3 if self.gated else 4 * self.d_model
        stack = Stack(
            layers=self.layers,
            heads=self.heads,
            kv_heads=self.kv_heads or self.heads,
            d_head=d_head,
            d_ff=self.d_ff or -(-wide // 32) * 32,
            norm=self.norm,
            placement=self.placement,
            activation=self.activation,
            gated=self.gated,
            rotary=self._rotary(d_head),
            alibi=self.positions == "alibi",
            dropout=self.dropout,
        )
        positions = self.positions if self.positions in ("learned", "sinusoidal") else None
        return Architecture(
            vocab=vocab,
            d_model=self.d_model,
            context=context,
            embedding=Embedding(positions=positions),
            decoder=stack,
            unembedding=Unembedding(tied=self.tied),
        )

    def _rotary(self, d_head: int) -> Rotary | None:
        if self.positions != "rotary":
            return None
        return Rotary(width=d_head, base=self.rotary_base)


def published(name: str) -> Architecture:
    """The preset of this name, which is to be a decoder.

    Example:
        >>> published("llama-15m").stack.layers
        6
        >>> published("bert-base")
        Traceback (most recent call last):
            ...
        ValueError: the preset bert-base is an encoder; allowed: gpt2-small, gpt2-medium, ...
    """
    kinds = {each: made().kind for each, made in PRESETS.items()}
    if kinds.get(name) == "decoder":
        return preset(name)
    found = f"the preset {name} is an {kinds[name]}" if name in kinds else f"no preset {name!r}"
    decoders = [each for each, kind in kinds.items() if kind == "decoder"]
    raise ValueError(f"{found}; allowed: {', '.join(decoders)}")
