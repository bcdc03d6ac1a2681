"""Every number of the circuits of a model, layer by layer, by the names of the schema.

A number that does not exist is left out, and NaN in the data set: sizes of W_QK where queries or
keys pass a norm of their own (only ratios are fixed then; ``logit_bound`` says how large a logit
becomes), that bound where they do not, scores of a square matrix in
cross-attention (it reads two streams), copying where no linear map leads from the stream to the
logits. Where what attention writes passes a norm, W_OV folded has its gain and lacks its division,
by a positive number of each token that the heads of a layer share: sizes then compare heads of one
layer, and everything else is as it is without the division.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import torch
from torch import Tensor

from headwise.circuits.composition import MEMORY, composition, extra_bytes
from headwise.circuits.difference import LayerChange
from headwise.circuits.factored import DOUBT, Factored, effective_rank, stable_rank
from headwise.circuits.layer_weights import HeadWeights, LayerWeights
from headwise.circuits.logit_bound import logit_bound
from headwise.circuits.rotary import at_offset, band_shares, constant_part, incomplete, spectra
from headwise.circuits.scores import kernel, sign_score, sign_spread, vocabulary_map

__all__ = [
    "change_numbers",
    "compositions",
    "copying_map",
    "layer_numbers",
    "ov_form",
    "qk_form",
    "rotary_numbers",
]

Numbers = dict[str, Tensor]

_SIZES: Final = ("singular_values", "norm", "spectral_norm")
_OUTPUT_NORM: Final = (
    "what attention writes passes a norm: W_OV is exact up to a positive number of each token, the"
    " same for all heads of a layer, so sizes compare heads of one layer only"
)
_LATENT: Final = (
    "values come out of the norm of a narrow latent vector: W_OV is exact up to a positive number"
    " of each token that is read, the same for all heads of a layer, so sizes compare heads of one"
    " layer only"
)


def qk_form(layer: LayerWeights) -> str:
    """Why the logits of a layer are no fixed bilinear form; empty where they are."""
    return "" if layer.fixed else layer.why_not


def ov_form(layer: LayerWeights) -> str:
    """Why W_OV holds up to a factor only; empty where it is exact."""
    reasons = ((layer.output_norm, _OUTPUT_NORM), (layer.latent, _LATENT))
    return "; ".join(words for part, words in reasons if part is not None)


@torch.no_grad()
def layer_numbers(
    layer: LayerWeights, through: Tensor | None, spreads: dict[tuple[str, int, int], float]
) -> Numbers:
    """Spectra and scores of one layer: ``head`` or ``head rank``.

    ``through`` is what ``copying_map`` gave; ``spreads`` keeps nulls that layers share.
    """
    normed = _normed(layer)
    numbers: Numbers = {}
    for end, folded in (("", False), ("_folded", True)):
        if folded or not normed:
            found = _spectrum(_qk(layer, folded), layer)
            for name, value in found.items():
                if not (normed and name in _SIZES):
                    numbers[f"qk_{name}{end}"] = value
            if folded:
                values = found["singular_values"]
                numbers["qk_relative_singular_values_folded"] = values / values[..., :1]
        for name, value in _spectrum(layer.ov(folded), layer).items():
            numbers[f"ov_{name}{end}"] = value
    bound = logit_bound(layer)
    if bound is not None:
        numbers["qk_logit_bound"] = bound
    if layer.role != "cross":
        numbers |= _signs(layer, through, spreads)
    return numbers


def _qk(layer: LayerWeights, folded: bool) -> Factored:
    """W_QK of distance 0: a rotation's attention factor is in it."""
    rotary = layer.rotary
    if rotary is None or rotary.factor == 1:
        return layer.qk(folded)
    own = layer.folded() if folded else layer
    return at_offset(own.query, own.key, rotary, 0)


@torch.no_grad()
def rotary_numbers(layer: LayerWeights, context: int | None, distances: Sequence[int]) -> Numbers:
    """Which pairs a head uses, and how its W_QK changes with the distance; empty without rotary."""
    rotary = layer.rotary
    if rotary is None:
        return {}
    own = layer.folded()
    shares = band_shares(own.query, own.key, rotary)[:, :-1]
    offsets = -torch.tensor(distances, dtype=torch.float64)
    values = spectra(own.query, own.key, rotary, offsets)
    numbers = {
        "rotary_share": shares,
        "rotary_angle": rotary.inv_freq.double(),
        "qk_effective_rank_by_distance": effective_rank(values).T,
    }
    if not _normed(layer):
        numbers["qk_spectral_norm_by_distance"] = values[..., 0].T
    if context is not None:
        slow = incomplete(rotary, context).to(shares.device)
        numbers["rotary_slow_share"] = shares[:, slow].sum(-1)
        numbers["rotary_constant_share"] = constant_part(own.query, own.key, rotary, context).share
    return numbers


