"""Less than n²: Choromanski et al. 2020, Katharopoulos et al. 2020, Dao et al. 2022."""

from __future__ import annotations

from typing import Final

import torch

from headwise.attention import linear
from headwise.attention.feature_maps import elu_plus_one
from headwise.theorems.flash import memory_slopes
from headwise.theorems.linear_attention import orthogonal_ratio
from headwise.theorems.measured import exact, within
from headwise.theorems.random_features import mean_of, pair, positive, variance_of
from headwise.theorems.statement import Control, Curve, Effort, Evidence, Kind, Plot, Theorem

__all__ = ["THEOREMS"]


def _choromanski(effort: Effort) -> Evidence:
    generator = torch.Generator().manual_seed(effort.seed)
    draws, d = effort.pick(400_009, 2_000_003), 13
    x, y = pair(d, 1.0, generator)
    ratios = positive(x, y, draws, generator)
    unbiased = mean_of(ratios, "mean / SM")
    variance = variance_of(ratios, x, y, "variance / formula")
    allowed = (0.9, 1.1)
    measured = [unbiased, variance, within("variance / formula", variance.value, allowed=allowed)]
    for features in (d, 4 * d):
        ratio, interval, count = orthogonal_ratio(effort, d, features)
        name = f"squared error, orthogonal / independent, m = {features}"
        measured.append(within(name, ratio, allowed=(0.0, 1.0), interval=interval, draws=count))
    wide = variance_of(positive(1.2 * x, 1.2 * y, draws, generator), x, y, "variance").value
    equal, interval, _ = orthogonal_ratio(effort, d, d, draws=1009, repeated=True)
    return Evidence(
        measured=tuple(measured),
        controls=(
            Control(
                name="vectors 20 % longer than in the formula",
                measured=(within("variance / formula", wide, allowed=allowed),),
            ),
            Control(
                name="one direction for all features",
                measured=(
                    within("squared error / independent", equal, allowed=(0.0, 1.0),
                           interval=interval),
                ),
            ),
        ),
        finding=(
            f"Mean / SM {unbiased.value:.4f}; variance / formula {variance.value:.3f} at"
            f" |x' + y'|² = 1; orthogonal features (at 1/2) have {measured[3].value:.2f} (m = d)"
            f" and {measured[4].value:.2f} (m = 4d) of the squared error of independent ones."
        ),
    )  # fmt: skip


def _katharopoulos(effort: Effort) -> Evidence:
    generator = torch.Generator().manual_seed(effort.seed)
    n = effort.pick(128, 1024)
    q, k, v = (torch.randn(1, 3, n, 17, generator=generator) for _ in range(3))
    parallel = linear.linear_attention_parallel(q, k, v, elu_plus_one)
    recurrent, state = linear.linear_attention_recurrent(q, k, v, elu_plus_one)
    chunked, _ = linear.linear_attention_chunked(q, k, v, elu_plus_one, chunk=31)
    name = "largest difference from the parallel form, float32"
    everything = linear.linear_attention(q, k, v, elu_plus_one)
    size = state.weighted.numel() + state.total.numel()
    found = [float((o - parallel).abs().max()) for o in (recurrent, chunked, everything)]
    return Evidence(
        measured=(
            exact(f"{name}: recurrent", found[0], tolerance=1e-5),
            exact(f"{name}: in chunks", found[1], tolerance=1e-5),
            exact("numbers in the state − h m (d_v + 1)", size - 3 * 17 * 18, tolerance=0.0),
        ),
        controls=(
            Control(
                name="without the causal mask",
                measured=(exact(name, found[2], tolerance=1e-5),),
            ),
        ),
        finding=(
            f"n = {n}, elu + 1, float32: the recurrence is within {found[0]:.1e} of the parallel"
            f" form; its state has {size:,} numbers at every length."
        ),
    )


# Table 21 of the paper, megabytes at n = 1024 and 4096: PyTorch and FlashAttention.
_PYTORCH: Final = (1184.0, 17024.0)
_FLASH: Final = (209.0, 836.0)


