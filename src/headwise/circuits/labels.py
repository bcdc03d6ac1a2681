"""What every head does: behaviours scored on repeated random tokens and on a text that was scanned.

Random tokens that repeat (T distinct ones, read several times over) have no meaning to look up, so
that what attends from one copy to another does it by the token alone. Definitions and thresholds:
``behaviour.BEHAVIOURS``; the data: Olsson et al. 2022 (arXiv:2209.11895), 25 tokens x 4.

No matrix is kept: a score is a diagonal of A, one dot product per row (``offset_mass``).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor, nn

from headwise.attention.bands import band_edges
from headwise.attention.statistics import Statistics
from headwise.circuits.behaviour import HeadLabels, LayerScores
from headwise.circuits.offset_mass import offset_mass
from headwise.circuits.repeated_tokens import Repeated, repeated_tokens
from headwise.observation.attach import observe
from headwise.observation.call import Call
from headwise.observation.evaluating import evaluating
from headwise.observation.loaded import LoadedModel
from headwise.observation.loading import wrap_model
from headwise.observation.pieces import Piece
from headwise.observation.scan import Scan
from headwise.results.records import LayerRecord, ScanRecord
from headwise.results.thresholds import LOCAL_FROM, LOCAL_TOKENS

__all__ = ["Score", "repeated_labels", "text_labels"]

_SEEDS: Final = (0, 1, 2, 3)


def repeated_labels(
    model: nn.Module | LoadedModel,
    *,
    period: int = 25,
    copies: int = 4,
    seeds: Sequence[int] = _SEEDS,
    layers: Iterable[int] | None = None,
) -> HeadLabels:
    """Run a model over random tokens that repeat, and score every head of its self-attention.

    Args:
        model: in memory, with or without its tokenizer. Special tokens are never drawn; those that
            the tokenizer puts around every text are put around this one.
        period: T, distinct tokens per copy.
        copies: how often they are read; two or more.
        seeds: one sequence each, all read side by side.
        layers: numbers of the layers to score (None: all).

    Raises:
        OptionError: fewer than two tokens or copies, more tokens than the vocabulary has, or a
            sequence longer than the model reads.

    Example:
        >>> from transformers import LlamaConfig, LlamaModel
        >>> config = LlamaConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=1,
        ...                      num_attention_heads=2, vocab_size=31)
        >>> found = repeated_labels(LlamaModel(config), period=7, copies=3, seeds=[0, 1])
        >>> found.layers[0].scores["induction"].shape, found.layers[0].rows["induction"]
        (torch.Size([2]), 28)
    """
    loaded = model if isinstance(model, LoadedModel) else wrap_model(model)
    given = repeated_tokens(loaded, period=period, copies=copies, seeds=seeds)
    sums = _Sums(given)
    with (
        evaluating(loaded.model),
        torch.no_grad(),
        observe(loaded.model, layers=layers, stream=False, each=sums.absorb) as scan,
    ):
        loaded.driver.run(given.documents)
    return HeadLabels(
        data=f"{period} random tokens, read {copies} times over, {len(seeds)} sequences",
        layers=tuple(
            _of_layer(layer, sums.of.get(layer.module, {}), given.length)
            for layer in scan.record.layers
            if layer.role != "cross"
        ),
    )


def text_labels(
    scan: Scan | ScanRecord, found: Mapping[str, Mapping[str, Score]] | None = None
) -> HeadLabels:
    """The scores that a scan of a text holds: previous token, sink, local, distance.

    Local needs a text of 128 tokens or more: in shorter ones everything is near. Induction and
    duplicate tokens need the tokens themselves: ``found`` has what a ``TextReader`` scored during
    the scan, by module.

    Example:
        >>> from transformers import LlamaConfig, LlamaModel
        >>> config = LlamaConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=1,
        ...                      num_attention_heads=2, vocab_size=11)
        >>> model = LlamaModel(config).eval()
        >>> with observe(model) as scan:
        ...     _ = model(torch.tensor([[1, 2, 3]]))
        >>> list(text_labels(scan).layers[0].scores)
        ['previous_token', 'sink', 'distance']
    """
    record = scan.record if isinstance(scan, Scan) else scan
    longest = {
        stream.name: int(stream.position.max()) + 1
        for stream in record.tokens
        if stream.position.numel()
    }
    return HeadLabels(
        data="text",
        layers=tuple(
            _of_layer(layer, (found or {}).get(layer.module, {}), longest.get(layer.key_stream, 0))
            for layer in record.layers
            if layer.role != "cross"
        ),
    )


@dataclass(frozen=True)
class _Diagonals:
    """Which keys a behaviour picks: offsets from the query, and the first key that may be one (a
    key after a token is not the first)."""

    offsets: tuple[int, ...]
    first: int = 0


@dataclass(frozen=True, eq=False)
class Score:
    """A mean over rows, that of a head that attends to all it may see alike, and the rows."""

    per_seed: Tensor  # (seed, head); a text is one
    uniform: float
    rows: int


def _diagonals(role: str, period: int, copies: int) -> dict[str, _Diagonals]:
    earlier = range(1, copies)
    if role == "encoder":
        others = tuple(k * period for k in range(1 - copies, copies) if k)
        return {
            "previous_token": _Diagonals((-1,)),
            "next_token": _Diagonals((1,)),
            "duplicate_token": _Diagonals(others),
        }
    return {
        "previous_token": _Diagonals((-1,)),
        "induction": _Diagonals((1 - period,), first=1),
        "induction_all": _Diagonals(tuple(1 - k * period for k in earlier), first=1),
        "duplicate_token": _Diagonals((-period,)),
    }


class _Sums:
    """What the pieces of the run have added up to: module -> behaviour -> score."""

    def __init__(self, given: Repeated) -> None:
        self.given = given
        self.of: dict[str, dict[str, Score]] = {}

    def absorb(self, module: str, call: Call, piece: Piece, found: Statistics) -> None:
        """Take in one piece: whole sequences, all of one length."""
        if not piece.relative:
            return
        given, role = self.given, call.self_role()
        chosen = _diagonals(role, given.period, given.copies)
        offsets = sorted({o for each in chosen.values() for o in each.offsets})
        masses = dict(zip(offsets, offset_mass(call, piece, found, offsets), strict=True))
        alike = _alike(call, piece, found, offsets)
        at = found.rows.to(alike[offsets[0]].device) + piece.position - given.before(role)
        mine = self.of.setdefault(module, {})
        for name, each in chosen.items():
            new = _scored(each, masses, alike, at, given)
            mine[name] = new if name not in mine else _joined(mine[name], new)


def _scored(
    chosen: _Diagonals,
    masses: dict[int, Tensor],
    alike: dict[int, Tensor],
    at: Tensor,
    given: Repeated,
) -> Score:
    """The mean over the rows that have such a key; ``at`` is the row's place in the repetition."""
    length = given.period * given.copies
    rows = torch.zeros_like(at, dtype=torch.bool)
    total = torch.zeros_like(masses[chosen.offsets[0]], dtype=torch.float64)
    uniform = torch.zeros_like(alike[chosen.offsets[0]], dtype=torch.float64)
    for offset in chosen.offsets:
        key = at + offset
        inside = (at >= 0) & (at < length) & (key >= chosen.first) & (key < length)
        total += torch.where(inside, masses[offset], 0.0)
        uniform += torch.where(inside, alike[offset], 0.0)
        rows |= inside
    return Score(
        per_seed=total[..., rows].mean(-1).cpu(),
        uniform=float(uniform[..., rows].mean()),
        rows=int(rows.sum()) * total.shape[0],
    )