def _normed(layer: LayerWeights) -> bool:
    """Whether queries or keys pass a norm of their own, or come out of that of a latent vector."""
    own = layer.query_norm is not None or layer.key_norm is not None
    return own or layer.latent is not None


def _spectrum(product: Factored, layer: LayerWeights) -> Numbers:
    unit = torch.finfo(torch.promote_types(layer.query.dtype, torch.float32)).eps / 2
    values = product.singular_values()
    least = max(product.shape[-2:]) * unit * values[..., :1]
    sure = bool((values[..., -1] > DOUBT * values[..., 0]).all())
    rank = (values > least).sum(-1) if sure else product.numerical_rank(unit)
    return {
        "singular_values": values,
        "norm": values.square().sum(-1).sqrt(),
        "spectral_norm": values[..., 0],
        "effective_rank": effective_rank(values),
        "stable_rank": stable_rank(values),
        "numerical_rank": rank.double(),
    }


def _signs(
    layer: LayerWeights, through: Tensor | None, spreads: dict[tuple[str, int, int], float]
) -> Numbers:
    product = layer.qk(folded=True)
    d, r = product.shape[-1], product.rank
    parts = kernel(product)
    sign = sign_score(product)
    numbers = {"qk_sign": sign, "qk_symmetry": parts.symmetric, "qk_negative": parts.negative}
    if ("qk", d, r) not in spreads:
        spreads["qk", d, r] = sign_spread(d, r)
    numbers["qk_sign_z"] = sign / spreads["qk", d, r]
    ov = layer.ov(folded=True)
    if through is not None and through.shape == ov.shape[-2:]:
        numbers["copying"] = copying = sign_score(ov, through)
        if ("ov", d, ov.rank) not in spreads:
            spreads["ov", d, ov.rank] = sign_spread(d, ov.rank, through)
        numbers["copying_z"] = copying / spreads["ov", d, ov.rank]
    return numbers


def copying_map(weights: HeadWeights) -> Tensor | None:
    """From what a head writes, over the vocabulary, back to what it reads; None without one."""
    if weights.embedding is None or weights.unembedding is None:
        return None
    if weights.embedding.shape != weights.unembedding.mT.shape:
        return None
    final = weights.final_norm
    return vocabulary_map(
        weights.embedding,
        weights.unembedding,
        gain=None if final is None else final.gain,
        centred=final is not None and final.kind == "layer",
    )


@torch.no_grad()
def compositions(layers: Sequence[LayerWeights], heads: int) -> Mapping[str, Tensor]:
    """Q-, K- and V-composition of all pairs, ``layer head earlier_layer earlier_head`` float32.

    ``heads`` is the most heads of a layer. Layers of one stack are paired.
    """
    shape = (len(layers), heads, len(layers), heads)
    tables = {
        f"composition_{letter}{end}": torch.full(shape, torch.nan)
        for letter in "qkv"
        for end in ("", "_z")
    }
    for role in ("encoder", "decoder"):
        chosen = [i for i, layer in enumerate(layers) if layer.role == role]
        if len(chosen) < 2 or layers[chosen[0]].query.shape[1] < 2:
            continue
        writers = [layers[i].ov(folded=True) for i in chosen]
        keys = [layers[i].qk(folded=True) for i in chosen]
        for letter, readers in (("q", keys), ("k", [f.T for f in keys]), ("v", writers)):
            room = max(MEMORY, extra_bytes(writers, readers))
            found = composition(writers, readers, memory=room)
            _place(tables[f"composition_{letter}"], found.value, chosen, layers)
            _place(tables[f"composition_{letter}_z"], found.z, chosen, layers)
    return tables


def _place(
    table: Tensor, pairs: Tensor, chosen: Sequence[int], layers: Sequence[LayerWeights]
) -> None:
    """``writer reader``, heads numbered through the layers, laid out by layer and head."""
    counts = [layers[i].heads for i in chosen]
    parts = [rows.split(counts, 1) for rows in pairs.float().cpu().split(counts, 0)]
    for a, writer in enumerate(chosen):
        for b, reader in enumerate(chosen):
            part = parts[a][b]
            table[reader, : counts[b], writer, : counts[a]] = part.mT


@torch.no_grad()
def change_numbers(change: LayerChange) -> Numbers:
    """Size, rank and use of the change of W_QK and of W_OV in one layer, ``head``."""
    numbers: Numbers = {}
    for short, each in (("qk", change.qk), ("ov", change.ov)):
        numbers |= {
            f"{short}_change_norm": each.norm(),
            f"{short}_change_relative": each.relative(),
            f"{short}_change_rank": each.rank().double(),
            f"{short}_change_energy": each.energy(1),
            f"{short}_change_amplification": each.amplification(1),
        }
    return numbers
