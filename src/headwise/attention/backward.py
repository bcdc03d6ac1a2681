"""The gradient of streaming attention, tile by tile, from each row's maximum M and sum Z.

With A = e^(S − M)/Z recomputed per tile, upstream gradients dO and dL (of the log-sum-exp):

    dV = Aᵀ dO        dA = dO Vᵀ        D_i = dO_i·O_i − dL_i        dS = A ∘ (dA − D)
    dQ = scale · dS K        dK = scale · dSᵀ Q        dbias = dS        dsink = −Σ_i a_i,sink D_i

and dS is multiplied by 1 − tanh²(s/c) before it reaches Q and K when logits are capped. 1/Z is
folded into dO and D once per row, so tiles work with E = e^(S − M) and save a pass.

Dao et al. 2022 (arXiv:2205.14135), algorithm 4 and appendix B.2.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headwise.attention.bias import add_to_gradient, four_axes
from headwise.attention.heads import group_size
from headwise.attention.problem import Problem, all_finite, product, stacked
from headwise.attention.state import LOG2E, negligible, weights_
from headwise.attention.tiles import Tile, hide, strips, tiles

__all__ = ["backward"]


@dataclass(frozen=True)
class _Inputs:
    """The tensors of the call in the arithmetic's dtype.

    ``*_clean`` have non-finite entries replaced by 0: what they must poison is poisoned through
    the logits and the output already, and 0 · NaN must not reach a pair that is hidden.
    """

    q: Tensor
    k: Tensor
    q_clean: Tensor
    k_clean: Tensor
    v_clean: Tensor
    tainted: bool


@dataclass(frozen=True)
class _Gradients:
    """What is accumulated; None where nobody asked."""

    q: Tensor | None
    k: Tensor | None
    v: Tensor | None
    sinks: Tensor | None
    bias: Tensor | None


@dataclass(frozen=True)
class _Rows:
    """One strip of one kv head: stacked rows ``(head query) …`` and where they come from."""

    batch: int
    kv_head: int
    heads: slice
    rows: range
    q: Tensor
    q_clean: Tensor
    d_output: Tensor
    delta: Tensor
    origin: Tensor

    @property
    def where(self) -> tuple[int, slice, slice]:
        return self.batch, self.heads, slice(self.rows.start, self.rows.stop)


def backward(
    saved: tuple[Tensor, ...],
    problem: Problem,
    d_output: Tensor | None,
    d_lse: Tensor | None,
    wanted: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    """The gradients of q, k, v, sinks and bias (None where ``wanted`` is False).

    ``saved`` is (q, k, v, sinks, bias, output, M, Z) of the forward pass.
    """
    q, k, v, sinks, bias, output, top, total = saved
    inputs = _inputs(q, k, v, problem)
    grads = _zeros(inputs, sinks, bias, q.shape, k.shape[2], wanted)
    d_output, delta = _upstream(output, total, d_output, d_lse)
    if grads.sinks is not None and sinks is not None:
        # delta carries 1/Z already: a_sink · D = e^(sink − M) · D/Z.
        share = torch.exp2(sinks.to(delta.dtype)[:, None] * LOG2E - top)
        grads.sinks.sub_((share * delta).sum((0, 2)))
    origin = top.masked_fill(top == -math.inf, 0.0)
    group = group_size(q.shape[1], k.shape[1])
    scratch = [problem.scratch(delta, group, q.shape[2], k.shape[2]) for _ in range(2)]
    for b in range(q.shape[0]):
        for rows in strips(q.shape[2], problem.strip_rows(group)):
            plan = tiles(
                problem.mask, b, problem.positions(rows), k.shape[2], problem.width, q.device
            )
            for h in range(k.shape[1]):
                heads = slice(h * group, (h + 1) * group)
                at = (b, heads, slice(rows.start, rows.stop))
                strip = _Rows(
                    b,
                    h,
                    heads,
                    rows,
                    stacked(inputs.q[at]) * problem.query_factor,
                    stacked(inputs.q_clean[at]) * problem.scale,
                    stacked(d_output[at]),
                    delta[at].reshape(-1, 1),
                    origin[at].reshape(-1, 1),
                )
                _strip(strip, plan, inputs, grads, problem, scratch)
    like = (q, k, v, sinks, bias)
    return tuple(
        None if g is None or x is None else g.view(x.shape).to(x.dtype)
        for g, x in zip((grads.q, grads.k, grads.v, grads.sinks, grads.bias), like, strict=True)
    )


def _strip(
    strip: _Rows,
    plan: list[Tile],
    inputs: _Inputs,
    grads: _Gradients,
    problem: Problem,
    scratch: list[Tensor],
) -> None:
    """Add what one strip of query rows contributes to every gradient."""
    b, h = strip.batch, strip.kv_head
    dq = torch.zeros_like(strip.q)
    skip = problem.flush and all_finite(strip.d_output) and all_finite(strip.delta)
    for tile in plan:
        key = slice(tile.start, tile.stop)
        e, capped = problem.logits(
            strip.q, inputs.k[b, h, key], b, strip.heads, strip.rows, tile, scratch[0]
        )
        if skip and negligible(e.amax(-1, keepdim=True) - strip.origin):
            continue
        weights_(e, strip.origin, problem.flush)
        if grads.v is not None:
            grads.v[b, h, key].addmm_(e.T, strip.d_output)
        ds = product(strip.d_output, inputs.v_clean[b, h, key].T, scratch[1])
        ds.sub_(strip.delta).mul_(e)
        blocks = ds.view(-1, len(strip.rows), tile.stop - tile.start)
        if grads.bias is not None:
            if inputs.tainted:
                hide(blocks, tile, 0.0)
            add_to_gradient(grads.bias, blocks, b, strip.heads, strip.where[2], key)
        if capped is not None:
            ds.mul_(capped.square_().neg_().add_(1))
        if inputs.tainted:
            hide(blocks, tile, 0.0)
        if grads.q is not None:
            dq.addmm_(ds, inputs.k_clean[b, h, key])
        if grads.k is not None:
            grads.k[b, h, key].addmm_(ds.T, strip.q_clean)
    if grads.q is not None:
        grads.q[strip.where] = dq.mul_(problem.scale).view(-1, len(strip.rows), dq.shape[-1])


def _inputs(q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> _Inputs:
    dtype = problem.arithmetic(q.dtype)
    q, k, v = (x.detach().to(dtype).contiguous() for x in (q, k, v))
    fine = [all_finite(x) for x in (q, k, v)]
    clean = [
        x if ok else torch.where(torch.isfinite(x), x, torch.zeros_like(x))
        for x, ok in zip((q, k, v), fine, strict=True)
    ]
    return _Inputs(q, k, clean[0], clean[1], clean[2], tainted=not all(fine))


def _zeros(
    inputs: _Inputs,
    sinks: Tensor | None,
    bias: Tensor | None,
    shape: torch.Size,
    keys: int,
    wanted: Sequence[bool],
) -> _Gradients:
    """Accumulators in the arithmetic's dtype."""
    like = [inputs.q, inputs.k, inputs.v_clean]
    q, k, v = (
        torch.zeros_like(x) if want else None for x, want in zip(like, wanted[:3], strict=True)
    )
    s = inputs.q.new_zeros(len(sinks)) if wanted[3] and sinks is not None else None
    t = None
    if wanted[4] and bias is not None:
        whole = four_axes(bias, shape[0], shape[1], shape[2], keys)
        t = inputs.q.new_zeros(whole.shape)
    return _Gradients(q, k, v, s, t)


def _upstream(
    output: Tensor, total: Tensor, d_output: Tensor | None, d_lse: Tensor | None
) -> tuple[Tensor, Tensor]:
    """dO / Z and D / Z; exactly 0 for rows with no visible key, whatever comes from above."""
    empty = total == 0
    inverse = torch.where(empty, 1.0, total).reciprocal()
    delta = torch.zeros_like(total)
    if d_output is None:
        d_output = torch.zeros_like(output)
    else:
        d_output = d_output.to(output.dtype)
        delta += (d_output * output).sum(-1)
    if d_lse is not None:
        delta -= d_lse.to(delta.dtype)
    d_output = (d_output * inverse[..., None]).masked_fill(empty[..., None], 0.0)
    return d_output, (delta * inverse).masked_fill(empty, 0.0)
