"""Without positions, attention reads a set: permuted tokens give permuted outputs."""

from __future__ import annotations

import math
from typing import Any, Final

import torch
from torch import Tensor

from headwise.attention.masks import Causal
from headwise.models import Encoder, build
from headwise.models.architecture import Architecture, Embedding, Rotary, Stack
from headwise.theorems.causal_order import CAUSAL_ORDER
from headwise.theorems.measured import Measured, exact
from headwise.theorems.permuted_model import order_in_model
from headwise.theorems.statement import (
    Control,
    Curve,
    Effort,
    Evidence,
    Kind,
    Plot,
    Textbook,
    Theorem,
)

__all__ = ["THEOREMS"]

_D, _HEADS, _VOCAB = 26, 2, 41


def _encoder(seed: int, layers: int, positions: Any = None, **others: Any) -> Encoder:
    """An encoder of the product, in float64; ``others`` are fields of its stack."""
    stack = Stack.checked(
        layers=layers, heads=_HEADS, kv_heads=_HEADS, d_head=_D // _HEADS - 1, d_ff=53,
        causal=False, norm="layer", qkv_bias=True, **others,
    )  # fmt: skip
    architecture = Architecture(
        vocab=_VOCAB, d_model=_D, context=127, encoder=stack, unembedding=None,
        embedding=Embedding(positions=positions),
    )  # fmt: skip
    model = build(architecture, seed=seed, dtype=torch.float64)
    assert isinstance(model, Encoder)
    return model.eval()


def _order(n: int, generator: torch.Generator) -> Tensor:
    """A permutation that moves something."""
    order = torch.randperm(n, generator=generator)
    return order if bool((order != torch.arange(n)).any()) else order.roll(1)


@torch.no_grad()
def _errors(model: Encoder, n: int, generator: torch.Generator, **more: Any) -> tuple[float, float]:
    """max |f(PX) − P f(X)|, and the same of the mean over positions, relative to max |f(X)|."""
    ids = torch.randint(_VOCAB, (1, n), generator=generator)
    order = _order(n, generator)
    plain, permuted = model.hidden(ids, **more), model.hidden(ids[:, order], **more)
    size = plain.abs().max()
    tokens = (permuted - plain[:, order]).abs().max() / size
    pooled = (permuted.mean(1) - plain.mean(1)).abs().max() / size
    return float(tokens), float(pooled)


def _measured(errors: list[tuple[float, float]], n: int, layers: int) -> tuple[Measured, ...]:
    """Only the order of sums changes: 50 √n u for each layer."""
    tolerance = 50 * math.sqrt(n) * layers * torch.finfo(torch.float64).eps / 2
    names = ("largest |f(PX) − P f(X)| / max |f(X)|", "the same of the mean over positions")
    largest = [max(column) for column in zip(*errors, strict=True)]
    return tuple(
        exact(name, value, tolerance=tolerance, draws=len(errors))
        for name, value in zip(names, largest, strict=True)
    )


