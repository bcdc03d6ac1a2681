"""From an attention module and its family's layout to ``LayerWeights``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from headwise.attention.masks import Everything
from headwise.circuits.latent import not_fixed, read_latent
from headwise.circuits.layer_weights import LayerWeights, RotaryUse
from headwise.circuits.layouts import FAMILIES, OWN, REASONS, HeadLayout
from headwise.circuits.matrices import bias, check_finite, matrix
from headwise.circuits.norms import HeadNorm, Kind, NormFold
from headwise.circuits.places import Paths, Places
from headwise.errors import ModelError
from headwise.models.attention import MultiHeadAttention
from headwise.models.norms import AcrossHeads, LayerNorm, OffsetRMSNorm
from headwise.observation.sites import AttentionModule
from headwise.positions import frequencies

__all__ = ["Reading", "layout_of", "norm_at", "read_layer"]

Parts = tuple[Tensor, Tensor, Tensor]
_RESIDUAL = "residual_multiplier"
_NORM_GIVES = (
    "queries and keys pass norms of their own: every logit is the folded form of its query and key"
    " times a positive number of each of the two, so signs and directions are exact and sizes are"
    " not"
)


@dataclass(frozen=True, eq=False)
class Reading:
    """The weights of one attention module, and where they and the norms around it were found."""

    weights: LayerWeights
    site: AttentionModule
    paths: Paths


def layout_of(places: Places, site: AttentionModule) -> HeadLayout:
    """The layout of the family that an attention module belongs to."""
    module = places.modules[site.path]
    if isinstance(module, MultiHeadAttention):
        around = type(places.modules[site.path.rpartition(".")[0]]).__name__
        if around in OWN:
            return OWN[around]
        raise ModelError(
            f"{site.path} stands in a {around}", allowed=f"one of {', '.join(OWN)}",
            to_do="put the attention into one of the placements of headwise.models.block",
        )  # fmt: skip
    config: Any = getattr(places.modules[site.stack], "config", None)
    family = getattr(config, "model_type", type(module).__name__)
    if family in REASONS:
        raise ModelError(f"{family} has no heads in this sense: {REASONS[family]}")
    if family not in FAMILIES:
        raise ModelError(
            f"where {family} keeps the weights of its heads is not known",
            allowed=", ".join(sorted(FAMILIES)),
        )
    layout = FAMILIES[family]
    for name, value in layout.only:
        if getattr(config, name, value) != value:
            raise ModelError(
                f"{family} with {name} = {getattr(config, name)} is not known",
                allowed=f"{name} = {value}",
            )
    if site.named_cross and layout.cross_norm is None:
        raise ModelError(
            f"{site.path}: cross-attention of {family} is not known", allowed="self-attention"
        )
    return layout


def read_layer(places: Places, site: AttentionModule, layout: HeadLayout) -> Reading:
    """The weights of one attention module, by heads; NaN and infinities are refused."""
    if layout.latent is not None:
        return _read_latent(places, site, layout)
    module = places.modules[site.path]
    paths = places.paths(layout, site)
    output = _matrix(places, layout.output, site)
    d_head = _attribute(module, layout.d_head, site)
    weights, biases = _split(places, layout, site, d_head, output.shape[0] // d_head)
    query, key, value = (_heads(w, d_head) for w in weights)
    q_bias, k_bias, v_bias = (None if b is None else b.view(-1, d_head) for b in biases)
    norms = [
        _head_norm(places.at(places.path(name, site)), layout, heads.shape[0], d_head)
        for name, heads in ((layout.query_norm, query), (layout.key_norm, key))
    ]
    clip = getattr(getattr(module, "config", None), "clip_qkv", None)
    block = places.at(places.path("{block}", site))
    out = LayerWeights(
        module=site.path,
        role="cross" if site.named_cross else _self_role(module),
        number=site.number,
        query=query,
        key=key,
        value=value,
        output=output.view(-1, d_head, output.shape[1]),
        scale=_attribute(module, layout.scale, site),
        query_bias=q_bias,
        key_bias=k_bias,
        value_bias=v_bias,
        output_bias=bias(places.at(paths.output)),
        rotary=_rotary(places, site, layout),
        norm=norm_at(places, paths.norm, layout),
        source_norm=norm_at(places, paths.source_norm, layout),
        query_norm=norms[0],
        key_norm=norms[1],
        clip=clip,
        output_norm=norm_at(places, paths.output_norm, layout),
        write_scale=float(getattr(block, _RESIDUAL, 1.0)),
        fixed=clip is None and norms == [None, None],
        why_not=_why_not(norms, clip),
    )
    _check_finite(out)
    return Reading(out, site, paths)


def _read_latent(places: Places, site: AttentionModule, layout: HeadLayout) -> Reading:
    module: Any = places.modules[site.path]
    paths = places.paths(layout, site)
    output = _matrix(places, layout.output, site)
    rotary = _rotary(places, site, layout)
    assert rotary is not None
    assert layout.latent is not None
    (query, key, value), use = read_latent(module, site.path, rotary, layout.latent)
    norm = norm_at(places, paths.norm, layout)
    out = LayerWeights(
        module=site.path,
        role=_self_role(module),
        number=site.number,
        query=query,
        key=key,
        value=value,
        output=output.view(-1, value.shape[2], output.shape[1]),
        scale=_attribute(module, layout.scale, site),
        output_bias=bias(places.at(paths.output)),
        norm=norm,
        source_norm=norm,
        latent=use,
        fixed=False,
        why_not=not_fixed(use, query.shape[2]),
    )
    _check_finite(out)
    return Reading(out, site, paths)


def norm_at(places: Places, path: str, layout: HeadLayout) -> NormFold | None:
    """The norm at a path, as what it does to the stream; None for ""."""
    module = places.at(path)
    if module is None:
        return None
    kind, gain = _kind_and_gain(module, layout)
    fold = NormFold(kind, gain, bias(module), _eps(module))
    for name, x in (("gain", fold.gain), ("bias", fold.bias)):
        check_finite(f"{path} ({name})", x)
    return fold


def _matrix(places: Places, name: str, site: AttentionModule) -> Tensor:
    path = places.path(name, site)
    return matrix(path or places.name(name, site), places.at(path))


def _split(
    places: Places, layout: HeadLayout, site: AttentionModule, d_head: int, heads: int
) -> tuple[Parts, Sequence[Tensor | None]]:
    """W_Q, W_K and W_V as ``d_model width``, and their biases."""
    if layout.fused is None:
        names = [layout.query, layout.key, layout.value]
        weights = [_matrix(places, name, site) for name in names]
        return (weights[0], weights[1], weights[2]), [
            bias(places.at(places.path(name, site))) for name in names
        ]
    whole = _matrix(places, layout.fused, site)
    b = bias(places.at(places.path(layout.fused, site)))
    q, k, v = _unfused(whole, layout, heads, d_head)
    return (q, k, v), [None] * 3 if b is None else list(_unfused(b, layout, heads, d_head))


def _unfused(x: Tensor, layout: HeadLayout, heads: int, d_head: int) -> Parts:
    """The last axis of a fused projection, in three; "heads" leaves it as ``head d_head``."""
    if layout.order == "heads":
        apart = x.unflatten(-1, (heads, 3, d_head))
        q, k, v = (apart[..., part, :] for part in range(3))  # views, as everything here
        return q, k, v
    rest = (x.shape[-1] - heads * d_head) // 2
    q, k, v = x.split((heads * d_head, rest, rest), -1)
    return q, k, v


def _heads(weight: Tensor, d_head: int) -> Tensor:
    """``head d_model d_head``, a view."""
    apart = weight if weight.dim() == 3 else weight.unflatten(-1, (-1, d_head))
    return apart.movedim(-2, 0)


def _attribute(module: nn.Module, name: str, site: AttentionModule) -> Any:
    value = getattr(module, name, None)
    if not isinstance(value, int | float):
        raise ModelError(
            f"{site.path} ({type(module).__name__}) does not say its {name}",
            to_do="use a version of transformers whose modules do (5.24 does)",
        )
    return value


def _self_role(module: nn.Module) -> str:
    if isinstance(module, MultiHeadAttention):
        return "encoder" if isinstance(module.mask, Everything) else "decoder"
    return "decoder" if getattr(module, "is_causal", True) else "encoder"


def _kind_and_gain(module: nn.Module, layout: HeadLayout) -> tuple[Kind, Tensor | None]:
    """Own norms say what they are by their class; the others' layout says it."""
    weight = getattr(module, "weight", None)
    gain = weight.detach() if isinstance(weight, Tensor) else None
    if type(module).__module__.startswith("headwise."):
        kind: Kind = "layer" if isinstance(module, LayerNorm) else "rms"
        offset = isinstance(module, OffsetRMSNorm)
    else:
        kind, offset = "layer" if layout.kind == "layer" else "rms", layout.kind == "rms+1"
    if not offset or gain is None:
        return kind, gain
    return kind, 1 + gain.to(torch.promote_types(gain.dtype, torch.float32))  # as Gemma adds it


