"""One attention call, with every convention resolved: what is measured, whoever computes it.

transformers' attention interface (``interface``) and Headwise's own models (``own``) each turn what
they are given into a ``Call``, whose mask is always a rule; everything after it is the same.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from headwise.attention.bias import BiasFunction
from headwise.attention.masks import Causal, Everything, Mask, Predicate
from headwise.attention.streaming import attend
from headwise.errors import OptionError
from headwise.observation.biases import cut, cut_array, of_heads
from headwise.observation.pieces import Piece
from headwise.observation.rule import MaskSpec
from headwise.observation.tokens import Index, take

__all__ = ["Call", "refuse_dropout"]

_SAMPLED: Final = 16


@dataclass(frozen=True, eq=False)
class Call:
    """q ``batch head query d_head``, k and v ``batch kv_head key dim``; the rule of the logits."""

    module: nn.Module
    q: Tensor
    k: Tensor
    v: Tensor
    spec: MaskSpec
    scale: float
    softcap: float | None
    sinks: Tensor | None
    bias: Tensor | BiasFunction | None  # a tensor broadcasts to batch head query key
    indices: Tensor | None = None  # (batch, query, kept): the only keys a query may attend to
    bias_hides: bool = False  # the bias may hold -inf: it is (part of) a mask

    def self_role(self) -> str:
        """ "decoder" for causal self-attention, else "encoder".

        Where the rule is not known in closed form, sampled rows say whether later keys are seen;
        a causal module whose mask opens some of them (a prefix, an image) is still a decoder.
        """
        spec = self.spec
        if not self.bias_hides and spec.pattern is not None:
            return "encoder" if spec.pattern.looks_ahead else "decoder"
        ahead = False
        for row in torch.linspace(0, spec.queries - 1, min(_SAMPLED, spec.queries)).long():
            query = row[None, None].to(spec.device) + spec.q_offset
            first = int(query) + 1 - spec.kv_offset
            key = torch.arange(max(first, 0), spec.keys, device=spec.device)[None]
            seen = spec.visible(0, query, key + spec.kv_offset)
            if isinstance(self.bias, Tensor) and self.bias_hides:
                row_bias = cut_array(self.bias, (0, 1), row[None], slice(max(first, 0), spec.keys))
                seen = seen & (row_bias[0, :, 0] > -torch.inf)
            ahead = ahead or bool(seen.any())
        causal = not ahead or getattr(self.module, "is_causal", False)
        return "decoder" if causal else "encoder"

    @property
    def differentiable(self) -> bool:
        """Whether somebody may ask for gradients through this call."""
        tensors = (self.q, self.k, self.v, self.sinks, self.bias)
        learned = any(isinstance(x, Tensor) and x.requires_grad for x in tensors)
        return torch.is_grad_enabled() and learned

    def of_heads(self, heads: Tensor) -> Call:
        """The same call of some of its query heads, each with a key-value head of its own."""
        here = heads.to(self.q.device)
        shared = here // (self.q.shape[1] // self.k.shape[1])
        return replace(
            self,
            q=self.q[:, here],
            k=self.k[:, shared],
            v=self.v[:, shared],
            sinks=None if self.sinks is None else self.sinks[here],
            bias=None if self.bias is None else of_heads(self.bias, heads),
        )

    def part(self, piece: Piece) -> tuple[Tensor, Tensor, Tensor]:
        """The queries, keys and values of one piece."""
        first, last = piece.batch
        q, k, v = (x[first:last] for x in (self.q, self.k, self.v))
        return take(q, 2, piece.rows), take(k, 2, piece.keys), take(v, 2, piece.keys)

    def part_mask(self, piece: Piece) -> Mask:
        """The mask of one piece, sparse key choices included."""
        if self.indices is None:
            return piece.mask
        return piece.mask & _chosen(self.indices, piece)

    def part_bias(self, piece: Piece) -> Tensor | BiasFunction | None:
        """The additive bias of one piece: a view where its rows and keys are runs."""
        if self.bias is None:
            return None
        return cut(self.bias, piece.batch, piece.rows, piece.keys)

    def output(self, piece: Piece) -> Tensor:
        """Attention output of one piece without measuring: ``batch head query d_value``."""
        q, k, v = self.part(piece)
        mask, bias = self.part_mask(piece), self.part_bias(piece)
        plain = self.softcap is None and self.sinks is None and bias is None
        causal = mask == Causal() and piece.offset == 0 and q.shape[2] == k.shape[2]
        if plain and (causal or isinstance(mask, Everything)):
            return functional.scaled_dot_product_attention(
                q, k, v, is_causal=causal, scale=self.scale, enable_gqa=q.shape[1] != k.shape[1]
            )
        return attend(
            q, k, v, mask=mask, scale=self.scale, softcap=self.softcap, bias=bias,
            sinks=self.sinks, offset=piece.offset,
        )  # fmt: skip

    def output_of_rows(self, batch: int, rows: Tensor) -> Tensor:
        """Output of rows that are no tokens (padding), by the same mask: ``1 head row d_value``."""
        spec = self.spec
        index = rows.to(self.q.device)

        def rule(_: int, query: Tensor, key: Tensor) -> Tensor:
            query = rows.to(query.device)[query] + spec.q_offset
            return spec.visible(batch, query, key + spec.kv_offset)

        mask: Mask = Predicate(rule)
        whole = (batch, batch + 1)
        keys = slice(0, self.k.shape[2])
        if self.indices is not None:
            mask = mask & _allowed(self.indices[batch][rows.to(self.indices.device)], 0, keys)
        bias = None if self.bias is None else cut(self.bias, whole, rows, keys)
        return attend(
            self.q[batch : batch + 1].index_select(2, index),
            self.k[batch : batch + 1], self.v[batch : batch + 1], mask=mask, scale=self.scale,
            softcap=self.softcap, bias=bias, sinks=self.sinks, offset=0,
        )  # fmt: skip


def refuse_dropout(name: str, dropout: float) -> None:
    """Weights that are dropped at random are not the softmax that is measured."""
    if dropout:
        raise OptionError(
            f"{name} drops attention weights (dropout {dropout:g})",
            allowed="a model in evaluation mode, or attention dropout 0",
            to_do="call model.eval()",
        )


def _chosen(indices: Tensor, piece: Piece) -> Mask:
    rows = take(indices[piece.batch[0]], 0, piece.rows)
    return _allowed(rows, piece.offset, piece.keys)


def _allowed(chosen: Tensor, offset: int, keys: Index) -> Mask:
    """Only the keys that are listed: ``chosen`` is ``query kept``, indices into the whole call."""
    columns = keys if isinstance(keys, Tensor) else torch.arange(keys.start, keys.stop)

    def rule(_: int, query: Tensor, key: Tensor) -> Tensor:
        query, key = torch.broadcast_tensors(query, key)
        listed = chosen.to(query.device)
        at = columns.to(key.device)[key]
        if query.dim() == 2 and bool((at[:1] == at).all()):
            width = int(max(int(at.max()), int(listed.max()))) + 1
            table = torch.zeros(query.shape[0], width + 1, dtype=torch.bool, device=query.device)
            mine = listed[query[:, 0] - offset].long()
            table.scatter_(1, torch.where(mine < 0, width, mine), True)
            return table.gather(1, at)
        return (listed[query - offset] == at[..., None]).any(-1)

    return Predicate(rule)
