"""What of a head has low rank (its logits, what it moves), and what has not (its weights)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final

import torch
from torch import Tensor

from headwise.attention.definition import scores, weights
from headwise.circuits.factored import Factored
from headwise.positions import alibi_bias, slopes
from headwise.theorems.measured import Measured, bootstrap, exact, within
from headwise.theorems.rewritten import own_heads
from headwise.theorems.spectra import SPECTRA
from headwise.theorems.statement import (
    Control,
    Curve,
    Effort,
    Evidence,
    Kind,
    NotApplicable,
    Plot,
    Textbook,
    Theorem,
)
from headwise.theorems.trained import Trained

__all__ = ["RANKS", "cut_error", "numerical_rank"]

_UNIT: Final = torch.finfo(torch.float64).eps / 2


def numerical_rank(x: Tensor) -> int:
    """How many σ exceed max(shape) · 2u · σ₁: what float64 can tell from 0."""
    values = torch.linalg.svdvals(x)
    return int((values > 2 * max(x.shape) * _UNIT * values[0]).sum())


def _at_most(name: str, value: int, most: int) -> Measured:
    return within(name, value, allowed=(0, most))


# -- ranks of one head ------------------------------------------------------------------------


def _normal(*shape: int, generator: torch.Generator) -> Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def _random(effort: Effort) -> Evidence:
    generator = torch.Generator().manual_seed(effort.seed)
    n, d, heads, width = effort.pick((67, 59, 5, 13), (211, 127, 7, 31))
    x = _normal(n, d, generator=generator)
    w_q, w_k, w_v = (_normal(heads, d, width, generator=generator) / math.sqrt(d) for _ in "qkv")
    w_o = _normal(heads, width, d, generator=generator)
    qk, ov = Factored(w_q, w_k.mT), Factored(w_v, w_o)
    s = scores((x @ w_q)[None], (x @ w_k)[None])
    a, log_a = weights(s)[0, 0], torch.log(weights(s)[0, 0])
    centred = log_a - log_a.mean(-1, keepdim=True)
    distance = alibi_bias(slopes(heads))(0, slice(0, 1), torch.arange(n), range(n))
    biased = s[0, 0] + distance[0]
    every = Factored(w_v.permute(1, 0, 2).flatten(1), w_o.flatten(0, 1))
    ranks = {
        "rank of W_QK": max(numerical_rank(each) for each in qk.dense()),
        "rank of W_OV": max(numerical_rank(each) for each in ov.dense()),
        "rank of the logits": max(numerical_rank(each) for each in s[0]),
        "rank of log A less the mean of each row": numerical_rank(centred),
    }
    of_a, of_log = numerical_rank(a), numerical_rank(log_a)
    together = int(every.numerical_rank())
    return Evidence(
        measured=(
            *(_at_most(name, value, width) for name, value in ranks.items()),
            _at_most("rank of log A", of_log, width + 1),
            exact("rank of A", of_a, predicted=n, tolerance=0.0),
            exact("rank of Σ_m W_OV^m", together, predicted=min(d, heads * width), tolerance=0.0),
        ),
        controls=(
            Control(name="A, held to d_k", measured=(_at_most("rank of A", of_a, width),)),
            Control(
                name="log A with its row constants, held to d_k",
                measured=(_at_most("rank of log A", of_log, width),),
            ),
            Control(
                name="logits with a bias by distance",
                measured=(_at_most("rank of the logits", numerical_rank(biased), width),),
            ),
        ),
        finding=(
            f"With d_k = {width}: W_QK, W_OV and the logits have rank {max(ranks.values())}, log A"
            f" {of_log}, A of {n} tokens {of_a}, and the sum of {heads} value maps {together} of"
            f" {d}."
        ),
    )


def _model(model: Trained) -> Evidence:
    layers = own_heads(model)
    seen = [each for each in model.heads if each.plain]
    if not seen:
        raise NotApplicable("its logits have biases or a softcap, so they are no product")
    if any(each.q.shape[1] <= each.q.shape[2] for each in seen):
        raise NotApplicable("the text is not longer than a head is wide")
    some = [seen[i] for i in sorted({0, len(seen) // 2, len(seen) - 1})]
    width = seen[0].q.shape[2]
    of_logits = max(numerical_rank(s) for each in some for s in each.logits)
    of_a = [numerical_rank(a) for each in some for a in each.weights()]
    n = seen[0].q.shape[1]
    values = _ranks(layer.ov() for layer in layers)
    keys = _ranks(layer.qk() for layer in layers)
    return Evidence(
        measured=(_at_most("largest rank of the logits", of_logits, width),),
        controls=(
            Control(
                name="A, held to d_k", measured=(_at_most("largest rank of A", max(of_a), width),)
            ),
        ),
        finding=(
            f"Over {n} tokens the logits of a head have rank {of_logits} at most (d_k = {width});"
            f" A has rank {min(of_a)} to {max(of_a)} in {len(some)} layers; W_QK has rank"
            f" {min(keys)} to {max(keys)} and W_OV {min(values)} to {max(values)}."
        ),
    )


def _ranks(products: Iterable[Factored]) -> list[int]:
    return [rank for each in products for rank in each.numerical_rank().tolist()]


# -- which A a head can have ------------------------------------------------------------------


def cut_error(a: Tensor, rank: int, *, centre: bool = True) -> float:
    """max |softmax(QKᵀ) − A| for Q, K of ``rank`` columns: the first singular directions of log A.

    ``centre``: of log A less the mean of each row, which the softmax does not see.
    """
    target = torch.log(a)
    target = target - target.mean(-1, keepdim=True) if centre else target
    u, s, v = torch.linalg.svd(target)
    root = s[:rank].sqrt()
    q, k = u[:, :rank] * root, v[:rank].mT * root
    return float((weights(scores(q[None, None], k[None, None], scale=1.0))[0, 0] - a).abs().max())


def _bottleneck(effort: Effort) -> Evidence:
    generator = torch.Generator().manual_seed(effort.seed)
    n, draws = effort.pick((7, 31), (13, 211))
    targets = [weights(_normal(1, 1, n, n, generator=generator))[0, 0] for _ in range(draws)]
    errors = {rank: [cut_error(a, rank) for a in targets] for rank in range(max(1, n - 4), n + 1)}
    whole = [cut_error(a, n - 1, centre=False) for a in targets]
    names = f"d_k = n − 1: largest |A' − A|, n = {n}", f"d_k = n − 2: median |A' − A|, n = {n}"

    def reached(values: list[float]) -> Measured:
        # n terms in each logit of size below 10, and twice that in a weight
        return exact(names[0], max(values), tolerance=20 * n * 10 * _UNIT, draws=draws)

    def missed(values: list[float]) -> Measured:
        interval = bootstrap(values, _median, seed=effort.seed)
        allowed = (1e-3, math.inf)
        return within(names[1], _median(values), allowed=allowed, interval=interval, draws=draws)

    return Evidence(
        measured=(reached(errors[n - 1]), missed(errors[n - 2])),
        controls=(
            Control(name="log A with its row constants, d_k = n − 1", measured=(reached(whole),)),
            Control(name="d_k = n − 1, held to n − 2", measured=(missed(errors[n - 1]),)),
        ),
        finding=(
            f"Any A of {n} tokens is reached with d_k = {n - 1} within {max(errors[n - 1]):.1e};"
            f" the same cut at {n - 2} is off by {_median(errors[n - 2]):.3g} (median of {draws})."
        ),
        plots=(_plot(errors, [_median([cut_error(a, r, centre=False) for a in targets])
                              for r in errors]),),
    )  # fmt: skip


def _plot(errors: dict[int, list[float]], whole: list[float]) -> Plot:
    n = max(errors)
    return Plot(
        title=f"A of {n} tokens from logits of rank d_k",
        across="d_k",
        up="largest |A' − A|, median over draws",
        places=tuple(float(rank) for rank in errors),
        curves=(
            Curve("measured", tuple(max(_median(e), 2.0**-54) for e in errors.values())),
            Curve("row constants kept", tuple(max(x, 2.0**-54) for x in whole)),
        ),
        log=(False, True),
    )


def _median(values: list[float]) -> float:
    return float(torch.tensor(values, dtype=torch.float64).median())


RANKS: Final = (
    Theorem(
        name="head-ranks",
        title="Logits and value maps have low rank; the attention matrix has not",
        statement=(
            "W_QK and the logits of a head have rank at most d_k, W_OV at most d_v, and log A at"
            " most d_k + 1. A itself has full rank in general, and the sum over heads of W_OV can"
            " have rank d."
        ),
        latex=(
            r"\operatorname{rank} W_Q W_K^{\top} \le d_k, \quad"
            r" \operatorname{rank} S \le \min(n, d_k), \quad \operatorname{rank} W_V W_O \le d_v,"
            r" \quad \operatorname{rank} \log A \le d_k + 1, \quad \operatorname{rank} A = n"
        ),
        conditions=(
            "logits are products of queries and keys: no bias by distance, no softcap",
            "every key is visible (for log A)",
            "generic weights (for the full rank of A)",
        ),
        source="Bhojanapalli et al. 2020 (arXiv:2002.07028), section 3; Elhage et al. 2021",
        kind=Kind.IDENTITY,
        prediction="d_k, d_v, d_k + 1, n and min(d, h d_v)",
        estimator="singular values above max(shape) · 2u · σ₁ in float64",
        random=_random,
        model=_model,
        textbook=(
            Textbook(
                "each head has rank at most d_k",
                "its logits have, and its value map has rank d_v; its attention matrix has full"
                " rank after the softmax",
            ),
        ),
        proof="head-ranks",
    ),
    Theorem(
        name="low-rank-bottleneck",
        title="A head can have any attention matrix from d_k = n − 1 on, and not below",
        statement=(
            "A positive row-stochastic A is the softmax of logits of rank d_k if and only if log A,"
            " less the mean of each row, has rank at most d_k. That is n − 1 at most, and n − 1 in"
            " general."
        ),
        latex=(
            r"A = \operatorname{softmax}(QK^{\top}),\ Q, K \in \mathbb{R}^{n \times d_k}"
            r" \iff \operatorname{rank}\!\left(\log A\,(I - \tfrac{1}{n}\mathbf{1}"
            r"\mathbf{1}^{\top})\right) \le d_k"
        ),
        conditions=(
            "all entries of A are positive",
            "queries and keys are free: they need not come out of one X and fixed weights",
        ),
        source="Bhojanapalli et al. 2020 (arXiv:2002.07028), theorem 1, which says d_k ≥ n; the"
        " sharp n − 1 follows from the softmax not seeing row constants",
        kind=Kind.IDENTITY,
        prediction="no error at d_k = n − 1; an error that is no rounding at n − 2",
        estimator="A from the first d_k singular directions of log A, row means removed, over"
        " random A",
        random=_bottleneck,
        reproduces="Bhojanapalli et al. 2020, the threshold of theorem 1",
        textbook=(
            Textbook(
                "d_k ≥ n is needed to express every attention pattern",
                "d_k ≥ n − 1 is enough, because the softmax ignores a constant of each row",
            ),
        ),
        proof="low-rank-bottleneck",
    ),
    *SPECTRA,
)
