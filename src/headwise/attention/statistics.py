"""Exact statistics of the attention weights in O(n) memory, at about the cost of attention.

With s_ij the logits that enter the softmax (scaled, capped, biased, masked), L_i = ln Σ_j exp s_ij
and a_ij = exp(s_ij - L_i), ``measure`` gives the output Σ_j a_ij v_j and, in the same pass, every
number that people compute from the matrix A, without holding A. The pass itself is in
``strips.py``; this file says what is computed, checks what is asked, shares the work over threads,
and names the results.

Statistics are of the softmax itself: before dropout, accumulated in float32 (float64 for float64
inputs), natural logarithms, nats. A row that sees no key has output 0, log-sum-exp -inf, and NaN
for every other statistic.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor

from headwise.attention.bands import band_edges
from headwise.attention.heads import group_size
from headwise.attention.masks import Everything, Mask
from headwise.attention.naming import name_rows
from headwise.attention.plan import Bias, Form, Problem, Sums
from headwise.attention.sharing import PAD, TILES, choose_form, run_strips
from headwise.errors import OptionError, ShapeError

__all__ = ["Statistics", "choose_rows", "measure"]

_MEMORY: Final = 48 * 2**20


@dataclass(frozen=True)
class Statistics:
    """What ``measure`` returns. H query heads, R measured rows, m queries, n keys.

    Per row, ``batch head row`` (nats and logits are natural; masses are shares of one):

    - ``log_sum_exp``: L_i, the learned sink included
    - ``max_logit``, ``min_logit``, ``max_abs_logit``: over the visible keys
    - ``mean_logit``, ``var_logit``: mean and population variance over the visible keys
    - ``entropy``: -Σ_j a ln a
    - ``entropy_without_sink``: entropy of the weights renormalised over the keys that are not
      sinks; NaN where a row sees none of those
    - ``sum_squares``: Σ_j a²; the softmax Jacobian has trace 1 - Σ a², 1/Σ a² keys are effective
    - ``top_weight``, ``top_key``: the largest weight and the key it is on (int64; -1 if none)
    - ``distance``: Σ_j a_ij |i - j|
    - ``sink_mass``, ``self_mass``, ``previous_mass``: on the first keys, on i, on i - 1
    - ``null_mass``: on the learned sink logit (0 without one)

    ``bands`` (``batch head row band``): mass at distances 0, [1, 2), [2, 4), [4, 8), …
    ``received`` (``batch head key``): Σ_i a_ij over the measured rows, times m/R when sampled.
    ``pooled`` (``batch head query_block key_block``): sums of A over blocks of ``pool`` positions;
    the first query block holds position ``pool * pooled_first``.
    ``visible`` (``batch head row``): visible keys. ``rows``: the measured query rows.
    ``output``: ``batch head query d_value`` in the dtype of v, when v was given and all rows asked.
    """

    output: Tensor | None
    log_sum_exp: Tensor
    max_logit: Tensor
    min_logit: Tensor
    max_abs_logit: Tensor
    mean_logit: Tensor
    var_logit: Tensor
    entropy: Tensor
    entropy_without_sink: Tensor
    sum_squares: Tensor
    top_weight: Tensor
    top_key: Tensor
    distance: Tensor
    sink_mass: Tensor
    self_mass: Tensor
    previous_mass: Tensor
    null_mass: Tensor
    bands: Tensor | None
    received: Tensor
    pooled: Tensor | None
    pooled_first: int
    visible: Tensor
    rows: Tensor


@torch.no_grad()
def measure(
    q: Tensor,
    k: Tensor,
    v: Tensor | None = None,
    *,
    mask: Mask | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    bias: Bias | None = None,
    sinks: Tensor | None = None,
    offset: int | None = None,
    query_mask: Tensor | None = None,
    rows: int | Tensor | None = None,
    sink_keys: int = 1,
    pool: int | None = None,
    relative: bool = True,
    workers: int | None = None,
    memory: int = _MEMORY,
    tile: int | None = None,
) -> Statistics:
    """Attention output and every statistic of its weights in one pass and O(n) memory.

    Shapes: q ``batch head query d_head``, k ``batch kv_head key d_head``,
    v ``batch kv_head key d_value`` (or None: statistics only).

    - ``mask``: an implicit mask (default: everything is visible)
    - ``scale`` (default d_head^(-1/2)), ``softcap`` c·tanh(s/c), ``bias(batch, heads, query, key)``
      added after the cap, ``sinks`` one learned logit per head in the denominator
    - ``offset``: the key index at which query 0 stands (default n - m)
    - ``query_mask`` (``batch query``, True = counts): other rows get an output, NaN statistics,
      and feed no reduction
    - ``rows``: all (None), this many in a stratified random sample, or these indices; statistics
      are exact for each measured row, column sums are unbiased estimates under sampling
    - ``sink_keys``: how many first keys count as the sink
    - ``pool``: positions per block of the pooled map (None: no map)
    - ``relative``: False when queries and keys share no axis (cross-attention): then distance,
      self, previous and bands are NaN or absent
    - ``workers``: threads (default: torch's); ``memory``: bytes of buffers for each of them;
      ``tile``: keys per matrix product (default: by the form of the pass)

    Example:
        >>> q = k = torch.zeros(1, 1, 4, 2)
        >>> from headwise.attention.masks import Causal
        >>> measure(q, k, mask=Causal()).entropy.exp()[0, 0].tolist()  # 1, 2, 3, 4 equal keys
        [1.0, 2.0, 3.0, 4.0]
    """
    _check_shapes(q, k, v)
    mask = Everything() if mask is None else mask
    _check_options(q, mask, query_mask, sink_keys, pool)
    queries, keys = q.shape[2], k.shape[2]
    chosen = _chosen(rows, queries)
    row_list = chosen.tolist()
    offset = keys - queries if offset is None else offset
    problem = Problem(
        q=q,
        k=k,
        v=v,
        mask=mask,
        scale=1 / math.sqrt(q.shape[-1]) if scale is None else float(scale),
        softcap=softcap,
        bias=bias,
        sinks=sinks,
        offset=offset,
        rows=chosen.to(q.device),
        row_list=row_list,
        every_row=not isinstance(rows, Tensor) and len(row_list) == queries,
        keep=query_mask,
        sink_keys=min(sink_keys, keys),
        pool=pool,
        relative=relative,
        dtype=torch.float64 if q.dtype == torch.float64 else torch.float32,
        tile=1,
        form=Form.TENSORS,
        pad=0,
        bands=_bands(row_list[0] + offset, row_list[-1] + offset, keys, mask) if relative else 0,
        clean_v=v is None or bool(v.sum().isfinite()) or bool(torch.isfinite(v).all()),
    )
    form = choose_form(problem)
    problem = replace(
        problem,
        form=form,
        tile=TILES[form] if tile is None else max(1, tile),
        pad=PAD if relative and form is Form.TENSORS else 0,
    )
    return _finish(problem, run_strips(problem, workers, memory))


def choose_rows(rows: int, queries: int, seed: int = 0) -> Tensor:
    """A stratified sample of query rows: one, uniform, from each of ``rows`` equal strata.

    Row means over such a sample are unbiased estimates of the means over all rows. A row that two
    strata share can come twice, as it must for that.

    Example:
        >>> choose_rows(4, 100).tolist() == sorted(choose_rows(4, 100).tolist())
        True
    """
    if rows < 1:
        raise OptionError(f"rows={rows}", allowed="1 or more", to_do="leave it out for all rows")
    if rows >= queries:
        return torch.arange(queries)
    generator = torch.Generator().manual_seed(seed)
    place = torch.arange(rows) + torch.rand(rows, generator=generator, dtype=torch.float64)
    return (place * (queries / rows)).long().clamp_(max=queries - 1)


def _chosen(rows: int | Tensor | None, queries: int) -> Tensor:
    """The indices of the measured rows, ascending."""
    if rows is None:
        return torch.arange(queries)
    if isinstance(rows, int):
        return choose_rows(rows, queries)
    chosen = rows.cpu().long().sort().values
    if not chosen.numel() or int(chosen[0]) < 0 or int(chosen[-1]) >= queries:
        raise OptionError(f"rows={rows.tolist()[:8]}", allowed=f"indices from 0 to {queries - 1}")
    return chosen


def _check_options(
    q: Tensor, mask: Mask, query_mask: Tensor | None, sink_keys: int, pool: int | None
) -> None:
    """One clear line for an option that cannot be."""
    for name, value, least in (("sink_keys", sink_keys, 0), ("pool", pool, 1)):
        if value is not None and value < least:
            raise OptionError(f"{name}={value}", allowed=f"{least} or more")
    batch, _, queries, _ = q.shape
    if mask.batches() not in (None, batch):
        raise ShapeError(f"the mask is for {mask.batches()} sequences, the queries for {batch}")
    if query_mask is None:
        return
    if query_mask.dtype != torch.bool or query_mask.shape != (batch, queries):
        raise ShapeError(
            f"query_mask has dtype {query_mask.dtype} and shape {tuple(query_mask.shape)}",
            allowed=f"torch.bool of shape ({batch}, {queries})",
        )


def _check_shapes(q: Tensor, k: Tensor, v: Tensor | None) -> None:
    """One clear line when the tensors do not fit together."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x is not None and (x.dim() != 4 or not x.is_floating_point()):
            raise ShapeError(
                f"{name} has shape {tuple(x.shape)} and dtype {x.dtype}",
                allowed="floating-point tensors laid out batch head position dim",
            )
    group_size(q.shape[1], k.shape[1])
    if q.shape[0] != k.shape[0] or q.shape[-1] != k.shape[-1]:
        raise ShapeError(
            f"q has shape {tuple(q.shape)} and k {tuple(k.shape)}",
            allowed="the same batch size and the same width d_head",
        )
    if v is not None and v.shape[:3] != k.shape[:3]:
        raise ShapeError(
            f"k has shape {tuple(k.shape)} and v {tuple(v.shape)}",
            allowed="the same batch, kv_head and key sizes",
        )
    if not q.shape[2] or not k.shape[2]:
        raise ShapeError(f"{q.shape[2]} queries and {k.shape[2]} keys", allowed="1 or more of each")


def _bands(first: int, last: int, keys: int, mask: Mask) -> int:
    """Bands up to the largest distance between queries first..last and a key they may see."""
    return len(band_edges(max(last, keys - 1 - first if mask.looks_ahead() else 0, 0) + 1))


def _finish(problem: Problem, sums: Sums) -> Statistics:
    """Name what was added up."""
    raw = sums.raw.transpose(2, 3).flatten(1, 2).movedim(2, 0)
    named = name_rows(
        raw=raw,
        sink_logits=sums.sink_logits.flatten(1, 2),
        log2_total=sums.log2_total.flatten(1, 2),
        top_key=sums.top_key.flatten(1, 2),
        problem=problem,
    )
    bands = None if sums.bands is None else sums.bands.flatten(1, 2)
    if bands is not None:
        dropped = named["visible"] == 0
        if problem.keep is not None:
            dropped = dropped | ~problem.keep[:, problem.rows][:, None]
        if bool(dropped.any()):
            bands.masked_fill_(dropped[..., None], math.nan)
    output = None
    if sums.output is not None and problem.v is not None:
        output = sums.output.flatten(1, 2).to(problem.v.dtype)
    first = problem.row_list[0] + problem.offset
    return Statistics(
        output=output,
        bands=bands,
        received=sums.received.flatten(1, 2) * (problem.q.shape[2] / len(problem.row_list)),
        pooled=None if sums.pooled is None else sums.pooled.flatten(1, 2),
        pooled_first=0 if problem.pool is None else first // problem.pool,
        rows=problem.rows,
        **named,
    )
