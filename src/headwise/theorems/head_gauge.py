"""Only W_QK and W_OV matter: changes of basis inside a head that nothing outside can see."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from headwise.circuits.layer_weights import LayerWeights
from headwise.models.architecture import Rotary
from headwise.models.attention import MultiHeadAttention
from headwise.models.norms import RMSNorm
from headwise.positions import Layout
from headwise.theorems.head_sizes import random_attention
from headwise.theorems.measured import Measured, exact
from headwise.theorems.rewritten import block_outputs, changed, moved, own_heads, rounding
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

__all__ = ["GAUGE", "by_heads", "commuting", "invertible", "rebase"]

_CONDITION: Final = 4.0
_HEAD: Final = 14


def invertible(count: int, width: int, generator: torch.Generator) -> Tensor:
    """Matrices ``count width width`` with singular values from 1/2 to 2, float64."""
    u, v = (
        torch.linalg.qr(
            torch.randn(count, width, width, generator=generator, dtype=torch.float64)
        ).Q
        for _ in range(2)
    )
    return u @ torch.diag(torch.linspace(0.5, 2, width, dtype=torch.float64)) @ v


def commuting(
    count: int, width: int, turned: int, layout: Layout, generator: torch.Generator
) -> Tensor:
    """Matrices that commute with every rotation: each pair turned and scaled, the rest anything."""
    found = torch.eye(width, dtype=torch.float64).repeat(count, 1, 1)
    pairs = torch.arange(turned // 2)
    first = pairs if layout is Layout.HALF else 2 * pairs
    second = pairs + turned // 2 if layout is Layout.HALF else 2 * pairs + 1
    angle, size = (torch.rand(count, turned // 2, generator=generator).double() for _ in range(2))
    size = 0.5 * 4**size  # from 1/2 to 2
    cos, sin = size * (6.28 * angle).cos(), size * (6.28 * angle).sin()
    found[:, first, first], found[:, second, second] = cos, cos
    found[:, first, second], found[:, second, first] = sin, -sin
    if turned < width:
        found[:, turned:, turned:] = invertible(count, width - turned, generator)
    return found


def by_heads(module: MultiHeadAttention) -> LayerWeights:
    """The weights of a module of the product as ``LayerWeights``: views that can be written to."""
    parts: dict[str, Tensor | None] = {}
    for name, heads in (("query", module.heads), ("key", module.kv_heads),
                        ("value", module.kv_heads)):  # fmt: skip
        part: Any = getattr(module, name)
        parts[name] = part.weight.view(heads, -1, part.weight.shape[1]).mT
        parts[f"{name}_bias"] = None if part.bias is None else part.bias.view(heads, -1)
    given: Any = parts
    return LayerWeights(
        module="", role="encoder", number=0, scale=module.scale,
        output=module.output_of_heads().permute(1, 2, 0), **given,
    )  # fmt: skip


def rebase(layer: LayerWeights, m: Tensor | None, n: Tensor | None, *, alone: bool = False) -> None:
    """(W_Q M, W_K M⁻ᵀ) and (W_V N, N⁻¹ W_O) in place, biases with them; M, N of each kv head.

    ``alone``: the first of each pair only, which is no symmetry.
    """
    if m is not None:
        m = m.to(layer.key.device)
        _times(layer.query, layer.query_bias, layer.shared(m))
        if not alone:
            _times(layer.key, layer.key_bias, torch.linalg.inv(m).mT)
    if n is not None:
        n = n.to(layer.value.device)
        _times(layer.value, layer.value_bias, n)
        if not alone:
            inverse = layer.shared(torch.linalg.inv(n))
            layer.output.copy_(inverse @ layer.output.double())


def _times(weight: Tensor, bias: Tensor | None, matrix: Tensor) -> None:
    weight.copy_(weight.double() @ matrix)
    if bias is not None:
        bias.copy_((bias.double()[:, None] @ matrix)[:, 0])


def _changes(
    draws: int,
    generator: torch.Generator,
    *,
    commute: bool = False,
    alone: bool = False,
    values: bool = True,
    **others: Any,
) -> list[float]:
    """Relative change of the output of random modules in another basis of each head."""
    found = []
    for _ in range(draws):
        more = {name: make() for name, make in others.items()}
        module = random_attention(
            41, 6, kv_heads=3, d_head=_HEAD, bias=True, generator=generator, **more
        )
        x = torch.randn(1, 23, 41, generator=generator, dtype=torch.float64)
        before, layer = module(x), by_heads(module)
        m = (
            commuting(3, _HEAD, _HEAD - 2, Layout.HALF, generator)
            if commute
            else invertible(3, _HEAD, generator)
        )
        rebase(layer, m, invertible(3, _HEAD, generator) if values else None, alone=alone)
        found.append(float((module(x) - before).abs().max() / before.abs().max()))
    return found


def _exact(name: str, changes: list[float]) -> Measured:
    """M⁻¹ multiplies rounding by its condition 4; logits are below 60 (32 u (1 + |s|) as for A)."""
    tolerance = _CONDITION * 32 * 60 * 2.0**-53
    return exact(name, max(changes), tolerance=tolerance, draws=len(changes))


def _norm() -> RMSNorm:
    return RMSNorm(_HEAD)


def _rotary() -> Rotary:
    return Rotary(width=_HEAD - 2)


def _random(effort: Effort) -> Evidence:
    generator = torch.Generator().manual_seed(effort.seed)
    draws = effort.pick(5, 53)
    name = "largest relative change of the output"
    plain = _changes(draws, generator)
    turned = _changes(draws, generator, commute=True, rotary=_rotary)
    broken = {
        "rotary positions and any M": _changes(draws, generator, values=False, rotary=_rotary),
        "a norm of queries and keys, and any M": _changes(
            draws, generator, values=False, query_norm=_norm, key_norm=_norm
        ),
        "M on the queries alone": _changes(draws, generator, alone=True, values=False),
    }
    return Evidence(
        measured=(
            _exact(f"{name}: any M and N", plain),
            _exact(f"{name}: rotary, M commutes with the rotations", turned),
        ),
        controls=tuple(
            Control(name=what, measured=(_exact(name, found),)) for what, found in broken.items()
        ),
        finding=(
            f"Other bases inside the heads change the output by {max(plain):.1e}, with rotary"
            f" positions and commuting ones by {max(turned):.1e}; any others by"
            f" {min(broken['rotary positions and any M']):.3g} and more."
        ),
    )


def _bases(layer: LayerWeights, generator: torch.Generator) -> tuple[Tensor | None, Tensor]:
    """M and N of a layer; no M behind norms of queries and keys, a commuting one if they turn."""
    n = invertible(layer.kv_heads, layer.value.shape[2], generator)
    count, width, use = layer.kv_heads, layer.key.shape[2], layer.rotary
    if layer.query_norm is not None or layer.key_norm is not None:
        return None, n
    if use is None:
        return invertible(count, width, generator), n
    return commuting(count, width, use.width, use.layout, generator), n


def _model(model: Trained) -> Evidence:
    layers = own_heads(model)
    if any(layer.clip is not None for layer in layers):
        raise NotApplicable("its queries, keys and values are clipped, entry by entry")
    document = model.document(64)
    ids, target = document.ids, document.target
    before = block_outputs(model, ids, target=target)[-1]

    def moves(wrong: bool) -> float:
        generator = torch.Generator().manual_seed(model.seed)
        with changed(x for layer in layers for x in _tensors(layer)):
            for layer in layers:
                m, n = _bases(layer, generator)
                if not wrong:
                    rebase(layer, m, n)
                elif layer.rotary is not None and m is not None:
                    rebase(layer, invertible(layer.kv_heads, layer.key.shape[2], generator), None)
                else:
                    rebase(layer, m, n, alone=True)
            return moved(before, block_outputs(model, ids, target=target)[-1])

    tolerance = _CONDITION * rounding(model, len(ids), len(layers))
    name = "largest relative move of a token after the last block"
    kept, broken = (exact(name, moves(wrong), tolerance=tolerance) for wrong in (False, True))
    turns = any(layer.rotary is not None for layer in layers)
    what = "an M that does not commute with the rotations" if turns else "M and N without inverses"
    held = "commuting with the rotations " if turns else ""
    return Evidence(
        measured=(kept,),
        controls=(Control(name=what, measured=(broken,)),),
        finding=(
            f"Other bases {held}in every head move outputs by {kept.value:.1e} of their length;"
            f" {what} by {broken.value:.3g}."
        ),
    )


def _tensors(layer: LayerWeights) -> tuple[Tensor | None, ...]:
    biases = (layer.query_bias, layer.key_bias, layer.value_bias)
    return (layer.query, layer.key, layer.value, layer.output, *biases)


GAUGE: Final = (
    Theorem(
        name="gauge-freedom",
        title="A head is its two products: bases inside it are free",
        statement=(
            "(W_Q M, W_K M⁻ᵀ) and (W_V N, N⁻¹ W_O) give the same head for any invertible M and N."
            " With rotary positions M has to commute with the rotations: a turn and a scale of"
            " each pair."
        ),
        latex=(
            r"(W_Q M)(W_K M^{-\top})^{\top} = W_Q W_K^{\top}, \qquad"
            r" (W_V N)(N^{-1} W_O) = W_V W_O"
        ),
        conditions=(
            "M commutes with what stands between W_Q and W_K: nothing, or rotations",
            "no norm of queries and keys (else only orthogonal M that commute with its gain)",
            "heads that share keys share M and N",
        ),
        source="Elhage et al. 2021, A Mathematical Framework for Transformer Circuits; rotary: Su"
        " et al. 2021 (arXiv:2104.09864), section 3.2",
        kind=Kind.IDENTITY,
        prediction="no output changes, up to rounding times the condition of M and N (4 here)",
        estimator="largest change over random modules and bases; in a model, the move of the last"
        " block with a random basis in every head",
        random=_random,
        model=_model,
        textbook=(
            Textbook(
                "a head is fully specified by W_QK and W_OV",
                "not with rotary positions, which need the family W_Q R_Δ W_Kᵀ, one matrix for each"
                " distance; nor with norms of queries and keys, or a query bias",
            ),
        ),
        proof="gauge-freedom",
    ),
)
