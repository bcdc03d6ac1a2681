"""Circuits and low-rank updates: only W_QK counts, and what fine-tuning adds has few directions."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from headwise.circuits.factored import Factored
from headwise.circuits.layer_weights import LayerWeights
from headwise.models.architecture import Rotary
from headwise.theorems.head_gauge import by_heads
from headwise.theorems.head_sizes import random_attention
from headwise.theorems.low_rank_updates import UPDATES
from headwise.theorems.measured import Measured, exact
from headwise.theorems.rewritten import block_outputs, changed, moved, own_heads, rounding
from headwise.theorems.statement import (
    Control,
    Effort,
    Evidence,
    Kind,
    NotApplicable,
    Textbook,
    Theorem,
)
from headwise.theorems.trained import Trained

__all__ = ["THEOREMS"]

_NAME: Final = "largest relative change of the output"


def _refactor(layer: LayerWeights, *, product: Factored | None = None) -> None:
    """W_Q := U √Σ and W_K := V √Σ of W_QK = U Σ Vᵀ, in place; query biases in the new basis.

    The new W_Q is W_Q M with M = W_Q⁺ U √Σ, so b_Q becomes b_Q M. A key bias does nothing.
    """
    u, s, v = (layer.qk() if product is None else product).svd()
    root = s.sqrt()[:, None, :]
    query, key = u * root, v.mT * root
    for name, weight in (("query", query), ("key", key)):
        bias: Tensor | None = getattr(layer, f"{name}_bias")
        if bias is not None:
            basis = torch.linalg.pinv(getattr(layer, name).double()) @ weight
            bias.copy_((bias.double()[:, None] @ basis)[:, 0])
    layer.query.copy_(query)
    layer.key.copy_(key)


def _changes(
    draws: int, generator: torch.Generator, *, rotary: Rotary | None = None, cut: int | None = None
) -> list[float]:
    """Relative change of the output of random modules; ``cut``: only that many directions kept."""
    found = []
    for _ in range(draws):
        module = random_attention(43, 3, d_head=12, bias=True, rotary=rotary, generator=generator)
        x = torch.randn(1, 23, 43, generator=generator, dtype=torch.float64)
        before, layer = module(x), by_heads(module)
        product = layer.qk()
        if cut is not None:
            u, s, v = product.svd()
            s[:, cut:] = 0
            product = Factored(u * s[:, None], v)
        _refactor(layer, product=product)
        found.append(float((module(x) - before).abs().max() / before.abs().max()))
    return found


def _exact(changes: list[float]) -> Measured:
    """Logits below 60; M has the condition of W_Q, below 100 for these shapes: 32 · 60 · 100 u."""
    tolerance = 32 * 60 * 100 * 2.0**-53
    return exact(_NAME, max(changes), tolerance=tolerance, draws=len(changes))


def _random(effort: Effort) -> Evidence:
    generator = torch.Generator().manual_seed(effort.seed)
    draws = effort.pick(5, 53)
    same = _changes(draws, generator)
    turned = _changes(draws, generator, rotary=Rotary(width=12))
    cut = _changes(draws, generator, cut=11)
    return Evidence(
        measured=(_exact(same),),
        controls=(
            Control(name="rotary positions", measured=(_exact(turned),)),
            Control(name="the smallest singular direction is dropped", measured=(_exact(cut),)),
        ),
        finding=(
            f"W_Q and W_K from the singular vectors of W_QK change the output by {max(same):.1e};"
            f" with rotary positions by {max(turned):.3g}."
        ),
    )


def _model(model: Trained) -> Evidence:
    layers = own_heads(model)
    if any(layer.query_norm is not None or layer.clip is not None for layer in layers):
        raise NotApplicable("queries and keys pass a norm or are clipped, so W_QK is not fixed")
    if any(layer.kv_heads != layer.heads for layer in layers):
        raise NotApplicable(
            "several heads share a W_K, so each W_QK has no factors of its own to be replaced"
        )
    document = model.document(64)
    ids, target = document.ids, document.target
    before = block_outputs(model, ids, target=target)[-1]

    def moves(rolled: bool) -> float:
        with changed(x for layer in layers for x in _tensors(layer)):
            for layer in layers:
                _refactor(layer)
                if rolled:
                    layer.key.copy_(layer.key.roll(1, 0).clone())
            return moved(before, block_outputs(model, ids, target=target)[-1])

    condition = max(_condition(layer) for layer in layers)
    tolerance = min(condition, 100.0) * rounding(model, len(ids), len(layers))
    name = "largest relative move of a token after the last block"
    same, wrong = (exact(name, moves(rolled), tolerance=tolerance) for rolled in (False, True))
    turns = any(layer.rotary is not None for layer in layers)
    return Evidence(
        measured=(same,),
        controls=(Control(name="W_K of the next head", measured=(wrong,)),),
        violated=(
            "rotary positions turn queries and keys between W_Q and W_K: a head is the family"
            " W_Q R_Δ W_Kᵀ"
            if turns
            else ""
        ),
        finding=(
            f"W_Q and W_K from the singular vectors of W_QK move outputs by {same.value:.3g} of"
            f" their length{', because rotary positions stand between them' if turns else ''}; W_K"
            f" of another head by {wrong.value:.3g}."
        ),
    )


def _tensors(layer: LayerWeights) -> tuple[Tensor | None, ...]:
    return layer.query, layer.key, layer.query_bias, layer.key_bias


def _condition(layer: LayerWeights) -> float:
    """σ₁/σ_r of W_Q, typical: biases are brought into the new basis through its inverse."""
    values = torch.linalg.svdvals(layer.query.double())
    return float((values[:, 0] / values[:, -1].clamp_min(1e-300)).median())


THEOREMS: Final = (
    Theorem(
        name="qk-refactoring",
        title="Queries and keys matter only through their product",
        statement=(
            "Replacing W_Q and W_K by any other factors of W_QK = W_Q W_Kᵀ, such as those of its"
            " singular value decomposition, changes no logit."
        ),
        latex=(
            r"W_{QK} = U \Sigma V^{\top}: \qquad"
            r" x W_Q W_K^{\top} x'^{\top} = (x U \Sigma^{1/2})(x' V \Sigma^{1/2})^{\top}"
        ),
        conditions=(
            "nothing stands between W_Q and W_K: no rotary positions, no norm of queries and keys",
            "each head has keys of its own",
            "a query bias is brought into the new basis",
        ),
        source="Elhage et al. 2021, A Mathematical Framework for Transformer Circuits, section"
        " “Splitting attention head terms into circuits”",
        kind=Kind.IDENTITY,
        prediction="no output changes",
        estimator="largest change over random modules after the SVD of every head; in a model, the"
        " move of the last block",
        random=_random,
        model=_model,
        textbook=(
            Textbook(
                "a head is specified by W_QK and W_OV",
                "without rotary positions, norms of queries and keys, and query biases",
            ),
        ),
        proof="gauge-freedom",
    ),
    *UPDATES,
)
