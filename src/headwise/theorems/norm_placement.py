"""Where the norm stands: the gradient of the top layer, the growth of the stream, and training.

post-norm  norm(x + F x)       pre-norm  x + F(norm x)
"""

from __future__ import annotations

import math
import re
from typing import Final

from headwise.theorems.measured import Measured, within
from headwise.theorems.norm_at_start import by_depth, profile, stream_growth
from headwise.theorems.stable_rates import stable_rates
from headwise.theorems.statement import (
    Control,
    Evidence,
    Kind,
    NotApplicable,
    Textbook,
    Theorem,
)
from headwise.theorems.trained import Trained

__all__ = ["THEOREMS"]

_WRITES: Final = re.compile(r"(down_proj|down|output\.dense|c_proj|fc2|wo|dense_4h_to_h)\.weight$")


def _by_layer(model: Trained) -> Evidence:
    """Gradient norms of the matrices that write last in each block, over the text."""
    data = model.scanned
    if "gradient_norm" not in data:
        raise NotApplicable("it has no loss whose gradient could be taken")
    columns = ("parameter", "parameter_block", "gradient_norm", "projection")
    rows = zip(*(data[name].values.tolist() for name in columns), strict=True)
    norms = {
        block: norm for name, block, norm, kind in rows if kind == "mlp" and _WRITES.search(name)
    }
    if len(norms) < 2:
        raise NotApplicable("the matrices that its feed-forward layers write with are not known")
    line = [norms[block] for block in sorted(norms)]
    name = "largest / smallest gradient norm over layers"
    allowed = (1.0, 100.0)
    cut = [0.0, *line[1:]]

    def spread(values: list[float]) -> Measured:
        ratio = max(values) / min(values) if min(values) > 0 else math.inf
        return within(name, ratio, allowed=allowed)

    chosen = sorted({0, len(line) // 4, len(line) // 2, 3 * len(line) // 4, len(line) - 1})
    return Evidence(
        measured=(spread(line),),
        controls=(Control(name="the first layer cut off from the loss", measured=(spread(cut),)),),
        violated="the theorem is about weights at initialisation, and these were trained",
        finding=(
            f"Gradient norms of the feed-forward writes: "
            f"{', '.join(f'{line[i]:.2g}' for i in chosen)} in layers"
            f" {', '.join(str(i) for i in chosen)}; largest over smallest {spread(line).value:.1f}."
        ),
    )


_XIONG: Final = "Xiong et al. 2020 (arXiv:2002.04745)"
_INITIAL: Final = (
    "weights are Xavier's, at initialisation",
    "writes into the stream are not scaled down with depth",
)
_GROWS: Final = Textbook(
    "the gradient of post-norm grows with depth; that of pre-norm is roughly independent of it",
    "at the top layer it is independent of depth with post-norm, and falls as L^(−1/2) with"
    " pre-norm: √L times larger, but it is not post-norm's that changes with depth",
)

THEOREMS: Final = (
    Theorem(
        name="norm-placement-gradient",
        title="The top layer's gradient: L⁰ with post-norm, L^(−1/2) with pre-norm",
        statement=(
            "At initialisation the gradient of the last feed-forward matrix does not depend on the"
            " depth of a post-norm model, and falls as one over the root of the depth of a pre-norm"
            " model."
        ),
        latex=(
            r"\Big\|\frac{\partial\mathcal{L}}{\partial W_2^{(L)}}\Big\|_F ="
            r" O\big(d\sqrt{\ln d}\big) \text{ (post)}, \qquad"
            r" O\big(d\sqrt{\ln d / L}\big) \text{ (pre)}"
        ),
        conditions=_INITIAL,
        source=f"{_XIONG}, theorem 1",
        kind=Kind.REGULARITY,
        prediction="slopes of log gradient on log depth of 0 ± 0.15 and −0.5 ± 0.15",
        estimator="least squares over depths 6 to 48; interval by bootstrap over draws of weights",
        random=by_depth,
        model=_by_layer,
        textbook=(_GROWS,),
        proof="norm-placement",
    ),
    Theorem(
        name="norm-placement-stream",
        title="With pre-norm the squared stream grows linearly with depth",
        statement=(
            "At initialisation the mean squared norm of a pre-norm stream after l layers lies"
            " between (1 + l/2) d and (1 + 3l/2) d; post-norm keeps it at d."
        ),
        latex=(
            r"\left(1 + \tfrac{l}{2}\right) d \;\le\; \mathbb{E}\,\|x_l\|^2 \;\le\;"
            r" \left(1 + \tfrac{3l}{2}\right) d"
        ),
        conditions=_INITIAL,
        source=f"{_XIONG}, lemma 2",
        kind=Kind.REGULARITY,
        prediction="growth of |x|²/d between 1/2 and 3/2 for each layer",
        estimator="least and largest growth over all layers of stacks of 6 to 48 layers",
        random=stream_growth,
        proof="norm-placement",
    ),
    Theorem(
        name="norm-placement-profile",
        title="Within a pre-norm model, lower layers have the larger gradients",
        statement=(
            "At initialisation the gradient of the first layer of a pre-norm model exceeds that of"
            " the last by about the root of the depth: polynomially, not exponentially."
        ),
        latex=(
            r"\Big\|\frac{\partial\mathcal{L}}{\partial W_2^{(1)}}\Big\|_F \Big/"
            r" \Big\|\frac{\partial\mathcal{L}}{\partial W_2^{(L)}}\Big\|_F \sim \sqrt{L}"
        ),
        conditions=_INITIAL,
        source=f"{_XIONG}, section 3.3 and figure 3",
        kind=Kind.REGULARITY,
        prediction="slope of log ratio on log depth between 0.35 and 0.75",
        estimator="least squares over depths 6 to 48; interval by bootstrap over draws of weights",
        random=profile,
        textbook=(_GROWS,),
        proof="norm-placement",
    ),
    Theorem(
        name="norm-placement-rates",
        title="Without warmup, pre-norm trains at larger learning rates",
        statement=(
            "Trained by Adam without warmup, a pre-norm model learns at rates at which the same"
            " model with post-norm does not; warmup widens the range of post-norm."
        ),
        latex=(
            r"\eta_{\max}(\text{pre}) > \eta_{\max}(\text{post}), \qquad"
            r" \eta_{\max}(\text{post, warmup}) > \eta_{\max}(\text{post})"
        ),
        conditions=("Adam", "a model of some depth", "no warmup, or a warmup of half the steps"),
        source=f"{_XIONG}, section 4",
        kind=Kind.REGULARITY,
        prediction="both ratios above 1.3, with the interval over draws",
        estimator="largest of 5 rates whose loss ends below half of ln V, as ratios over 8 draws",
        random=stable_rates,
        textbook=(
            Textbook(
                "pre-norm needs no warmup, and is universal",
                "it is stable without; large models still warm up, and several recent families norm"
                " what is written (Gemma 2, OLMo 2)",
            ),
        ),
        proof="norm-placement",
    ),
)
