"""Whether logits fall with distance under rotary positions: Su's bound, and Gaussian vectors.

logit(Δ) = Re Σ_i h_i e^{iΔθ_i}, h_i = q_i k̄_i by pairs     S_j(Δ) = Σ_{i<j} e^{iΔθ_i}
|logit(Δ)| ≤ (max_i |h_{i+1} − h_i|) Σ_j |S_j(Δ)|,  h of the pair after the last being 0
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from headwise.positions import Layout, frequencies, rotate
from headwise.theorems.measured import Measured, exact, mean_estimate, within
from headwise.theorems.statement import Control, Curve, Effort, Evidence, Plot

__all__ = ["CURVE", "bound_holds", "curve", "no_decay", "partial_sums"]

# Mean over j of |S_j(Δ)| for 64 pairs and base 10,000.
CURVE: Final = {
    0: 32.5, 1: 31.5, 5: 20.9, 10: 17.9, 50: 12.6, 100: 10.2, 200: 7.2, 500: 6.2, 1000: 4.5,
}  # fmt: skip
_WIDTH: Final = 128


def partial_sums(distances: Tensor, width: int, base: float = 10_000.0) -> Tensor:
    """|S_j(Δ)| for j = 1 … width/2: ``distance pair``, float64.

    Example:
        >>> partial_sums(torch.tensor([0]), 6).tolist()
        [[1.0, 2.0, 3.0]]
    """
    angle = distances.double()[:, None] * frequencies(width, base=base).inv_freq
    sums: Tensor = torch.polar(torch.ones_like(angle), angle).cumsum(1).abs()
    return sums


def _logits(q: Tensor, k: Tensor, distances: Tensor) -> Tensor:
    """⟨R_Δ q, k⟩ for queries and keys ``draw dim``: ``draw distance``."""
    inv_freq = frequencies(q.shape[-1]).inv_freq
    turned = rotate(
        q[:, None].expand(-1, len(distances), -1), distances, inv_freq, layout=Layout.HALF
    )
    return (turned @ k[:, :, None])[..., 0]


def bound_holds(effort: Effort) -> Evidence:
    """The bound over random vectors, where it is reached, and the decay of a constant one."""
    generator = torch.Generator().manual_seed(effort.seed)
    draws = effort.pick(307, 5003)
    distances = torch.tensor([0, 1, 2, 5, 11, 53, 101, 499, 1009, 10_007, 100_003])
    q, k = torch.randn(2, draws, _WIDTH, generator=generator, dtype=torch.float64)
    sums = partial_sums(distances, _WIDTH)
    ratio = _logits(q, k, distances).abs() / (_largest_step(q, k) * sums.sum(1))
    place = 6
    tight, ones = _reaching(int(distances[place])), torch.ones(1, _WIDTH, dtype=torch.float64)
    key = torch.cat((ones[:, : _WIDTH // 2], 0 * ones[:, _WIDTH // 2 :]), 1)  # 1 in every pair
    reached = float(_logits(tight, key, distances)[0, place] / _largest_step(tight, key))
    whole, short = float(sums[place].sum()), float(sums[place, :-1].sum())
    line = _logits(ones, ones, distances)[0]
    half = torch.ones(_WIDTH // 4, dtype=torch.float64)
    flat = torch.cat((0 * half, half)).repeat(2)[None]  # pairs of low frequency alone
    slow = _logits(flat, flat, distances)[0]
    name, decay = "largest |logit| / bound", "logit at Δ = 1009 over that at Δ = 0, all ones"
    at_bound = "|logit| / bound where it is reached"
    rounding = 1e3 * _WIDTH * torch.finfo(torch.float64).eps  # of sums of angles up to 101
    return Evidence(
        measured=(
            within(name, float(ratio.max()), allowed=(0.0, 1.0), draws=draws),
            exact(at_bound, reached / whole, predicted=1.0, tolerance=rounding),
            within(decay, float(line[8] / line[0]), allowed=(-0.3, 0.3)),
        ),
        controls=(
            Control(
                name="the last partial sum left out of the bound",
                measured=(within(name, reached / short, allowed=(0.0, 1.0)),),
            ),
            Control(
                name="a query on the slow half of the pairs",
                measured=(within(decay, float(slow[8] / slow[0]), allowed=(-0.3, 0.3)),),
            ),
        ),
        finding=(
            f"In {draws} draws at {len(distances)} distances logits come to"
            f" {float(ratio.max()):.2f} of their bound at most, and one made for it reaches"
            f" it; an all-ones query and key fall to {float(line[8] / line[0]):.2f} in 1,009 steps."
        ),
    )


def _pairs(x: Tensor) -> Tensor:
    return torch.view_as_complex(x.unflatten(-1, (2, -1)).mT.contiguous())


def _largest_step(q: Tensor, k: Tensor) -> Tensor:
    """max_i |h_{i+1} − h_i|, ``draw 1``."""
    h = _pairs(q) * _pairs(k).conj()
    return torch.nn.functional.pad(h, (0, 1)).diff(dim=1).abs().amax(1, keepdim=True)


def _reaching(distance: int) -> Tensor:
    """A query whose steps all have size 1 and the phase that adds up: ``1 dim``, for the key 1."""
    angle = distance * frequencies(_WIDTH).inv_freq
    sums = torch.polar(torch.ones_like(angle), angle).cumsum(0)
    steps = sums.conj() / sums.abs()  # h_{j−1} − h_j
    h = steps.resolve_conj().flip(0).cumsum(0).flip(0)
    return torch.cat((h.real, h.imag))[None]


def curve(effort: Effort) -> Evidence:
    """The mean of |S_j(Δ)| over j against its known values."""
    distances = torch.tensor(list(CURVE))
    found = partial_sums(distances, _WIDTH).mean(1).tolist()
    other = partial_sums(distances, _WIDTH, base=100.0).mean(1).tolist()
    far = float(partial_sums(torch.tensor([100_000]), _WIDTH).mean())

    def near(values: list[float]) -> tuple[Measured, ...]:
        # The known values have one decimal: 1 % and half a unit of it.
        return tuple(
            exact(f"mean |S_j| at Δ = {d}", value, predicted=known, tolerance=0.01 * known + 0.05)
            for (d, known), value in zip(CURVE.items(), values, strict=True)
        )

    return Evidence(
        measured=near(found),
        controls=(Control(name="base 100 in place of 10,000", measured=near(other)[2:]),),
        finding=(
            f"The mean of |S_j| falls from {found[0]:.1f} at Δ = 0 to {found[-1]:.1f} at 1,000, and"
            f" is {far:.1f} at 100,000: an upper bound, and not monotone."
        ),
        plots=(
            Plot(
                title="Su's bound on rotary logits",
                across="distance Δ",
                up="mean |S_j|",
                places=tuple(float(d) for d in CURVE),
                curves=(
                    Curve("prediction", tuple(CURVE.values())),
                    Curve("measured", tuple(found)),
                    Curve("base 100", tuple(other)),
                ),
            ),
        ),
    )


def no_decay(effort: Effort) -> Evidence:
    """Gaussian queries and keys: mean 0 and mean square d at every distance.

    And for every distance there is a key, R_Δ q, whose logit is largest there.
    """
    generator = torch.Generator().manual_seed(effort.seed)
    draws, width = effort.pick((2003, 62), (20_011, 134))
    distances = torch.tensor([0, 1, 11, 101, 1009, 10_007])
    q, k = torch.randn(2, draws, width, generator=generator, dtype=torch.float64)
    logits = _logits(q, k, distances)
    aligned = _logits(q, q, distances)
    reach = torch.arange(effort.pick(307, 2003))
    measured = [
        mean_estimate(f"mean logit / √d at Δ = {d}", logits[:, i] / width**0.5, predicted=0.0)
        for i, d in enumerate(distances.tolist())
    ] + [
        mean_estimate(f"mean logit² / d at Δ = {d}", logits[:, i] ** 2 / width, predicted=1.0)
        for i, d in enumerate(distances.tolist())
    ]
    name = "distances at which no key is largest"
    return Evidence(
        measured=(*measured, exact(name, _missed(q[0], reach, 1), tolerance=0.0)),
        controls=(
            Control(
                name="keys equal to their queries",
                measured=(
                    mean_estimate(
                        "mean logit / √d at Δ = 0", aligned[:, 0] / width**0.5, predicted=0.0
                    ),
                ),
            ),
            Control(
                name="the key is the query itself, not turned",
                measured=(exact(name, _missed(q[0], reach, 0), tolerance=0.0),),
            ),
        ),
        finding=(
            f"Over {draws} Gaussian pairs the mean square logit is"
            f" {float((logits[:, 0] ** 2).mean()) / width:.2f} d at Δ = 0 and"
            f" {float((logits[:, -1] ** 2).mean()) / width:.2f} d at {int(distances[-1]):,}; each"
            f" of {len(reach)} distances is where some key is largest."
        ),
        plots=(_plot(distances, logits / width**0.5, aligned / width**0.5),),
    )


def _plot(distances: Tensor, logits: Tensor, aligned: Tensor) -> Plot:
    errors = logits.std(0) / len(logits) ** 0.5
    return Plot(
        title="Logits of Gaussian queries and keys",
        across="distance Δ",
        up="mean logit / √d",
        places=tuple(float(d) for d in distances),
        curves=(
            Curve("prediction", (0.0,) * len(distances)),
            Curve("Gaussian", tuple(logits.mean(0).tolist()), tuple(errors.tolist())),
            Curve("keys equal to queries (control)", tuple(aligned.mean(0).tolist())),
        ),
    )


def _missed(q: Tensor, reach: Tensor, turned: int) -> int:
    """At how many distances Δ the key R_Δ q (q itself, if not ``turned``) is largest elsewhere."""
    rows = q[None].expand(len(reach), -1)
    keys = rotate(rows, reach * turned, frequencies(len(q)).inv_freq, layout=Layout.HALF)
    queries = rotate(rows, reach, frequencies(len(q)).inv_freq, layout=Layout.HALF)
    return int(((queries @ keys.T).argmax(0) != reach).sum())
