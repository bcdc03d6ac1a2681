"""The weights of the heads of one attention module, and of a whole model.

Row vectors: q = x W_Q + b_Q, W_QK = W_Q W_Kᵀ, W_OV = W_V W_O. Two forms are shown of each: of the
raw weights, which read what the norm before attention gives; and folded, which reads the stream
that is only centred (LayerNorm) and divided by a positive number of each token.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from headwise.circuits.factored import Factored
from headwise.circuits.latent import LatentUse
from headwise.circuits.norms import HeadNorm, NormFold
from headwise.positions import Layout

__all__ = ["HeadWeights", "LayerWeights", "RotaryUse"]


@dataclass(frozen=True, eq=False)
class RotaryUse:
    """How queries and keys turn: their first ``width`` entries, pair i by position · inv_freq[i].

    ``factor`` multiplies queries and keys (YaRN's and LongRoPE's attention factor), so logits have
    its square.
    """

    inv_freq: Tensor  # (pair,) float64
    width: int
    layout: Layout
    factor: float = 1.0


@dataclass(frozen=True, eq=False, repr=False)
class LayerWeights:
    """The heads of one attention module.

    Shapes: query ``head d_model d_head``, key ``kv_head d_model d_head``, value ``kv_head d_model
    d_value``, output ``head d_value d_model``; biases without ``d_model``, output_bias
    ``d_model``. In cross-attention, keys and values read the other sequence, whose norm is
    ``source_norm``.

    Attributes:
        fixed: whether logits are scale · (a fixed bilinear form of the normed stream, biases and
            rotation apart); ``why_not`` says what stands in the way and what is still exact.
            Logits are those before softcap, learned biases by distance, and mask.
        output_norm: the norm that what attention writes passes before it is added, so W_OV is exact
            up to a positive number of each token, which all heads of the layer share.
        latent: narrow vectors that queries, keys and values come out of; the weights are then
            products, of the entries that do not turn, and reach ``d_model`` up to a positive number
            of each token (``why_not``). It reads what ``norm`` gives, folded or not.
        write_scale: factor with which the block adds what attention writes (Granite).
    """

    module: str
    role: str  # "decoder", "encoder" or "cross"
    number: int
    query: Tensor
    key: Tensor
    value: Tensor
    output: Tensor
    scale: float
    query_bias: Tensor | None = None
    key_bias: Tensor | None = None
    value_bias: Tensor | None = None
    output_bias: Tensor | None = None
    rotary: RotaryUse | None = None
    norm: NormFold | None = None
    source_norm: NormFold | None = None
    query_norm: HeadNorm | None = None
    key_norm: HeadNorm | None = None
    clip: float | None = None
    output_norm: NormFold | None = None
    latent: LatentUse | None = None
    write_scale: float = 1.0
    fixed: bool = True
    why_not: str = ""

    def __repr__(self) -> str:
        return (
            f"LayerWeights({self.module}: {self.role} {self.number}, {self.heads} heads over"
            f" {self.kv_heads}, d_head {self.query.shape[2]})"
        )

    @property
    def heads(self) -> int:
        """Query heads."""
        return self.query.shape[0]

    @property
    def kv_heads(self) -> int:
        """Heads of keys and values; query head h reads number h // (heads / kv_heads)."""
        return self.key.shape[0]

    def shared(self, x: Tensor) -> Tensor:
        """Something of each key-value head, for the query heads that read it: ``head …``."""
        return x if len(x) == self.heads else x.repeat_interleave(self.heads // len(x), 0)

    def qk(self, folded: bool = False) -> Factored:
        """W_Q W_Kᵀ of every head, ``head d_model d_model``, without scale and rotation.

        Folded, the norms of queries and keys have their gains in it too. Between the two factors
        stand the ``d_head`` entries that a rotation turns.
        """
        own = self.folded() if folded else self
        return Factored(_wide(own.query), _wide(self.shared(own.key)).mT)

    def ov(self, folded: bool = False) -> Factored:
        """W_V W_O of every head, ``head d_model d_model``.

        Folded, the gain (and centring) of the norm of what is written is in it too.
        """
        own = self.folded() if folded else self
        return Factored(_wide(self.shared(own.value)), _wide(own.output))

    def folded(self) -> LayerWeights:
        """The same heads, with the linear part of every norm in their weights and biases.

        ``norm`` and ``source_norm`` of the result only centre and divide; ``output_norm`` divides,
        by the size that was before its gain, and adds its bias. Weights in half precision become
        float32.
        """
        changed: dict[str, Any] = {}
        for name in _WEIGHTS:
            x = getattr(self, name)
            changed[name] = None if x is None else _wide(x)
        for name, norm in (("query", self.norm), ("key", self.source_norm),
                           ("value", self.source_norm)):  # fmt: skip
            weight, bias = changed[name], changed[f"{name}_bias"]
            if norm is not None:
                bias = norm.fold_bias(weight, bias)
                weight = norm.fold(weight)
            head_norm = None if name == "value" else getattr(self, f"{name}_norm")
            if head_norm is not None:
                weight = head_norm.fold(weight)
                bias = None if bias is None else head_norm.fold(bias)
                changed[f"{name}_norm"] = head_norm.plain()
            changed |= {name: weight, f"{name}_bias": bias}
        if self.output_norm is not None:
            for name in ("output", "output_bias"):
                x = changed[name]
                changed[name] = None if x is None else self.output_norm.fold_output(x)
            changed["output_norm"] = self.output_norm.written()
        changed["norm"] = None if self.norm is None else self.norm.plain()
        changed["source_norm"] = None if self.source_norm is None else self.source_norm.plain()
        return replace(self, **changed)


@dataclass(frozen=True, eq=False, repr=False)
class HeadWeights:
    """The heads of a model, and the two tables at its ends.

    Shapes: embedding ``vocab d_model`` (the raw table: a model may scale it by one number),
    unembedding ``d_model vocab``; None where there is none, or where no linear map leads from the
    stream to the logits (``notes`` say so).
    """

    layers: tuple[LayerWeights, ...]
    embedding: Tensor | None
    unembedding: Tensor | None
    final_norm: NormFold | None
    context: int | None
    family: str
    validated: bool
    notes: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return f"HeadWeights({self.family}: {len(self.layers)} attention modules)"


_WEIGHTS = (
    "query", "key", "value", "output", "query_bias", "key_bias", "value_bias", "output_bias",
)  # fmt: skip


def _wide(x: Tensor) -> Tensor:
    """In float32 or better."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