def _token_shift(model: Encoder) -> None:
    """Every block reads half of the token before: what a convolution does."""

    def shift(module: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        x = inputs[0]
        return ((x + torch.roll(x, 1, 1)) / 2, *inputs[1:])

    for block in model.encoder.blocks:
        block.register_forward_pre_hook(shift)


def _batch_norm(model: Encoder) -> None:
    """Norms over positions with weights that depend on the place: the first half counts double."""

    def norm(module: Any, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
        counts = 1 + (torch.arange(output.shape[1]) < output.shape[1] // 2).to(output)
        mean = (counts[:, None] * output).sum(1, keepdim=True) / counts.sum()
        return output - mean

    for block in model.encoder.blocks:
        block.register_forward_hook(norm)


def _broken(
    effort: Effort, n: int, layers: int, generator: torch.Generator
) -> dict[str, tuple[float, float]]:
    """The error with each condition dropped."""
    seed = effort.seed
    rotary = Rotary(width=_D // _HEADS - 1)
    learned = _encoder(seed, layers, "learned")
    shifted, normed = _encoder(seed, layers), _encoder(seed, layers)
    _token_shift(shifted)
    _batch_norm(normed)
    models: dict[str, tuple[Encoder, dict[str, Any]]] = {
        "learned positions": (learned, {}),
        "sinusoidal positions": (_encoder(seed, layers, "sinusoidal"), {}),
        "rotary positions": (_encoder(seed, layers, rotary=rotary), {}),
        "ALiBi": (_encoder(seed, layers, alibi=True), {}),
        "a causal mask": (_encoder(seed, layers), {"mask": Causal()}),
        "a token shift": (shifted, {}),
        "a norm over positions that weighs them by place": (normed, {}),
    }
    return {name: _errors(model, n, generator, **more) for name, (model, more) in models.items()}


def _random(effort: Effort) -> Evidence:
    generator = torch.Generator().manual_seed(effort.seed)
    n, draws = effort.pick((17, 3), (101, 11))
    depths = effort.pick((1, 3), (1, 2, 3, 5, 11))
    by_depth = {
        depth: [_errors(_encoder(effort.seed + i, depth), n, generator) for i in range(draws)]
        for depth in depths
    }
    causal = [
        _errors(_encoder(effort.seed, depth), n, generator, mask=Causal())[0] for depth in depths
    ]
    deepest = depths[-1]
    measured = _measured(by_depth[deepest], n, deepest)
    broken = _broken(effort, n, deepest, generator)
    smallest = min(broken, key=lambda name: broken[name][0])
    return Evidence(
        measured=measured,
        controls=tuple(
            Control(name=name, measured=(_measured([error], n, deepest)[0],))
            for name, error in broken.items()
        ),
        finding=(
            f"{deepest} layers move by {measured[0].value:.1e} of their size when the tokens are"
            f" permuted; with a causal mask by {broken['a causal mask'][0]:.3g}, with {smallest}"
            f" still by {broken[smallest][0]:.3g}."
        ),
        plots=(_plot(depths, by_depth, causal, n),),
    )


def _plot(
    depths: tuple[int, ...],
    by_depth: dict[int, list[tuple[float, float]]],
    causal: list[float],
    n: int,
) -> Plot:
    bounds = tuple(50 * math.sqrt(n) * depth * 2.0**-53 for depth in depths)
    worst = tuple(max(max(e[0] for e in by_depth[depth]), 2.0**-60) for depth in depths)
    return Plot(
        title="What a permutation of the tokens changes, beyond permuting the outputs",
        across="layers",
        up="largest |f(PX) − P f(X)| / max |f(X)|",
        places=tuple(float(depth) for depth in depths),
        curves=(
            Curve("rounding allows", bounds),
            Curve("measured", worst),
            Curve("with a causal mask", tuple(causal)),
        ),
        log=(False, True),
    )


THEOREMS: Final = (
    Theorem(
        name="permutation-equivariance",
        title="Attention without positions is permutation equivariant",
        statement=(
            "Permuting the tokens of an encoder without positional information permutes its"
            " outputs and changes nothing else; a symmetric read-out of them is a function of the"
            " multiset of tokens."
        ),
        latex=(
            r"f(PX) = P\,f(X) \quad\text{for every permutation } P, \qquad"
            r" \tfrac{1}{n}\mathbf{1}^{\top} f(PX) = \tfrac{1}{n}\mathbf{1}^{\top} f(X)"
        ),
        conditions=(
            "every query may see every key (or a mask that permutes with them)",
            "no positions: none added, none in the logits (rotary, ALiBi, learned biases)",
            "norms and feed-forward parts act on one token at a time (no convolution, token shift"
            " or statistics over positions that depend on their order)",
            "no dropout, or the same mask of it for both orders",
        ),
        source="Vaswani et al. 2017 (arXiv:1706.03762), section 3.5; Lee et al. 2019"
        " (arXiv:1810.00825), section 3",
        kind=Kind.IDENTITY,
        prediction="f(PX) − P f(X) = 0 up to the order of sums; the mean over positions is equal",
        estimator="the largest deviation over random encoders of several layers and permutations,"
        " in float64, relative to the largest output",
        random=_random,
        model=order_in_model,
        textbook=(
            Textbook(
                "nothing else in the architecture breaks the symmetry",
                "the causal mask of every decoder does, and so do convolutions, token shifts and"
                " independent dropout",
            ),
            Textbook(
                "a transformer without positions computes a function of the multiset",
                "its token outputs are equivariant, not invariant; only a symmetric read-out of"
                " them is a function of the multiset",
            ),
        ),
        exercise=3,
        proof="permutation-equivariance",
    ),
    *CAUSAL_ORDER,
)
