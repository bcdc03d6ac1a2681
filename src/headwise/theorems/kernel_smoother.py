"""Attention as a kernel smoother: which kernel, and when it is symmetric and positive definite."""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import Tensor

from headwise.attention.definition import attention, output, scores, weights
from headwise.circuits.factored import Factored, triangle
from headwise.theorems.measured import Measured, exact
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

__all__ = ["THEOREMS"]

_U: Final = torch.finfo(torch.float64).eps / 2
_MOST_WIDTH: Final = 4096  # of a stream whose W_QK are looked at


def _smoother(
    q: Tensor, k: Tensor, scale: float, keep: Tensor | None, *, prior: bool, width: float = 1.0
) -> Tensor:
    """Nadaraya–Watson weights of the Gaussian kernel of bandwidth ``width`` · scale^(−1/2).

    With ``prior``, key j has the weight exp(scale |k_j|² / 2) as well.
    """
    log_kernel = -scale / (2 * width**2) * torch.cdist(q, k, compute_mode=_EXACT).square()
    if prior:
        log_kernel = log_kernel + scale / 2 * k.square().sum(-1)[..., None, :]
    return weights(log_kernel, keep)


_EXACT: Final = "donot_use_mm_for_euclid_dist"


def _difference(a: Tensor, b: Tensor, q: Tensor, k: Tensor, scale: float, name: str) -> Measured:
    """max |a − b| of two matrices of weights made from the same q and k.

    Both exponents are sums of terms of size s (|q| + |k|)²; each is wrong by (d + 4) u of that, and
    a weight by twice as much.
    """
    size = scale * float((q.norm(dim=-1).max() + k.norm(dim=-1).max()) ** 2)
    bound = 4 * (q.shape[-1] + 4) * _U * max(size, 1.0) + (a.shape[-1] + 4) * _U
    return exact(name, float((a - b).abs().max()), tolerance=bound)


def _gaussian(effort: Effort) -> Evidence:
    generator = torch.Generator().manual_seed(effort.seed)
    n, d, heads = effort.pick((61, 13, 5), (199, 31, 11))
    q, k, v = (
        torch.randn(1, heads, n, d, generator=generator, dtype=torch.float64) for _ in range(3)
    )
    scale = d**-0.5
    a = weights(scores(q, k))
    equal = k / k.norm(dim=-1, keepdim=True) * math.sqrt(d)
    a_equal = weights(scores(q, equal))
    with_prior = _smoother(q, k, scale, None, prior=True)
    plain = _smoother(q, equal, scale, None, prior=False)
    apart = [
        _difference(a, with_prior, q, k, scale, "prior by key norm: largest difference of weights"),
        _difference(a_equal, plain, q, equal, scale, "keys of one length, no prior: the same"),
    ]
    outputs = float((attention(q, k, v) - output(with_prior, v)).abs().max())
    tolerance = (n * (apart[0].tolerance or 0.0) + n * _U) * float(v.abs().max())
    apart.append(exact("largest difference of outputs", outputs, tolerance=tolerance))
    no_prior = _difference(
        a, _smoother(q, k, scale, None, prior=False), q, k, scale, "keys as they are, no prior"
    )
    wide = _smoother(q, equal, scale, None, prior=False, width=1.1)
    wrong = _difference(a_equal, wide, q, equal, scale, "bandwidth 1.1 d_k^(1/4)")
    return Evidence(
        measured=tuple(apart),
        controls=(
            Control(name="keys of different length, without the prior", measured=(no_prior,)),
            Control(name="a bandwidth that is 10 % too wide", measured=(wrong,)),
        ),
        finding=(
            f"With the prior the weights agree within {apart[0].value:.1e}; without it they differ"
            f" by up to {no_prior.value:.3g}, unless all keys have one length"
            f" ({apart[1].value:.1e})."
        ),
        plots=(_bandwidths(q, equal, a_equal, scale),),
    )


def _bandwidths(q: Tensor, k: Tensor, a: Tensor, scale: float) -> Plot:
    factors = (0.5, 0.7, 0.85, 1.0, 1.2, 1.4, 2.0)
    found = [
        float((a - _smoother(q, k, scale, None, prior=False, width=f)).abs().max()) for f in factors
    ]
    return Plot(
        title="Only one bandwidth gives attention",
        across="bandwidth / d_k^(1/4)",
        up="largest difference of weights",
        places=factors,
        curves=(Curve("measured", tuple(found)), Curve("prediction at 1", (0.0,) * len(factors))),
    )


