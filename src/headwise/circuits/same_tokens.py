"""The weight on the earlier copies of a token, and on what came after them, in any text.

    duplicate   Σ_j a_ij over the j < i with token[j] = token[i]    (in encoders: over the j ≠ i)
    induction   Σ_j a_ij over the j ≤ i with token[j − 1] = token[i]

a_ij = exp(s_ij − L_i), with L_i of the pass that measured the row. Positions are grouped by their
token, and each group is a small block of logits: Σ_t c_t² of them for c_t copies of token t, a few
percent of n² in a text. Blocks are computed in bounded chunks: O(n) memory also where one token is
the whole text.

Olsson et al. 2022 (arXiv:2209.11895), prefix matching; Wang et al. 2022 (arXiv:2211.00593).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from headwise.attention.statistics import Statistics
from headwise.circuits.offset_mass import bias_at, capped, seen_at
from headwise.observation.call import Call
from headwise.observation.pieces import Piece

__all__ = ["MassSum", "groups", "same_token_mass"]

_ROOM: Final = 2**18  # numbers that a chunk holds at once: small blocks are soon found again


@dataclass(eq=False)
class MassSum:
    """Sums over rows that see at least one of the keys in question; sums of two texts add up.

    ``total``: the weight on those keys, ``head`` float64; ``uniform``: the same of a head that
    attends to all visible keys alike; ``rows``: how many.
    """

    total: Tensor
    uniform: float = 0.0
    rows: int = 0

    @classmethod
    def empty(cls, heads: int) -> MassSum:
        """Of no rows."""
        return cls(torch.zeros(heads, dtype=torch.float64))

    def absorb(self, other: MassSum) -> None:
        """Add other rows to these, in place."""
        self.total += other.total
        self.uniform += other.uniform
        self.rows += other.rows


@torch.no_grad()
def same_token_mass(call: Call, piece: Piece, found: Statistics, role: str) -> dict[str, MassSum]:
    """``duplicate_token`` and, in decoders, ``induction``, summed over the rows of a piece.

    Args:
        call, piece, found: as ``observe(each=...)`` gives them, of self-attention.
        role: "decoder" or "encoder".

    Example:
        >>> from transformers import LlamaConfig, LlamaModel
        >>> from headwise.observation.attach import observe
        >>> config = LlamaConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=1,
        ...                      num_attention_heads=2, vocab_size=11)
        >>> model, sums = LlamaModel(config).eval(), []
        >>> def each(module, call, piece, found):
        ...     sums.append(same_token_mass(call, piece, found, "decoder"))
        >>> with observe(model, each=each) as scan:
        ...     _ = model(torch.tensor([[1, 2, 1, 3, 1]]))
        >>> sums[0]["induction"].rows, sums[0]["induction"].total.shape
        (2, torch.Size([2]))
    """
    q, k, _ = call.part(piece)
    rows = found.rows.to(q.device)
    column = torch.full((piece.length,), -1, device=q.device)
    column[rows + piece.offset] = torch.arange(rows.numel(), device=q.device)
    names = ("duplicate_token", "induction") if role == "decoder" else ("duplicate_token",)
    sums = {name: MassSum.empty(q.shape[1]) for name in names}
    for b, tables in enumerate(_tables(piece)):
        text = _Text(call, piece, found, b, q[b], k[b], column, role)
        for table in tables:
            for some in table.to(q.device).split(text.at_once(table.shape[1])):
                for name in names:
                    for part in text.masses(some, name):
                        sums[name].absorb(part)
    return sums


def groups(tokens: Tensor) -> tuple[Tensor, ...]:
    """The places of every token that is there twice or more, groups of like size side by side.

    Each table is ``group place``, ascending, −1 beyond the end of a group. What has no number in
    the vocabulary (−1) is no token.

    Example:
        >>> [table.tolist() for table in groups(torch.tensor([7, 5, 7, 9, 5, 7]))]
        [[[1, 4]], [[0, 2, 5]]]
    """
    order = torch.argsort(tokens, stable=True)
    token, counts = torch.unique_consecutive(tokens[order], return_counts=True)
    starts = counts.cumsum(0) - counts
    counts = counts.masked_fill(token < 0, 0)
    out, below, size = [], 1, 2
    most = max(counts.tolist(), default=0)
    while below < most:
        chosen = (counts > below) & (counts <= size)
        if bool(chosen.any()):
            step = torch.arange(size)
            at = (starts[chosen, None] + step).clamp(max=len(order) - 1)
            out.append(torch.where(step < counts[chosen, None], order[at], -1))
        below, size = size, size + (1 << (size.bit_length() - 2))  # 2, 3, 4, 6, 8, 12, 16, …
    return tuple(out)


def _tables(piece: Piece) -> list[tuple[Tensor, ...]]:
    """The groups of every sequence of a piece; layers share them."""
    if "same_tokens" not in piece.memory:
        piece.memory["same_tokens"] = [groups(ids.cpu()) for ids in piece.key_ids()]
    found: list[tuple[Tensor, ...]] = piece.memory["same_tokens"]
    return found


@dataclass(frozen=True, eq=False)
class _Text:
    """One sequence of a piece: q ``head query d_head``, k ``kv_head key d_head``; ``column`` says
    which measured row stands at a key (−1: none)."""

    call: Call
    piece: Piece
    found: Statistics
    b: int
    q: Tensor
    k: Tensor
    column: Tensor
    role: str

    @property
    def room(self) -> int:
        """Numbers at once; a mask of listed keys compares each with all that are listed."""
        listed = self.call.indices
        return _ROOM if listed is None else max(1, _ROOM // listed.shape[-1])

    def at_once(self, size: int) -> int:
        """How many groups of this size are one chunk."""
        return max(1, self.room // (self.q.shape[0] * size * max(size, self.q.shape[2])))

    def masses(self, table: Tensor, name: str) -> Iterator[MassSum]:
        """The rows at ``table`` (``group place``), a strip of every group at a time."""
        keys = torch.where(table >= 0, table + (name == "induction"), -1)
        keys = torch.where(keys < self.piece.length, keys, -1)
        of_keys = self.k[:, keys.clamp(min=0)].to(self.found.log_sum_exp.dtype)
        count, size = table.shape
        strip = max(1, self.room // (self.q.shape[0] * count * size))
        for start in range(0, size, strip):
            rows = table[:, start : start + strip]
            # A decoder's rows have their keys among the places up to their own.
            last = size if self.role == "encoder" else start + rows.shape[1]
            yield self._mass(rows, keys[:, :last], of_keys[:, :, :last], name)

    def _mass(self, at: Tensor, keys: Tensor, of_keys: Tensor, name: str) -> MassSum:
        """Rows ``group row`` against keys ``group kept``, ``of_keys`` ``kv_head group kept d``."""
        column = torch.where(at >= 0, self.column[at.clamp(min=0)], -1)
        query = at.clamp(min=0)[..., None]
        key = keys[:, None].expand(-1, at.shape[1], -1)
        seen = (key >= 0) & (column >= 0)[..., None]
        if self.role == "encoder":
            seen &= key != query
        else:
            seen &= key <= query if name == "induction" else key < query
        flat = query.flatten(0, 1)[:, 0], key.flatten(0, 1).clamp(min=0)
        seen &= seen_at(self.call, self.piece, self.b, *flat).view(seen.shape)
        row = column.clamp(min=0)
        logits = self._logits(at, of_keys, flat)
        seen = seen & (logits > -torch.inf) if self.call.bias_hides else seen[None]
        weight = torch.exp(logits - self._of_rows(self.found.log_sum_exp, row)[..., None])
        total = torch.where(seen, weight, 0.0).sum((1, 2, 3), dtype=torch.float64)
        picked = seen.sum(-1)
        share = picked.double() / self._of_rows(self.found.visible, row).clamp(min=1)
        rows = int((picked > 0).any(0).sum())
        return MassSum(total.cpu(), float(share.mean(0).sum()), rows)

    def _of_rows(self, values: Tensor, row: Tensor) -> Tensor:
        """What was measured of the rows, ``head group row``."""
        return values[self.b].to(row.device)[:, row]

    def _logits(self, at: Tensor, of_keys: Tensor, flat: tuple[Tensor, Tensor]) -> Tensor:
        """``head group row kept``, masked ones among them."""
        rows = (at - self.piece.offset).clamp(0, self.q.shape[1] - 1)
        q = self.q[:, rows].to(of_keys.dtype)
        by_group = q.unflatten(0, (of_keys.shape[0], -1)).transpose(1, 2).flatten(2, 3)
        logits = (by_group @ of_keys.mT).unflatten(2, (-1, at.shape[1])).transpose(1, 2)
        logits = capped(logits.flatten(0, 1) * self.call.scale, self.call)
        if self.call.bias is None:
            return logits
        bias = bias_at(self.call, self.piece, self.b, rows.flatten(), flat[1])
        return logits + bias.view(logits.shape).to(logits)
