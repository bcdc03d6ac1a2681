"""Decoders of Llama's make: norms before each sublayer, rotary positions, no table of positions.

What a family does in its own way is a line of ``FAMILIES``; the rest is one function.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from headwise.cost.blocks import Block, Experts, FeedForward, blocks, norm
from headwise.cost.families.common import CAUSAL, causal_heads, class_of, shared, table
from headwise.cost.parts import Component, Parts, Stack
from headwise.cost.settings import Settings
from headwise.errors import ModelError

__all__ = ["FAMILIES"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Manner:
    """How a family differs from Llama.

    Attributes:
        name: the start of its class names.
        qkv_bias, output_bias: the key that says so; True or False where there is no key.
        windows: which layers see a window: none, "all", "even", "sixth" (all but every sixth),
            "late" (Qwen: from ``max_window_layers`` on, if ``use_sliding_window``).
        window: the window where the configuration has none; None: no window then.
        head: the width of a head where the configuration has none; None: d_model / heads.
        experts: makes the feed-forward of a layer; None: a plain gated one.
    """

    name: str
    tied: bool = False
    qkv_bias: bool | str = False
    output_bias: bool | str = False
    mlp_bias: bool | str = False
    gated: bool = True
    norm_bias: bool | str = False
    norms: int = 2
    qk_norm: str | None = None
    qk_norm_key: str | None = None
    windows: str | None = None
    window: int | None = None
    head: int | None = None
    sinks: bool = False
    experts: Callable[[Settings, int], FeedForward | Experts] | None = None


def _gated(settings: Settings, key: str, default: int | None = None) -> FeedForward:
    return FeedForward(d_ff=settings.size(key, **_default(default)), gated=True)


def _default(value: int | None) -> dict[str, int]:
    return {} if value is None else {"default": value}


def _mixtral(settings: Settings, layer: int) -> Experts:
    return Experts(
        count=settings.size("num_local_experts", "num_experts"),
        used=settings.size("num_experts_per_tok"),
        each=_gated(settings, "intermediate_size"),
    )


def _sparse(settings: Settings, layer: int) -> bool:
    """Qwen's rule: every ``decoder_sparse_step``-th layer, unless it is named as dense."""
    dense = settings.sequence("mlp_only_layers") or []
    step = settings.size("decoder_sparse_step", default=1)
    return layer not in dense and (layer + 1) % step == 0


def _qwen2_moe(settings: Settings, layer: int) -> FeedForward | Experts:
    if not _sparse(settings, layer):
        return _gated(settings, "intermediate_size")
    return Experts(
        count=settings.size("num_experts", "num_local_experts"),
        used=settings.size("num_experts_per_tok"),
        each=_gated(settings, "moe_intermediate_size"),
        shared=_gated(settings, "shared_expert_intermediate_size"),
        shared_gate=True,
    )


def _qwen3_moe(settings: Settings, layer: int) -> FeedForward | Experts:
    if not _sparse(settings, layer):
        return _gated(settings, "intermediate_size")
    return Experts(
        count=settings.size("num_experts", "num_local_experts"),
        used=settings.size("num_experts_per_tok"),
        each=_gated(settings, "moe_intermediate_size"),
    )


def _gpt_oss(settings: Settings, layer: int) -> Experts:
    return Experts(
        count=settings.size("num_local_experts"),
        used=settings.size("num_experts_per_tok", "experts_per_token"),
        each=FeedForward(d_ff=settings.size("intermediate_size"), gated=True, bias=True),
        router_bias=True,
    )


_LLAMA: Final = Manner(
    name="Llama", qkv_bias="attention_bias", output_bias="attention_bias", mlp_bias="mlp_bias"
)
MANNERS: Final[dict[str, Manner]] = {
    "llama": _LLAMA,
    "mistral": Manner(name="Mistral", windows="all", window=4096),
    "mixtral": Manner(name="Mixtral", windows="all", experts=_mixtral),
    "qwen2": Manner(name="Qwen2", qkv_bias=True, windows="late"),
    "qwen2_moe": Manner(name="Qwen2Moe", qkv_bias="qkv_bias", windows="late", experts=_qwen2_moe),
    "qwen3": Manner(
        name="Qwen3", qkv_bias="attention_bias", output_bias="attention_bias", windows="late",
        qk_norm="head", head=128,
    ),
    "qwen3_moe": Manner(
        name="Qwen3Moe", qkv_bias="attention_bias", output_bias="attention_bias", windows="all",
        qk_norm="head", experts=_qwen3_moe,
    ),
    "gemma": Manner(
        name="Gemma", tied=True, qkv_bias="attention_bias", output_bias="attention_bias", head=256
    ),
    "gemma2": Manner(
        name="Gemma2", tied=True, qkv_bias="attention_bias", output_bias="attention_bias",
        norms=4, windows="even", window=4096, head=256,
    ),
    "gemma3_text": Manner(
        name="Gemma3", tied=True, qkv_bias="attention_bias", output_bias="attention_bias",
        norms=4, windows="sixth", window=4096, qk_norm="head", head=256,
    ),
    "phi3": Manner(name="Phi3", windows="all"),
    "granite": Manner(
        name="Granite", qkv_bias="attention_bias", output_bias="attention_bias",
        mlp_bias="mlp_bias",
    ),
    "olmo2": Manner(
        name="Olmo2", qkv_bias="attention_bias", output_bias="attention_bias", qk_norm="all"
    ),
    "smollm3": Manner(
        name="SmolLM3", tied=True, qkv_bias="attention_bias", output_bias="attention_bias",
        mlp_bias="mlp_bias", windows="late",
    ),
    "gpt_oss": Manner(
        name="GptOss", qkv_bias="attention_bias", output_bias="attention_bias", windows="even",
        window=128, head=64, sinks=True, experts=_gpt_oss,
    ),
}  # fmt: skip
_ON: Final = {"gpt_oss": True}  # families whose attention_bias is on unless said otherwise


