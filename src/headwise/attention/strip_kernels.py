"""Compiled loops over the rows of a strip: absorb a tile, normalise, sum columns.

Built from the sweeps over one row in ``kernels.py``. Everything is in base 2, as in ``strips.py``;
rows of a strip are ordered ``head row``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from headwise.attention.caching import CACHE
from headwise.attention.kernels import (
    add_bands,
    bare,
    exp2,
    extremes_with_holes,
    find,
    peek,
    total_of,
    weigh,
    weigh_holes,
    wide,
)

__all__ = ["STATE", "absorb_tile", "close_rows", "open_rows", "sum_columns"]

# Columns of a row's running state, in the order of ``problem.RAW``.
PEAK, TOTAL, WEIGHTED, SQUARE, DISTANCE, LEAST, SUM_X, SUM_XX, COUNT, LARGEST = range(10)
STATE = 10
TOP = 10  # the kept value of the largest weight, in the tile where it is

_SUMS: Any = {"reassoc", "contract", "nsz", "arcp"}

_INF = np.float32(np.inf)
_ZERO, _TWO = np.float32(0), np.float32(2)
_FLOOR = np.float32(-126)
_MOST = np.float32(30)  # 2^30 squared, times a million keys, is still far from overflow


@njit(nogil=True, cache=CACHE)
def open_rows(state, top, sink_logits, bands, output):
    """The empty state: no key seen yet."""
    state[:] = _ZERO
    state[:, PEAK] = -_INF
    top[:] = -1
    sink_logits[:] = -_INF
    bands[:] = _ZERO
    output[:] = _ZERO


@njit(nogil=True, cache=CACHE)
def absorb_tile(
    number,
    logits,
    kept,
    where,
    j0,
    width,
    position,
    lo,
    hi,
    holes,
    sinks,
    state,
    top,
    sink_logits,
    bands,
    peaks,
    output,
):
    """Exponentials and sums of one tile of logits, merged into the rows' running state.

    ``logits`` is ``row width``; the exponentials go to ``kept[:, where : where + width]``. Row x
    sees keys lo..hi-1; with ``holes``, not those whose logit is -inf. The first ``sinks`` keys
    are set aside. ``peaks`` receives the peak that this tile's exponentials are relative to;
    ``output`` is rescaled when the peak moves; ``top`` gets the number of the tile with the largest
    logit so far.
    """
    logits, kept, state, bands, output = (
        bare(logits),
        bare(kept),
        bare(state),
        bare(bands),
        bare(output),
    )
    t = position.shape[0]
    for x in range(logits.shape[0]):
        i = x % t
        s, e = logits[x], kept[x, where : where + width]
        a = min(max(lo[i], j0, sinks) - j0, width)
        b = min(max(hi[i] - j0, a), width)
        e[:a] = _ZERO
        e[b:] = _ZERO
        for j in range(max(lo[i], j0), min(sinks, j0 + width, hi[i])):
            sink_logits[x, j] = s[j - j0]
        peaks[x] = state[x, PEAK]
        if a >= b:
            continue
        ahead = np.float32(position[i] - j0 - a)
        if _absorb_row(state[x], s[a:b], e[a:b], ahead, holes, bands[x], output[x]):
            top[x] = number
        peaks[x] = state[x, PEAK]
        if bands.shape[1]:
            add_bands(bands[x], e, a, b, position[i] - j0)


@njit(nogil=True, cache=CACHE)
def _absorb_row(row, s, e, ahead, holes, bands, output):
    """One row of a tile; returns whether its largest logit is the largest of the row so far.

    The row's exponentials are relative to a reference that is near its largest logit, not exactly
    that: the first logits of the row give it, and only where a later one is larger by more than
    2^30 is the row done again. So one sweep finds the extremes and the sums.
    """
    seen = row[PEAK] != -_INF
    if holes:
        best, least = extremes_with_holes(s)
        if best == -_INF:
            e[:] = _ZERO
            return False
        peak = max(row[PEAK], best)
        total, weighted, square, distance, sum_x, sum_xx, count = weigh_holes(s, e, peak, ahead)
        largest, least = best - peak, least - peak
    else:
        peak = row[PEAK] if seen else peek(s)
        sums = weigh(s, e, peak, ahead)
        if sums[7] > _MOST:
            peak += sums[7]
            sums = weigh(s, e, peak, ahead)
        total, weighted, square, distance, sum_x, sum_xx, count, largest, least = sums
    if seen and peak != row[PEAK]:
        _lower(row, bands, output, row[PEAK] - peak)
    record = not seen or largest > row[LARGEST]
    if record:
        row[LARGEST], row[TOP] = largest, exp2(largest)
    row[LEAST] = min(row[LEAST], least) if seen else least
    row[PEAK] = peak
    row[TOTAL] += total
    row[WEIGHTED] += weighted
    row[SQUARE] += square
    row[DISTANCE] += distance
    row[SUM_X] += sum_x
    row[SUM_XX] += sum_xx
    row[COUNT] += count
    return record


@njit(fastmath=_SUMS, nogil=True, cache=CACHE)
def _lower(row, bands, output, drop):
    """Make a row's state relative to a peak that is ``-drop`` higher."""
    shrink = _power(drop)
    row[WEIGHTED] = shrink * (row[WEIGHTED] + drop * row[TOTAL])
    row[TOTAL] *= shrink
    row[SQUARE] *= shrink * shrink
    row[DISTANCE] *= shrink
    row[LEAST] += drop
    row[LARGEST] += drop
    row[SUM_XX] += drop * (_TWO * row[SUM_X] + row[COUNT] * drop)
    row[SUM_X] += row[COUNT] * drop
    bands *= shrink
    output *= shrink


