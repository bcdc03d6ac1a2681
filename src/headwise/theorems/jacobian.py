"""The Jacobian of the softmax is a variance, and it vanishes when one weight takes all."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from headwise.attention.definition import weights
from headwise.attention.streaming import attend
from headwise.theorems.measured import Measured, exact
from headwise.theorems.saturation_bounds import (
    SATURATION,
    SPECTRUM,
    jacobian_of_weights,
    sample_logits,
    trained_rows,
)
from headwise.theorems.statement import Control, Effort, Evidence, Kind, Textbook, Theorem
from headwise.theorems.trained import Trained
from headwise.theorems.trained_spread import quantiles

__all__ = ["THEOREMS"]

_U: Final = torch.finfo(torch.float64).eps / 2


def _softmax(s: Tensor) -> Tensor:
    """The weights that the definition gives to rows of logits; ``row key``."""
    return weights(s[None, None])[0, 0]


def _derivative(rows: Tensor, temperature: float = 1.0) -> Tensor:
    """∂a/∂s of every row by automatic differentiation: ``row key key``."""
    s = rows.clone().requires_grad_(True)
    a = _softmax(s / temperature)
    columns = [
        torch.autograd.grad(a[:, j].sum(), s, retain_graph=True)[0] for j in range(s.shape[1])
    ]
    return torch.stack(columns, 1)


def _sigmoid_derivative(rows: Tensor) -> Tensor:
    a = torch.sigmoid(rows)
    return torch.diag_embed(a * (1 - a))


def _formula(name: str, found: Tensor, a: Tensor) -> Measured:
    """Largest difference. Tolerance: an entry is at most 1/4 and comes from sums of n terms."""
    difference = (found - jacobian_of_weights(a)).abs().max()
    return exact(name, float(difference), tolerance=(a.shape[-1] + 8) * _U, draws=len(a))


def _gradient(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    """∂(g·output)/∂q by the streaming attention's own backward pass."""
    leaf = q.clone().requires_grad_(True)
    found: Tensor = torch.autograd.grad((attend(leaf, k, v) * g).sum(), leaf)[0]
    return found


def _jacobian(effort: Effort) -> Evidence:
    generator = torch.Generator().manual_seed(effort.seed)
    rows, n = effort.pick((53, 31), (211, 61))
    s = sample_logits(generator, rows, n)
    a = _softmax(s)
    d = 13
    q, k, v, g = (
        torch.randn(1, 1, n, d, generator=generator, dtype=torch.float64) for _ in range(4)
    )
    a_q = _softmax(q[0, 0] @ k[0, 0].T / d**0.5)
    pulled = torch.einsum("iab,ib->ia", jacobian_of_weights(a_q), g[0, 0] @ v[0, 0].T)
    predicted = pulled @ k[0, 0] / d**0.5
    off = float((_gradient(q, k, v, g)[0, 0] - predicted).abs().max())
    # ds is a difference of two sums of n products of size |g||v|; then n terms with k.
    sizes = g.norm(dim=-1).max() * v.norm(dim=-1).max() * k.abs().max()
    found = _formula("largest |∂a/∂s − (diag a − a aᵀ)|", _derivative(s), a)
    return Evidence(
        measured=(
            found,
            exact(
                "largest |∂/∂q of the streaming attention − J|", off,
                tolerance=float(4 * (n + d) * _U * sizes),
            ),
        ),
        controls=(
            Control(
                name="a sigmoid in place of the softmax",
                measured=(_formula("largest |∂a/∂s − J|", _sigmoid_derivative(s), a),),
            ),
            Control(
                name="a temperature that the formula does not know",
                measured=(_formula("largest |∂a/∂s − J|", _derivative(s, 1.25), a),),
            ),
        ),
        finding=(
            f"Automatic differentiation and diag(a) − a aᵀ differ by {found.value:.1e} at most over"
            f" {rows} rows; the streaming backward pass by {off:.1e}."
        ),
    )  # fmt: skip


def _jacobian_of_model(model: Trained) -> Evidence:
    s, _ = trained_rows(model)
    a = _softmax(s)
    found = _formula("largest |∂a/∂s − (diag a − a aᵀ)|", _derivative(s), a)
    traces = torch.cat([(1 - layer.weights().square().sum(-1)).mean(1) for layer in model.heads])
    return Evidence(
        measured=(found,),
        controls=(
            Control(
                name="a temperature that the formula does not know",
                measured=(_formula("largest |∂a/∂s − J|", _derivative(s, 1.25), a),),
            ),
        ),
        finding=(
            f"Over the logits of one row of {len(s)} heads the two differ by {found.value:.1e} at"
            f" most; mean trace over the rows of a head {quantiles(traces)} (0/10/50/90/100 %)."
        ),
    )


