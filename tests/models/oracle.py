"""Multi-head attention written out head by head in plain steps, and the bounds it is held to.

Nothing here uses the package's arithmetic: projections are cut by hand, pairs turn as complex
numbers, keys are shared by counting, weights are exponentials over their sum.

Bounds. u is the unit roundoff. A projection sums d_model products, so queries, keys and values
carry at most d_model · u of the size of their terms (√d_model · u typically, which leaves room for
terms that cancel); the logits then move by (ε + 2 d_model u (1 + reach)) with ε and reach of
``tests.tolerance``, the output of a head by twice that times max |v|, and the output projection
adds its own h·d_v · u and multiplies by the row sums of |W_O|. Two computed forms: twice all that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from headwise.attention.masks import Mask
from headwise.models import Context, Decoder, MultiHeadAttention
from tests.tolerance import UNIT, Tolerance, finite_max

Keep = Callable[[int, int, int], bool]


@dataclass(frozen=True)
class Rule:
    """What a head does, in numbers that the reference reads (not the module's own objects)."""

    heads: int
    kv_heads: int
    scale: float
    keep: Keep = lambda b, i, j: True
    cap: float | None = None
    turning: int = 0  # rotated entries
    base: float = 10000.0
    interleaved: bool = False
    positions: Tensor | None = None  # (batch, position)
    norm: str | None = None  # "head" or "all"
    bias: Tensor | None = None  # head query key


def by_definition(
    module: MultiHeadAttention, x: Tensor, rule: Rule, source: Tensor | None = None
) -> Tensor:
    """Σ_m A^m X W_V^m W_O^m + b: ``batch query d_model``."""
    read = x if source is None else source
    q, k, v = module.query(x), module.key(read), module.value(read)
    if rule.norm == "all":
        q, k = _rms(q, module.query_norm.norm), _rms(k, module.key_norm.norm)  # type: ignore[union-attr]
    d, e = q.shape[-1] // rule.heads, v.shape[-1] // rule.kv_heads
    hidden = _hidden(rule, x.shape[0], x.shape[1], read.shape[1])
    total = torch.zeros(*x.shape[:2], module.output.out_features, dtype=x.dtype)
    for m in range(rule.heads):
        g = m // (rule.heads // rule.kv_heads)
        a, b, c = q[..., m * d : m * d + d], k[..., g * d : g * d + d], v[..., g * e : g * e + e]
        if rule.norm == "head":
            a, b = _rms(a, module.query_norm), _rms(b, module.key_norm)  # type: ignore[arg-type]
        if rule.turning:
            a, b = _turned(a, rule), _turned(b, rule)
        s = rule.scale * (a[:, :, None] * b[:, None]).sum(-1)
        if rule.cap is not None:
            s = rule.cap * torch.tanh(s / rule.cap)
        if rule.bias is not None:
            s = s + rule.bias[m]
        sink = None if module.sinks is None else module.sinks[m]
        w = module.output.weight[:, m * e : m * e + e]  # type: ignore[index]
        total = total + _weights(s, hidden, sink) @ c @ w.T
    bias = module.output.bias
    return total if bias is None else total + bias  # type: ignore[operator]


def _hidden(rule: Rule, batch: int, queries: int, keys: int) -> Tensor:
    shift = keys - queries
    return torch.tensor(
        [
            [[not rule.keep(b, i + shift, j) for j in range(keys)] for i in range(queries)]
            for b in range(batch)
        ]
    )


def _weights(s: Tensor, hidden: Tensor, sink: Tensor | None) -> Tensor:
    e = torch.exp(s - s.detach().amax()).masked_fill(hidden, 0.0)
    total = e.sum(-1, keepdim=True)
    if sink is not None:
        total = total + torch.exp(sink - s.detach().amax())
    empty = total == 0
    return e / total.masked_fill(empty, 1.0)


def _rms(x: Tensor, norm: nn.Module) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + norm.eps).sqrt() * norm.weight  # type: ignore[operator]


def _turned(x: Tensor, rule: Rule) -> Tensor:
    pairs = rule.turning // 2
    positions = torch.arange(x.shape[1])[None] if rule.positions is None else rule.positions
    theta = torch.tensor([rule.base ** (-i / pairs) for i in range(pairs)], dtype=x.dtype)
    angle = positions[..., None] * theta
    turn = torch.polar(torch.ones_like(angle), angle)
    head, rest = x[..., : rule.turning], x[..., rule.turning :]
    if rule.interleaved:
        z = torch.complex(head[..., 0::2], head[..., 1::2]) * turn
        return torch.cat((torch.stack((z.real, z.imag), -1).flatten(-2), rest), -1)
    z = torch.complex(head[..., :pairs], head[..., pairs:]) * turn
    return torch.cat((z.real, z.imag, rest), -1)


def output_bound(module: MultiHeadAttention, x: Tensor, context: Context) -> float:
    """How far two ways of computing a module's output may differ (see above)."""
    call = module.call(x, context)
    bias = call.bias if isinstance(call.bias, Tensor) else None
    t = Tolerance.of(call.q.detach(), call.k.detach(), call.scale, bias, call.sinks)
    u, width, values = UNIT[x.dtype], x.shape[-1], finite_max(call.v)
    weight = module.output.weight.detach()  # type: ignore[union-attr]
    rows = float(weight.abs().sum(-1).max())  # type: ignore[operator]
    head = 2 * values * (t.epsilon + 2 * width * u * (1 + t.reach)) + width * u * values
    return 2 * rows * (head + weight.shape[1] * u * values)  # type: ignore[union-attr,index]


def model_bound(model: nn.Module, result: Tensor) -> float:
    """How far two ways of computing a whole model may differ in its own arithmetic.

    Norms make each block's relative error that of its input plus its own, so relative errors add:
    along a path through a block, sums of d_model (five projections), d_head, keys, heads · d_head
    and d_ff terms, each with at most its length times u. 16 as in ``tests.tolerance``: room for the
    exponentials and for what cancels in the stream.
    """
    a = model.architecture
    path = 0
    for stack in (a.encoder, a.decoder):
        if stack is not None:
            block = 5 * a.d_model + stack.d_head * (1 + stack.heads) + a.context + stack.d_ff
            path += stack.layers * block * (2 if stack.cross else 1)
    assert isinstance(path, int)
    return 16 * UNIT[result.dtype] * (path + a.d_model) * (1 + finite_max(result))


def context_of(
    x: Tensor,
    *,
    positions: Tensor | None = None,
    visible: Mask | None = None,
    bias: Tensor | None = None,
    source: Tensor | None = None,
    source_visible: Mask | None = None,
) -> Context:
    """The context of a pass without a cache."""
    return Context(
        x.shape[0], x.shape[1], 0, x.device, x.dtype, position_ids=positions, visible=visible,
        bias=bias, source=source, source_visible=source_visible,
    )  # fmt: skip


def spread(model: nn.Module, seed: int = 0) -> nn.Module:
    """The model with weights of size 1/√width and gains that differ, in place.

    Fresh weights of 0.02 make logits so small that a wrong mask or position hardly shows.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            noise = torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p.dtype)
            if p.dim() >= 2:
                p.copy_(noise / p.shape[-1] ** 0.5)
            elif "norm" in name:
                p.add_(0.2 * noise)
            else:
                p.copy_(0.5 * noise)
    return model


def decoder_of(model: nn.Module) -> Decoder:
    """The same object, which the type checker knows as a decoder."""
    assert isinstance(model, Decoder)
    return model