def _gaussian_model(model: Trained) -> Evidence:
    layers = [each for each in model.heads if each.plain and each.sinks is None]
    if not layers:
        raise NotApplicable("its logits are not q·k alone: a softcap, a bias or a learned sink")
    worst: list[Measured] = []
    bare: list[Measured] = []
    spreads: list[float] = []
    for layer in layers:
        a = weights(layer.scale * (layer.q @ layer.k.mT), layer.keep)
        for prior, into, name in ((True, worst, "with the prior"), (False, bare, "without")):
            other = _smoother(layer.q, layer.k, layer.scale, layer.keep, prior=prior)
            into.append(_difference(a, other, layer.q, layer.k, layer.scale, name))
        spreads += (layer.scale / 2 * layer.k.square().sum(-1)).std(-1).tolist()
    first = max(worst, key=lambda each: each.value / (each.tolerance or 1.0))
    last = max(bare, key=lambda each: each.value)
    spreads.sort()
    return Evidence(
        measured=(first,),
        controls=(Control(name="without the prior of the key norms", measured=(last,)),),
        finding=(
            f"Every head is a Gaussian smoother with a prior on its keys; the logarithm of the"
            f" prior has a standard deviation of {spreads[len(spreads) // 2]:.3g} in the median"
            f" head ({spreads[0]:.3g} to {spreads[-1]:.3g}), and without it weights are wrong by up"
            f" to {last.value:.3g}."
        ),
    )


def _asymmetry(w: Factored) -> Tensor:
    """‖W − Wᵀ‖ / ‖W‖ of every head: 0 for a symmetric W, √2 where W and Wᵀ are orthogonal."""
    small = w.right.double() @ w.left.double()
    square = (small @ small).diagonal(dim1=-2, dim2=-1).sum(-1)
    norm = w.norm().square()
    return ((2 * norm - 2 * square).clamp(min=0) / norm).sqrt()


def _negative_share(w: Factored) -> Tensor:
    """Share of Σ|λ| of (W + Wᵀ)/2 that is negative: 0 for a positive semidefinite form.

    Its eigenvalues besides zeros are those of R (0 I; I 0) Rᵀ / 2, R from [left, rightᵀ] = QR.
    """
    r = triangle(torch.cat((w.left.double(), w.right.double().mT), -1))
    half = w.rank
    turned = torch.cat((r[..., half:], r[..., :half]), -1)
    values = torch.linalg.eigvalsh(turned @ r.mT / 2)
    share: Tensor = (-values).clamp(min=0).sum(-1) / values.abs().sum(-1)
    return share


def _kernel_parts(x: Tensor, w: Tensor, scale: float, name: str) -> tuple[Measured, Measured]:
    """How far κ(x_i, x_j) = exp(scale x_i W x_jᵀ) is from symmetric, and its negative part.

    An eigenvalue of the symmetric part is wrong by n u ‖K‖ at most, an entry by (d + 4) u times the
    size of its exponent.
    """
    exponent = scale * (x @ w @ x.mT)
    kernel = torch.exp(exponent)
    norm = torch.linalg.matrix_norm(kernel)
    apart = float(torch.linalg.matrix_norm(kernel - kernel.mT) / norm)
    values = torch.linalg.eigvalsh((kernel + kernel.mT) / 2)
    size = float(scale * (x.norm(dim=-1) @ (x @ w).norm(dim=-1)) / len(x))
    rounding = 4 * (x.shape[1] + 4) * _U * max(1.0, float(exponent.abs().max()), size)
    return (
        exact(f"{name}: ‖K − Kᵀ‖ / ‖K‖", apart, tolerance=rounding),
        exact(
            f"{name}: most negative eigenvalue / ‖K‖",
            float((-values[0]).clamp(min=0) / norm),
            tolerance=rounding + len(x) * _U,
        ),
    )


def _symmetry(effort: Effort) -> Evidence:
    generator = torch.Generator().manual_seed(effort.seed)
    n, d, d_k = effort.pick((67, 23, 7), (199, 61, 13))
    x = torch.randn(n, d, generator=generator, dtype=torch.float64)
    w_q, w_k = (
        torch.randn(d, d_k, generator=generator, dtype=torch.float64) / math.sqrt(d)
        for _ in range(2)
    )
    scale = d_k**-0.5
    same = _kernel_parts(x, w_q @ w_q.mT, scale, "W_K = W_Q")
    points = _kernel_parts(x @ w_q, torch.eye(d_k, dtype=x.dtype), scale, "one set of points")
    general = _kernel_parts(x, w_q @ w_k.mT, scale, "W_K ≠ W_Q")
    signs = torch.ones(d_k, dtype=x.dtype)
    signs[::2] = -1
    mixed = _kernel_parts(x, (w_q * signs) @ w_q.mT, scale, "symmetric, both signs")
    random = Factored(w_q, w_k.mT)
    return Evidence(
        measured=(*same, *points),
        controls=(
            Control(name="W_Q and W_K drawn apart", measured=general),
            Control(name="a symmetric W_QK with negative eigenvalues", measured=(mixed[1],)),
        ),
        finding=(
            f"With W_K = W_Q the kernel is symmetric and positive definite; drawn apart, it is"
            f" asymmetric by {general[0].value:.3g} of its norm, W_QK by"
            f" {float(_asymmetry(random)):.3g}, and {100 * float(_negative_share(random)):.0f} % of"
            f" the eigenvalue mass of the symmetric part of W_QK is negative."
        ),
    )


