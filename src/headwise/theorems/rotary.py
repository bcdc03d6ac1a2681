"""Rotary positions: logits see p' − p alone; how precisely, how far, and what does not follow.

⟨R_p q, R_p' k⟩ = ⟨q, R_{p'−p} k⟩
"""

from __future__ import annotations

from typing import Final

import torch

from headwise.theorems.measured import Measured, exact
from headwise.theorems.rotary_decay import bound_holds, no_decay
from headwise.theorems.rotary_relativity import (
    conventions,
    precision,
    relativity,
    turns_in,
    turns_of,
)
from headwise.theorems.shifted_model import check_turns, outputs_at
from headwise.theorems.statement import Control, Evidence, Kind, Textbook, Theorem
from headwise.theorems.trained import Trained

__all__ = ["THEOREMS"]

_SU: Final = "Su et al. 2021 (arXiv:2104.09864)"
_BARBERO: Final = "Barbero et al. 2024 (arXiv:2410.06205)"
_SHIFTS: Final = (101, 10_007)
_ROUNDING: Final = 1e-3  # of logits, by the other operations of a model in float32


def _tolerance(largest: int) -> float:
    """5 p u for angles in float32 at positions up to p, and the rounding of everything else."""
    return 5 * largest * torch.finfo(torch.float32).eps / 2 + _ROUNDING


def _shifted(model: Trained) -> Evidence:
    """The whole model, its positions moved by a constant; and stretched, as the control."""
    check_turns(model)
    plain = outputs_at(model, 0)
    length = len(plain)
    name = "largest change of a logit, positions + {:,}"

    def change(first: int, stride: int) -> Measured:
        found = float((outputs_at(model, first, stride) - plain).abs().max())
        return exact(name.format(first), found, tolerance=_tolerance(first + stride * length))

    measured = [change(shift, 1) for shift in _SHIFTS]
    stretched = change(0, 2)
    return Evidence(
        measured=tuple(measured),
        controls=(Control(name="positions doubled", measured=(stretched,)),),
        finding=(
            f"Moving all positions by {_SHIFTS[0]:,} and {_SHIFTS[1]:,} changes no logit of"
            f" {length} tokens by more than {measured[0].value:.1e} and {measured[1].value:.1e};"
            f" doubling them changes one by {stretched.value:.2g}."
        ),
    )


_UNSEEN: Final = Textbook(
    "the construction extends to positions that training never saw",
    "the formula does; a trained model has never seen the angles of pairs that do not complete a"
    " turn within its training length, and fails beyond it unless they are interpolated",
)

