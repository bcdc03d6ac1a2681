"""How many directions trained heads use, beside random ones of the same shape."""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import Tensor

from headwise.circuits.factored import Factored, effective_rank, stable_rank
from headwise.theorems.measured import Measured, bootstrap, mean_estimate, within
from headwise.theorems.rewritten import own_heads
from headwise.theorems.statement import Control, Effort, Evidence, Kind, Textbook, Theorem
from headwise.theorems.trained import Trained

__all__ = ["SPECTRA", "random_products", "widest_stable_rank"]

# The largest singular value lies below its limit by a few r^(-2/3) of it (Tracy–Widom).
_SHIFT: Final = 1.5
_ENTRIES: Final = 10_000_000  # of the factors that are drawn beside a model


def random_products(count: int, d: int, rank: int, generator: torch.Generator) -> Factored:
    """Products of Gaussian d×r and r×d factors with entries of variance 1/d."""
    left, right = (
        torch.randn(count, d, rank, generator=generator, dtype=torch.float64) / math.sqrt(d)
        for _ in range(2)
    )
    return Factored(left, right.mT)


def widest_stable_rank(d: int, rank: int) -> float:
    """r / x₊: the limit of ‖W‖_F² / σ₁² for large Gaussian factors, c = r/d fixed.

    x₊ is the upper edge of the free product of two Marchenko–Pastur laws of ratio c. With the
    S-transform 1/(1 + c z) of each, x = (1 + z)(1 + c z)²/z, smallest at 2 c z² + c z = 1.

    Example:
        >>> round(widest_stable_rank(576, 64), 1)
        28.6
    """
    c = rank / d
    z = (math.sqrt(c * c + 8 * c) - c) / (4 * c)
    return rank * z / ((1 + z) * (1 + c * z) ** 2)


def _stable(name: str, values: list[float], edge: float, seed: int) -> Measured:
    mean = sum(values) / len(values)
    interval = bootstrap(values, lambda x: sum(x) / len(x), seed=seed)
    allowed = (edge, _SHIFT * edge)
    return within(name, mean, allowed=allowed, interval=interval, draws=len(values))


def _random(effort: Effort) -> Evidence:
    generator = torch.Generator().manual_seed(effort.seed)
    d, rank = effort.pick((211, 23), (577, 61))
    draws = effort.pick(17, 101)
    product = random_products(draws, d, rank, generator)
    decay = torch.arange(1, rank + 1, dtype=torch.float64) ** -0.5
    decay *= math.sqrt(rank / float(decay.square().sum()))
    decayed = Factored(product.left * decay, product.right * decay[:, None])
    names = "‖W_QK‖_F² / r, entries of variance 1/d", "stable rank"
    edge = widest_stable_rank(d, rank)
    sizes = [product.norm().square() / rank, decayed.norm().square() / rank]
    stable = [x.stable_rank().tolist() for x in (product, decayed)]
    effective = product.effective_rank()
    return Evidence(
        measured=(
            mean_estimate(names[0], sizes[0], predicted=1.0),
            _stable(names[1], stable[0], edge, effort.seed),
        ),
        controls=(
            Control(
                name="directions of falling size, as trained heads have them",
                measured=(
                    mean_estimate(names[0], sizes[1], predicted=1.0),
                    _stable(names[1], stable[1], edge, effort.seed),
                ),
            ),
        ),
        finding=(
            f"Random heads of {d}×{rank} use {float(effective.mean()):.3g} of {rank} directions"
            f" (effective rank), with a stable rank of {_mean(stable[0]):.3g} (limit {edge:.3g})."
        ),
    )


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _model(model: Trained) -> Evidence:
    layers = own_heads(model)
    ranks: dict[str, list[float]] = {}
    for layer in layers:
        for name, product in (("W_QK", layer.qk(folded=True)), ("W_OV", layer.ov(folded=True))):
            values = product.singular_values()
            for kind, of in (("effective", effective_rank), ("stable", stable_rank)):
                ranks.setdefault(f"{kind} rank of {name}", []).extend(of(values).tolist())
    d, width = layers[0].qk().shape[-1], layers[0].qk().rank
    generator = torch.Generator().manual_seed(model.seed)
    count = min(2003, max(131, _ENTRIES // (d * width)))
    drawn, others = (random_products(count, d, width, generator) for _ in range(2))
    reference = {
        "effective": float(drawn.effective_rank().median()),
        "stable": float(drawn.stable_rank().median()),
    }
    stable = reference["stable"]
    measured = [_median_ratio(n, x, stable) for n, x in ranks.items() if n.startswith("stable")]
    again = _median_ratio("stable rank", others.stable_rank().tolist(), stable)
    return Evidence(
        measured=tuple(measured),
        controls=(Control(name="random heads of the same shape", measured=(again,)),),
        finding="; ".join(
            f"{name} {_quantiles(values)} (random {reference[name.split()[0]]:.3g})"
            for name, values in ranks.items()
        )
        + f"; 0/10/50/90/100 % of {len(ranks['stable rank of W_QK'])} heads, of {width}.",
    )


def _median_ratio(name: str, values: list[float], reference: float) -> Measured:
    """The median over heads to that of random heads, which varies by 2 % or less."""
    ratio = [x / reference for x in values]
    interval = bootstrap(ratio, lambda x: float(Tensor(x).median()))
    return within(
        f"{name}, median to random",
        float(Tensor(ratio).median()),
        allowed=(0.0, 0.95),
        interval=interval,
        draws=len(ratio),
    )


def _quantiles(values: list[float]) -> str:
    at = torch.tensor([0, 0.1, 0.5, 0.9, 1.0], dtype=torch.float64)
    found = torch.tensor(values, dtype=torch.float64).quantile(at)
    return "/".join(f"{x:.3g}" for x in found.tolist())


SPECTRA: Final = (
    Theorem(
        name="trained-ranks",
        title="Trained heads use fewer directions than random ones",
        statement=(
            "Random heads have a known stable rank, r/x₊ and a little more, and an effective rank"
            " near r. In trained models the stable rank of most heads is lower: a few directions"
            " stand out."
        ),
        latex=(
            r"\frac{\lVert W \rVert_F^2}{\sigma_1^2} \to \frac{r}{x_+}, \qquad"
            r" x_+ = \frac{(1+z)(1+cz)^2}{z}, \quad 2cz^2 + cz = 1, \quad c = \tfrac{r}{d}"
        ),
        conditions=(
            "entries of the factors are independent, of one variance (for the random reference)",
            "the model is trained (for the regularity)",
        ),
        source="Marchenko and Pastur 1967; free products: Voiculescu 1987; effective rank: Roy and"
        " Vetterli 2007, section 2",
        kind=Kind.REGULARITY,
        prediction="random: r/x₊ and a little more at finite size; trained: at most 0.95 of it",
        estimator="singular values of W_QK and W_OV, norms folded in: the mean over draws, the"
        " median over heads",
        random=_random,
        model=_model,
        textbook=(
            Textbook(
                "heads have low rank",
                "their rank is d_k, nearly all of it used by W_OV; low is d_k beside d",
            ),
        ),
        proof="trained-ranks",
    ),
)