def _said(settings: Settings, key: bool | str) -> bool:
    if isinstance(key, bool):
        return key
    default = settings.family == "gpt_oss" or key == "qkv_bias"
    return settings.flag(key, default)


def windows(settings: Settings, manner: Manner, layers: int) -> Sequence[int | None]:
    """The window of every layer: from ``layer_types``, or by the rule of the family."""
    window = settings.maybe("sliding_window") if manner.windows else None
    if window is None and "sliding_window" not in settings.values:
        window = manner.window
    if manner.windows is None or window is None:
        return (None,) * layers
    kinds = settings.sequence("layer_types", layers)
    if kinds is not None:
        known = ("full_attention", "sliding_attention")
        wrong = next((kind for kind in kinds if kind not in known), None)
        if wrong is not None:
            raise ModelError(
                f"layer_types has {wrong!r} in {settings.where}", allowed=" or ".join(known)
            )
        return tuple(window if kind == "sliding_attention" else None for kind in kinds)
    return tuple(window if _slides(settings, manner, layer) else None for layer in range(layers))


def _slides(settings: Settings, manner: Manner, layer: int) -> bool:
    if manner.windows == "even":
        return layer % 2 == 0
    if manner.windows == "sixth":
        pattern = settings.size("sliding_window_pattern", "_sliding_window_pattern", default=6)
        return (layer + 1) % pattern != 0
    if manner.windows == "late":
        late = settings.size("max_window_layers", default=28, least=0)
        return settings.flag("use_sliding_window", False) and layer >= late
    return settings.flag("use_sliding_window", True)


def _read(settings: Settings, manner: Manner) -> Parts:
    d, layers = settings.size("hidden_size"), settings.size("num_hidden_layers")
    heads = settings.size("num_attention_heads")
    kv_heads = settings.size("num_key_value_heads", default=heads)
    if heads % kv_heads:
        raise ModelError(
            f"{heads} query heads cannot share {kv_heads} key-value heads in {settings.where}",
            allowed="a number of key-value heads that divides the query heads",
        )
    width = settings.maybe("head_dim") or manner.head
    if width is None:
        width = settings.divided("hidden_size", heads, "head_dim")
    vocab, tied = settings.size("vocab_size"), shared(settings, manner.tied)
    name, head = class_of(settings, f"{manner.name}ForCausalLM", CAUSAL)
    qkv_bias, bias = _said(settings, manner.qkv_bias), _said(settings, manner.norm_bias)
    each = [
        Block(
            d_model=d,
            heads=heads,
            kv_heads=kv_heads,
            d_qk=width,
            d_value=width,
            feed_forward=_feed_forward(settings, manner, layer),
            window=window,
            query_bias=qkv_bias,
            key_bias=qkv_bias,
            value_bias=qkv_bias,
            output_bias=_said(settings, manner.output_bias),
            norms=manner.norms,
            norm_bias=bias,
            qk_norm=manner.qk_norm,
            sinks=manner.sinks,
        )
        for layer, window in enumerate(windows(settings, manner, layers))
    ]
    stack = Stack(
        name="decoder",
        d_model=d,
        layers=blocks(each),
        matrices=(
            table("tokens", Component.EMBEDDING, vocab, d),
            *causal_heads(settings, head, d, vocab, tied),
        ),
        vectors=(norm("final norm", d, bias),),
        context=settings.maybe("max_position_embeddings"),
    )
    return Parts(family=settings.family, model_class=name, vocab=vocab, stacks=(stack,))


def _feed_forward(settings: Settings, manner: Manner, layer: int) -> FeedForward | Experts:
    if manner.experts is not None:
        return manner.experts(settings, layer)
    return FeedForward(
        d_ff=settings.size("intermediate_size"),
        gated=manner.gated,
        bias=_said(settings, manner.mlp_bias),
    )


def _reader(manner: Manner) -> Callable[[Settings], Parts]:
    return lambda settings: _read(settings, manner)


FAMILIES: Final[dict[str, Callable[[Settings], Parts]]] = {
    family: _reader(manner) for family, manner in MANNERS.items()
}