def _dao(effort: Effort) -> Evidence:
    lengths = effort.pick((256, 512, 1024, 2048), (256, 512, 1024, 2048, 4096))
    heads, d = 3, 17
    found = memory_slopes(lengths, heads, d)
    dense = found["materialised"][0]
    last = (dense[-1] / dense[-2], found["tiles"][0][-1] / found["tiles"][0][-2])
    quadratic = within("bytes at 2n / bytes at n, materialised", last[0], allowed=(3.5, 4.0))
    measured = [
        within(f"slope of log bytes on log n, {name}", found[name][1], allowed=(0.99, 1.01))
        for name in ("tiles", "torch's fused kernel")
    ]
    slope_dense = within(
        "slope of log bytes on log n", found["materialised"][1], allowed=(0.99, 1.01)
    )
    paper = _PYTORCH[1] / _PYTORCH[0], _FLASH[1] / _FLASH[0]
    return Evidence(
        measured=(*measured, quadratic),
        controls=(
            Control(name="the materialised form", measured=(slope_dense,)),
            Control(
                name="tiles, where n² is expected",
                measured=(
                    within("bytes at 2n / bytes at n", last[1], allowed=(3.5, 4.0)),
                ),
            ),
        ),
        finding=(
            f"Slopes of the saved bytes: tiles {found['tiles'][1]:.2f}, torch's fused kernel"
            f" {found['torch' + chr(39) + 's fused kernel'][1]:.2f}, materialised"
            f" {found['materialised'][1]:.2f}. From n = 1024 to 4096 the paper has factors of"
            f" {paper[1]:.1f} (FlashAttention) and {paper[0]:.1f} (PyTorch)."
        ),
        plots=(
            Plot(
                title="Bytes saved for the backward pass",
                across="tokens n",
                up="bytes",
                places=tuple(float(n) for n in lengths),
                curves=tuple(
                    Curve(name, tuple(float(b) for b in saved))
                    for name, (saved, _) in found.items()
                ),
                log=(True, True),
            ),
        ),
    )  # fmt: skip


THEOREMS: Final = (
    Theorem(
        name="choromanski-features",
        title="Positive orthogonal random features",
        statement=(
            "Positive random features are unbiased with variance SM² (e^s − 1)/m, s = |x' + y'|²,"
            " and orthogonal ones have a smaller squared error."
        ),
        latex=r"\mathrm{Var} = \tfrac1m\,\mathrm{SM}^2\,(e^{|x'+y'|^2} - 1)",
        conditions=("normal directions", "|x' + y'|² at most 2"),
        source="Choromanski et al. 2020 (arXiv:2009.14794), lemma 2 and theorem 2",
        kind=Kind.EXPECTATION,
        prediction="mean / SM = 1; variance / formula in 1 ± 0.1; orthogonal ≤ independent",
        estimator="independent features, and independent maps of d and 4d features",
        random=_choromanski,
        proof="random-features",
        reproduces="B13: Choromanski et al. 2020, lemma 2 and theorem 2",
    ),
    Theorem(
        name="katharopoulos-recurrence",
        title="Transformers are RNNs",
        statement="Causal linear attention is a recurrence with a state of constant size.",
        latex=r"W_i = W_{i-1} + \phi(k_i)^\top v_i, \qquad z_i = z_{i-1} + \phi(k_i)",
        conditions=("causal mask", "φ = elu + 1"),
        source="Katharopoulos et al. 2020 (arXiv:2006.16236), section 3.4",
        kind=Kind.IDENTITY,
        prediction="a difference below 10⁻⁵ in float32; a state of m (d_v + 1) numbers per head",
        estimator="the largest difference between the forms, n = 128",
        random=_katharopoulos,
        proof="recurrent-is-parallel",
        reproduces="B14: Katharopoulos et al. 2020, section 3.4",
    ),
    Theorem(
        name="dao-memory",
        title="FlashAttention's memory grows as n",
        statement=(
            "The memory of attention in tiles grows as n, that of materialised attention towards"
            " n²."
        ),
        latex=r"\frac{d\log \mathrm{bytes}}{d \log n} = 1 \quad\text{against}\quad \to 2",
        conditions=("no n × n matrix is kept", "saved storages are counted once"),
        source="Dao et al. 2022 (arXiv:2205.14135), table 21",
        kind=Kind.IDENTITY,
        prediction="slope 1.00 for tiles; materialised bytes nearly four times at twice the length",
        estimator="bytes saved for the backward pass, n = 256 to 2048",
        random=_dao,
        proof="streaming-is-exact",
        reproduces="B15: Dao et al. 2022, table 21",
    ),
)
