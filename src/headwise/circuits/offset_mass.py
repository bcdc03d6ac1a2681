"""The weight on the key at a fixed offset from the query: one diagonal of A without A.

    a_{i, i+o} = exp(s_{i, i+o} - L_i)

L_i, the log-sum-exp of a row, is known once the row has been measured, so that a diagonal costs one
dot product per row: O(n d) time, O(n) memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from headwise.attention.statistics import Statistics
from headwise.observation.biases import tiles
from headwise.observation.call import Call
from headwise.observation.pieces import Piece

__all__ = ["bias_at", "capped", "offset_mass", "seen_at"]

_ROWS: Final = 64  # of a bias that is a function, evaluated a block of rows at a time


@torch.no_grad()
def offset_mass(call: Call, piece: Piece, found: Statistics, offsets: Sequence[int]) -> Tensor:
    """a_{i, i+o} of every measured row: ``offset batch head row``, in the dtype of L.

    NaN where the text has no token at i+o; 0 where it has one that the mask hides.

    Args:
        call, piece, found: as ``observe(each=...)`` gives them.
        offsets: o, key position less query position: -1 is the token before.

    Example:
        >>> from transformers import LlamaConfig, LlamaModel
        >>> from headwise.observation.attach import observe
        >>> config = LlamaConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=1,
        ...                      num_attention_heads=2, vocab_size=11)
        >>> model, masses = LlamaModel(config).eval(), []
        >>> def each(module, call, piece, found):
        ...     masses.append(offset_mass(call, piece, found, [0, -1]).sum(0)[0, 0])
        >>> with observe(model, each=each) as scan:
        ...     _ = model(torch.tensor([[1, 2]]))
        >>> [round(float(mass), 4) for mass in masses[0]]  # row 0 has no token before it
        [nan, 1.0]
    """
    q, k, _ = call.part(piece)
    kind = found.log_sum_exp.dtype
    rows = found.rows.to(q.device)
    q = q.index_select(2, rows).to(kind)
    k = k.to(kind).repeat_interleave(q.shape[1] // k.shape[1], 1)
    at = rows + piece.offset
    out = []
    for offset in offsets:
        key = at + offset
        there = (key >= 0) & (key < k.shape[2])
        key = key.clamp(0, k.shape[2] - 1)
        logit = capped((q * k.index_select(2, key)).sum(-1) * call.scale, call)
        one, batch = key[:, None], range(piece.batch[1] - piece.batch[0])
        if call.bias is not None:
            bias = torch.stack([bias_at(call, piece, b, rows, one)[..., 0] for b in batch])
            logit = logit + bias.to(logit)
        mass = torch.exp(logit - found.log_sum_exp.to(logit))
        seen = torch.stack([seen_at(call, piece, b, at, one)[:, 0] for b in batch])
        mass = torch.where(seen[:, None], mass, 0.0)
        out.append(mass.masked_fill(~there, math.nan))
    return torch.stack(out)


def capped(logit: Tensor, call: Call) -> Tensor:
    """The scaled logits after the softcap, where the call has one."""
    return logit if call.softcap is None else call.softcap * torch.tanh(logit / call.softcap)


def seen_at(call: Call, piece: Piece, b: int, at: Tensor, key: Tensor) -> Tensor:
    """``row kept``: whether each row of sequence b may see its keys.

    Args:
        at: where the rows stand among the keys, ``row``.
        key: ``row kept``.
    """
    seen = call.part_mask(piece).visible(b, at[:, None], key)
    return seen.expand(key.shape).to(key.device)


def bias_at(call: Call, piece: Piece, b: int, rows: Tensor, key: Tensor) -> Tensor:
    """``head row kept``: what is added to the logits of the rows of sequence b and their keys.

    Args:
        call: one with a bias.
        rows: ``row``, counted within the piece.
        key: ``row kept``.
    """
    bias, heads = call.part_bias(piece), call.q.shape[1]
    assert bias is not None
    function = tiles(bias, 0, (piece.batch[1] - piece.batch[0], heads, piece.queries, piece.length))
    picked = []
    for start in range(0, rows.numel(), _ROWS):
        some, keys = rows[start : start + _ROWS], key[start : start + _ROWS]
        first, last = int(keys.min()), int(keys.max())
        block = function(b, slice(0, heads), some, range(first, last + 1))
        block = block.expand(heads, some.numel(), last - first + 1)
        picked.append(block.gather(2, (keys - first).expand(heads, -1, -1)))
    return torch.cat(picked, 1)
