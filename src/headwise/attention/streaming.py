"""Exact attention in tiles: the n×n matrix never exists, forward or backward.

A strip of T query rows meets the keys tile by tile; a ``State`` remembers the running maximum, the
running sum and the weighted values. Memory is O(T · tile) for the tile and O(n) for what is kept
for the backward pass: output, maximum and sum of every row. The backward pass computes the tiles
again (``backward.py``). Query heads that share a key-value head are stacked as rows of one matrix
product, so shared keys are never repeated.

One algorithm serves every mask, bias, softcap and sink, on every device; there is no second path
to a fused kernel.

Rabe and Staats 2021 (arXiv:2112.05682); Dao et al. 2022 (arXiv:2205.14135), algorithms 1 and 4.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from headwise.attention import bias as biases
from headwise.attention.backward import backward
from headwise.attention.bias import BiasFunction
from headwise.attention.heads import group_size
from headwise.attention.masks import Everything, Mask
from headwise.attention.problem import Problem, all_finite, check_shapes, stacked
from headwise.attention.state import LOG2E, State
from headwise.attention.tiles import strips, tiles

__all__ = ["attend", "attend_with_lse"]


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Mask | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    bias: Tensor | BiasFunction | None = None,
    sinks: Tensor | None = None,
    offset: int | None = None,
) -> Tensor:
    """Exact attention in O(n) memory: O_i = Σ_j a_ij v_j with a_i = softmax_j s_ij.

    s_ij = scale · q_i·k_j, then c·tanh(s/c) if ``softcap`` is c, then + bias.

    Shapes: q ``batch head query d_head``, k ``batch kv_head key d_head``,
    v ``batch kv_head key d_value`` -> ``batch head query d_value`` in the dtype of q.

    Args:
        mask: who may attend to whom (None: everybody to everybody).
        scale: factor of the dot products (None: d_head^(-1/2)).
        softcap: c of the tanh cap (None or 0: off).
        bias: a tensor that broadcasts to ``batch head query key`` and receives gradients, or a
            function of tiles (see ``headwise.attention.bias``), which must not be learned.
        sinks: one learned logit per head that only enters the denominator; receives gradients.
        offset: the key position of query row 0 (None: n − m, the last query at the last key).

    Arithmetic is float32, or float64 when q is. A row with no visible key gives 0 and gradients of
    exactly 0. What is hidden may be NaN or infinite without effect; what is visible propagates.
    Gradients are of first order only.

    Raises:
        ShapeError: tensors that do not fit together.
        OptionError: a softcap below 0, or a learned bias function.

    Example:
        >>> from headwise.attention.masks import Causal
        >>> v = torch.tensor([1.0, 3.0]).view(1, 1, 2, 1)
        >>> attend(torch.zeros_like(v), torch.zeros_like(v), v, mask=Causal()).flatten().tolist()
        [1.0, 2.0]
    """
    output, _ = attend_with_lse(
        q, k, v, mask=mask, scale=scale, softcap=softcap, bias=bias, sinks=sinks, offset=offset
    )
    return output


def attend_with_lse(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Mask | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    bias: Tensor | BiasFunction | None = None,
    sinks: Tensor | None = None,
    offset: int | None = None,
) -> tuple[Tensor, Tensor]:
    """``attend`` and L_i = ln Σ_j e^(s_ij), the logarithm of the softmax's denominator.

    L has shape ``batch head query`` in float32 (float64 when q is), natural logarithm, -inf for a
    row with no visible key. A learned sink is part of the denominator, hence of L. Both results
    are differentiable: ∂L_i/∂s_ij = a_ij.

    Example:
        >>> x = torch.zeros(1, 1, 8, 2)
        >>> round(attend_with_lse(x, x, x)[1][0, 0, 0].exp().item(), 4)
        8.0
    """
    check_shapes(q, k, v, mask, softcap, sinks)
    queries, keys = q.shape[2], k.shape[2]
    learned = bias if isinstance(bias, Tensor) else None
    if learned is not None:
        function: BiasFunction | None = biases.as_function(
            learned.detach(), q.shape[0], q.shape[1], queries, keys
        )
    else:
        function = bias  # type: ignore[assignment]
        if function is not None and torch.is_grad_enabled():
            biases.refuse_learned_function(function, q.device)
    problem = Problem(
        mask=Everything() if mask is None else mask,
        scale=1 / math.sqrt(q.shape[-1]) if scale is None else float(scale),
        softcap=float(softcap) if softcap else None,
        bias=function,
        offset=keys - queries if offset is None else offset,
        # A bias makes arrays of its own for every tile; larger ones come from fresh memory each
        # time, which takes twice as long as the whole rest.
        **({} if function is None else {"width": 512}),
    )
    output, lse = _Attend.apply(q, k, v, sinks, learned, problem)
    return output, lse


class _Attend(torch.autograd.Function):
    """Ties the forward and the backward pass together for autograd."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        bias: Tensor | None,
        problem: Problem,
    ) -> tuple[Tensor, Tensor]:
        with torch.autocast(q.device.type, enabled=False):
            output, lse, top, total = forward(q, k, v, sinks, problem)
        ctx.save_for_backward(q, k, v, sinks, bias, output, top, total)
        ctx.problem = problem
        ctx.set_materialize_grads(False)
        return output.to(q.dtype), lse

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, d_output: Tensor | None, d_lse: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        if d_output is None and d_lse is None:
            return (None,) * 6
        saved = ctx.saved_tensors  # asked once: checkpointing gives them out only once
        with torch.autocast(saved[0].device.type, enabled=False):
            gradients = backward(saved, ctx.problem, d_output, d_lse, ctx.needs_input_grad[:5])
        return (*gradients, None)


def forward(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, problem: Problem
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Output, log-sum-exp, and each row's M and Z (``State``), all in the arithmetic's dtype."""
    batch, heads, queries, _ = q.shape
    kv_heads, keys, d_value = v.shape[1:]
    group = group_size(heads, kv_heads)
    dtype = problem.arithmetic(q.dtype)
    k, v = k.to(dtype).contiguous(), v.to(dtype).contiguous()
    finite = None if all_finite(v) else torch.isfinite(v)
    output = q.new_zeros((batch, heads, queries, d_value), dtype=dtype)
    lse = q.new_zeros((batch, heads, queries), dtype=dtype)
    top, total = torch.zeros_like(lse), torch.zeros_like(lse)
    scratch = problem.scratch(lse, group, queries, keys)
    for b in range(batch):
        for rows in strips(queries, problem.strip_rows(group)):
            plan = tiles(problem.mask, b, problem.positions(rows), keys, problem.width, q.device)
            for h in range(kv_heads):
                part = slice(h * group, (h + 1) * group)
                where = (b, part, slice(rows.start, rows.stop))
                queries_2 = stacked(q[where]).to(dtype) * problem.query_factor
                state = State.empty(len(queries_2), d_value, dtype, q.device)
                if sinks is not None:
                    logit = sinks[part].to(dtype).repeat_interleave(len(rows))[:, None] * LOG2E
                    state = State.sink(logit, d_value)
                for tile in plan:
                    key = slice(tile.start, tile.stop)
                    s, _ = problem.logits(queries_2, k[b, h, key], b, part, rows, tile, scratch)
                    ok = None if finite is None else finite[b, h, key]
                    state = state.absorb(s, v[b, h, key], ok, problem.flush)
                rows_output, rows_lse = state.finish()
                output[where] = rows_output.view(group, len(rows), d_value)
                for whole, x in ((lse, rows_lse), (top, state.top), (total, state.total)):
                    whole[where] = x.view(group, len(rows))
    return output, lse, top, total
