"""How the strips of one ``measure`` are cut, shared over threads, and added up again.

The cut depends on shapes and the memory budget alone, and parts are added in a fixed order: the
result does not depend on how many threads there are.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any, Final

import torch

from headwise.attention.plan import RAW, Bounds, Form, Problem, Sums
from headwise.attention.strips import StripPass, Workspace
from headwise.errors import OptionError

__all__ = ["PAD", "TILES", "choose_form", "run_strips"]

# Rows of a strip and keys of a tile. Where every step is a call from Python, few large ones; where
# strips are compiled whole, such that a tile's logits and weights stay in the second-level cache.
_ROWS: Final = {Form.TENSORS: 256, Form.LOOPS: 256, Form.WHOLE: 64}
TILES: Final = {Form.TENSORS: 4096, Form.LOOPS: 4096, Form.WHOLE: 1024}
_LEAST_ROWS: Final = 16
_TASKS: Final = 8  # the least pieces of work to share out
_Task = tuple[int, int, int]  # sequence, kv head, part of the strips
PAD: Final = (
    256  # at least _ROWS: zero columns beside a run of keys, where bands are read off skewed views
)


def choose_form(problem: Problem) -> Form:
    """The one place that decides how the pass is carried out."""
    if problem.q.device.type != "cpu" or problem.dtype != torch.float32:
        return Form.TENSORS
    if problem.bias is not None or problem.softcap or not problem.clean_v:
        return Form.LOOPS
    from headwise.attention import blas

    position = problem.rows + problem.offset
    batches = range(problem.mask.batches() or 1)
    runs = all(problem.mask.interval(b, position, problem.keys) is not None for b in batches)
    return Form.WHOLE if runs and blas.sgemm_address() is not None else Form.LOOPS


def _passes(form: Form) -> tuple[type, type]:
    """The workspace and the pass of a form."""
    if form is Form.TENSORS:
        return Workspace, StripPass
    from headwise.attention.compiled import CompiledPass, CompiledWorkspace  # Numba loads here

    return CompiledWorkspace, CompiledPass


def _plan(problem: Problem, memory: int) -> tuple[list[tuple[int, int]], int, int]:
    """The strips, their query rows (per kv head), and the widest run of columns one keeps."""
    rows = max(1, min(_ROWS[problem.form] // problem.group, len(problem.row_list)))
    item = torch.finfo(problem.dtype).bits // 8
    while True:
        strips = _strips(problem, rows)
        width = max(_widest(problem, b, strips) for b in range(problem.mask.batches() or 1))
        tile = min(problem.tile, problem.keys) + 128
        need = item * problem.group * rows * (width + 2 * problem.pad + 32 + tile)
        if need <= memory or rows <= max(1, _LEAST_ROWS // problem.group):
            return strips, rows, width
        rows = max(rows // 2, 1)


def _widest(problem: Problem, batch: int, strips: list[tuple[int, int]]) -> int:
    """Columns the widest strip of a sequence keeps, pads between its runs included."""
    if problem.form is Form.WHOLE:
        return Bounds.of(problem, batch).widest(strips, problem.sink_keys)
    runs = [problem.runs(batch, i0, i1) for i0, i1 in strips]
    return max(sum(b - a for a, b in r) + problem.pad * (len(r) - 1) for r in runs)


def _strips(problem: Problem, rows: int) -> list[tuple[int, int]]:
    """Cut the measured rows into strips of whole blocks of the pooled map, or of parts of one."""
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
    return list(pairwise(cuts))


def _workers(problem: Problem, workers: int | None) -> int:
    if workers is not None and workers < 1:
        raise OptionError(f"workers={workers}", allowed="1 or more")
    if problem.q.device.type != "cpu":
        return 1
    return torch.get_num_threads() if workers is None else workers


def run_strips(problem: Problem, workers: int | None, memory: int) -> Sums:
    """All strips of all (sequence, kv head), shared over threads, added up.

    The fields of the result have two more axes in front: ``batch kv_head``.
    """
    strips, rows, width = _plan(problem, memory)
    batch, kv_heads = problem.k.shape[:2]
    parts = min(len(strips), _parts(batch * kv_heads))
    count = min(_workers(problem, workers), batch * kv_heads * parts)
    everything = _empty_sums(problem)
    tasks = [(b, h, x) for b in range(batch) for h in range(kv_heads) for x in range(parts)]
    workspace, strip_pass = _passes(problem.form)
    spaces = [workspace(problem, problem.group * rows, width) for _ in range(count)]

    @torch.no_grad()  # the caller's own no_grad does not reach the threads
    def work(task: _Task) -> Sums:
        b, h, part = task
        space = spaces.pop()
        try:
            sums = everything.part(b, h)
            # Every parts-th strip, so that parts of a causal mask weigh the same.
            strip_pass(problem, b, h, space).absorb(sums, strips[part::parts])
            return sums
        finally:
            spaces.append(space)

    for (b, h, _), done in zip(tasks, _map(work, tasks, count), strict=True):
        everything.received[b, h] += done.received
        if everything.pooled is not None and done.pooled is not None:
            everything.pooled[b, h] += done.pooled
    return everything


def _parts(heads: int) -> int:
    """Into how many parts to cut the strips of each head: an even number of tasks, 8 or more.

    Example:
        >>> [heads * _parts(heads) for heads in (1, 2, 3, 9, 64)]
        [8, 8, 12, 18, 64]
    """
    parts = -(-_TASKS // heads)
    return parts + heads * parts % 2


def _map(work: Callable[[_Task], Sums], tasks: list[_Task], count: int) -> list[Sums]:
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
    """Sums of no rows yet, for every (sequence, kv head)."""
    each = (*problem.k.shape[:2],)
    g, r, n = problem.group, len(problem.row_list), problem.keys
    kind: dict[str, Any] = {"dtype": problem.dtype, "device": problem.q.device}
    pooled = output = bands = None
    if problem.pool is not None:
        first, last = (problem.row_list[i] + problem.offset for i in (0, -1))
        blocks = last // problem.pool - first // problem.pool + 1
        pooled = torch.zeros(*each, g, blocks, -(-n // problem.pool), **kind)
    if problem.every_row and problem.v is not None:
        output = torch.empty(*each, g, r, problem.v.shape[-1], **kind)
    if problem.bands:
        bands = torch.zeros(*each, g, r, problem.bands, **kind)
    return Sums(
        raw=torch.zeros(*each, len(RAW), g, r, **kind),
        sink_logits=torch.empty(*each, g, r, problem.sink_keys, **kind),
        log2_total=torch.empty(*each, g, r, **kind),
        top_key=torch.full((*each, g, r), -1, device=problem.q.device),
        bands=bands,
        output=output,
        received=torch.zeros(*each, g, n, **kind),
        pooled=pooled,
    )
