"""Rank collapse: attention alone makes tokens alike, at a rate that depends on everything else."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn.functional import layer_norm

from headwise.attention.definition import scores, weights
from headwise.theorems.measured import Measured, bootstrap, slope, within
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

__all__ = ["THEOREMS", "Layer", "contraction", "cubic", "depth_run", "draw_layer", "residual"]

_CUBIC: Final = (2.95, 3.05)


@dataclass(frozen=True, slots=True)
class Layer:
    """One multi-head self-attention without positions, and what may be put around it.

    Shapes: query, key and value ``head d d_head``, output ``head d_head d``.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    output: Tensor
    scale: float
    normed: bool = False  # LayerNorm of what comes out
    skip: bool = False
    causal: bool = False
    bias: bool = False  # of distance, −|i − j| / 8

    def __call__(self, x: Tensor) -> Tensor:
        q, k, v = (x[None] @ w for w in (self.query, self.key, self.value))
        s = scores(q[None], k[None], scale=self.scale)
        n = len(x)
        if self.bias:
            place = torch.arange(n, dtype=x.dtype)
            s = s - (place[:, None] - place).abs() / 8
        keep = torch.ones(n, n, dtype=torch.bool).tril() if self.causal else None
        out = (weights(s, keep)[0] @ v @ self.output).sum(0)
        if self.skip:
            out = out + x
        return layer_norm(out, x.shape[-1:]) if self.normed else out


def residual(x: Tensor) -> float:
    """‖X − 1 x̄ᵀ‖_F: what is left once the mean token is taken off."""
    return float(torch.linalg.matrix_norm(x - x.mean(0)))


def draw_layer(
    generator: torch.Generator, heads: int, d: int, d_head: int, **around: bool
) -> Layer:
    """Weights of variance 1 / (width that is read)."""
    q, k, v = (
        torch.randn(heads, d, d_head, generator=generator, dtype=torch.float64) / math.sqrt(d)
        for _ in range(3)
    )
    o = torch.randn(heads, d_head, d, generator=generator, dtype=torch.float64)
    return Layer(q, k, v, o / math.sqrt(heads * d_head), d_head**-0.5, **around)


def contraction(
    layer: Layer, mean: Tensor, spread: Tensor, sizes: tuple[float, ...]
) -> list[float]:
    """Residual that comes out for X = 1 x̄ᵀ + ε R, over ε."""
    return [residual(layer(mean + size * spread)) for size in sizes]


_KINDS: Final[dict[str, dict[str, Any]]] = {
    "plain": {},
    "LayerNorm": {"normed": True},
    "skip": {"skip": True},
    "causal mask": {"causal": True},
    "bias of distance": {"bias": True},
}
_NAMES: Final = {
    "skip": "a skip connection",
    "causal mask": "the causal mask",
    "bias of distance": "a bias of the distance",
}


def _slopes(
    kinds: dict[str, list[list[float]]], sizes: tuple[float, ...]
) -> tuple[tuple[Measured, ...], tuple[Control, ...], dict[str, float]]:
    """Slopes of log residual out on log residual in; whatever is not plain or normed is control."""
    at, measured, controls = {}, [], []
    for kind, draws in kinds.items():
        values = [slope(sizes, draw) for draw in draws]
        at[kind] = sum(values) / len(values)
        found = within(
            f"slope, {kind}",
            at[kind],
            allowed=_CUBIC,
            interval=bootstrap(values, lambda d: sum(d) / len(d)),
            draws=len(values),
        )
        if kind in _NAMES:
            controls.append(Control(name=_NAMES[kind], measured=(found,)))
        else:
            measured.append(found)
    return tuple(measured), tuple(controls), at