def _symmetry_model(model: Trained) -> Evidence:
    layers = [each for each in model.weights.layers if each.role != "cross"]
    if not layers:
        raise NotApplicable("queries and keys of its attention read different streams")
    if max(each.query.shape[1] for each in layers) > _MOST_WIDTH:
        raise NotApplicable(f"its stream is wider than {_MOST_WIDTH:,}")
    apart, negative, wrong = [], [], []
    for layer in layers:
        w = layer.qk(folded=True)
        apart.append(_asymmetry(w))
        negative.append(_negative_share(w))
        wrong.append(_asymmetry(Factored(w.left, w.right.roll(1, 0))))
    asymmetry, share = torch.cat(apart).sort().values, torch.cat(negative).sort().values
    tolerance = math.sqrt(_U) * 4  # a root of a difference of two squares, each wrong by some u
    name = "largest ‖W_QK − W_QKᵀ‖ / ‖W_QK‖"
    middle = len(asymmetry) // 2
    measured = exact(name, float(asymmetry[-1]), tolerance=tolerance)
    return Evidence(
        measured=(measured,),
        controls=(
            Control(
                name="W_Q of one head, W_K of another",
                measured=(exact(name, float(torch.cat(wrong).max()), tolerance=tolerance),),
            ),
        ),
        violated="" if measured.holds else "W_QK is not symmetric",
        finding=(
            f"Asymmetry ‖W − Wᵀ‖ / ‖W‖ of W_QK is {float(asymmetry[middle]):.3g} in the median head"
            f" ({float(asymmetry[0]):.3g} to {float(asymmetry[-1]):.3g}; drawn at random, √2);"
            f" {100 * float(share[middle]):.0f} % of the eigenvalue mass of its symmetric part is"
            f" negative ({100 * float(share[0]):.0f} to {100 * float(share[-1]):.0f} %; 50 % at"
            " random)."
        ),
    )


THEOREMS: Final = (
    Theorem(
        name="gaussian-smoother",
        title="Attention smooths with a Gaussian kernel and a prior on keys",
        statement=(
            "Attention is the Nadaraya–Watson smoother of the values with a Gaussian kernel of"
            " bandwidth d_k^(1/4), in which key j has the prior weight exp(|k_j|² / (2 √d_k))."
            " Without the prior this is so exactly if all keys have one length."
        ),
        latex=(
            r"e^{q\cdot k/\sqrt{d_k}} = e^{|q|^2/2\sqrt{d_k}}\, e^{|k|^2/2\sqrt{d_k}}\,"
            r" e^{-|q-k|^2/2\sqrt{d_k}}, \qquad"
            r" o_i = \frac{\sum_j e^{|k_j|^2/2\sqrt{d_k}}\, e^{-|q_i-k_j|^2/2\sqrt{d_k}}\, v_j}"
            r"{\sum_j e^{|k_j|^2/2\sqrt{d_k}}\, e^{-|q_i-k_j|^2/2\sqrt{d_k}}}"
        ),
        conditions=(
            "logits are scale · q·k: no softcap, bias or learned sink",
            "for the plain Gaussian smoother: all keys have one length",
        ),
        source="Tsai et al. 2019 (arXiv:1908.11775), section 3; the split by norms is derived here",
        kind=Kind.IDENTITY,
        prediction="the weights are equal up to rounding",
        estimator="the largest difference of weights and of outputs, in float64",
        random=_gaussian,
        model=_gaussian_model,
        textbook=(
            Textbook(
                "attention is a Gaussian kernel smoother",
                "with a prior weight on each key that grows with its length",
            ),
        ),
        proof="gaussian-smoother",
    ),
    Theorem(
        name="token-kernel-symmetry",
        title="The kernel between tokens is symmetric only if W_QK is",
        statement=(
            "exp(⟨x, y⟩/√d_k) is a symmetric positive definite kernel on one set of points. The"
            " kernel between tokens, exp(x W_QK yᵀ/√d_k), is symmetric if and only if W_QK is, and"
            " positive definite if W_QK is symmetric and positive semidefinite."
        ),
        latex=(
            r"\kappa(x, y) = \exp\!\big(x W_{QK}\, y^\top / \sqrt{d_k}\big), \qquad"
            r" \kappa(x,y) = \kappa(y,x)\ \forall x,y \iff W_{QK} = W_{QK}^\top"
        ),
        conditions=("W_QK is symmetric", "W_QK has no negative eigenvalue"),
        source="Schölkopf and Smola 2002, Learning with Kernels, section 2.3; derived here",
        kind=Kind.IDENTITY,
        prediction="with W_K = W_Q: no asymmetry, no negative eigenvalue",
        estimator="‖K − Kᵀ‖/‖K‖ and the lowest eigenvalue of the kernel's matrix over n tokens",
        random=_symmetry,
        model=_symmetry_model,
        textbook=(
            Textbook(
                "the kernel of attention is positive definite in pairs (q, k)",
                "on one set of points; between tokens it is in general neither symmetric nor"
                " definite",
            ),
        ),
        proof="token-kernel-symmetry",
    ),
)