def _alike(
    call: Call, piece: Piece, found: Statistics, offsets: Sequence[int]
) -> dict[int, Tensor]:
    """The masses of a head whose logits are all 0: it attends to every visible key alike."""
    flat = replace(
        call, q=torch.zeros_like(call.q[:, :1]), k=call.k[:, :1], softcap=None, sinks=None,
        bias=None,
    )  # fmt: skip
    seen = found.visible[:, :1].to(found.log_sum_exp).log()
    masses = offset_mass(flat, piece, replace(found, log_sum_exp=seen), offsets)
    return dict(zip(offsets, masses, strict=True))


def _joined(a: Score, b: Score) -> Score:
    """Sequences of two pieces: all have the same number of rows."""
    seeds = torch.cat((a.per_seed, b.per_seed))
    share = a.per_seed.shape[0] / seeds.shape[0]
    return Score(seeds, a.uniform * share + b.uniform * (1 - share), a.rows + b.rows)


def _of_layer(layer: LayerRecord, found: Mapping[str, Score], length: int) -> LayerScores:
    """Diagonals, and what the layer's own record says."""
    scores: dict[str, Tensor] = {name: each.per_seed.mean(0) for name, each in found.items()}
    rows = {name: each.rows for name, each in found.items()}
    recorded = _recorded(layer, length)
    if layer.non_finite is not None:
        scores = {name: torch.full_like(score, math.nan) for name, score in scores.items()}
    measured = layer.rows - layer.rows_empty
    return LayerScores(
        module=layer.module,
        role=layer.role,
        number=layer.number,
        scores=recorded | scores,
        rows=dict.fromkeys(recorded, measured) | rows,
        spread={name: each.per_seed.std(0) for name, each in found.items()}
        if all(each.per_seed.shape[0] > 1 for each in found.values())
        else {},
        uniform={name: each.uniform for name, each in found.items()},
    )


def _recorded(layer: LayerRecord, length: int) -> dict[str, Tensor]:
    values: dict[str, Any] = dict(layer.values)
    scores = {
        "previous_token": values["previous_mass"],
        "sink": values["sink_mass"] + torch.nan_to_num(values["null_mass"]),
        "distance": values["distance"],
    }
    if length >= LOCAL_FROM:
        edges = torch.tensor(band_edges(length)[: layer.bands.shape[1]])
        scores["local"] = layer.bands[:, : len(edges)][:, edges < LOCAL_TOKENS].sum(1)
    return {name: score.double() for name, score in scores.items()}
