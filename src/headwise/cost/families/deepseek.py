"""DeepSeek-V2 and V3: latent attention (MLA) and experts, a few of them shared by all tokens.

Source: DeepSeek-AI 2024 (arXiv:2405.04434), section 2; DeepSeek-AI 2024 (arXiv:2412.19437).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from headwise.cost.blocks import Block, Latent, norm
from headwise.cost.families.decoder import decoder
from headwise.cost.families.experts import deepseek
from headwise.cost.families.outside import shared
from headwise.cost.parts import Parts
from headwise.cost.settings import Settings

__all__ = ["FAMILIES"]

_WIDTHS: Final[dict[str, Any]] = {
    "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128,
    "v_head_dim": 128,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class _Manner:
    """The start of the class names, and the sizes of a configuration that leaves them out."""

    name: str
    defaults: Mapping[str, Any]


def _read(settings: Settings, manner: _Manner) -> Parts:
    said = settings.over(manner.defaults)
    d, heads, vocab = (
        said.size("hidden_size"),
        said.size("num_attention_heads"),
        said.size("vocab_size"),
    )
    rotary = said.size("qk_rope_head_dim")
    bias = said.flag("attention_bias", False)
    latent = Latent(
        rank=said.size("kv_lora_rank"), rotary=rotary, query_rank=said.maybe("q_lora_rank")
    )
    each = [
        Block(
            d_model=d,
            heads=heads,
            kv_heads=heads,
            d_qk=said.size("qk_nope_head_dim") + rotary,
            d_value=said.size("v_head_dim"),
            feed_forward=deepseek(said, layer),
            query_bias=bias,
            key_bias=bias,
            output_bias=bias,
            latent=latent,
        )
        for layer in range(said.layers("num_hidden_layers"))
    ]
    return decoder(
        said,
        each,
        default=f"{manner.name}ForCausalLM",
        vocab=vocab,
        tied=shared(said, False),
        final=(norm("final norm", d, bias=False),),
        context=said.maybe("max_position_embeddings"),
        notes=[*settings.taken(manner.defaults), *_left_out(said)],
    )


def _left_out(settings: Settings) -> list[str]:
    more = settings.maybe("num_nextn_predict_layers", "num_mtp_layers", least=0)
    if not more:
        return []
    return [f"{more} layer(s) that predict further tokens (MTP) are not part of the pass: left out"]


def _reader(manner: _Manner) -> Callable[[Settings], Parts]:
    return lambda settings: _read(settings, manner)


_V2: Final = {**_WIDTHS, "n_shared_experts": 2, "first_k_dense_replace": 0}
_V3: Final = {**_WIDTHS, "n_shared_experts": 1, "first_k_dense_replace": 3}
MANNERS: Final[dict[str, _Manner]] = {
    "deepseek_v2": _Manner(name="DeepseekV2", defaults=MappingProxyType(_V2)),
    "deepseek_v3": _Manner(name="DeepseekV3", defaults=MappingProxyType(_V3)),
    "kimi_k2": _Manner(name="DeepseekV3", defaults=MappingProxyType(_V3)),
}
FAMILIES: Final[dict[str, Callable[[Settings], Parts]]] = {
    family: _reader(manner) for family, manner in MANNERS.items()
}
