"""Mixtures of experts: which layers have one, and what it is made of, family by family."""

from __future__ import annotations

from headwise.cost.blocks import Experts, FeedForward
from headwise.cost.settings import Settings
from headwise.errors import ModelError

__all__ = ["deepseek", "gated", "gpt_oss", "mixtral", "mixture", "olmoe", "qwen2_moe", "qwen3_moe"]


def gated(settings: Settings, key: str, *, bias: bool = False, times: int = 1) -> FeedForward:
    """A gated feed-forward of the width under ``key``, ``times`` over."""
    return FeedForward(d_ff=times * settings.size(key), gated=True, bias=bias)


def mixture(
    settings: Settings,
    counts: tuple[str, ...],
    each: FeedForward,
    *,
    used_under: tuple[str, ...] = ("num_experts_per_tok",),
    shared: FeedForward | None = None,
    shared_gate: bool = False,
    router_bias: bool = False,
) -> Experts:
    """Experts whose number stands under one of the keys ``counts``."""
    count, used = settings.size(*counts), settings.size(*used_under)
    if used > count:
        raise ModelError(
            f"{used} of {count} experts work on a token in {settings.where}",
            allowed=f"{used_under[0]} from 1 to {count}",
        )
    return Experts(
        count=count,
        used=used,
        each=each,
        shared=shared,
        shared_gate=shared_gate,
        router_bias=router_bias,
    )


def mixtral(settings: Settings, layer: int) -> Experts:
    """Every layer alike, each expert of the full width (Jiang et al. 2024, arXiv:2401.04088)."""
    each = gated(settings, "intermediate_size")
    return mixture(settings, ("num_local_experts", "num_experts"), each)


def _dense(settings: Settings, layer: int) -> bool:
    """Qwen's rule: every ``decoder_sparse_step``-th layer is sparse, unless named as dense."""
    named = settings.sequence("mlp_only_layers") or []
    return layer in named or (layer + 1) % settings.size("decoder_sparse_step", default=1) != 0


def qwen2_moe(settings: Settings, layer: int) -> FeedForward | Experts:
    """Small experts, and a shared one whose output a learned gate weighs."""
    if _dense(settings, layer):
        return gated(settings, "intermediate_size")
    return mixture(
        settings,
        ("num_experts", "num_local_experts"),
        gated(settings, "moe_intermediate_size"),
        shared=gated(settings, "shared_expert_intermediate_size"),
        shared_gate=True,
    )


def qwen3_moe(settings: Settings, layer: int) -> FeedForward | Experts:
    """Small experts, none of them shared."""
    if _dense(settings, layer):
        return gated(settings, "intermediate_size")
    each = gated(settings, "moe_intermediate_size")
    return mixture(settings, ("num_experts", "num_local_experts"), each)


def olmoe(settings: Settings, layer: int) -> Experts:
    """Every layer alike, many experts of the full width (Muennighoff et al. 2024)."""
    each = gated(settings, "intermediate_size")
    return mixture(settings, ("num_experts", "num_local_experts"), each)


def gpt_oss(settings: Settings, layer: int) -> Experts:
    """Experts and a router with biases (arXiv:2508.10925)."""
    return mixture(
        settings,
        ("num_local_experts", "num_experts"),
        gated(settings, "intermediate_size", bias=True),
        used_under=("num_experts_per_tok", "experts_per_token"),
        router_bias=True,
    )


def deepseek(settings: Settings, layer: int) -> FeedForward | Experts:
    """Dense first layers; then small experts and some that all tokens pass (arXiv:2401.06066)."""
    bias = settings.flag("mlp_bias", False)
    every = settings.size("moe_layer_freq", default=1)
    if layer < settings.size("first_k_dense_replace", least=0) or layer % every:
        return gated(settings, "intermediate_size", bias=bias)
    key, shared = "moe_intermediate_size", settings.size("n_shared_experts", default=0, least=0)
    return mixture(
        settings,
        ("n_routed_experts", "num_experts", "num_local_experts"),
        gated(settings, key),
        shared=gated(settings, key, bias=bias, times=shared) if shared else None,
    )
