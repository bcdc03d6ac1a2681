"""Published sizes by name, each with its source, and builders that take sizes.

``preset("gpt2-small")`` is an ``Architecture``; ``decoder_sizes(vocab=…, d_model=…)`` makes that of
a modern decoder of any size (RMSNorm before each sublayer, rotary positions, SwiGLU).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

from headwise.errors import ModelError
from headwise.models.architecture import (
    Architecture,
    Embedding,
    Rotary,
    Stack,
    Unembedding,
    head_width,
)

__all__ = ["PRESETS", "decoder_sizes", "encoder_sizes", "preset", "transformer_sizes"]


def decoder_sizes(
    *,
    vocab: int,
    d_model: int,
    layers: int,
    heads: int,
    d_ff: int,
    context: int,
    kv_heads: int | None = None,
    d_head: int | None = None,
    base: float = 10000.0,
    tied: bool = True,
    **others: Any,
) -> Architecture:
    """A Llama-style decoder: RMSNorm, rotary positions, SwiGLU, no biases.

    ``others`` are fields of ``Stack``. Touvron et al. 2023 (arXiv:2302.13971), section 2.2.

    Example:
        >>> a = decoder_sizes(vocab=257, d_model=32, layers=2, heads=4, d_ff=96, context=64)
        >>> a.stack.d_head
        8
    """
    width = head_width(d_model, heads) if d_head is None else d_head
    settings: dict[str, Any] = {"rotary": Rotary(width=width, base=base), **others}
    stack = _stack(
        layers=layers, heads=heads, kv_heads=kv_heads, d_head=width, d_ff=d_ff, **settings
    )
    return Architecture.checked(
        vocab=vocab, d_model=d_model, context=context, decoder=stack,
        unembedding=Unembedding(tied=tied),
    )  # fmt: skip


def encoder_sizes(
    *,
    vocab: int,
    d_model: int,
    layers: int,
    heads: int,
    d_ff: int,
    context: int,
    segments: int = 2,
    **others: Any,
) -> Architecture:
    """A BERT-style encoder: LayerNorm after each sublayer, learned positions, GELU, biases.

    Devlin et al. 2019 (arXiv:1810.04805), section 3.
    """
    settings: dict[str, Any] = {
        "norm": "layer", "norm_eps": 1e-12, "placement": "post", "final_norm": False,
        "activation": "gelu", "gated": False, "qkv_bias": True, "output_bias": True,
        "feed_forward_bias": True, "causal": False, **others,
    }  # fmt: skip
    stack = _stack(
        layers=layers, heads=heads, d_head=head_width(d_model, heads), d_ff=d_ff, **settings
    )
    return Architecture.checked(
        vocab=vocab, d_model=d_model, context=context, encoder=stack,
        embedding=Embedding(positions="learned", segments=segments, norm=True),
        unembedding=Unembedding(bias=True, transform=True),
    )  # fmt: skip


def transformer_sizes(
    *,
    vocab: int,
    d_model: int,
    layers: int,
    heads: int,
    d_ff: int,
    context: int,
    **others: Any,
) -> Architecture:
    """The original encoder–decoder: LayerNorm after each sublayer, sinusoids, ReLU.

    Vaswani et al. 2017 (arXiv:1706.03762), section 3.
    """
    settings: dict[str, Any] = {
        "norm": "layer", "norm_eps": 1e-5, "placement": "post", "final_norm": False,
        "activation": "relu", "gated": False, "qkv_bias": True, "output_bias": True,
        "feed_forward_bias": True, **others,
    }  # fmt: skip
    sizes = {"layers": layers, "heads": heads, "d_head": head_width(d_model, heads), "d_ff": d_ff}
    return Architecture.checked(
        vocab=vocab, d_model=d_model, context=context,
        encoder=_stack(**sizes, causal=False, **settings),
        decoder=_stack(**sizes, cross=True, **settings),
        embedding=Embedding(positions="sinusoidal", scale=math.sqrt(d_model)),
    )  # fmt: skip


def preset(name: str) -> Architecture:
    """The architecture of a published model, by name.

    Example:
        >>> preset("gpt2-small").stack.heads
        12
    """
    if name not in PRESETS:
        raise ModelError(
            f"no preset is called {name!r}",
            allowed=", ".join(PRESETS),
            to_do="or give sizes: decoder_sizes(vocab=…, d_model=…, …)",
        )
    return PRESETS[name]()


def _gpt2(d_model: int, layers: int, heads: int) -> Architecture:
    """Radford et al. 2019 (GPT-2), table 2 and the released configurations."""
    stack = _stack(
        layers=layers, heads=heads, d_head=head_width(d_model, heads), d_ff=4 * d_model,
        norm="layer", norm_eps=1e-5, activation="gelu_tanh", gated=False,
        qkv_bias=True, output_bias=True, feed_forward_bias=True,
    )  # fmt: skip
    return Architecture.checked(
        family="gpt2", vocab=50257, d_model=d_model, context=1024, decoder=stack,
        embedding=Embedding(positions="learned"),
    )  # fmt: skip


def _smollm2_135m() -> Architecture:
    """Allal et al. 2025 (arXiv:2502.02737), and the released configuration of the 135M model."""
    return decoder_sizes(
        vocab=49152, d_model=576, layers=30, heads=9, kv_heads=3, d_ff=1536, context=8192,
        base=100000.0, norm_eps=1e-5,
    )  # fmt: skip


def _llama_15m() -> Architecture:
    """The 15M model trained on TinyStories with the Llama 2 architecture (Karpathy 2023)."""
    return decoder_sizes(
        vocab=32000, d_model=288, layers=6, heads=6, d_ff=768, context=256, norm_eps=1e-5
    )


def _tiny() -> Architecture:
    """For examples and tests."""
    return decoder_sizes(vocab=257, d_model=32, layers=2, heads=4, kv_heads=2, d_ff=96, context=64)


# The original Transformer: Vaswani et al. 2017, table 3 (a joint vocabulary of about 37,000, and
# sentences of any length; 1,024 positions are named here as the context). BERT base: Devlin et al.
# 2019, section 3.
PRESETS: Final[dict[str, Callable[[], Architecture]]] = {
    "transformer-base": lambda: transformer_sizes(
        vocab=37000, d_model=512, layers=6, heads=8, d_ff=2048, context=1024, dropout=0.1
    ),
    "transformer-big": lambda: transformer_sizes(
        vocab=37000, d_model=1024, layers=6, heads=16, d_ff=4096, context=1024, dropout=0.3
    ),
    "gpt2-small": lambda: _gpt2(768, 12, 12),
    "gpt2-medium": lambda: _gpt2(1024, 24, 16),
    "gpt2-large": lambda: _gpt2(1280, 36, 20),
    "gpt2-xl": lambda: _gpt2(1600, 48, 25),
    "bert-base": lambda: encoder_sizes(
        vocab=30522, d_model=768, layers=12, heads=12, d_ff=3072, context=512, dropout=0.1,
        attention_dropout=0.1,
    ),
    "llama-15m": _llama_15m,
    "smollm2-135m": _smollm2_135m,
    "tiny": _tiny,
    "tiny-encoder": lambda: encoder_sizes(
        vocab=257, d_model=32, layers=2, heads=4, d_ff=96, context=64
    ),
    "tiny-encoder-decoder": lambda: transformer_sizes(
        vocab=257, d_model=32, layers=2, heads=4, d_ff=96, context=64
    ),
}  # fmt: skip


def _stack(*, heads: int, kv_heads: int | None = None, **settings: Any) -> Stack:
    return Stack.checked(heads=heads, kv_heads=heads if kv_heads is None else kv_heads, **settings)