@njit(nogil=True, cache=CACHE)
def close_rows(
    state,
    top,
    sink_logits,
    bands,
    output,
    learned,
    position,
    kept,
    sink_place,
    tiles,
    peaks,
    sink_values,
    factors,
    row0,
    raw,
    sinks_out,
    log2_total,
    top_out,
    bands_out,
    output_out,
):
    """Normalise the rows of a strip and write them to rows row0, row0 + 1, … of the sums.

    ``tiles`` is ``tile (start, stop, place)``; ``peaks`` and ``factors`` are ``tile row``: a kept
    exponential times its factor is the weight. The sinks' weights are written to ``kept``.
    """
    state, sink_logits, bands, output, kept = (
        bare(state),
        bare(sink_logits),
        bare(bands),
        bare(output),
        bare(kept),
    )
    t, sinks = position.shape[0], sink_logits.shape[1]
    a_sink = np.zeros(sinks, np.float32)
    for x in range(state.shape[0]):
        head, i = x // t, x % t
        target = row0 + i
        row = state[x]
        null = learned[head] if learned.shape[0] else -_INF
        total = _denominator(row, sink_logits[x], null)
        share = _share(row[PEAK], total)
        for y in range(tiles.shape[0]):
            factors[y, x] = _share(peaks[y, x], total)
        for j in range(sinks):
            a_sink[j] = _share(sink_logits[x, j], total)
            kept[x, sink_place + j] = a_sink[j]
            sinks_out[head, target, j] = sink_logits[x, j]
        for k in range(STATE):
            raw[k, head, target] = row[k]
        log2_total[head, target] = total
        top_out[head, target] = _key_at_top(top[x], row[TOP], x, kept, tiles)
        for back in range(2):
            raw[STATE + back, head, target] = _weight_at(
                position[i] - back, x, a_sink, kept, tiles, factors
            )
        if bands_out.shape[2]:
            for band in range(bands.shape[1]):
                bands_out[head, target, band] = bands[x, band] * share
            for j in range(sinks):
                if a_sink[j] != _ZERO:
                    bands_out[head, target, _band(abs(position[i] - j))] += a_sink[j]
        if output_out.shape[2]:
            for c in range(output.shape[1]):
                output_out[head, target, c] = output[x, c] * share
            for j in range(sinks):
                if a_sink[j] != _ZERO:
                    for c in range(output.shape[1]):
                        output_out[head, target, c] += a_sink[j] * sink_values[j, c]


@njit(nogil=True, cache=CACHE)
def _denominator(row, sink_logits, null):
    """log2 of Σ 2^logit over tiles, sinks and the learned sink; -inf when nothing is visible."""
    top = max(row[PEAK], null)
    for j in range(sink_logits.shape[0]):
        top = max(top, sink_logits[j])
    if top == -_INF:
        return top
    total = row[TOTAL] * _power(row[PEAK] - top) + _power(null - top)
    for j in range(sink_logits.shape[0]):
        total += _power(sink_logits[j] - top)
    return top + np.float32(np.log2(total))


