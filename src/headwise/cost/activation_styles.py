"""How the blocks of a family are computed, as far as it decides what the backward pass keeps."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from headwise.cost.parts import Component, Layer, Parts
from headwise.errors import OptionError

__all__ = ["ACTIVATIONS", "CONVENTIONS", "EXACT", "KNOWN_ACTIVATIONS", "Style", "style_of"]

CONVENTIONS: Final = ("transformers", "headwise", "megatron")

# Word of an activation f -> tensors of width d_ff that its backward formula keeps besides f(x),
# which the next product keeps: x, or nothing where f(x) says enough, or the pieces of a composed f.
ACTIVATIONS: Final[dict[str, tuple[str, ...]]] = {
    "relu": (),
    "relu2": ("relu",),
    "silu": ("x",),
    "gelu": ("x",),
    "gelu_tanh": ("x",),
    "gelu_new": ("x", "x / 2", "tanh", "1 + tanh"),
    "quick_gelu": ("x", "sigmoid"),
    "clamped_swish": ("x", "clamped x", "sigmoid", "clamped factor"),  # gpt-oss
}
_FUSED: Final = {"gelu_new": "gelu_tanh", "clamped_swish": "silu"}  # as Headwise computes them
_SAME: Final = {"gelu_pytorch_tanh": "gelu_tanh", "swish": "silu"}
KNOWN_ACTIVATIONS: Final = (*ACTIVATIONS, *_SAME)


@dataclass(frozen=True, slots=True, kw_only=True)
class Style:
    """What a block keeps beyond the inputs of its products.

    Attributes:
        norm: "layer" (one kernel: its input, mean and deviation), "rms" (composed: its input in
            float32, the normalised vector, 1/√mean), "rms32" (the gain multiplies in float32), or
            "rms+1" (and is made anew from what is stored).
        wide_softmax: in 16 bits, the weights are kept in float32 and once more as they are used.
        softcap: scores pass a tanh.
        repeats: materialised, shared keys and values are repeated for every query head.
        one_product: queries, keys and values are views of one product.
        fused_values: values are used as that view, queries and keys are turned first.
        copies_output: fused, W_O reads a copy of the output, whose heads lie apart in memory.
        residual_dropout: dropout on what a sublayer writes and on the embedding.
        output_dropout: it is there for attention too, not for the feed-forward alone.
        parallel: both sublayers read the same stream.
        positions: what is kept of positions: "table" (ids, once), "each" (ids of every sequence),
            "rotary" (cosines and sines) or "none".
        segments: whether ids of segments are kept.
        wide_loss: log-probabilities are float32 whatever the model is.
    """

    norm: str = "layer"
    activation: str = "gelu"
    wide_softmax: bool = True
    softcap: bool = False
    repeats: bool = True
    one_product: bool = False
    fused_values: bool = False
    copies_output: bool = False
    residual_dropout: bool = False
    output_dropout: bool = True
    parallel: bool = False
    positions: str = "table"
    segments: bool = False
    wide_loss: bool = True
    exact: bool = False


_LLAMA: Final = Style(norm="rms", activation="silu", positions="rotary", exact=True)
_BERT: Final = Style(
    wide_softmax=False, residual_dropout=True, segments=True, wide_loss=False, exact=True
)
_ROBERTA: Final = replace(_BERT, positions="each")
_BART: Final = replace(_BERT, segments=False, positions="none")
_CLIP: Final = Style(activation="quick_gelu", positions="none", exact=True)
_STYLES: Final[dict[str, Style]] = {
    **dict.fromkeys(
        ("llama", "mistral", "ministral", "qwen2", "qwen3", "granite", "smollm3", "seed_oss"),
        _LLAMA,
    ),
    "arcee": replace(_LLAMA, activation="relu2"),
    "olmo2": replace(_LLAMA, norm="rms32"),
    "gemma": replace(_LLAMA, norm="rms+1", activation="gelu_tanh"),
    "gemma3_text": replace(_LLAMA, norm="rms+1", activation="gelu_tanh"),
    "phi3": replace(
        _LLAMA, one_product=True, fused_values=True, copies_output=True, residual_dropout=True,
    ),
    "phi": replace(
        _LLAMA, norm="layer", activation="gelu_new", parallel=True, copies_output=True,
        residual_dropout=True,
    ),
    "starcoder2": replace(
        _LLAMA, norm="layer", activation="gelu_tanh", residual_dropout=True,
    ),
    "stablelm": replace(_LLAMA, norm="layer", copies_output=True),
    "gpt2": Style(
        activation="gelu_new", wide_softmax=False, one_product=True, residual_dropout=True,
        exact=True,
    ),
    "gpt_neox": Style(
        one_product=True, fused_values=True, copies_output=True, residual_dropout=True,
        parallel=True, positions="rotary", exact=True,
    ),
    "opt": Style(activation="relu", residual_dropout=True, positions="each", exact=True),
    "bert": _BERT,
    "roberta": _ROBERTA,
    "electra": _BERT,
    "distilbert": replace(_BERT, segments=False, positions="none", output_dropout=False),
    **dict.fromkeys(("bart", "mbart", "marian", "pegasus"), _BART),
    "whisper": replace(_BART, copies_output=True),
    "vit": Style(positions="none", residual_dropout=True, exact=True),
    "clip_text_model": _CLIP,
}  # fmt: skip
_LIKE: Final[dict[str, Style]] = {
    **dict.fromkeys(("xlm-roberta", "camembert"), _ROBERTA),
    "gemma2": replace(_STYLES["gemma"], softcap=True),
    "olmo3": _STYLES["olmo2"],
    "gpt_oss": replace(_LLAMA, activation="clamped_swish"),
    "nemotron": replace(_LLAMA, norm="layer", activation="relu2", copies_output=True),
    "gptj": replace(_LLAMA, norm="layer", activation="gelu_new", parallel=True),
    **dict.fromkeys(("clip", "clip_vision_model"), _CLIP),
    "t5": replace(_LLAMA, activation="relu", positions="none", residual_dropout=True),
}
EXACT: Final = tuple(_STYLES)  # families of transformers whose blocks come out to the byte


def style_of(parts: Parts, convention: str, activation: str | None, *, stack: int = 0) -> Style:
    """How a stack of a model is computed under a convention.

    A family that is not among ``EXACT`` follows the nearest one, and its style is not exact.

    Raises:
        OptionError: an unknown convention or activation.

    Example:
        >>> from headwise.cost.explicit import explicit
        >>> parts = explicit(d_model=64, layers=2, heads=4, vocab=257, gated=True)
        >>> style_of(parts, "transformers", None).activation
        'silu'
    """
    if convention not in CONVENTIONS:
        raise OptionError(f"the convention {convention!r}", allowed=", ".join(CONVENTIONS))
    layer = parts.stacks[stack].layers[0]
    found = _STYLES.get(parts.family)
    if found is None:
        near = _LIKE.get(parts.family) or _nearest(layer, parts.stacks[stack].d_model)
        found = replace(near, exact=False)
    if convention == "headwise":
        found = _own(found, layer, parts.stacks[stack].d_model)
    if activation is None:
        return found
    word = _SAME.get(activation, activation)
    if word not in ACTIVATIONS:
        raise OptionError(f"the activation {activation!r}", allowed=", ".join(KNOWN_ACTIVATIONS))
    own = convention == "headwise" and not found.parallel
    return replace(found, activation=word, exact=found.exact or own)


def _nearest(layer: Layer, d: int) -> Style:
    """Llama's make, or GPT-2's with LayerNorms, by what the blocks have learned."""
    gated = any(matrix.name == "W_gate" for matrix in layer.matrices)
    activation = "silu" if gated else "gelu"
    if _norm_biases(layer, d):
        return Style(activation=activation)
    return replace(_LLAMA, activation=activation)


def _norm_biases(layer: Layer, d: int) -> bool:
    return any(v.component is Component.NORMS and v.size == 2 * d for v in layer.vectors)


def _own(style: Style, layer: Layer, d: int) -> Style:
    """Headwise's models: one form of everything, whatever family the sizes come from."""
    gain = "rms+1" if style.norm == "rms+1" else "rms"
    gated = any(matrix.name == "W_gate" for matrix in layer.matrices)
    return replace(
        style,
        norm="layer" if _norm_biases(layer, d) else gain,
        activation=_FUSED.get(style.activation, style.activation),
        softcap=False,
        repeats=False,
        one_product=False,
        fused_values=False,
        copies_output=_normed_alone(layer),
        positions="table" if style.positions == "each" else style.positions,
        residual_dropout=True,
        output_dropout=True,
        wide_loss=True,
        exact=style.exact or (gated and not style.parallel),
    )


def _normed_alone(layer: Layer) -> bool:
    """Whether each head's queries are normed by themselves, which lays the heads apart."""
    width = layer.attentions[0].d_qk if layer.attentions else 0
    return any(v.name == "query norm" and v.size in (width, 2 * width) for v in layer.vectors)
