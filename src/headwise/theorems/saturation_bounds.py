"""Eigenvalues of the softmax Jacobian, and what a large top weight leaves of them."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from headwise.attention.definition import weights
from headwise.theorems.measured import Measured, exact
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

__all__ = ["SATURATION", "SPECTRUM", "jacobian_of_weights", "sample_logits", "trained_rows"]

_SPREADS: Final = (0.1, 1.0, 3.0, 8.0, 30.0)


def jacobian_of_weights(a: Tensor) -> Tensor:
    """J = diag(a) − a aᵀ of every row: ``... key`` -> ``... key key``.

    Example:
        >>> jacobian_of_weights(torch.tensor([0.5, 0.5])).tolist()
        [[0.25, -0.25], [-0.25, 0.25]]
    """
    return torch.diag_embed(a) - a[..., :, None] * a[..., None, :]


def sample_logits(generator: torch.Generator, rows: int, n: int) -> Tensor:
    """Normal logits, ``row key``, of spreads from 0.1 (flat weights) to 30 (one weight)."""
    s = torch.randn(rows, n, generator=generator, dtype=torch.float64)
    spreads = torch.tensor(_SPREADS, dtype=torch.float64)
    return s * spreads[torch.arange(rows) % len(spreads), None]


def trained_rows(model: Trained) -> tuple[Tensor, Tensor]:
    """The logits and weights of the last row that sees every key, one of each head.

    Shapes: ``head key``, both.

    Raises:
        NotApplicable: every head has a learned sink, or no row sees every key.
    """
    found = [
        layer.logits[:, torch.nonzero(layer.keep.all(1))[-1, 0]]
        for layer in model.heads
        if layer.sinks is None and bool(layer.keep.all(1).any())
    ]
    if not found:
        raise NotApplicable("no softmax without a learned sink sees the whole text")
    width = found[0].shape[1]
    s = torch.cat([each for each in found if each.shape[1] == width])
    return s, weights(s[None, None])[0, 0]


def _spectrum(a: Tensor, jacobian: Tensor) -> tuple[Measured, ...]:
    """J 1, the least eigenvalue, the bounds of the largest, and the trace, worst over rows.

    Tolerance: eigenvalues of a symmetric matrix of norm at most 1/2 are found within n u of it,
    and its entries are sums of up to n terms: 8 n u together.
    """
    n = a.shape[-1]
    tolerance = 8 * n * torch.finfo(a.dtype).eps / 2
    values = torch.linalg.eigvalsh(jacobian)
    largest, peak = values[:, -1], (a * (1 - a)).amax(1)
    upper = torch.minimum(2 * peak, torch.full_like(peak, 0.5))
    trace = torch.diagonal(jacobian, dim1=1, dim2=2).sum(1)
    worst = {
        "largest |J 1|": jacobian.sum(2).abs().max(),
        "largest negative eigenvalue": (-values[:, 0]).max().clamp(min=0),
        "λ below max a(1−a)": (peak - largest).max().clamp(min=0),
        "λ above min(1/2, 2 max a(1−a))": (largest - upper).max().clamp(min=0),
        "largest |tr J − (1 − Σ a²)|": (trace - (1 - a.square().sum(1))).abs().max(),
    }
    return tuple(
        exact(name, float(value), tolerance=tolerance, draws=len(a))
        for name, value in worst.items()
    )


def _spectrum_evidence(a: Tensor) -> Evidence:
    jacobian = jacobian_of_weights(a)
    found = _spectrum(a, jacobian)
    without = _spectrum(a, torch.diag_embed(a))
    doubled = _spectrum(a, 2 * jacobian - torch.diag_embed(a))
    halved = _spectrum(a, jacobian / 2)
    largest = torch.linalg.eigvalsh(jacobian)[:, -1] / (a * (1 - a)).amax(1)
    return Evidence(
        measured=found,
        controls=(
            Control(name="diag(a) without a aᵀ", measured=(without[0], without[3], without[4])),
            Control(name="a aᵀ taken twice", measured=(doubled[0], doubled[1], doubled[4])),
            Control(name="half of J", measured=(halved[2], halved[4])),
        ),
        finding=(
            f"Over {len(a)} rows no bound is passed by more than"
            f" {max(each.value for each in found):.1e}; the largest eigenvalue is"
            f" {float(largest.min()):.3f} to {float(largest.max()):.3f} times max a(1−a)."
        ),
    )


def _weights(effort: Effort) -> Tensor:
    generator = torch.Generator().manual_seed(effort.seed)
    rows, n = effort.pick((503, 29), (5003, 61))
    return weights(sample_logits(generator, rows, n)[None, None])[0, 0]


def _spectrum_of_model(model: Trained) -> Evidence:
    return _spectrum_evidence(trained_rows(model)[1])


def _bounds(a: Tensor, factor: float = 2.0) -> tuple[Measured, Measured]:
    """How far the norm and the trace of J pass factor · (1 − a_max), worst over rows.

    1 − a_max is summed from the other weights, so that it keeps its digits.
    """
    n = a.shape[-1]
    tolerance = 8 * n * torch.finfo(a.dtype).eps / 2
    rest = a.sort(1).values[:, :-1].sum(1)
    jacobian = jacobian_of_weights(a)
    norm = torch.linalg.eigvalsh(jacobian)[:, -1]
    trace = 1 - a.square().sum(1)
    return (
        exact("‖J‖₂ above 2(1 − a_max)", float((norm - factor * rest).max().clamp(min=0)),
              tolerance=tolerance, draws=len(a)),
        exact("tr J above 2(1 − a_max)", float((trace - factor * rest).max().clamp(min=0)),
              tolerance=tolerance, draws=len(a)),
    )  # fmt: skip


def _saturation_evidence(a: Tensor) -> Evidence:
    top = a[a.amax(1) >= 0.5]
    if not len(top) or float(top.amax(1).min()) > 1 - 1e-9:
        raise NotApplicable("no row has a top weight between one half and one")
    found = _bounds(top)
    rest = 1 - top.amax(1)
    return Evidence(
        measured=found,
        controls=(
            Control(
                name="half the bound: 1 − a_max for the trace", measured=(_bounds(top, 1.0)[1],)
            ),
            Control(name="a quarter: (1 − a_max)/2 for the norm", measured=(_bounds(top, 0.5)[0],)),
        ),
        finding=(
            f"{len(top)} rows with a_max from {float(1 - rest.max()):.3f} to"
            f" {float(1 - rest.min()):.6f}: norm and trace of J stay below 2(1 − a_max)."
        ),
    )


def _saturation(effort: Effort) -> Evidence:
    return _saturation_evidence(_weights(effort))


def _saturation_of_model(model: Trained) -> Evidence:
    return _saturation_evidence(trained_rows(model)[1])


SPECTRUM: Final = Theorem(
    name="jacobian-spectrum",
    title="Eigenvalues of the softmax Jacobian",
    statement=(
        "J is symmetric and positive semidefinite, J 1 = 0, its trace is 1 − Σ a², and its largest"
        " eigenvalue lies between max a(1 − a) and min(1/2, 2 max a(1 − a))."
    ),
    latex=r"\max_i a_i(1-a_i) \le \lambda_{\max}(J) \le"
    r" \min\left(\tfrac12,\; 2\max_i a_i(1-a_i)\right), \quad J\mathbf{1} = 0, \quad J \succeq 0",
    conditions=("a is a distribution",),
    source="Gershgorin's and Popoviciu's inequalities; proof given",
    kind=Kind.IDENTITY,
    prediction="no bound is passed",
    estimator="eigenvalues over rows from flat to concentrated, worst row",
    random=lambda effort: _spectrum_evidence(_weights(effort)),
    model=_spectrum_of_model,
    exercise=2,
    proof="softmax-jacobian",
)

SATURATION: Final = Theorem(
    name="saturation-bound",
    title="How small the Jacobian is when one weight is large",
    statement=(
        "The spectral norm and the trace of J are at most 2(1 − a_max): a row whose top weight is"
        " within ε of 1 passes on at most 2ε of any gradient."
    ),
    latex=r"\|J\|_2 \le 2(1 - a_{\max}), \qquad \mathrm{tr}\,J \le 2(1 - a_{\max})",
    conditions=("a is a distribution", "informative where a_max is at least 1/2"),
    source="from the bounds of the largest eigenvalue; proof given",
    kind=Kind.IDENTITY,
    prediction="no row passes the bound",
    estimator="norm and trace over rows with a_max ≥ 1/2, worst row",
    random=_saturation,
    model=_saturation_of_model,
    textbook=(
        Textbook(
            "if a concentrates on one index the Jacobian is approximately zero",
            "quantitatively: at most 2(1 − a_max); but rows with flat weights have a small Jacobian"
            " too, about 1/n",
        ),
    ),
    exercise=2,
    proof="softmax-jacobian",
)
