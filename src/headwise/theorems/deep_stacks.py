"""Deep stacks at initialisation: the gradient of the last layer, and how large the stream becomes.

The setting of Xiong et al. 2020 (arXiv:2002.04745), section 3: Xavier weights, LayerNorm with gain
1, a feed-forward layer as wide as the stream with ReLU, no biases; the loss is that of one token
at each position. Attention is the real one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from headwise.models import Decoder, build
from headwise.models.presets import decoder_sizes

__all__ = ["Drawn", "Setting", "draw", "stack"]

_VOCAB: Final = 257
Writes = Literal["xavier", "scaled"]


@dataclass(frozen=True, slots=True)
class Setting:
    """Sizes, where the norm stands, and how projections that write into the stream start.

    ``writes``: "xavier", or "scaled" by 1/√(2 layers) as in GPT-2.
    """

    placement: str
    layers: int
    d_model: int = 128
    heads: int = 4
    tokens: int = 31
    writes: Writes = "xavier"


@dataclass(frozen=True, slots=True)
class Drawn:
    """One draw: ``last`` is the Frobenius norm of ∂loss/∂W_2 of the last layer.

    ``gradients``: of every layer, if they were asked for. ``sizes``: mean over tokens of
    |x_l|²/d after layer l = 1 … L.
    """

    last: float
    sizes: tuple[float, ...]
    gradients: tuple[float, ...] = field(default=())


def stack(setting: Setting) -> Decoder:
    """The model of a setting; its weights are drawn by ``draw``."""
    pre = setting.placement == "pre"
    model = build(
        decoder_sizes(
            vocab=_VOCAB, d_model=setting.d_model, layers=setting.layers, heads=setting.heads,
            d_ff=setting.d_model, context=setting.tokens, tied=False, norm="layer", norm_eps=1e-5,
            placement=setting.placement, final_norm=pre, activation="relu", gated=False,
        )
    )  # fmt: skip
    assert isinstance(model, Decoder)
    return model.requires_grad_(False)


def draw(model: Decoder, setting: Setting, seed: int, *, every: bool = False) -> Drawn:
    """Fresh weights, a random text, and one backward pass, to the last layer or through all."""
    generator = torch.Generator().manual_seed(seed)
    _xavier(model, setting, generator)
    ids, wanted = torch.randint(_VOCAB, (2, 1, setting.tokens), generator=generator)
    sizes: list[float] = []

    def keep(module: object, args: object, output: Tensor) -> None:
        sizes.append(float(output.detach().square().sum(-1).mean()) / setting.d_model)

    blocks: list[Any] = [*model.decoder.blocks]
    chosen = blocks if every else blocks[-1:]
    weights: list[Tensor] = [block.feed_forward.branch.down.weight for block in chosen]
    hooks = [block.register_forward_hook(keep) for block in blocks]
    try:
        for weight in weights:
            weight.requires_grad_(True)
        loss = cross_entropy(model(ids)[0], wanted[0])
        norms = [float(g.norm()) for g in torch.autograd.grad(loss, weights)]
    finally:
        for hook in hooks:
            hook.remove()
        for weight in weights:
            weight.requires_grad_(False)
    return Drawn(norms[-1], tuple(sizes), tuple(norms) if every else ())


@torch.no_grad()
def _xavier(model: Decoder, setting: Setting, generator: torch.Generator) -> None:
    """Normal numbers of variance 2 / (inputs + outputs); embeddings of variance 1."""
    for name, weight in model.named_parameters():
        if weight.dim() < 2:
            continue
        std = math.sqrt(2 / sum(weight.shape))
        if name.startswith("embedding."):
            std = 1.0
        elif setting.writes == "scaled" and name.endswith((".output.weight", ".down.weight")):
            std /= math.sqrt(2 * setting.layers)
        weight.copy_(torch.randn(weight.shape, generator=generator) * std)
