"""The definitions of every number of a head's circuits in words: the texts of the schema.

Row vectors: q = x W_Q, W_QK = W_Q W_Kᵀ, W_OV = W_V W_O; σ are singular values, λ eigenvalues.
Folded: with the linear part of the norm before attention in the weights, which then read the
stream, and that of a norm of what attention writes in W_OV, where there is one. What is left of a
norm is its division by a positive number of each token. With rotary positions W_QK is that of
distance 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from headwise.results.definitions import Kind
from headwise.results.thresholds import LOCAL_FROM, LOCAL_TOKENS

__all__ = ["BEHAVIOUR_PREFIX", "CIRCUITS", "TEXT_PREFIX", "CircuitVariable"]

BEHAVIOUR_PREFIX: Final = "repeated_"
TEXT_PREFIX: Final = "text_"

_LH = ("layer", "head")
_PAIR = (*_LH, "earlier_layer", "earlier_head")
_ELHAGE = "Elhage et al. 2021, A Mathematical Framework for Transformer Circuits"
_ROY = "Roy and Vetterli 2007, The effective rank"
_BARBERO = "Barbero et al. 2024 (arXiv:2410.06205)"
_HU = "Hu et al. 2021 (arXiv:2106.09685), section 7"
_DRAWN = "exact; its null is estimated from 64 random heads"
_RUN = "exact over the rows of the repeated tokens"
_ON_TEXT = "exact over the measured rows of the text"


@dataclass(frozen=True, kw_only=True, slots=True)
class CircuitVariable:
    """One variable of the circuits."""

    dims: tuple[str, ...]
    kind: Kind
    units: str
    long_name: str
    definition: str
    source: str = ""
    exactness: str = "exact"


def _head(long_name: str, definition: str, source: str = "", **more: str) -> CircuitVariable:
    return CircuitVariable(
        dims=_LH,
        kind="float64",
        units=more.get("units", "1"),
        long_name=long_name,
        definition=definition,
        source=source,
        exactness=more.get("exactness", "exact"),
    )


def _spectra() -> dict[str, CircuitVariable]:
    table = {}
    for short, name in (("qk", "W_QK"), ("ov", "W_OV")):
        for end, word in (("", ""), ("_folded", ", folded")):
            up_to = _WRITTEN if short == "ov" and end else ""
            table[f"{short}_singular_values{end}"] = CircuitVariable(
                dims=(*_LH, "rank"),
                kind="float64",
                units="1",
                long_name=f"singular values of {name}{word}",
                definition=f"σ of {name}{word}, largest first; NaN beyond the width of the head"
                f"{up_to}",
            )
            for key, what, formula, source in _OF_SPECTRUM:
                table[f"{short}_{key}{end}"] = _head(
                    f"{what} of {name}{word}",
                    f"{formula}, for σ of {name}{word}{up_to if key in _SIZES else ''}",
                    source,
                )
    return table


_SIZES: Final = ("norm", "spectral_norm")
_WRITTEN: Final = (
    "; where ov_form says so, up to a positive number of each token that the heads of a layer share"
)
_OF_SPECTRUM: Final = (
    ("norm", "Frobenius norm", "√Σσ²", ""),
    ("spectral_norm", "spectral norm", "σ₁", ""),
    ("effective_rank", "effective rank", "exp(−Σ p ln p) with p = σ/Σσ", _ROY),
    ("stable_rank", "stable rank", "Σσ² / σ₁²", ""),
    (
        "numerical_rank",
        "numerical rank",
        "how many σ exceed d·u·σ₁, with the rounding u of float32 (float64 for float64 weights)",
        "",
    ),
)


def _of_normed_queries() -> dict[str, CircuitVariable]:
    """What is exact where queries and keys pass norms of their own, too."""
    return {
        "qk_relative_singular_values_folded": CircuitVariable(
            dims=(*_LH, "rank"),
            kind="float64",
            units="1",
            long_name="relative singular values of W_QK, folded",
            definition="σ/σ₁ of W_QK, folded, largest first: also where sizes are not fixed, since"
            " queries and keys pass norms of their own; NaN beyond the width of the head, and where"
            " W_QK is 0",
        ),
        "qk_logit_bound": _head(
            "bound on logits by the norms of queries and keys",
            "scale · √(n_q n_k) · max |γ_q| |γ_k| over the entries of a head, the two of a rotary"
            " pair taken as one (f² |γ_q| |γ_k| with each one's largest; f is the attention"
            " factor); γ are the gains of the norms, taken over n_q and n_k entries. |logit| before"
            " softcap, learned biases and mask is never above it. NaN unless queries and keys both"
            " pass norms without biases",
            "Henry et al. 2020 (arXiv:2010.04245); Dehghani et al. 2023 (arXiv:2302.05442)",
        ),
    }


def _scores() -> dict[str, CircuitVariable]:
    return {
        "copying": _head(
            "copying score",
            "Re Σλ / Σ|λ| over the eigenvalues of W_E W_OV W_U, norms folded (before attention, of"
            " what it writes, before W_U): 1 when the head makes the tokens it looks at likelier,"
            " −1 when less likely",
            _ELHAGE,
        ),
        "copying_z": _head(
            "copying score against its null",
            "copying / its root mean square over heads with Gaussian factors of the same shape",
            exactness=_DRAWN,
        ),
        "qk_sign": _head(
            "sign of W_QK",
            "Re Σλ / Σ|λ| over the eigenvalues of W_QK, folded: 1 when tokens look for what"
            " resembles them, −1 for the opposite",
            _ELHAGE,
        ),
        "qk_sign_z": _head(
            "sign of W_QK against its null",
            "qk_sign / its root mean square over heads with Gaussian factors of the same shape",
            exactness=_DRAWN,
        ),
        "qk_symmetry": _head(
            "symmetry of W_QK",
            "‖(W + Wᵀ)/2‖² / ‖W‖² of W_QK, folded: 1 symmetric, 0 antisymmetric, about 1/2 random",
        ),
        "qk_negative": _head(
            "negative part of W_QK",
            "Σ|λ⁻| / Σ|λ| over the eigenvalues of the symmetric part of W_QK, folded: 0 when it is"
            " positive semi-definite, about 1/2 random",
        ),
    }


def _rotary() -> dict[str, CircuitVariable]:
    by_distance = {
        f"qk_{key}_by_distance": CircuitVariable(
            dims=(*_LH, "offset"),
            kind="float64",
            units="1",
            long_name=f"{what} of W_QK by distance",
            definition=f"{formula}, for σ of W_Q R_Δ W_Kᵀ, folded, Δ = −offset; NaN without"
            " rotary positions",
            source=source,
        )
        for key, what, formula, source in _OF_SPECTRUM
        if key in ("spectral_norm", "effective_rank")
    }
    return {
        **by_distance,
        "rotary_share": CircuitVariable(
            dims=(*_LH, "pair"),
            kind="float64",
            units="1",
            long_name="share of each rotary pair",
            definition="‖W_Q^(m)‖ ‖W_K^(m)‖ of pair m as a share of all pairs and of what does not"
            " turn, folded",
            source=_BARBERO,
        ),
        "rotary_angle": CircuitVariable(
            dims=("layer", "pair"),
            kind="float64",
            units="radians per token",
            long_name="angle of each rotary pair",
            definition="θ_m, by which pair m turns from one position to the next",
            source="Su et al. 2021 (arXiv:2104.09864)",
        ),
        "rotary_slow_share": _head(
            "share of the slow rotary pairs",
            "rotary_share summed over the pairs that complete no turn within the trained length",
            _BARBERO,
        ),
        "rotary_constant_share": _head(
            "share of W_QK that does not depend on distance",
            "‖mean of W_Q R_Δ W_Kᵀ‖² / mean of ‖W_Q R_Δ W_Kᵀ‖² over the distances of the trained"
            " length, folded",
        ),
    }


def _composition() -> dict[str, CircuitVariable]:
    table = {}
    for letter, reader in (("q", "W_QK"), ("k", "W_QKᵀ"), ("v", "W_OV")):
        capital = letter.upper()
        table[f"composition_{letter}"] = CircuitVariable(
            dims=_PAIR,
            kind="float32",
            units="1",
            long_name=f"{capital}-composition",
            definition=f"‖A B‖ / (‖A‖ ‖B‖) with A = W_OV of the earlier head and B = {reader} of"
            " the later one, folded; NaN where the earlier head is not of an earlier layer of the"
            " same stack",
            source=_ELHAGE,
        )
        table[f"composition_{letter}_z"] = CircuitVariable(
            dims=_PAIR,
            kind="float32",
            units="1",
            long_name=f"{capital}-composition against its null",
            definition=f"(composition_{letter}² − 1/d) / its standard deviation, for the same two"
            " heads turned against each other at random",
        )
    return table


def _behaviours() -> dict[str, CircuitVariable]:
    sink = "mean weight on the first token, a learned sink included"
    table = {
        "previous_token": ("previous token", "mean of A[i, i−1]"),
        "next_token": ("next token", "mean of A[i, i+1], in encoders"),
        "induction": (
            "induction",
            "mean of A[i, i−T+1] from the second copy on: the key after the token's last copy",
        ),
        "induction_all": (
            "induction, all copies",
            "the same, summed over the keys after every earlier copy",
        ),
        "duplicate_token": (
            "duplicate token",
            "mean of A[i, i−T] from the second copy on: the token's last copy; in encoders the sum"
            " over all other copies",
        ),
        "sink": ("sink", sink),
        "distance": ("distance", "mean of |i − j| under the weights"),
    }
    found = {
        f"{BEHAVIOUR_PREFIX}{name}": _head(
            f"{words} on repeated tokens",
            f"{formula}, on random tokens that repeat with period T",
            "Olsson et al. 2022 (arXiv:2209.11895)" if name != "distance" else "",
            units="tokens" if name == "distance" else "1",
            exactness=_RUN,
        )
        for name, (words, formula) in table.items()
    }
    labels = CircuitVariable(
        dims=_LH,
        kind="str",
        units="names",
        long_name="behaviours on repeated tokens",
        definition="names of the behaviours whose score is above their threshold, joined by commas",
        exactness=_RUN,
    )
    return {**found, "behaviours": labels}


def _on_text() -> dict[str, CircuitVariable]:
    after = "the keys j ≤ i with token[j−1] = token[i]: after the token's earlier copies"
    copies = "the keys j < i with token[j] = token[i] (in encoders j ≠ i): the token's other copies"
    olsson, wang = "Olsson et al. 2022 (arXiv:2209.11895)", "Wang et al. 2022 (arXiv:2211.00593)"
    seen = "over the rows that see such a key"
    table = {
        "previous_token": ("previous token", "mean of A[i, i−1]", ""),
        "next_token": ("next token", "mean of A[i, i+1], in encoders", ""),
        "induction": ("induction", f"mean weight on {after}; {seen}", olsson),
        "duplicate_token": ("duplicate token", f"mean weight on {copies}; {seen}", wang),
        "sink": ("sink", "mean weight on the first token, a learned sink included", ""),
        "local": (
            "local",
            f"mean weight on keys nearer than {LOCAL_TOKENS} tokens, in texts of {LOCAL_FROM} or"
            " more",
            "",
        ),
        "distance": ("distance", "mean of |i − j| under the weights", ""),
    }
    found = {
        f"{TEXT_PREFIX}{name}": _head(
            f"{words} on the text",
            formula,
            source,
            units="tokens" if name == "distance" else "1",
            exactness=_ON_TEXT,
        )
        for name, (words, formula, source) in table.items()
    }
    for name in ("induction", "duplicate_token"):
        words = table[name][0]
        for end, units, long_name, definition in (
            ("uniform", "1", f"{words} on the text, of chance", f"{TEXT_PREFIX}{name} of a head"
             " that attends to all visible keys alike"),
            ("rows", "rows", f"rows behind {words} on the text", "rows that see such a key"),
        ):  # fmt: skip
            found[f"{TEXT_PREFIX}{name}_{end}"] = CircuitVariable(
                dims=("layer",), kind="float64", units=units, long_name=long_name,
                definition=definition, exactness=_ON_TEXT,
            )  # fmt: skip
    found[f"{TEXT_PREFIX}behaviours"] = CircuitVariable(
        dims=_LH,
        kind="str",
        units="names",
        long_name="behaviours on the text",
        definition="names of the behaviours whose score on the text is above their threshold,"
        " joined by commas",
        exactness=_ON_TEXT,
    )
    return found


def _rotary_on_text() -> dict[str, CircuitVariable]:
    share = CircuitVariable(
        dims=(*_LH, "pair"),
        kind="float64",
        units="1",
        long_name="share of each rotary pair on the text",
        definition="mean of |q^(m)| |k^(m)| over the queries and the keys at or before them (in"
        " encoders all), of pair m, as a share of all pairs and of what does not turn",
        source=_BARBERO,
        exactness=_ON_TEXT,
    )
    slow = _head(
        "share of the slow rotary pairs on the text",
        "rotary_share_on_text summed over the pairs that complete no turn within the trained"
        " length",
        _BARBERO,
        exactness=_ON_TEXT,
    )
    return {"rotary_share_on_text": share, "rotary_slow_share_on_text": slow}


def _changes() -> dict[str, CircuitVariable]:
    table = {}
    for short, name in (("qk", "W_QK"), ("ov", "W_OV")):
        change = f"change of {name}"
        for key, what, formula in (
            ("change_norm", f"size of the {change}", f"‖Δ‖ of {name}, tuned less base"),
            ("change_relative", f"relative size of the {change}", f"‖Δ‖ / ‖{name}‖ of the base"),
            ("change_rank", f"rank of the {change}", "how many σ of Δ stand above rounding"),
            ("change_energy", f"share of the {change} in one direction", "σ₁² / Σσ² of Δ"),
            (
                "change_amplification",
                f"amplification by the {change}",
                f"‖Δ‖ / |u₁ᵀ {name} v₁| with the first singular directions u₁, v₁ of Δ",
            ),
        ):
            table[f"{short}_{key}"] = _head(what, formula, _HU)
    return table


CIRCUITS: Final[dict[str, CircuitVariable]] = {
    **_spectra(),
    **_of_normed_queries(),
    **_scores(),
    **_rotary(),
    **_composition(),
    **_behaviours(),
    **_on_text(),
    **_rotary_on_text(),
    **_changes(),
}
