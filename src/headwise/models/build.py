"""From an ``Architecture`` to a model: every word becomes a part, once, here.

Weights start as normal numbers of variance 1/(3 · width they read), that of torch's linear layers;
at GPT-2's widths this is its 0.02². Projections that write into the residual stream have it divided
by the number of writes of their stack, so that the stream's variance does not grow with depth
(Radford et al. 2019, GPT-2, section 2.3). Tables of an embedding that does not also give the logits
start with variance 1. Biases start at 0, gains at the identity.
"""

from __future__ import annotations

import math
from collections import Counter

import torch
from torch import nn

from headwise.attention.masks import Causal, Everything, Mask, Window
from headwise.errors import OptionError
from headwise.models.architecture import Architecture, Stack
from headwise.models.attention import MultiHeadAttention
from headwise.models.block import Block, Branch, ParallelBlock, PostNorm, PreNorm, Sandwich
from headwise.models.decoder import Decoder
from headwise.models.embedding import (
    Pooler,
    SinusoidalPositions,
    TokenEmbedding,
    Transform,
    Unembedding,
)
from headwise.models.encoder import Encoder
from headwise.models.feed_forward import ACTIVATIONS, MLP, GatedMLP
from headwise.models.joined import join
from headwise.models.norms import AcrossHeads, LayerNorm, OffsetRMSNorm, RMSNorm
from headwise.models.relative import AlibiBias, RelativeBias
from headwise.models.seq2seq import EncoderDecoder
from headwise.models.stack import BlockStack
from headwise.positions import LearnedPositions

__all__ = ["Model", "build", "skeleton"]

Model = Decoder | Encoder | EncoderDecoder