def _eps(module: nn.Module) -> float:
    value = getattr(module, "eps", getattr(module, "variance_epsilon", None))
    return 1e-5 if value is None else float(value)


def _head_norm(
    module: nn.Module | None, layout: HeadLayout, heads: int, d_head: int
) -> HeadNorm | None:
    if module is None:
        return None
    inner = module.norm if isinstance(module, AcrossHeads) else module
    assert isinstance(inner, nn.Module)
    kind, gain = _kind_and_gain(inner, layout)
    across = isinstance(module, AcrossHeads) or (
        gain is not None and gain.shape == (heads * d_head,) and heads > 1
    )
    shift = bias(inner)
    return HeadNorm(
        kind,
        None if gain is None else gain.reshape(-1, d_head),
        None if shift is None else shift.reshape(-1, d_head),
        _eps(inner),
        across,
    )


def _why_not(norms: Sequence[HeadNorm | None], clip: float | None) -> str:
    if clip is not None:
        return (
            f"queries, keys and values are clipped to ±{clip:g}: the forms hold for tokens none of"
            " whose entries reach that"
        )
    if any(norm is not None and norm.bias is not None for norm in norms):
        return (
            "queries and keys pass norms of their own that add a bias: the folded form is exact,"
            " up to a positive number of each query and key, for what is left without the biases"
        )
    return _NORM_GIVES if any(norm is not None for norm in norms) else ""