@njit(nogil=True, cache=CACHE)
def _key_at_top(tile, value, x, kept, tiles):
    """The key in this tile whose kept value is the largest of row x."""
    if tile < 0:
        return -1
    start, stop, place = tiles[tile]
    return start + find(kept[x, place : place + stop - start], value)


@njit(nogil=True, cache=CACHE)
def _weight_at(key, x, a_sink, kept, tiles, factors):
    """The weight of row x on one key."""
    if 0 <= key < a_sink.shape[0]:
        return a_sink[key]
    for y in range(tiles.shape[0]):
        if tiles[y, 0] <= key < tiles[y, 1]:
            return kept[x, tiles[y, 2] + key - tiles[y, 0]] * factors[y, x]
    return _ZERO


@njit(nogil=True, cache=CACHE)
def _power(x):
    """2^x for x <= 0, and 0 below the normal numbers."""
    return _ZERO if x < _FLOOR else exp2(x)


@njit(nogil=True, cache=CACHE)
def _share(peak, total):
    """2^(peak - total); 0 where nothing is visible."""
    return _ZERO if total == -_INF else _power(peak - total)


@njit(nogil=True, cache=CACHE)
def _band(distance):
    band = 0
    while distance > 0:
        band += 1
        distance >>= 1
    return band


@njit(fastmath=_SUMS, nogil=True, cache=CACHE)
def _accumulate(sums, kept, where, width, factor, x0, x1):
    """sums[j] += Σ_x kept[x, where + j] · factor[x], four rows at a time."""
    wide()
    x = x0
    while x + 4 <= x1:
        e0, e1 = kept[x, where : where + width], kept[x + 1, where : where + width]
        e2, e3 = kept[x + 2, where : where + width], kept[x + 3, where : where + width]
        f0, f1, f2, f3 = factor[x], factor[x + 1], factor[x + 2], factor[x + 3]
        for j in range(width):
            sums[j] += e0[j] * f0 + e1[j] * f1 + e2[j] * f2 + e3[j] * f3
        x += 4
    while x < x1:
        e0, f0 = kept[x, where : where + width], factor[x]
        for j in range(width):
            sums[j] += e0[j] * f0
        x += 1


@njit(nogil=True, cache=CACHE)
def sum_columns(
    kept, tiles, sink_place, sinks, factors, feeds, row_block, pool, received, pooled, scratch
):
    """Column sums of the weights, and their blocks of the pooled map.

    ``factors`` is ``tile row``; the sinks' weights are already normalised. ``feeds`` is 0 for rows
    that do not count, else 1; ``row_block`` is the block of each of the t rows.
    """
    heads, t = received.shape[0], row_block.shape[0]
    chunk = scratch.shape[0]
    for y in range(factors.shape[0]):
        for x in range(factors.shape[1]):
            factors[y, x] *= feeds[x % t]
    for head in range(heads):
        x0 = 0
        while x0 < t:
            x1 = x0 + 1
            while x1 < t and row_block[x1] == row_block[x0]:
                x1 += 1
            for x in range(x0, x1):
                for j in range(sinks):
                    w = kept[head * t + x, sink_place + j] * feeds[x]
                    received[head, j] += w
                    if pool:
                        pooled[head, row_block[x], j // pool] += w
            for y in range(tiles.shape[0]):
                start = max(tiles[y, 0], sinks)
                while start < tiles[y, 1]:
                    stop = min(tiles[y, 1], start + chunk)
                    width, where = stop - start, tiles[y, 2] + start - tiles[y, 0]
                    scratch[:width] = _ZERO
                    _accumulate(
                        scratch, kept, where, width, factors[y], head * t + x0, head * t + x1
                    )
                    for j in range(width):
                        received[head, start + j] += scratch[j]
                    if pool:
                        at = start
                        while at < stop:
                            end = min(stop, (at // pool + 1) * pool)
                            part = total_of(scratch[at - start : end - start])
                            pooled[head, row_block[x0], at // pool] += part
                            at = end
                    start = stop
            x0 = x1
