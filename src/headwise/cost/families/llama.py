"""Decoders of Llama's make: rotary positions or none, one or more norms around each sublayer.

A family is one line of ``MANNERS``: what it does unlike Llama. Everything else is one function.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from headwise.cost.blocks import Block, Experts, FeedForward, norm
from headwise.cost.families import experts as mixtures
from headwise.cost.families.decoder import decoder, kv_heads_of
from headwise.cost.families.outside import shared
from headwise.cost.parts import Parts
from headwise.cost.settings import Settings
from headwise.errors import ModelError

__all__ = ["FAMILIES", "MANNERS", "Manner"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Manner:
    """How a family differs from Llama.

    Attributes:
        name: the start of its class names.
        defaults: values of keys that a configuration leaves out, as the family's class has them.
        qkv_bias, output_bias, mlp_bias: True, False, or the key that says so.
        head_bias: of the unembedding.
        gated: whether the feed-forward has three matrices.
        norm_bias, norm_gain: what a norm has learned.
        norms: of each block; one less if the key ``parallel`` is true.
        qk_norm: as in ``Block``; ``qk_norm_key`` is the key that turns it on, if there is one.
        windows: which layers see a window where ``layer_types`` does not say: None (no layer),
            "all", "even", "pattern" (all but every n-th), "late" (from ``max_window_layers`` on),
            "early" (even ones before it), "unturned" (those without rotary positions).
        sinks: a learned logit of every head.
        experts: makes the feed-forward of a layer; None: a plain one.
    """

    name: str
    defaults: Mapping[str, Any] = field(default_factory=dict)
    qkv_bias: bool | str = False
    output_bias: bool | str = False
    mlp_bias: bool | str = False
    head_bias: bool = False
    gated: bool = True
    norm_bias: bool = False
    norm_gain: bool = True
    norms: int = 2
    parallel: str | None = None
    qk_norm: str | None = None
    qk_norm_key: str | None = None
    qk_norm_bias: bool = False
    windows: str | None = None
    sinks: bool = False
    experts: Callable[[Settings, int], FeedForward | Experts] | None = None


_BIASES: Final[dict[str, Any]] = {"qkv_bias": "attention_bias", "output_bias": "attention_bias"}
_TIED: Final = {"tie_word_embeddings": True}
_LATE: Final = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}
MANNERS: Final[dict[str, Manner]] = {
    "llama": Manner(name="Llama", mlp_bias="mlp_bias", **_BIASES),
    "mistral": Manner(
        name="Mistral", windows="all",
        defaults={"num_key_value_heads": 8, "sliding_window": 4096},
    ),
    "ministral": Manner(
        name="Ministral", windows="all",
        defaults={"num_key_value_heads": 8, "sliding_window": 4096},
    ),
    "ministral3": Manner(
        name="Ministral3", windows="all", defaults={"num_key_value_heads": 8, "head_dim": 128}
    ),
    "mixtral": Manner(
        name="Mixtral", windows="all", experts=mixtures.mixtral,
        defaults={"num_key_value_heads": 8},
    ),
    "qwen2": Manner(
        name="Qwen2", qkv_bias=True, windows="late", defaults={"num_key_value_heads": 32, **_LATE}
    ),
    "qwen2_moe": Manner(
        name="Qwen2Moe", qkv_bias="qkv_bias", windows="early", experts=mixtures.qwen2_moe,
        defaults={"num_key_value_heads": 16, "qkv_bias": True, **_LATE},
    ),
    "qwen3": Manner(
        name="Qwen3", windows="late", qk_norm="head", **_BIASES,
        defaults={"num_key_value_heads": 32, "head_dim": 128, **_LATE},
    ),
    "qwen3_moe": Manner(
        name="Qwen3Moe", windows="all", qk_norm="head", experts=mixtures.qwen3_moe, **_BIASES,
        defaults={"num_key_value_heads": 4, **_LATE},
    ),
    "gemma": Manner(
        name="Gemma", **_BIASES, defaults={"num_key_value_heads": 16, "head_dim": 256, **_TIED}
    ),
    "gemma2": Manner(
        name="Gemma2", norms=4, windows="even", **_BIASES,
        defaults={"num_key_value_heads": 4, "head_dim": 256, "sliding_window": 4096, **_TIED},
    ),
    "gemma3_text": Manner(
        name="Gemma3", norms=4, windows="pattern", qk_norm="head", **_BIASES,
        defaults={
            "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
            "vocab_size": 262_208, "max_position_embeddings": 131_072, "sliding_window": 4096,
            "sliding_window_pattern": 6, **_TIED,
        },
    ),
    "phi": Manner(
        name="Phi", qkv_bias=True, output_bias=True, mlp_bias=True, head_bias=True, gated=False,
        norm_bias=True, norms=1, qk_norm="head", qk_norm_key="qk_layernorm", qk_norm_bias=True,
    ),
    "phi3": Manner(name="Phi3", windows="all"),
    "granite": Manner(name="Granite", mlp_bias="mlp_bias", **_BIASES),
    "olmo": Manner(name="Olmo", norm_gain=False, **_BIASES),
    "olmo2": Manner(name="Olmo2", qk_norm="all", **_BIASES),
    "olmo3": Manner(
        name="Olmo3", qk_norm="all", windows="pattern", **_BIASES,
        defaults={"sliding_window": 4096, "sliding_window_pattern": 4},
    ),
    "olmoe": Manner(name="Olmoe", qk_norm="all", experts=mixtures.olmoe, **_BIASES),
    "smollm3": Manner(
        name="SmolLM3", mlp_bias="mlp_bias", windows="unturned", **_BIASES,
        defaults={"num_key_value_heads": 4, "use_sliding_window": False, **_TIED},
    ),
    "gpt_oss": Manner(
        name="GptOss", windows="even", sinks=True, experts=mixtures.gpt_oss, **_BIASES,
        defaults={
            "num_key_value_heads": 8, "head_dim": 64, "sliding_window": 128,
            "attention_bias": True,
        },
    ),
    "gpt_neox": Manner(
        name="GPTNeoX", mlp_bias=True, gated=False, norm_bias=True, **_BIASES,
        defaults={"attention_bias": True},
    ),
    "starcoder2": Manner(
        name="Starcoder2", qkv_bias="use_bias", output_bias="use_bias", mlp_bias="use_bias",
        gated=False, norm_bias=True, windows="all",
        defaults={"num_key_value_heads": 2, "use_bias": True, **_TIED},
    ),
    "stablelm": Manner(
        name="StableLm", qkv_bias="use_qkv_bias", norm_bias=True, parallel="use_parallel_residual",
        qk_norm="all", qk_norm_key="qk_layernorm", defaults={"num_key_value_heads": 32},
    ),
    "cohere": Manner(
        name="Cohere", norms=1, qk_norm="all", qk_norm_key="use_qk_norm", **_BIASES,
        defaults=_TIED,
    ),
    "cohere2": Manner(
        name="Cohere2", norms=1, windows="pattern", **_BIASES,
        defaults={"sliding_window": 4096, "sliding_window_pattern": 4, **_TIED},
    ),
    "glm": Manner(
        name="Glm", qkv_bias="attention_bias",
        defaults={"num_key_value_heads": 2, "head_dim": 128, "attention_bias": True},
    ),
    "glm4": Manner(
        name="Glm4", qkv_bias="attention_bias", norms=4,
        defaults={"num_key_value_heads": 2, "head_dim": 128, "attention_bias": True},
    ),
    "seed_oss": Manner(
        name="SeedOss", qkv_bias="attention_bias", output_bias="attention_out_bias",
        mlp_bias="mlp_bias",
        defaults={"num_key_value_heads": 8, "head_dim": 128, "attention_bias": True},
    ),
    "arcee": Manner(name="Arcee", gated=False, mlp_bias="mlp_bias", **_BIASES),
    "nemotron": Manner(
        name="Nemotron", gated=False, mlp_bias="mlp_bias", norm_bias=True, **_BIASES
    ),
}  # fmt: skip


def _said(settings: Settings, key: bool | str) -> bool:
    return key if isinstance(key, bool) else settings.flag(key, False)


def windows(settings: Settings, manner: Manner, layers: int) -> Sequence[int | None]:
    """The window of every layer: from ``layer_types``, or by the rule of the family."""
    window = settings.maybe("sliding_window", least=0) or None
    if manner.windows is None or window is None or not settings.flag("use_sliding_window", True):
        return (None,) * layers
    kinds = settings.sequence("layer_types", layers)
    if kinds is None:
        slides = [_slides(settings, manner, layer) for layer in range(layers)]
        return tuple(window if each else None for each in slides)
    known = ("full_attention", "sliding_attention")
    wrong = next((kind for kind in kinds if kind not in known), None)
    if wrong is not None:
        raise ModelError(
            f"layer_types has {wrong!r} in {settings.where}", allowed=" or ".join(known)
        )
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _slides(settings: Settings, manner: Manner, layer: int) -> bool:
    if manner.windows == "even":
        return layer % 2 == 0
    if manner.windows == "pattern":
        pattern = settings.size("sliding_window_pattern", "_sliding_window_pattern")
        return (layer + 1) % pattern != 0
    if manner.windows in ("late", "early"):
        bound = settings.size("max_window_layers", least=0)
        return layer >= bound if manner.windows == "late" else layer < bound and layer % 2 == 0
    if manner.windows == "unturned":
        turned = settings.sequence("no_rope_layers")
        if turned is not None:
            return layer < len(turned) and turned[layer] == 0
        return (layer + 1) % settings.size("no_rope_layer_interval", default=4) == 0
    return True


def _read(settings: Settings, manner: Manner) -> Parts:
    said = settings.over(manner.defaults)
    d, heads, layers = (
        said.size("hidden_size"),
        said.size("num_attention_heads"),
        said.layers("num_hidden_layers"),
    )
    width = said.maybe("head_dim") or said.divided("hidden_size", heads, "head_dim")
    qkv_bias, causal = _said(said, manner.qkv_bias), not said.flag(_BOTH_WAYS, False)
    kinds = windows(said, manner, layers)
    with_norms = manner.qk_norm_key is None or said.flag(manner.qk_norm_key, False)
    each = [
        Block(
            d_model=d,
            heads=heads,
            kv_heads=kv_heads_of(said, heads),
            d_qk=width,
            d_value=width,
            feed_forward=_feed_forward(said, manner, layer),
            causal=causal,
            window=window if causal else None,
            query_bias=qkv_bias,
            key_bias=qkv_bias,
            value_bias=qkv_bias,
            output_bias=_said(said, manner.output_bias),
            norms=manner.norms - _said(said, manner.parallel or False),
            norm_bias=manner.norm_bias,
            norm_gain=manner.norm_gain,
            qk_norm=manner.qk_norm if with_norms else None,
            qk_norm_bias=manner.qk_norm_bias,
            sinks=manner.sinks,
        )
        for layer, window in enumerate(kinds)
    ]
    return decoder(
        said,
        each,
        default=f"{manner.name}ForCausalLM",
        vocab=said.size("vocab_size"),
        tied=shared(said, False),
        final=(norm("final norm", d, manner.norm_bias),) if manner.norm_gain else (),
        context=said.maybe("max_position_embeddings"),
        head_bias=manner.head_bias,
        notes=[*_taken(settings, manner, kinds), *_both_ways(causal, kinds)],
    )


_BOTH_WAYS: Final = "use_bidirectional_attention"


def _taken(settings: Settings, manner: Manner, kinds: Sequence[int | None]) -> list[str]:
    rules = {"max_window_layers", "sliding_window_pattern"}
    unused = rules if any(kinds) else {*rules, "sliding_window"}
    return settings.taken({k: v for k, v in manner.defaults.items() if k not in unused})


def _both_ways(causal: bool, kinds: Sequence[int | None]) -> list[str]:
    if causal or not any(kinds):
        return []
    return ["queries see keys on both sides, and windows are not counted: all pairs are"]


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