def build(
    architecture: Architecture,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> Model:
    """A model with fresh weights; the same seed gives the same weights on every device.

    Example:
        >>> from headwise.models import preset
        >>> model = build(preset("tiny"), seed=7)
        >>> sum(p.numel() for p in model.parameters())
        32960
    """
    if not dtype.is_floating_point:
        raise OptionError(
            f"weights of type {dtype}",
            allowed="float32, float64, bfloat16 or float16",
            to_do="give dtype=torch.float32",
        )
    model = skeleton(architecture).to_empty(device="cpu")
    _initialise(model, torch.Generator().manual_seed(seed))
    return join(model.to(device=device, dtype=dtype))


def skeleton(architecture: Architecture) -> Model:
    """The model without memory for its weights (on the ``meta`` device), to be filled."""
    with torch.device("meta"):
        return _assembled(architecture)


def _assembled(a: Architecture) -> Model:
    embedding = _embedding(a)
    if a.decoder is None:
        assert a.encoder is not None
        return Encoder(
            a,
            embedding,
            _stack(a, a.encoder),
            _unembedding(a, a.encoder),
            Pooler(nn.Linear(a.d_model, a.d_model)) if a.pooler else None,
            nn.Linear(a.d_model, a.classes) if a.classes else None,
        )
    unembedding = _unembedding(a, a.decoder)
    assert unembedding is not None  # the architecture of a decoder has one
    if a.encoder is None:
        return Decoder(a, embedding, _stack(a, a.decoder), unembedding)
    return EncoderDecoder(a, embedding, _stack(a, a.encoder), _stack(a, a.decoder), unembedding)


def _embedding(a: Architecture) -> TokenEmbedding:
    spec, stack = a.embedding, a.encoder or a.stack
    positions: nn.Module | None = None
    if spec.positions == "learned":
        positions = LearnedPositions(a.context, a.d_model)
    elif spec.positions == "sinusoidal":
        positions = SinusoidalPositions(a.d_model, spec.layout)
    return TokenEmbedding(
        nn.Embedding(a.vocab, a.d_model),
        positions,
        nn.Embedding(spec.segments, a.d_model) if spec.segments else None,
        scale=spec.scale,
        norm=_norm(stack, a.d_model) if spec.norm else None,
        dropout=stack.dropout,
    )


def _unembedding(a: Architecture, stack: Stack) -> Unembedding | None:
    spec = a.unembedding
    if spec is None:
        return None
    transform = None
    if spec.transform:
        activation = _Activation(stack.activation)
        dense = nn.Linear(a.d_model, a.d_model)
        transform = Transform(dense, activation, _norm(stack, a.d_model))
    return Unembedding(
        None if spec.tied else nn.Parameter(torch.empty(a.vocab, a.d_model)),
        bias=nn.Parameter(torch.empty(a.vocab)) if spec.bias else None,
        scale=spec.scale,
        softcap=spec.softcap,
        transform=transform,
    )


class _Activation(nn.Module):
    """An activation by its word, as a module."""

    def __init__(self, word: str) -> None:
        super().__init__()
        self.word = word

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ACTIVATIONS[self.word](x)


def _stack(a: Architecture, stack: Stack) -> BlockStack:
    bias: nn.Module | None = None
    if stack.relative is not None:
        bias = RelativeBias(
            stack.relative.buckets,
            stack.heads,
            max_distance=stack.relative.max_distance,
            bidirectional=not stack.causal,
        )
    elif stack.alibi:
        bias = AlibiBias(stack.heads)
    norm = _norm(stack, a.d_model) if stack.final_norm else None
    blocks = [_block(a.d_model, stack, layer) for layer in range(stack.layers)]
    return BlockStack(blocks, norm, bias)


def _block(d_model: int, stack: Stack, layer: int) -> nn.Module:
    attention = _placed(d_model, stack, _attention(d_model, stack, layer))
    feed_forward = _placed(d_model, stack, _feed_forward(d_model, stack))
    if isinstance(attention, PreNorm) and stack.placement == "parallel":
        assert isinstance(feed_forward, PreNorm)
        return ParallelBlock(attention, feed_forward)
    cross = None
    if stack.cross:
        cross = _placed(d_model, stack, _attention(d_model, stack, layer, cross=True))
    return Block(attention, feed_forward, cross)


def _placed(d_model: int, stack: Stack, branch: nn.Module) -> nn.Module:
    norm = _norm(stack, d_model)
    match stack.placement:
        case "pre" | "parallel":
            return PreNorm(norm, branch, stack.dropout)
        case "post":
            return PostNorm(norm, branch, stack.dropout)
        case "sandwich":
            return Sandwich(norm, branch, _norm(stack, d_model), stack.dropout)
        case "branch":
            return Branch(norm, branch, stack.dropout)


def _attention(
    d_model: int, stack: Stack, layer: int, *, cross: bool = False
) -> MultiHeadAttention:
    queries, keys = stack.heads * stack.d_head, stack.kv_heads * stack.d_head
    return MultiHeadAttention(
        nn.Linear(d_model, queries, bias=stack.qkv_bias),
        nn.Linear(d_model, keys, bias=stack.qkv_bias),
        nn.Linear(d_model, keys, bias=stack.qkv_bias),
        nn.Linear(queries, d_model, bias=stack.output_bias),
        heads=stack.heads,
        kv_heads=stack.kv_heads,
        mask=Everything() if cross else _mask(stack, layer),
        rotary=None if cross else stack.rotary,
        query_norm=_head_norm(stack, stack.heads),
        key_norm=_head_norm(stack, stack.kv_heads),
        scale=stack.scale(layer),
        softcap=stack.softcap,
        sinks=stack.sinks and not cross,
        dropout=stack.attention_dropout,
        cross=cross,
    )


def _mask(stack: Stack, layer: int) -> Mask:
    if not stack.causal:
        return Everything()
    window = stack.window(layer)
    return Causal() if window is None else Window(window)


def _head_norm(stack: Stack, heads: int) -> nn.Module | None:
    if stack.qk_norm is None:
        return None
    if stack.qk_norm == "head":
        return _norm(stack, stack.d_head)
    return AcrossHeads(_norm(stack, heads * stack.d_head))


def _feed_forward(d_model: int, stack: Stack) -> nn.Module:
    bias, activation = stack.feed_forward_bias, ACTIVATIONS[stack.activation]
    up, down = nn.Linear(d_model, stack.d_ff, bias), nn.Linear(stack.d_ff, d_model, bias)
    if not stack.gated:
        return MLP(up, down, activation)
    return GatedMLP(nn.Linear(d_model, stack.d_ff, bias), up, down, activation)


def _norm(stack: Stack, width: int) -> nn.Module:
    match stack.norm:
        case "layer":
            return LayerNorm(width, eps=stack.norm_eps)
        case "rms":
            return RMSNorm(width, eps=stack.norm_eps)
        case "rms+1":
            return OffsetRMSNorm(width, eps=stack.norm_eps)


@torch.no_grad()
def _initialise(model: Model, generator: torch.Generator) -> None:
    writers = [name for name, _ in model.named_modules() if name.endswith((".output", ".down"))]
    writes = Counter(name.partition(".")[0] for name in writers)  # of each stack
    unembedding = model.architecture.unembedding
    read_only = unembedding is None or not unembedding.tied
    for name, parameter in model.named_parameters():
        if parameter.dim() < 2:
            parameter.zero_()
            continue
        std = 1 / math.sqrt(3 * parameter.shape[-1])
        if name.startswith("embedding.") and read_only:
            std = 1.0
        elif name.endswith((".output.weight", ".down.weight")):
            std /= math.sqrt(writes[name.partition(".")[0]])
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)
    for module in model.modules():
        if isinstance(module, LayerNorm | RMSNorm):
            nn.init.ones_(module.weight)