def cubic(effort: Effort) -> Evidence:
    """Slopes of what comes out on what goes in, by what stands around the attention."""
    generator = torch.Generator().manual_seed(effort.seed)
    n, heads, d_head, d = effort.pick((31, 3, 19, 61), (61, 5, 31, 127))
    sizes = tuple(0.003 * 10 ** (i / 4) for i in range(5))
    kinds: dict[str, list[list[float]]] = {kind: [] for kind in _KINDS}
    for _ in range(effort.pick(8, 31)):
        mean = torch.randn(d, generator=generator, dtype=torch.float64)
        spread = torch.randn(n, d, generator=generator, dtype=torch.float64)
        for kind, around in _KINDS.items():
            layer = draw_layer(generator, heads, d, d_head, **around)
            kinds[kind].append(contraction(layer, mean, spread, sizes))
    measured, controls, at = _slopes(kinds, sizes)
    curves = [
        Curve(kind if kind not in _NAMES else f"control: {kind}",
              tuple(sum(x) / len(x) for x in zip(*draws, strict=True)))
        for kind, draws in kinds.items()
    ]  # fmt: skip
    first = curves[0].values
    curves.insert(1, Curve("ε³", tuple(first[-1] * (e / sizes[-1]) ** 3 for e in sizes)))
    return Evidence(
        measured=measured,
        controls=controls,
        finding=(
            f"The residual that comes out grows as ε to the power {at['plain']:.3f} (plain) and"
            f" {at['LayerNorm']:.3f} (LayerNorm); with a skip connection {at['skip']:.3f}, a causal"
            f" mask {at['causal mask']:.3f}, a bias of distance {at['bias of distance']:.3f}."
        ),
        plots=(
            Plot(
                title="What one layer leaves of the differences between tokens",
                across="ε",
                up="‖residual out‖",
                places=sizes,
                curves=tuple(curves),
                log=(True, True),
            ),
        ),
    )


def depth_run(
    generator: torch.Generator, layers: int, n: int, sizes: tuple[int, int, int], **around: bool
) -> list[float]:
    """Residual over norm after each layer, from random tokens; sizes: heads, d, d_head."""
    heads, d, d_head = sizes
    x = torch.randn(n, d, generator=generator, dtype=torch.float64)
    found = []
    for _ in range(layers):
        x = draw_layer(generator, heads, d, d_head, **around)(x)
        found.append(residual(x) / float(torch.linalg.matrix_norm(x)))
    return found


def _depth(effort: Effort) -> Evidence:
    """Layers until tokens are alike to 10⁻⁶; a contraction by a constant factor takes more."""
    generator = torch.Generator().manual_seed(effort.seed)
    sizes, n, most = (3, 61, 19), 31, 16
    alike = 1e-6

    def layers_needed(**around: bool) -> float:
        run = depth_run(generator, most, n, sizes, **around)
        return float(next((i + 1 for i, r in enumerate(run) if r < alike), most + 1))

    def mean(values: list[float]) -> float:
        return sum(values) / len(values)

    def found(name: str, **around: bool) -> Measured:
        values = [layers_needed(**around) for _ in range(effort.pick(8, 31))]
        return within(name, mean(values), allowed=(1.0, 8.0), interval=bootstrap(values, mean),
                      draws=len(values))  # fmt: skip

    plain, normed = found("layers, plain"), found("layers, LayerNorm", normed=True)
    skip = found("layers", skip=True, normed=True)
    run = depth_run(generator, 4, n, sizes)
    return Evidence(
        measured=(plain, normed),
        controls=(Control(name="a skip connection before the norm", measured=(skip,)),),
        finding=(
            f"Tokens are alike to 10⁻⁶ after {plain.value:.1f} layers (plain) or"
            f" {normed.value:.1f} (LayerNorm); with a skip connection not within {most}. In one run"
            f" the share of differences was {', '.join(f'{r:.2g}' for r in run)}."
        ),
    )


def _trained_layers(model: Trained) -> list[Layer]:
    out = []
    for layer in model.weights.layers:
        if layer.role == "cross":
            continue
        parts = (layer.query, layer.shared(layer.key), layer.shared(layer.value), layer.output)
        q, k, v, o = (x.detach().double().cpu() for x in parts)
        out.append(Layer(q, k, v, o, layer.scale))
    return out


