"""Where the weights of heads are in the models of each family: data, no code.

Names are paths in which a word in braces stands for a module:

    {attention}   the attention module          {parent}     the module around it
    {block}       its transformer block         {previous}   the block before (see ``first``)
    {stack}       the stack that runs it        {last}       the last block of that stack
    {encoder}     the encoder beside a decoder  {source}     the last block of that encoder

Every entry is checked when it is used (``validation``): weights against what the model computes
with, norms against what stands before and after attention.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, Literal

from headwise.circuits.latent import Turned
from headwise.positions import Layout

__all__ = ["FAMILIES", "OWN", "REASONS", "HeadLayout"]


@dataclass(frozen=True)
class HeadLayout:
    """Where one family keeps W_Q, W_K, W_V, W_O, and the norms around attention.

    ``fused`` names one projection instead of three: its columns are "blocks" q | k | v, or "heads"
    (q | k | v of head 0, then of head 1, …). ``first`` is the norm before the first block where
    ``norm`` is in the previous one. ``d_head``, ``scale`` and ``turns`` are attributes of the
    attention module; ``turns`` is true (or not None) in layers whose queries and keys turn.
    ``latent`` says that the names of projections are those of ``circuits.latent``.
    """

    query: str = "{attention}.q_proj"
    key: str = "{attention}.k_proj"
    value: str = "{attention}.v_proj"
    output: str = "{attention}.o_proj"
    fused: str | None = None
    order: Literal["blocks", "heads"] = "blocks"
    d_head: str = "head_dim"
    scale: str = "scaling"
    norm: str | None = "{block}.input_layernorm"
    first: str | None = None
    kind: Literal["layer", "rms", "rms+1"] = "rms"
    cross_norm: str | None = None
    source_norm: tuple[str, ...] = ()  # the first that is there
    output_norm: str | None = None
    query_norm: str = "{attention}.q_norm"
    key_norm: str = "{attention}.k_norm"
    rotary: Layout | None = None
    turns: str | None = None
    latent: Turned | None = None  # multi-head latent attention, and the order of what turns
    final: tuple[str, ...] = ("{stack}.norm",)
    only: tuple[tuple[str, object], ...] = ()  # settings of the configuration that this holds for


_LLAMA: Final = HeadLayout(rotary=Layout.HALF)
_GEMMA: Final = replace(_LLAMA, kind="rms+1")
_SANDWICH: Final = replace(_GEMMA, output_norm="{block}.post_attention_layernorm")
_BERT: Final = HeadLayout(
    query="{attention}.query",
    key="{attention}.key",
    value="{attention}.value",
    output="{parent}.output.dense",
    d_head="attention_head_size",
    norm="{previous}.output.LayerNorm",
    first="{stack}.embeddings.LayerNorm",
    kind="layer",
    final=("{last}.output.LayerNorm",),
)
_BART: Final = HeadLayout(
    output="{attention}.out_proj",
    norm="{previous}.final_layer_norm",
    first="{stack}.layernorm_embedding",
    kind="layer",
    cross_norm="{block}.self_attn_layer_norm",
    source_norm=("{source}.final_layer_norm",),
    final=("{last}.final_layer_norm",),
)
_CLIP: Final = HeadLayout(
    output="{attention}.out_proj", scale="scale", norm="{block}.layer_norm1", kind="layer",
    final=(),
)  # fmt: skip
_LATENT: Final = replace(_LLAMA, latent="kept", rotary=Layout.INTERLEAVED)
_SORTED: Final = replace(_LLAMA, latent="sorted")
_COHERE: Final = HeadLayout(kind="layer", rotary=Layout.INTERLEAVED)

FAMILIES: Final[dict[str, HeadLayout]] = {
    "gpt2": HeadLayout(
        fused="{attention}.c_attn", output="{attention}.c_proj", norm="{block}.ln_1",
        kind="layer", final=("{stack}.ln_f",),
    ),
    "gpt_neox": HeadLayout(
        fused="{attention}.query_key_value", order="heads", output="{attention}.dense",
        d_head="head_size", kind="layer", rotary=Layout.HALF, final=("{stack}.final_layer_norm",),
    ),
    "gptj": HeadLayout(
        output="{attention}.out_proj", norm="{block}.ln_1", kind="layer",
        rotary=Layout.INTERLEAVED, final=("{stack}.ln_f",),
    ),
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "mixtral": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": _LLAMA,
    "qwen3_moe": _LLAMA,
    "olmo": replace(_LLAMA, kind="layer"),
    "olmo2": replace(_LLAMA, norm=None, output_norm="{block}.post_attention_layernorm"),
    "granite": _LLAMA,
    "gpt_oss": _LLAMA,
    "smollm3": replace(_LLAMA, turns="use_rope"),
    "glm": replace(_LLAMA, rotary=Layout.INTERLEAVED),
    "glm4": replace(
        _LLAMA, rotary=Layout.INTERLEAVED, output_norm="{block}.post_self_attn_layernorm"
    ),
    "phi": replace(
        _LLAMA, output="{attention}.dense", kind="layer", final=("{stack}.final_layernorm",),
        query_norm="{attention}.q_layernorm", key_norm="{attention}.k_layernorm",
    ),
    "phi3": replace(_LLAMA, fused="{attention}.qkv_proj"),
    "gemma": _GEMMA,
    "gemma2": _SANDWICH,
    "gemma3_text": _SANDWICH,
    "cohere": _COHERE,
    "cohere2": replace(_COHERE, turns="sliding_window"),
    "deepseek_v2": _LATENT,
    "deepseek_v3": replace(_SORTED, only=(("rope_interleave", True),)),
    "deepseek_v32": _SORTED,
    "bert": _BERT,
    "roberta": _BERT,
    "electra": _BERT,
    "distilbert": HeadLayout(
        query="{attention}.q_lin", key="{attention}.k_lin", value="{attention}.v_lin",
        output="{attention}.out_lin", d_head="attention_head_size",
        norm="{previous}.output_layer_norm", first="{stack}.embeddings.LayerNorm", kind="layer",
        final=("{last}.output_layer_norm",),
    ),
    "t5": HeadLayout(
        query="{attention}.q", key="{attention}.k", value="{attention}.v", output="{attention}.o",
        d_head="key_value_proj_dim", norm="{parent}.layer_norm", cross_norm="{parent}.layer_norm",
        source_norm=("{encoder}.final_layer_norm",), final=("{stack}.final_layer_norm",),
    ),
    "bart": _BART,
    "marian": replace(_BART, first=None),
    "opt": HeadLayout(
        output="{attention}.out_proj", norm="{block}.self_attn_layer_norm", kind="layer",
        final=("{stack}.final_layer_norm",), only=(("do_layer_norm_before", True),),
    ),
    "vit": HeadLayout(norm="{block}.layernorm_before", kind="layer", final=("{stack}.layernorm",)),
    "clip_text_model": replace(_CLIP, final=("{stack}.final_layer_norm",)),
    "clip_vision_model": _CLIP,
}  # fmt: skip

_PARTS: Final = HeadLayout(
    query="{attention}.query",
    key="{attention}.key",
    value="{attention}.value",
    output="{attention}.output",
    d_head="d_head",
    scale="scale",
    norm="{parent}.norm",
    cross_norm="{parent}.norm",
    source_norm=("{encoder}.norm",),
    query_norm="{attention}.query_norm",
    key_norm="{attention}.key_norm",
)
# Headwise's own models, by the placement around attention.
OWN: Final[dict[str, HeadLayout]] = {
    "PreNorm": _PARTS,
    "Sandwich": replace(_PARTS, output_norm="{parent}.norm_after"),
    "Branch": replace(_PARTS, norm=None, cross_norm=None, output_norm="{parent}.norm"),
    "PostNorm": replace(
        _PARTS,
        norm="{previous}.feed_forward.norm",
        first="embedding.norm",
        cross_norm="{block}.attention.norm",
        source_norm=("{encoder}.norm", "{source}.feed_forward.norm"),
        final=("{stack}.norm", "{last}.feed_forward.norm"),
    ),
}

# Families that have no weights of heads in this sense, and why.
REASONS: Final[dict[str, str]] = {
    "qwen3_next": "what its heads give is gated by the token, so W_OV is no fixed product",
}