THEOREMS: Final = (
    Theorem(
        name="rotary-relative",
        title="Rotary positions make the logit depend on p' − p alone",
        statement=(
            "With queries and keys turned by their own positions, their inner product depends on"
            " the contents and on the difference of the two positions, and on nothing else."
        ),
        latex=(
            r"\langle R_p q,\; R_{p'} k\rangle = \langle q,\; R_{p'-p}\, k\rangle, \qquad"
            r" R_p^\top R_{p'} = R_{p'-p}"
        ),
        conditions=(
            "queries and keys are turned in the same way: same base, same convention",
            "nothing is done to them after the rotation: no bias, no gain that differs in a pair",
            "positions are not stretched",
            "in a whole model: no absolute positions, no scaling that looks at the length",
        ),
        source=f"{_SU}, section 3.2, equation 16",
        kind=Kind.IDENTITY,
        prediction="no difference beyond the rounding of angles, 2 p u |q||k|",
        estimator=(
            "random queries and keys in float64; in a model, all logits with all positions moved"
        ),
        random=relativity,
        model=_shifted,
        textbook=(
            Textbook(
                "the attention logit depends on positions only through p' − p",
                "for given q and k; from the second layer on, the contents of a causal model depend"
                " on absolute position through the mask",
            ),
        ),
        exercise=5,
        proof="rotary-relative",
    ),
    Theorem(
        name="rotary-conventions",
        title="A wrong convention used throughout keeps relativity",
        statement=(
            "Whether the members of a pair stand side by side or half a width apart, logits depend"
            " on p' − p alone. A mixture of the two breaks it; exchanging them only ruins what was"
            " trained, which relativity cannot notice."
        ),
        latex=(
            r"\langle R^{c}_p q, R^{c}_{p'} k\rangle = \langle q, R^{c}_{p'-p} k\rangle, \quad"
            r" c \in \{\text{half}, \text{interleaved}\}"
        ),
        conditions=("queries and keys follow one convention",),
        source=f"{_SU}, section 3.2; released code of both conventions",
        kind=Kind.IDENTITY,
        prediction="no difference for either convention; a large one for the mixture",
        estimator="random queries and keys in float64",
        random=conventions,
        textbook=(
            Textbook(
                "a test of relativity finds a wrong rotary convention",
                "only a mixture; one convention in place of the other passes, and has to be found"
                " by comparing the loss",
            ),
        ),
        proof="rotary-relative",
    ),
    Theorem(
        name="rotary-precision",
        title="Angles in float32 are good for long texts, in bfloat16 for none",
        statement=(
            "An angle at position p is rounded to p u radians, so a logit is wrong by at most"
            " 2 p u |q||k|: in float32 10⁻⁷ p, in bfloat16 whole turns from p ≈ 1000."
        ),
        latex=r"|\hat s - s| \le 2\,p\,u\,\|q\|\,\|k\|",
        conditions=("angles are computed in float32 or better",),
        source="Higham 2002, Accuracy and Stability of Numerical Algorithms, section 2.2",
        kind=Kind.IDENTITY,
        prediction="errors stay below the bound at every position",
        estimator="largest error over random pairs near p = 10³ … 10⁶, over the bound",
        random=precision,
        proof="rotary-relative",
    ),
    Theorem(
        name="rotary-decay-bound",
        title="Su's bound: an upper bound on logits that falls with distance",
        statement=(
            "The size of a rotary logit at distance Δ is at most the largest step between"
            " neighbouring pairs times the sum of partial sums of rotations. That sum falls with"
            " distance, though not monotonically; the logit itself need not."
        ),
        latex=(
            r"\Big|\mathrm{Re}\sum_i h_i e^{i\Delta\theta_i}\Big| \le \max_i |h_{i+1} - h_i|"
            r" \sum_j |S_j(\Delta)|, \qquad S_j(\Delta) = \sum_{i<j} e^{i\Delta\theta_i}"
        ),
        conditions=(
            "the sum runs over all partial sums",
            "for decay: products of pairs vary slowly from pair to pair",
        ),
        source=f"{_SU}, section 3.4.3, equations 35 to 37",
        kind=Kind.IDENTITY,
        prediction="no logit above the bound; an all-ones query and key decay",
        estimator="random and aligned queries and keys at distances up to 10⁵",
        random=bound_holds,
        textbook=(
            Textbook(
                "rotary logits decay with distance",
                "an upper bound does, for vectors whose pairs vary slowly; Gaussian vectors show no"
                " decay at all",
            ),
        ),
        proof="rotary-decay",
    ),
    Theorem(
        name="rotary-no-decay",
        title="Gaussian queries and keys do not decay with distance",
        statement=(
            "For independent Gaussian queries and keys the logit has mean 0 and the same variance"
            " at every distance, and for every distance some key has its largest logit there."
        ),
        latex=(
            r"\mathbb{E}\,\langle q, R_\Delta k\rangle = 0, \qquad"
            r" \mathbb{E}\,\langle q, R_\Delta k\rangle^2 = d \quad \text{for every } \Delta"
        ),
        conditions=("queries and keys are independent", "their distribution is rotation-invariant"),
        source=f"{_BARBERO}, section 3 and figure 2",
        kind=Kind.EXPECTATION,
        prediction="mean 0 and mean square d at every distance",
        estimator="independent draws at each distance",
        random=no_decay,
        textbook=(
            Textbook(
                "rotary positions make attention fall with distance",
                "nothing in the construction does: the model has to choose its queries and keys so",
            ),
        ),
        proof="rotary-decay",
    ),
    Theorem(
        name="rotary-incomplete-turns",
        title="Slow pairs never complete a turn in training",
        statement=(
            "A pair of frequency θ completes a turn within L positions if L θ reaches 2π. The"
            " slower ones see in longer texts angles that training never showed them."
        ),
        latex=(r"L\,b^{-2i/d} < 2\pi \iff i > \frac{d}{2}\,\frac{\ln(L/2\pi)}{\ln b}"),
        conditions=("positions run from 0 to L − 1 without gaps",),
        source="Peng et al. 2023 (arXiv:2309.00071), section 3.2",
        kind=Kind.IDENTITY,
        prediction="18 of 64 pairs for base 10,000 and 4,096 positions; 14, 32, 29 in other cases",
        estimator="the rule, and the angle walked step by step",
        random=turns_of,
        model=turns_in,
        textbook=(_UNSEEN,),
        proof="rotary-relative",
    ),
)