def _cubic_model(model: Trained) -> Evidence:
    layers = _trained_layers(model)
    if not layers:
        raise NotApplicable("its attention reads another sequence")
    chosen = [layers[i] for i in sorted({round(i * (len(layers) - 1) / 7) for i in range(8)})]
    generator = torch.Generator().manual_seed(model.seed)
    n, d = 31, chosen[0].query.shape[1]
    steps = tuple(10 ** (i / 4) for i in range(5))
    kinds: dict[str, list[list[float]]] = {kind: [] for kind in ("plain", *_NAMES)}
    for layer in chosen:
        mean = torch.randn(d, generator=generator, dtype=torch.float64)
        spread = torch.randn(n, d, generator=generator, dtype=torch.float64)
        q, k = spread[None] @ layer.query, spread[None] @ layer.key
        largest = layer.scale * max(
            float((mean @ layer.query)[:, None].matmul(k.mT).abs().max()),
            float((mean @ layer.key)[:, None].matmul(q.mT).abs().max()),
            float((q @ k.mT).abs().max()) ** 0.5,
        )
        smallest = 0.003 / largest  # logits differ by less than 0.03 at most: the cubic regime
        sizes = tuple(smallest * step for step in steps)
        for kind in kinds:
            made = replace(layer, **_KINDS[kind])
            kinds[kind].append(contraction(made, mean, spread, sizes))
    measured, controls, at = _slopes(kinds, steps)
    return Evidence(
        measured=measured,
        controls=controls,
        finding=(
            f"Of {len(chosen)} of its layers, attention alone, without mask and positions,"
            f" contracts differences with a power of {at['plain']:.3f}; with a skip connection,"
            f" as in the model, {at['skip']:.3f}, with a causal mask {at['causal mask']:.3f}."
        ),
    )


THEOREMS: Final = (
    Theorem(
        name="cubic-contraction",
        title="Attention alone contracts differences to their third power",
        statement=(
            "One layer of attention without skip connection, mask and positions turns tokens that"
            " differ by ε into tokens that differ by O(ε³), also with a LayerNorm. A skip"
            " connection, a causal mask or a bias of the distance each make it O(ε)."
        ),
        latex=(
            r"X = \mathbf{1}\bar x^\top + \varepsilon R \;\Longrightarrow\;"
            r" \|\mathrm{res}(\mathrm{SA}(X))\| = O(\varepsilon^3)"
        ),
        conditions=(
            "no skip connection",
            "every query sees every key",
            "logits do not depend on positions",
            "differences are small",
        ),
        source="Dong et al. 2021 (arXiv:2103.03404), theorems 2.2 and 2.3",
        kind=Kind.REGULARITY,
        prediction="a slope of log residual out on log ε between 2.95 and 3.05",
        estimator="slopes over draws of weights and tokens, with a bootstrap interval; float64",
        random=cubic,
        model=_cubic_model,
        textbook=(
            Textbook(
                "attention loses rank doubly exponentially with depth",
                "attention without mask and positions does, once tokens are alike; a causal mask or"
                " a bias alone makes the contraction of a layer linear",
            ),
        ),
        proof="cubic-contraction",
    ),
    Theorem(
        name="collapse-with-depth",
        title="Attention alone makes all tokens alike within a few layers",
        statement=(
            "Through layers of attention without skip connections, the differences between tokens"
            " fall doubly exponentially; with skip connections tokens stay apart."
        ),
        latex=r"\|\mathrm{res}(X^{(l+1)})\| \le C\,\|\mathrm{res}(X^{(l)})\|^3",
        conditions=("no skip connections", "no mask and no positions"),
        source="Dong et al. 2021 (arXiv:2103.03404), theorem 2.3 and figure 2",
        kind=Kind.REGULARITY,
        prediction="alike to 10⁻⁶ within 8 layers",
        estimator="layers until ‖residual‖ / ‖X‖ < 10⁻⁶, mean over draws",
        random=_depth,
    ),
)
