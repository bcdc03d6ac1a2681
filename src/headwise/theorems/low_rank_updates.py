"""Updates of weights: how few directions fine-tuning uses, and how many noise does."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from headwise.circuits.change import similarity_null, subspace_similarity
from headwise.theorems.fine_tuning import TUNING, change, noise_energy, whole
from headwise.theorems.measured import Measured, bootstrap, mean_estimate, within
from headwise.theorems.statement import Control, Curve, Effort, Evidence, Kind, Plot, Theorem

__all__ = ["UPDATES"]

_TOP: Final = 4  # rank of the update that is no noise


def _energy(name: str, values: list[float], predicted: float, seed: int) -> Measured:
    """Within 5 % of the law of large matrices: edges move by some size^(-2/3)."""
    interval = bootstrap(values, lambda x: sum(x) / len(x), seed=seed)
    allowed = (0.95 * predicted, 1.05 * predicted)
    mean = sum(values) / len(values)
    return within(name, mean, allowed=allowed, interval=interval, draws=len(values))


def _numbers(
    delta: Tensor, other: Tensor, base: Tensor, ranks: tuple[int, int], seed: int
) -> tuple[Measured, ...]:
    """Energy, similarity and amplification of updates ``draw row column`` beside their nulls."""
    rows, columns = delta.shape[-2:]
    i, j = ranks
    found = change(delta, base)
    phi = subspace_similarity(found.product, whole(other), rank=j)[:, i - 1, j - 1]
    null = float(similarity_null(j, rows)[i - 1, j - 1])
    seen = (found.norm() / found.amplification(i)).square()
    size = torch.linalg.matrix_norm(base).square()
    used = seen / size * rows * columns / i**2
    return (
        _energy(
            f"energy in {i} directions", found.energy(i).tolist(),
            noise_energy(i, rows, columns), seed,
        ),
        mean_estimate(f"φ({i}, {j}) of two updates", phi, predicted=null),
        mean_estimate(f"‖UᵀWV‖² / (r²‖W‖²/(d e)), r = {i}", used, predicted=1.0),
    )  # fmt: skip


def _null(effort: Effort) -> Evidence:
    generator = torch.Generator().manual_seed(effort.seed)
    rows, columns = effort.pick((131, 97), (257, 211))
    draws = effort.pick(17, 53)
    ranks = effort.pick((7, 11), (11, 23))

    def normal(*shape: int) -> Tensor:
        return torch.randn(draws, *shape, generator=generator, dtype=torch.float64)

    base, noise, other = normal(rows, columns), normal(rows, columns), normal(rows, columns)
    measured = _numbers(noise, other, base, ranks, effort.seed)
    low = normal(rows, _TOP) @ normal(_TOP, columns) + 0.01 * noise
    near = low + 0.01 * other
    u, s, v = torch.linalg.svd(base, full_matrices=False)
    along = u[..., : ranks[0]] * s[:, None, : ranks[0]] @ v[:, : ranks[0]] + 0.01 * noise
    wrong = _numbers(low, near, base, ranks, effort.seed)
    own = _numbers(along, other, base, ranks, effort.seed)
    places = [1, 2, 3, 5, 7, 11, 17, 29, 43, 61, 79, 97]
    curves = [
        Curve("Marchenko–Pastur", tuple(noise_energy(r, rows, columns) for r in places)),
        *(
            Curve(name, tuple(float(change(x, base).energy(r).mean()) for r in places))
            for name, x in (("measured, noise", noise), (f"an update of rank {_TOP}", low))
        ),
    ]
    return Evidence(
        measured=measured,
        controls=(
            Control(name=f"updates of rank {_TOP} that share it", measured=wrong[:2]),
            Control(name="an update along W's own first directions", measured=own[2:]),
        ),
        finding=(
            f"{ranks[0]} of {columns} directions hold {measured[0].value:.3g} of noise (law:"
            f" {noise_energy(ranks[0], rows, columns):.3g}) and {wrong[0].value:.3g} of an update"
            f" of rank {_TOP}; φ{ranks} is {measured[1].value:.3g} (null"
            f" {measured[1].predicted:.3g}) and {wrong[1].value:.3g}."
        ),
        plots=(
            Plot(
                title="Energy of an update in its first r directions",
                across="r",
                up="Σ_{i ≤ r} σ_i² / ‖ΔW‖_F²",
                places=tuple(float(r) for r in places),
                curves=tuple(curves),
                log=(True, False),
            ),
        ),
    )


UPDATES: Final = (
    Theorem(
        name="update-noise-null",
        title="What noise looks like among updates",
        statement=(
            "An update of iid noise has no preferred directions: its energy follows the"
            " Marchenko–Pastur law, two of them share φ(i, j) = max(i, j)/d, and W uses r of its"
            " directions by r²/(d e) of its energy. Findings about updates are read beside this."
        ),
        latex=(
            r"\mathbb{E}\,\tfrac{\lVert U_i^{\top} V_j \rVert_F^2}{\min(i,j)}"
            r" = \tfrac{\max(i,j)}{d}, \qquad \mathbb{E}\,\lVert U_r^{\top} W V_r \rVert_F^2"
            r" = \tfrac{r^2}{d\,e} \lVert W \rVert_F^2"
        ),
        conditions=(
            "entries of ΔW are independent, of one variance, and Gaussian",
            "ΔW does not depend on W, nor on the other update",
        ),
        source="Hu et al. 2021 (arXiv:2106.09685), sections 7.2 and 7.3, whose measures these are;"
        " Marchenko and Pastur 1967",
        kind=Kind.EXPECTATION,
        prediction="energy by the law, φ = max(i, j)/d, and r²/(d e)",
        estimator="means over independent updates; energy within 5 % of the law of large matrices",
        random=_null,
        proof="update-noise-null",
    ),
    *TUNING,
)
