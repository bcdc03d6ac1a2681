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
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from headwise.attention.bands import band_edges
from headwise.attention.heads import group_size
from headwise.attention.masks import Everything, Mask
from headwise.attention.naming import name_rows
from headwise.attention.strips import RAW, Bias, Problem, StripPass, Sums, Workspace
from headwise.errors import OptionError, ShapeError

__all__ = ["Statistics", "choose_rows", "measure"]

_STRIP_ROWS: Final = 256
_LEAST_ROWS: Final = 16
_TILE: Final = 4096
_TASKS: Final = 12  # pieces of work to share out; fixed, so that results do not depend on threads
_MEMORY: Final = 96 * 2**20


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
    tile: int = _TILE,
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
    - ``workers``: threads (default: torch's); ``memory``: bytes for buffers, over all workers

    Example:
        >>> q = k = torch.zeros(1, 1, 4, 2)
        >>> from headwise.attention.masks import Causal
        >>> measure(q, k, mask=Causal()).entropy.exp()[0, 0].tolist()  # 1, 2, 3, 4 equal keys
        [1.0, 2.0, 3.0, 4.0]
    """
    problem = _problem(q, k, v, locals())
    rows_per_strip, width = _strip_rows(problem, workers, memory)
    strips = _strips(problem, rows_per_strip)
    sums = _run(problem, strips, rows_per_strip, width, workers)
    return _finish(problem, sums)


def choose_rows(rows: int, queries: int, seed: int = 0) -> Tensor:
    """A stratified sample of query rows: one, uniform, from each of ``rows`` equal strata.

    Row means over such a sample are unbiased estimates of the means over all rows.

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
    return (place * (queries / rows)).long().clamp_(max=queries - 1).unique()


def _problem(q: Tensor, k: Tensor, v: Tensor | None, asked: dict) -> Problem:
    """Check shapes and options; fill the defaults."""
    _check_shapes(q, k, v)
    queries, keys = q.shape[2], k.shape[2]
    rows, every = asked["rows"], asked["rows"] is None
    if every:
        chosen = torch.arange(queries)
    elif isinstance(rows, int):
        chosen = choose_rows(rows, queries)
        every = chosen.numel() == queries
    else:
        chosen = rows.cpu().long().sort().values
        if not chosen.numel() or int(chosen[0]) < 0 or int(chosen[-1]) >= queries:
            raise OptionError(
                f"rows={rows.tolist()[:8]}", allowed=f"indices from 0 to {queries - 1}"
            )
    for name, least in (("sink_keys", 0), ("pool", 1)):
        if asked[name] is not None and asked[name] < least:
            raise OptionError(f"{name}={asked[name]}", allowed=f"{least} or more")
    mask = asked["mask"] or Everything()
    if mask.batches() not in (None, q.shape[0]):
        raise ShapeError(
            f"the mask is for {mask.batches()} sequences, the queries for {q.shape[0]}"
        )
    keep = asked["query_mask"]
    if keep is not None and (keep.dtype != torch.bool or keep.shape != (q.shape[0], queries)):
        raise ShapeError(
            f"query_mask has dtype {keep.dtype} and shape {tuple(keep.shape)}",
            allowed=f"torch.bool of shape ({q.shape[0]}, {queries})",
        )
    scale = asked["scale"]
    offset = keys - queries if asked["offset"] is None else asked["offset"]
    row_list = chosen.tolist()
    reach = _reach(row_list[0] + offset, row_list[-1] + offset, keys, mask)
    return Problem(
        q=q,
        k=k,
        v=v,
        mask=mask,
        scale=1 / math.sqrt(q.shape[-1]) if scale is None else float(scale),
        softcap=asked["softcap"],
        bias=asked["bias"],
        sinks=asked["sinks"],
        offset=offset,
        rows=chosen.to(q.device),
        row_list=row_list,
        every_row=every,
        keep=keep,
        sink_keys=min(asked["sink_keys"], keys),
        pool=asked["pool"],
        relative=asked["relative"],
        dtype=torch.float64 if q.dtype == torch.float64 else torch.float32,
        tile=max(1, asked["tile"]),
        pad=0 if _compiles(q) or not asked["relative"] else _STRIP_ROWS,
        bands=len(band_edges(reach)) if asked["relative"] else 0,
        clean_v=v is None or bool(v.sum().isfinite()) or bool(torch.isfinite(v).all()),
    )


def _compiles(q: Tensor) -> bool:
    """The one place that decides which form of the strip pass runs: compiled loops or torch."""
    return q.device.type == "cpu" and q.dtype != torch.float64


def _form(q: Tensor) -> tuple[type, type]:
    """The workspace and the pass of that form."""
    if _compiles(q):
        from headwise.attention.compiled import CompiledPass, CompiledWorkspace  # Numba loads here

        return CompiledWorkspace, CompiledPass
    return Workspace, StripPass


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


def _strip_rows(problem: Problem, workers: int | None, memory: int) -> tuple[int, int]:
    """Query rows per strip (per kv head), and the widest run of columns a strip keeps."""
    count = _workers(problem, workers)
    rows = max(1, min(_STRIP_ROWS // problem.group, len(problem.row_list)))
    while True:
        width = _widest(problem, _strips(problem, rows))
        tile = min(problem.tile, problem.keys) + 128
        item = torch.finfo(problem.dtype).bits // 8
        need = item * problem.group * rows * (width + 2 * problem.pad + 32 + tile) * count
        if need <= memory or rows <= max(1, _LEAST_ROWS // problem.group):
            return rows, width
        rows = max(rows // 2, 1)


def _widest(problem: Problem, strips: list[tuple[int, int]]) -> int:
    """Columns the widest strip keeps, pads between its runs included."""
    widest = 0
    batches = range(problem.q.shape[0]) if problem.mask.batches() is not None else range(1)
    for b in batches:
        for i0, i1 in strips:
            runs = problem.runs(b, i0, i1)
            width = sum(stop - start for start, stop in runs) + problem.pad * (len(runs) - 1)
            widest = max(widest, width)
    return widest


def _strips(problem: Problem, rows: int) -> list[tuple[int, int]]:
    """Cut the measured rows into strips that hold whole blocks of the pooled map, or parts of one."""
    total, pool = len(problem.row_list), problem.pool
    if pool is None or not problem.every_row:
        return [(i, min(total, i + rows)) for i in range(0, total, rows)]
    step = pool * (rows // pool) if pool <= rows else rows
    cuts, at = [0], 0
    while at < total:
        position = problem.row_list[at] + problem.offset
        block = position - position % pool
        ahead = step - (position - block) if pool <= rows else min(rows, block + pool - position)
        at = min(total, at + max(1, ahead))
        cuts.append(at)
    return list(zip(cuts, cuts[1:], strict=False))


def _workers(problem: Problem, workers: int | None) -> int:
    if workers is not None and workers < 1:
        raise OptionError(f"workers={workers}", allowed="1 or more")
    if problem.q.device.type != "cpu":
        return 1
    return torch.get_num_threads() if workers is None else workers


def _run(
    problem: Problem,
    strips: list[tuple[int, int]],
    rows: int,
    width: int,
    workers: int | None,
) -> list[list[Sums]]:
    """All strips of all (sequence, kv head), shared over threads; sums per (batch, kv head)."""
    batch, kv_heads = problem.k.shape[:2]
    parts = max(1, min(len(strips), -(-_TASKS // (batch * kv_heads))))
    count = min(_workers(problem, workers), batch * kv_heads * parts)
    totals = [[_empty_sums(problem) for _ in range(kv_heads)] for _ in range(batch)]
    tasks = [(b, h, x) for b in range(batch) for h in range(kv_heads) for x in range(parts)]
    workspace, strip_pass = _form(problem.q)
    spaces = [workspace(problem, problem.group * rows, width) for _ in range(count)]

    @torch.no_grad()  # the caller's own no_grad does not reach the threads
    def work(task: tuple[int, int, int]) -> Sums:
        b, h, part = task
        space = spaces.pop()
        try:
            sums = _share(totals[b][h])
            head = strip_pass(problem, b, h, space)
            # Every parts-th strip, so that parts of a causal mask weigh the same.
            for i0, i1 in strips[part::parts]:
                head.absorb(sums, i0, i1)
            return sums
        finally:
            spaces.append(space)

    for (b, h, _), done in zip(tasks, _map(work, tasks, count), strict=True):
        totals[b][h].received += done.received
        pooled = totals[b][h].pooled
        if pooled is not None and done.pooled is not None:
            pooled += done.pooled
    return totals


def _map(work, tasks: list, count: int) -> list:  # type: ignore[no-untyped-def]
    """Run tasks on ``count`` threads, each with one intra-op thread; order is kept."""
    if count == 1:
        return [work(task) for task in tasks]
    threads = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(
            count, initializer=torch.set_num_threads, initargs=(1,)
        ) as executor:
            return list(executor.map(work, tasks))
    finally:
        torch.set_num_threads(threads)


def _empty_sums(problem: Problem) -> Sums:
    """Sums of no rows yet."""
    g, r, n = problem.group, len(problem.row_list), problem.keys
    kind = {"dtype": problem.dtype, "device": problem.q.device}
    bands = problem.bands or None
    pooled = None
    if problem.pool is not None:
        first, last = (problem.row_list[i] + problem.offset for i in (0, -1))
        blocks = last // problem.pool - first // problem.pool + 1
        pooled = torch.zeros(g, blocks, -(-n // problem.pool), **kind)
    every = problem.every_row and problem.v is not None
    return Sums(
        raw=torch.zeros(len(RAW), g, r, **kind),
        sink_logits=torch.empty(g, r, problem.sink_keys, **kind),
        log2_total=torch.empty(g, r, **kind),
        top_key=torch.full((g, r), -1, device=problem.q.device),
        bands=None if bands is None else torch.zeros(g, r, bands, **kind),
        output=torch.empty(g, r, problem.v.shape[-1], **kind)
        if every and problem.v is not None
        else None,
        received=torch.zeros(g, n, **kind),
        pooled=pooled,
    )


def _reach(first: int, last: int, keys: int, mask: Mask) -> int:
    """One more than the largest distance between a measured query and a key it may see."""
    return max(last, keys - 1 - first if mask.looks_ahead() else 0, 0) + 1


def _share(sums: Sums) -> Sums:
    """The same rows, and own column sums: what one part of the strips writes to."""
    return Sums(
        raw=sums.raw,
        sink_logits=sums.sink_logits,
        log2_total=sums.log2_total,
        top_key=sums.top_key,
        bands=sums.bands,
        output=sums.output,
        received=torch.zeros_like(sums.received),
        pooled=None if sums.pooled is None else torch.zeros_like(sums.pooled),
    )


def _finish(problem: Problem, totals: list[list[Sums]]) -> Statistics:
    """Join heads and sequences, and name what was added up."""

    def join(get) -> Tensor:  # type: ignore[no-untyped-def]
        return torch.stack([torch.cat([get(s) for s in row]) for row in totals])

    sampled = len(problem.row_list) / problem.q.shape[2]
    some = totals[0][0]
    named = name_rows(
        raw=torch.stack([torch.cat([s.raw for s in row], 1) for row in totals], 1),
        sink_logits=join(lambda s: s.sink_logits),
        log2_total=join(lambda s: s.log2_total),
        top_key=join(lambda s: s.top_key),
        problem=problem,
    )
    bands = join(lambda s: s.bands) if some.bands is not None else None
    if bands is not None:
        bands = bands.masked_fill_((named["visible"] == 0)[..., None], math.nan)
        if problem.keep is not None:
            dropped = ~problem.keep[:, problem.rows][:, None, :, None]
            bands = bands.masked_fill_(dropped, math.nan)
    pooled = join(lambda s: s.pooled) if some.pooled is not None else None
    output = join(lambda s: s.output) if some.output is not None else None
    first = problem.row_list[0] + problem.offset
    return Statistics(
        output=None if output is None or problem.v is None else output.to(problem.v.dtype),
        bands=bands,
        received=join(lambda s: s.received) / sampled,
        pooled=pooled,
        pooled_first=0 if problem.pool is None else first // problem.pool,
        rows=problem.rows,
        **named,
    )