def _two_pass(a: Tensor, v: Tensor) -> Tensor:
    """Var_{j~a}(v_j): deviations from the mean, squared."""
    mean = (a * v).sum(-1, keepdim=True)
    return (a * (v - mean).square()).sum(-1)


def _one_pass(a: Tensor, v: Tensor) -> Tensor:
    """E v² − (E v)², which loses digits where the mean is large."""
    return (a * v.square()).sum(-1) - (a * v).sum(-1).square()


def _quadratic(a: Tensor, v: Tensor) -> Tensor:
    return torch.einsum("ia,iab,ib->i", v, jacobian_of_weights(a), v)


def _variance(effort: Effort) -> Evidence:
    generator = torch.Generator().manual_seed(effort.seed)
    rows, n = effort.pick((211, 31), (2003, 61))
    a = _softmax(sample_logits(generator, rows, n))
    v = torch.randn(rows, n, generator=generator, dtype=torch.float64)

    def compare(name: str, one: Tensor, other: Tensor, size: float, unit: float) -> Measured:
        """Σ a v² and its parts are at most size² and sums of n terms in that precision."""
        worst = float((one.double() - other.double()).abs().max())
        return exact(name, worst, tolerance=4 * (n + 8) * unit * size**2, draws=rows)

    size = float(v.abs().max())
    found = compare("largest |vᵀJv − Var_a(v)|", _quadratic(a, v), _two_pass(a, v), size, _U)
    # In float32 with v = 10⁴ + noise: the two-pass variance knows its own deviations only, up to
    # the rounding of v itself (10⁴ u) and of its mean (n 10⁴ u).
    single, shifted = a.float(), (v + 1e4).float()
    u = torch.finfo(torch.float32).eps / 2
    reference = _two_pass(single.double(), shifted.double())
    slack = size + (n + 4) * u * 1e4
    name = "largest error of the variance in float32, v = 10⁴ + noise"
    right = compare(name, _two_pass(single, shifted), reference, slack, u)
    right = exact(
        name, right.value, tolerance=(right.tolerance or 0.0) + ((n + 4) * u * 1e4) ** 2, draws=rows
    )
    wrong = float((_one_pass(single, shifted).double() - reference).abs().max())
    doubled = _quadratic(a, v) + (a * v).sum(-1).square()
    return Evidence(
        measured=(found, right),
        controls=(
            Control(
                name="one pass: E v² − (E v)²",
                measured=(exact(name, wrong, tolerance=right.tolerance or 0.0),),
            ),
            Control(
                name="diag(a) without a aᵀ",
                measured=(compare(found.name, doubled, _two_pass(a, v), size, _U),),
            ),
        ),
        finding=(
            f"vᵀJv and the variance differ by {found.value:.1e} at most over {rows} rows; in"
            f" float32 at v = 10⁴ + noise two passes are wrong by {right.value:.1e}, one by"
            f" {wrong:.1f}."
        ),
    )


_JACOBIAN: Final = Theorem(
    name="softmax-jacobian",
    title="The Jacobian of the softmax",
    statement="For a = softmax(s) the derivative of a with respect to s is J = diag(a) − a aᵀ.",
    latex=r"\frac{\partial a}{\partial s} = J = \mathrm{diag}(a) - a a^\top",
    conditions=("a is the softmax of s itself: no temperature, cap or sink in between",),
    source="calculus; proof given",
    kind=Kind.IDENTITY,
    prediction="the two matrices agree up to rounding",
    estimator="automatic differentiation of the definition of attention, and the backward pass of"
    " the streaming attention, in float64",
    random=_jacobian,
    model=_jacobian_of_model,
    exercise=2,
    proof="softmax-jacobian",
)

_VARIANCE: Final = Theorem(
    name="jacobian-is-a-variance",
    title="The Jacobian of the softmax is a variance",
    statement="For every v, vᵀ J v is the variance of v_j when j is drawn with probabilities a.",
    latex=r"v^\top \left(\mathrm{diag}(a) - a a^\top\right) v = \mathrm{Var}_{j \sim a}(v_j)",
    conditions=("a is a distribution: its entries sum to 1",),
    source="calculus; proof given",
    kind=Kind.IDENTITY,
    prediction="equal up to rounding; and a variance in two passes keeps its digits in float32",
    estimator="largest difference over random rows, from flat to concentrated",
    random=_variance,
    textbook=(
        Textbook(
            "the variance is E v² − (E v)²",
            "in exact arithmetic; in float32, with a mean of 10⁴, nothing of it is left",
        ),
    ),
    exercise=2,
    proof="softmax-jacobian",
)

THEOREMS: Final = (_JACOBIAN, _VARIANCE, SPECTRUM, SATURATION)