def _rotary(places: Places, site: AttentionModule, layout: HeadLayout) -> RotaryUse | None:
    module: Any = places.modules[site.path]
    if isinstance(module, MultiHeadAttention):
        if module.rotary is None:
            return None
        spec = module.rotary
        inv_freq, factor = frequencies(spec.width, base=spec.base, scaling=spec.scaling)
        return RotaryUse(inv_freq, spec.width, spec.layout, factor)
    if layout.rotary is None or (layout.turns and not getattr(module, layout.turns)):
        return None
    if hasattr(module, "rotary_dim"):  # GPT-J holds no frequencies, only their sines
        width = module.rotary_dim or module.embed_dim
        return RotaryUse(frequencies(width).inv_freq, width, layout.rotary)
    turner: Any = places.at(places.path("{stack}.rotary_emb", site))
    kinds = getattr(getattr(module, "config", None), "layer_types", None) or ()
    kind = f"{kinds[site.number]}_" if site.number < len(kinds) else ""
    prefix = kind if hasattr(turner, f"{kind}inv_freq") else ""
    found = getattr(turner, f"{prefix}inv_freq", None)
    if not isinstance(found, Tensor):
        raise ModelError(f"{site.path}: the frequencies of its rotation were not found")
    factor = float(getattr(turner, f"{prefix}attention_scaling", 1.0))
    return RotaryUse(found.detach().to(torch.float64), 2 * len(found), layout.rotary, factor)


def _check_finite(weights: LayerWeights) -> None:
    names = ("query", "key", "value", "output")
    for name in (*names, *(f"{name}_bias" for name in names)):
        check_finite(f"{weights.module} ({name})", getattr(weights, name))
    for name in ("query_norm", "key_norm"):
        norm = getattr(weights, name)
        check_finite(f"{weights.module} ({name})", None if norm is None else norm.gain)
