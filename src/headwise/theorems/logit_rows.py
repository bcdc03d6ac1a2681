"""What the softmax sees: the spread of the logits within one row, when tokens are alike."""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import Tensor

from headwise.attention.definition import scores
from headwise.attention.heads import split_heads
from headwise.models.norms import rms_norm
from headwise.theorems.logit_draws import gaussian
from headwise.theorems.measured import Measured, mean_estimate
from headwise.theorems.statement import (
    Control,
    Curve,
    Effort,
    Evidence,
    Kind,
    Plot,
    Textbook,
    Theorem,
)
from headwise.theorems.trained_spread import within_row_of

__all__ = ["WITHIN_ROW"]

_COSINES: Final = (0.0, 0.5, 0.9)
_TOKENS: Final = 61
_MODEL: Final = 101
_HEAD: Final = 37


def _tokens(generator: torch.Generator, rho: float) -> tuple[Tensor, float]:
    """Normed tokens that share a direction, and the mean cosine between two of them."""
    common, own = (gaussian(generator, size, _MODEL) for size in (1, _TOKENS))
    mixed = math.sqrt(rho) * common + math.sqrt(1 - rho) * own
    x = rms_norm(mixed, torch.ones(_MODEL, dtype=torch.float64), eps=0.0)
    cosines = x @ x.T / _MODEL
    pairs = _TOKENS * (_TOKENS - 1)
    return x, float((cosines.sum() - cosines.trace()) / pairs)


def _logits(generator: torch.Generator, x: Tensor, tied: bool = False) -> Tensor:
    """Logits of one head with fresh weights of variance 1/d_model, so that σ = 1."""
    w_q, w_k = gaussian(generator, 2, _MODEL, _HEAD)
    q, k = ((x @ w / math.sqrt(_MODEL))[None] for w in (w_q, w_q if tied else w_k))
    return scores(split_heads(q, 1), split_heads(k, 1))[0, 0]


def _draws(
    generator: torch.Generator, draws: int, rho: float, tied: bool = False
) -> tuple[list[float], list[float], list[float]]:
    """Variance within rows, its share of 1 − ρ_x, and mean square, each over fresh weights.

    Given X, E s_ij s_il = x_i·x_i x_j·x_l / d_model² for independent W_Q and W_K: the unbiased
    variance of a row has expectation exactly 1 − ρ_x and the mean square exactly 1.
    """
    rows, shares, squares = [], [], []
    for _ in range(draws):
        x, cosine = _tokens(generator, rho)
        s = _logits(generator, x, tied)
        rows.append(float(s.var(1).mean()))
        shares.append(rows[-1] / (1 - cosine))
        squares.append(float(s.square().mean()))
    return rows, shares, squares


def _random(effort: Effort) -> Evidence:
    generator = torch.Generator().manual_seed(effort.seed)
    draws = effort.pick(67, 401)
    found = {rho: _draws(generator, draws, rho) for rho in _COSINES}
    tied = _draws(generator, draws, 0.5, tied=True)

    def row(values: list[float], rho: float) -> Measured:
        return mean_estimate(f"variance within rows / (1 − ρ_x), ρ = {rho}", values, predicted=1.0)

    def total(values: list[float], rho: float) -> Measured:
        return mean_estimate(f"mean square of all logits, ρ = {rho}", values, predicted=1.0)

    spread = {rho: math.sqrt(sum(rows) / draws) for rho, (rows, _, _) in found.items()}
    return Evidence(
        measured=tuple(
            each
            for rho, (_, shares, squares) in found.items()
            for each in (row(shares, rho), total(squares, rho))
        ),
        controls=(
            Control(name="ρ_x taken as 0 where it is 0.9", measured=(row(found[0.9][0], 0.9),)),
            Control(name="W_K = W_Q", measured=(total(tied[2], 0.5),)),
        ),
        finding=(
            "The spread within a row is "
            + ", ".join(f"{spread[rho]:.3f} at ρ_x = {rho}" for rho in _COSINES)
            + "; over all pairs and weights it stays 1."
        ),
        plots=(_plot(found),),
    )


def _plot(found: dict[float, tuple[list[float], list[float], list[float]]]) -> Plot:
    def curve(name: str, which: int) -> Curve:
        table = torch.tensor([columns[which] for columns in found.values()])
        errors = table.std(1) / math.sqrt(table.shape[1])
        return Curve(name, tuple(table.mean(1).tolist()), tuple(errors.tolist()))

    return Plot(
        title="Variance of the logits when tokens are alike",
        across="mean cosine between tokens",
        up="variance",
        places=_COSINES,
        curves=(
            Curve("1 − ρ_x", tuple(1 - rho for rho in _COSINES)),
            curve("within a row", 0),
            curve("over all pairs", 2),
        ),
    )


WITHIN_ROW: Final = Theorem(
    name="logits-within-a-row",
    title="Within one row the spread of the logits is smaller, by the likeness of the tokens",
    statement=(
        "For fixed normed tokens and independent random W_Q, W_K the scaled logits have mean square"
        " σ⁴ over all pairs, whatever the tokens; within a row, where the softmax compares them,"
        " their variance is σ⁴ (1 − ρ_x), with ρ_x the mean cosine between tokens."
    ),
    latex=r"\mathbb{E}\, s_{ij}^2 = \sigma^4, \qquad"
    r" \mathbb{E}\,\mathrm{Var}_j(s_{ij}) = \sigma^4 (1 - \rho_x)",
    conditions=(
        "W_Q and W_K are independent, with independent entries",
        "tokens have one norm",
        "logits are divided by √d_k",
    ),
    source="second moments of x W_Q W_Kᵀ x'ᵀ given x and x'; proof given",
    kind=Kind.EXPECTATION,
    prediction="1 within rows after division by 1 − ρ_x; 1 over all pairs",
    estimator="unbiased variance of each row, averaged; standard error over draws of the weights",
    random=_random,
    model=within_row_of,
    textbook=(
        Textbook(
            "q_i and k_j are independent at initialisation",
            "they are functions of the same X; independence is of W_Q and W_K, given X",
        ),
    ),
    exercise=1,
    proof="logit-variance",
)
