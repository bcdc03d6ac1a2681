"""The strips of one head in one compiled call, matrix products included.

The same steps as ``CompiledPass.absorb``, for masks under which each row sees one run of keys.
Without a return to Python between them, strips can be so small that their logits and weights stay
in the nearer caches, and the half-empty corner that a causal mask leaves in each strip is small.
"""

from __future__ import annotations

import numpy as np
from numba import carray, njit

from headwise.attention.caching import CACHE
from headwise.attention.fortran import floats_at, sgemm
from headwise.attention.plan import GAP
from headwise.attention.strip_kernels import absorb_tile, close_rows, open_rows, sum_columns

__all__ = ["absorb_part"]


@njit(nogil=True, cache=CACHE)
def _load_queries(q, queries, row, heads, d):
    """Copy the queries of a strip to ``q``, scaled so that logits come out in base 2."""
    address, head_stride, row_stride, scale = queries
    scale = np.float32(scale)
    for head in range(heads):
        for i in range(row.shape[0]):
            start = address + 4 * (head * head_stride + row[i] * row_stride)
            source = carray(floats_at(start), (d,))
            target = q[head * row.shape[0] + i]
            for c in range(d):
                target[c] = source[c] * scale


@njit(nogil=True, cache=CACHE)
def _find_tiles(lo, hi, sinks, tile, table):
    """Cut the keys that some row sees into tiles (start, stop, column of ``kept``); their number.

    The first tile always starts with the sinks.
    """
    start, stop = np.int64(2**62), np.int64(0)
    for i in range(lo.shape[0]):
        if lo[i] < hi[i]:
            start, stop = min(start, lo[i]), max(stop, hi[i])
    count, place = 0, np.int64(0)
    if sinks:
        if start > stop or start - sinks >= GAP:
            table[0, 0], table[0, 1], table[0, 2] = 0, sinks, 0
            count, place = 1, np.int64(sinks)
            start = max(start, sinks)
        else:
            start, stop = np.int64(0), max(stop, sinks)
    while start < stop:
        end = min(start + tile, stop)
        table[count, 0], table[count, 1], table[count, 2] = start, end, place
        place += end - start
        count += 1
        start = end
    return count


@njit(nogil=True, cache=CACHE)
def absorb_part(
    address, queries, strips, keys, values, row, position, lo, hi, sinks, sink_values, learned,
    feeds, row_block, pool, tile, work, targets, received, pooled,
):  # fmt: skip
    """Measure the strips ``(first row, one after the last)`` and add them to the sums.

    ``queries`` is (address, stride of heads, stride of rows, scale); ``values`` (address, stride
    of rows, d_value); ``keys`` is ``d_head key``; measured row i is row ``row[i]`` of the queries.
    ``work`` are the buffers of the worker, ``targets`` the arrays of ``Sums.arrays``.
    """
    logits, kept, output, state, top, sink_logits, bands, peaks, factors, table, q, scratch = work[
        :12
    ]
    size, number, plain = work[12:]  # kept alive by the caller: sgemm gets their addresses
    value_address, value_stride, d_value = values
    heads, d = received.shape[0], keys.shape[0]
    size[2], size[3], size[4] = d, keys.shape[1], d_value
    size[5], size[6] = value_stride, kept.shape[1]
    at, one, no = size.ctypes.data, number.ctypes.data, plain.ctypes.data
    for k in range(strips.shape[0]):
        i0, i1 = strips[k, 0], strips[k, 1]
        r = heads * (i1 - i0)
        size[1] = r
        _load_queries(q, queries, row[i0:i1], heads, d)
        spot, low, high = position[i0:i1], lo[i0:i1], hi[i0:i1]
        tiles = table[: _find_tiles(low, high, sinks, tile, table)]
        open_rows(state[:r], top[:r], sink_logits[:r], bands[:r], output[:r])
        for y in range(tiles.shape[0]):
            j0, place = tiles[y, 0], tiles[y, 2]
            c = tiles[y, 1] - j0
            size[0] = c
            s = logits[: r * c].reshape(r, c)
            sgemm(
                address, no, no, at, at + 4, at + 8, one, keys[:, j0:].ctypes.data, at + 12,
                q.ctypes.data, at + 8, one + 4, s.ctypes.data, at,
            )  # fmt: skip
            absorb_tile(
                y, s, kept, place, j0, c, spot, low, high, False, sinks, state[:r], top[:r],
                sink_logits[:r], bands[:r], peaks[y], output[:r],
            )  # fmt: skip
            if d_value:
                sgemm(
                    address, no, no, at + 16, at + 4, at, one,
                    value_address + 4 * value_stride * j0, at + 20,
                    kept[:, place:].ctypes.data, at + 24, one, output.ctypes.data, at + 16,
                )  # fmt: skip
        close_rows(
            state[:r], top[:r], sink_logits[:r], bands[:r], output[:r], learned, spot, kept, 0,
            tiles, peaks, sink_values, factors, i0, *targets,
        )  # fmt: skip
        sum_columns(
            kept, tiles, 0, sinks, factors[: tiles.shape[0]], feeds[i0:i1], row_block[i0:i1], pool,
            received, pooled, scratch,
        )  # fmt: skip
