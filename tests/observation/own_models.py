"""Small models of Headwise's own with everything an attention can have, and how they are read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from headwise.models import Architecture, Model, build, decoder_sizes, encoder_sizes
from headwise.models.architecture import Relative
from headwise.models.attention import MultiHeadAttention
from headwise.models.presets import transformer_sizes
from headwise.observation.attach import observe
from headwise.observation.scan import Scan

__all__ = ["KINDS", "VOCABULARY", "definitions", "ids", "own", "shaken", "watched"]

VOCABULARY = 131
CONTEXT = 127
_SIZES: dict[str, Any] = {
    "vocab": VOCABULARY, "d_model": 24, "layers": 3, "heads": 4, "d_ff": 31, "context": CONTEXT
}  # fmt: skip

KINDS: dict[str, Callable[[], Architecture]] = {
    "grouped": lambda: decoder_sizes(**_SIZES, kv_heads=2),
    "window": lambda: decoder_sizes(**_SIZES, windows=(7, None, 11)),
    "softcap": lambda: decoder_sizes(**_SIZES, softcap=1.7, scales=(0.9,)),
    "sinks": lambda: decoder_sizes(**_SIZES, kv_heads=1, sinks=True),
    "alibi": lambda: decoder_sizes(**_SIZES, rotary=None, alibi=True),
    "relative": lambda: decoder_sizes(
        **_SIZES, rotary=None, relative=Relative(buckets=8, max_distance=19), scales=(1.0,)
    ),
    "qk_norm": lambda: decoder_sizes(**_SIZES, qk_norm="head", qkv_bias=True, output_bias=True),
    "sandwich": lambda: decoder_sizes(**_SIZES, placement="sandwich", norm="rms+1"),
    "branch": lambda: decoder_sizes(**_SIZES, placement="branch", qk_norm="all"),
    "parallel": lambda: decoder_sizes(**_SIZES, placement="parallel", norm="layer"),
    "encoder": lambda: encoder_sizes(**_SIZES),
    "encoder-decoder": lambda: transformer_sizes(**_SIZES),
}


def own(kind: str) -> Model:
    """The model in float64 and evaluation mode, its weights far enough from 0 to matter."""
    return shaken(build(KINDS[kind](), dtype=torch.float64).eval())


def shaken(model: Model) -> Model:
    """Weights of order one, biases, gains and sinks too, so that heads differ."""
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.add_(0.3 * noise.to(parameter.dtype))
    return model


def ids(*lengths: int) -> list[Tensor]:
    """Rows of token ids ``1 position``, no token twice: equal keys would make the top key a tie."""
    generator = torch.Generator().manual_seed(5)
    return [torch.randperm(VOCABULARY - 1, generator=generator)[None, :n] + 1 for n in lengths]


def watched(model: nn.Module, *runs: Callable[[], Any], **options: Any) -> Scan:
    """The scan of several forward passes."""
    with observe(model, **options) as scan, torch.no_grad():
        for run in runs:
            run()
    return scan


def definitions(model: nn.Module, run: Callable[[], Any]) -> list[Tensor]:
    """The attention matrices of one pass by ``MultiHeadAttention.weights``, in order of calls."""
    found: list[Tensor] = []

    def hook(module: MultiHeadAttention, args: tuple[Any, ...], _: Any) -> None:
        found.append(module.weights(args[0], args[1]))

    handles = [
        part.register_forward_hook(hook)
        for part in model.modules()
        if isinstance(part, MultiHeadAttention)
    ]
    with torch.no_grad():
        run()
    for handle in handles:
        handle.remove()
    return found
