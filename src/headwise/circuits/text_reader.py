"""What heads do on a text, gathered while the text is scanned: one pass for both.

    reader = TextReader(head_weights(loaded.model))
    scan = headwise.scan(loaded, text, each=reader.absorb)
    found = reader.finish(scan)

The scan's record holds some behaviours itself (previous token, sink, local, distance); the reader
adds those that need the tokens (``same_tokens``), and how much of the logits each rotary pair can
carry (``rotary.band_products``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from headwise.attention.statistics import Statistics
from headwise.circuits.behaviour import HeadLabels
from headwise.circuits.labels import Score, text_labels
from headwise.circuits.layer_weights import HeadWeights, LayerWeights, RotaryUse
from headwise.circuits.offset_mass import offset_mass
from headwise.circuits.rotary import band_products, incomplete
from headwise.circuits.same_tokens import MassSum, same_token_mass
from headwise.observation.call import Call
from headwise.observation.pieces import Piece
from headwise.observation.scan import Scan

__all__ = ["TextCircuits", "TextReader"]


@dataclass(frozen=True, kw_only=True, eq=False)
class TextCircuits:
    """Behaviours on a text, and by module the share of each rotary band, ``head band``.

    The last band is what does not turn. Heads that were not measured are NaN. ``weights`` are those
    of the model that read, ``data`` says what it read.
    """

    data: str
    labels: HeadLabels
    shares: Mapping[str, Tensor]
    weights: HeadWeights

    def shares_of(self, layer: LayerWeights) -> dict[str, Tensor]:
        """What the data set holds of the shares of one layer; nothing without rotary positions."""
        shares = self.shares.get(layer.module)
        if shares is None or layer.rotary is None:
            return {}
        found = {"rotary_share_on_text": shares[:, :-1]}
        if self.weights.context is not None:
            slow = incomplete(layer.rotary, self.weights.context).to(shares.device)
            found["rotary_slow_share_on_text"] = shares[:, :-1][:, slow].sum(-1)
        return found


class TextReader:
    """What the pieces of a scan have added up to; hand ``absorb`` to the scan as ``each``.

    Args:
        weights: of the model that is scanned, for its rotations.
        heads: numbers of the heads that the scan measures (None: all).

    Example:
        >>> import headwise as hw
        >>> from headwise.circuits.head_weights import head_weights
        >>> from headwise.observation.run import opened
        >>> loaded = opened()
        >>> reader = TextReader(head_weights(loaded.model))
        >>> scan = hw.scan(loaded, tokens=40, each=reader.absorb)
        >>> found = reader.finish(scan)
        >>> found.data, found.labels.layers[0].scores["induction"].shape
        ('40 tokens of text', torch.Size([5]))
    """

    def __init__(self, weights: HeadWeights, heads: Iterable[int] | None = None) -> None:
        self.weights = weights
        self._heads = None if heads is None else sorted(set(heads))
        self._layers = {layer.module: layer for layer in weights.layers}
        # What is kept is there before the scan: laid between the large blocks that every layer
        # takes and gives back, it would keep them from being taken again.
        self._sums = {layer.module: self._empty(layer) for layer in weights.layers}
        self._bands = {
            layer.module: torch.zeros(
                self._measured(layer.heads), len(layer.rotary.inv_freq) + 1, dtype=torch.float64
            )
            for layer in weights.layers
            if layer.rotary is not None
        }

    @torch.no_grad()
    def absorb(self, module: str, call: Call, piece: Piece, found: Statistics) -> None:
        """Take in one piece of self-attention; see ``observe(each=...)``."""
        if not piece.relative:
            return
        role = call.self_role()
        sums = same_token_mass(call, piece, found, role)
        if role == "encoder":
            sums["next_token"] = _next_token(call, piece, found)
        mine = self._sums.setdefault(module, {})
        for name, each in sums.items():
            mine.setdefault(name, MassSum.empty(each.total.numel())).absorb(each)
        layer = self._layers.get(module)
        if layer is not None and layer.rotary is not None:
            self._bands[module] += _bands(call, piece, found, layer.rotary, role)

    def finish(self, scan: Scan) -> TextCircuits:
        """Everything, once the text has been read."""
        record = scan.record
        heads = {layer.module: layer.heads for layer in record.layers}
        scores = {
            module: {
                name: Score(self._placed(each.total / each.rows, heads[module])[None],
                            each.uniform / each.rows, each.rows)
                for name, each in sums.items()
                if each.rows
            }
            for module, sums in self._sums.items()
            if module in heads
        }  # fmt: skip
        shares = {
            module: self._placed(bands / bands.sum(-1, keepdim=True), heads[module])
            for module, bands in self._bands.items()
            if module in heads and bool((bands > 0).any())
        }
        for layer in record.layers:
            if layer.non_finite is not None and layer.module in shares:
                shares[layer.module] = torch.full_like(shares[layer.module], torch.nan)
        return TextCircuits(
            data=_in_words(scan),
            labels=text_labels(record, scores),
            shares=shares,
            weights=self.weights,
        )

    def _measured(self, heads: int) -> int:
        """How many heads of a layer with so many are measured."""
        return heads if self._heads is None else sum(head < heads for head in self._heads)

    def _empty(self, layer: LayerWeights) -> dict[str, MassSum]:
        if layer.role == "cross":
            return {}
        names = ("duplicate_token", "next_token" if layer.role == "encoder" else "induction")
        return {name: MassSum.empty(self._measured(layer.heads)) for name in names}

    def _placed(self, values: Tensor, heads: int) -> Tensor:
        """Values of the measured heads among all heads of the layer; the others are NaN."""
        if self._heads is None:
            return values
        chosen = [head for head in self._heads if head < heads]
        out = values.new_full((heads, *values.shape[1:]), torch.nan)
        out[chosen] = values
        return out


def _in_words(scan: Scan) -> str:
    tokens, documents = (int(scan.record.about[name]) for name in ("tokens", "documents"))
    return f"{tokens:,} tokens of text{f' in {documents:,} documents' if documents > 1 else ''}"


def _next_token(call: Call, piece: Piece, found: Statistics) -> MassSum:
    """The weight on the token after, over the rows that have one and see anything."""
    (mass,) = offset_mass(call, piece, found, [1])
    visible = found.visible[:, 0].to(mass.device)
    there = ~mass[:, 0].isnan() & (visible > 0)
    total = torch.where(there[:, None], mass, 0.0).sum((0, 2), dtype=torch.float64).cpu()
    share = torch.where(there, 1 / visible.double(), 0.0)
    return MassSum(total, float(share.sum()), int(there.sum()))


def _bands(call: Call, piece: Piece, found: Statistics, rotary: RotaryUse, role: str) -> Tensor:
    """``head band``: queries and keys are those of the logits, turned and with their factor."""
    q, k, _ = call.part(piece)
    rows = found.rows.to(q.device)
    at = rows + piece.offset if role == "decoder" else None
    return band_products(q.index_select(2, rows), k, rotary, at).cpu()
