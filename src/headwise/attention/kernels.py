"""Compiled row loops for the strip pass on the CPU in float32.

Between the two matrix products of a strip (q kᵀ and A v, which stay torch's) every statistic is a
handful of sums over a row that is already in the cache. As separate tensor operations each of them
would stream the strip from memory again; compiled together they cost a fraction of the products.
Numba compiles them on first use and keeps the result.

Everything is in base 2, as in ``strips.py``; rows of a strip are ordered ``head row``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

__all__ = ["LEAST", "PEAK", "STATE", "absorb_tile", "close_rows", "sum_columns"]

# Columns of a row's running state.
PEAK, TOTAL, WEIGHTED, SQUARE, DISTANCE, LEAST, SUM_X, SUM_XX, COUNT = range(9)
STATE = 9

# Sums may be reordered (that is what makes them vectors) and products fused; NaN and infinity keep
# their meaning. The exponential must not be reordered: it rounds by adding a large number.
_SUMS: Any = {"reassoc", "contract", "nsz", "arcp"}
_EXACT: Any = {"contract"}

_INF = np.float32(np.inf)
_ZERO, _ONE, _TWO = np.float32(0), np.float32(1), np.float32(2)
_FLOOR = np.float32(-126)
_ROUND = np.float32(1.5 * 2**23 + 127)
# 2^f = 1 + f·q(f) on [-1/2, 1/2]: minimax q of degree 5, relative error 2e-9.
_C1, _C2, _C3, _C4, _C5, _C6 = (
    np.float32(c)
    for c in (
        0.6931472028550953,
        0.24022647913627587,
        0.05550332471041649,
        0.00961843735762637,
        0.001339887445257226,
        0.0001535336200177263,
    )
)
_BLOCK = 128


@intrinsic
def _wide(typingctx):  # type: ignore[no-untyped-def]
    """Ask LLVM for the widest vectors in this function; on some processors it prefers half."""

    def build(context, builder, signature, args):  # type: ignore[no-untyped-def]
        # llvmlite only knows flag attributes; this one has a value.
        set.add(builder.function.attributes, '"prefer-vector-width"="512"')
        return context.get_dummy_value()

    return types.none(), build


@intrinsic
def _float_from_bits(typingctx, bits):  # type: ignore[no-untyped-def]
    """The float32 with these 32 bits."""

    def build(context, builder, signature, args):  # type: ignore[no-untyped-def]
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.int32), build


@intrinsic
def _bits_from_float(typingctx, x):  # type: ignore[no-untyped-def]
    """The 32 bits of a float32."""

    def build(context, builder, signature, args):  # type: ignore[no-untyped-def]
        return builder.bitcast(args[0], ir.IntType(32))

    return types.int32(types.float32), build


def _llvm_binary(name: str):  # type: ignore[no-untyped-def]
    """An LLVM intrinsic of two float32: unlike a comparison, it can become a vector reduction."""

    @intrinsic
    def operation(typingctx, x, y):  # type: ignore[no-untyped-def]
        def build(context, builder, signature, args):  # type: ignore[no-untyped-def]
            kind = ir.FunctionType(ir.FloatType(), [ir.FloatType(), ir.FloatType()])
            function = builder.module.declare_intrinsic(name, [ir.FloatType()], kind)
            return builder.call(function, args)

        return types.float32(types.float32, types.float32), build

    return operation


_max = _llvm_binary("llvm.maximum")  # NaN if either is
_min = _llvm_binary("llvm.minimum")


@njit(fastmath=_EXACT)
def _exp2(x):  # type: ignore[no-untyped-def]
    """2^x for x <= 0: exactly 1 at 0, 2^-126 below the normal numbers; NaN stays NaN."""
    shifted = _max(x, _FLOOR)
    rounded = shifted + _ROUND
    f = shifted - (rounded - _ROUND)
    p = _C5 + f * _C6
    p = _C4 + f * p
    p = _C3 + f * p
    p = _C2 + f * p
    p = _C1 + f * p
    p = _ONE + f * p
    return p * _float_from_bits(np.int32(_bits_from_float(rounded) << np.int32(23)))


@njit(fastmath=_SUMS, nogil=True, cache=True)
def _extremes_of_block(s):  # type: ignore[no-untyped-def]
    """Largest logit, and the least one that is not hidden (-inf)."""
    _wide()
    top, low = -_INF, _INF
    for j in range(s.shape[0]):
        x = s[j]
        top = _max(top, x)
        low = _min(low, _INF if x == -_INF else x)
    return top, low


@njit(nogil=True, cache=True)
def _extremes(s):  # type: ignore[no-untyped-def]
    """Largest and least visible logit, and where the largest is."""
    _wide()
    best, least, where = -_INF, _INF, 0
    for start in range(0, s.shape[0], _BLOCK):
        top, low = _extremes_of_block(s[start : start + _BLOCK])
        if not top <= best:
            best, where = top, start
        if low < least:
            least = low
    for j in range(where, min(s.shape[0], where + _BLOCK)):
        if s[j] == best:
            return best, least, j
    return best, least, where


@njit(fastmath=_SUMS, nogil=True, cache=True)
def _weigh(s, e, peak, ahead):  # type: ignore[no-untyped-def]
    """e = 2^(s - peak) and its sums; ``ahead`` = query position - key of column 0."""
    _wide()
    total, weighted, square, distance, sum_x, sum_xx = _ZERO, _ZERO, _ZERO, _ZERO, _ZERO, _ZERO
    for j in range(s.shape[0]):
        x = s[j] - peak
        w = _exp2(x)
        e[j] = w
        total += w
        weighted += w * x
        square += w * w
        distance += w * abs(ahead - np.float32(np.int32(j)))
        sum_x += x
        sum_xx += x * x
    return total, weighted, square, distance, sum_x, sum_xx, np.float32(s.shape[0])


@njit(fastmath=_SUMS, nogil=True, cache=True)
def _weigh_holes(s, e, peak, ahead):  # type: ignore[no-untyped-def]
    """As ``_weigh``, where a logit of -inf means a hidden key."""
    _wide()
    total, weighted, square, distance = _ZERO, _ZERO, _ZERO, _ZERO
    sum_x, sum_xx, count = _ZERO, _ZERO, _ZERO
    for j in range(s.shape[0]):
        hidden = s[j] == -_INF
        x = _ZERO if hidden else s[j] - peak
        w = _ZERO if hidden else _exp2(x)
        e[j] = w
        total += w
        weighted += w * x
        square += w * w
        distance += w * abs(ahead - np.float32(np.int32(j)))
        sum_x += x
        sum_xx += x * x
        count += _ZERO if hidden else _ONE
    return total, weighted, square, distance, sum_x, sum_xx, count


@njit(fastmath=_SUMS, nogil=True, cache=True)
def _sum(e):  # type: ignore[no-untyped-def]
    _wide()
    total = _ZERO
    for j in range(e.shape[0]):
        total += e[j]
    return total


@njit(nogil=True, cache=True)
def _add_bands(bands, e, a, b, own):  # type: ignore[no-untyped-def]
    """Sums of e over the distance bands around column ``own``, within [a, b)."""
    if a <= own < b:
        bands[0] += e[own]
    low = 1
    for band in range(1, bands.shape[0]):
        left_a, left_b = max(a, own - 2 * low + 1), min(b, own - low + 1)
        if left_a < left_b:
            bands[band] += _sum(e[left_a:left_b])
        right_a, right_b = max(a, own + low), min(b, own + 2 * low)
        if right_a < right_b:
            bands[band] += _sum(e[right_a:right_b])
        low *= 2


@njit(nogil=True, cache=True)
def absorb_tile(  # type: ignore[no-untyped-def]
    logits, kept, where, j0, width, position, lo, hi, holes, sinks, state, top, sink_logits, bands,
    peaks, output,
):
    """Exponentials and sums of one tile of logits, merged into the rows' running state.

    ``logits`` is ``row width``; the exponentials go to ``kept[:, where : where + width]``. Row x
    sees keys lo..hi-1; with ``holes``, not those whose logit is -inf. The first ``sinks`` keys
    are set aside. ``peaks`` receives the peak that this tile's exponentials are relative to;
    ``output`` is rescaled when the peak moves.
    """
    _wide()
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
        old = state[x, PEAK]
        best, least, at = -_INF, _INF, 0
        if a < b:
            best, least, at = _extremes(s[a:b])
        if a >= b or best == -_INF:
            e[a:b] = _ZERO
            peaks[x] = old
            continue
        if not best <= old:
            top[x] = at + a + j0
        peak = old if best <= old else best
        peaks[x] = peak
        ahead = np.float32(position[i] - j0 - a)
        if holes:
            sums = _weigh_holes(s[a:b], e[a:b], peak, ahead)
        else:
            sums = _weigh(s[a:b], e[a:b], peak, ahead)
        total, weighted, square, distance, sum_x, sum_xx, count = sums
        row = state[x]
        seen = old != -_INF
        if seen and old != peak:
            _lower(row, bands[x], output[x], old - peak)
        row[PEAK] = peak
        row[TOTAL] += total
        row[WEIGHTED] += weighted
        row[SQUARE] += square
        row[DISTANCE] += distance
        row[LEAST] = min(row[LEAST], least - peak) if seen else least - peak
        row[SUM_X] += sum_x
        row[SUM_XX] += sum_xx
        row[COUNT] += count
        if bands.shape[1]:
            _add_bands(bands[x], e, a, b, position[i] - j0)


@njit(fastmath=_SUMS, nogil=True, cache=True)
def _lower(row, bands, output, drop):  # type: ignore[no-untyped-def]
    """Make a row's state relative to a peak that is ``-drop`` higher."""
    shrink = _power(drop)
    row[WEIGHTED] = shrink * (row[WEIGHTED] + drop * row[TOTAL])
    row[TOTAL] *= shrink
    row[SQUARE] *= shrink * shrink
    row[DISTANCE] *= shrink
    row[LEAST] += drop
    row[SUM_XX] += drop * (_TWO * row[SUM_X] + row[COUNT] * drop)
    row[SUM_X] += row[COUNT] * drop
    bands *= shrink
    output *= shrink


@njit(nogil=True, cache=True)
def close_rows(  # type: ignore[no-untyped-def]
    state, sink_logits, learned, position, kept, runs, tiles, peaks, bands, output, sink_values,
    log2_total, factors, diagonal,
):
    """Normalise the rows of a strip: denominators, factors of the tiles, output, bands, diagonals.

    ``runs`` is ``run (start, stop, place)``, ``tiles`` is ``tile (start, stop, place)``; ``peaks``
    and ``factors`` are ``tile row``. ``diagonal`` receives the weights on self and previous.
    """
    t = position.shape[0]
    sinks = sink_logits.shape[1]
    a_sink = np.empty(sinks, np.float32)
    for x in range(state.shape[0]):
        i = x % t
        row = state[x]
        null = learned[x // t] if learned.shape[0] else -_INF
        top = max(row[PEAK], null)
        for j in range(sinks):
            top = max(top, sink_logits[x, j])
        if top == -_INF:
            log2_total[x] = -_INF
            factors[:, x] = _ZERO
            if runs.shape[0] and runs[0, 0] == 0:
                kept[x, runs[0, 2] : runs[0, 2] + sinks] = _ZERO
            continue
        denominator = row[TOTAL] * _power(row[PEAK] - top) + _power(null - top)
        for j in range(sinks):
            denominator += _power(sink_logits[x, j] - top)
        total = top + np.float32(np.log2(denominator))
        log2_total[x] = total
        for y in range(tiles.shape[0]):
            factors[y, x] = _power(peaks[y, x] - total)
        share = _power(row[PEAK] - total)
        bands[x] *= share
        output[x] *= share
        for j in range(sinks):
            a_sink[j] = _power(sink_logits[x, j] - total)
            kept[x, runs[0, 2] + j] = a_sink[j]
            if bands.shape[1]:
                bands[x, _band(abs(position[i] - j))] += a_sink[j]
            if sink_values.shape[0] and a_sink[j] != _ZERO:
                for c in range(output.shape[1]):
                    output[x, c] += a_sink[j] * sink_values[j, c]
        for back in range(2):
            own = position[i] - back
            if 0 <= own < sinks:
                diagonal[back, x] = a_sink[own]
            for y in range(tiles.shape[0]):
                if tiles[y, 0] <= own < tiles[y, 1] and own >= sinks:
                    diagonal[back, x] = kept[x, tiles[y, 2] + own - tiles[y, 0]] * factors[y, x]


@njit(nogil=True, cache=True)
def _power(x):  # type: ignore[no-untyped-def]
    """2^x with 2^-inf = 0, accurate for any x."""
    return _ZERO if x == -_INF else np.float32(2.0 ** np.float64(x))


@njit(nogil=True, cache=True)
def _band(distance):  # type: ignore[no-untyped-def]
    band = 0
    while distance > 0:
        band += 1
        distance >>= 1
    return band


@njit(fastmath=_SUMS, nogil=True, cache=True)
def _accumulate(sums, kept, where, width, factor, x0, x1):  # type: ignore[no-untyped-def]
    """sums[j] += Σ_x kept[x, where + j] · factor[x], four rows at a time."""
    _wide()
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


@njit(nogil=True, cache=True)
def sum_columns(  # type: ignore[no-untyped-def]
    kept, tiles, sink_place, sinks, factors, feeds, row_block, pool, received, pooled, scratch
):
    """Column sums of the weights, and their blocks of the pooled map.

    ``factors`` is ``tile row``, 0 for rows that do not count; ``feeds`` is 0 or 1 per row (the
    sinks' weights are already normalised). ``row_block`` is the block of each of the t rows.
    """
    heads, t = received.shape[0], row_block.shape[0]
    chunk = scratch.shape[0]
    for head in range(heads):
        _wide()
        x0 = 0
        while x0 < t:
            x1 = x0 + 1
            while x1 < t and row_block[x1] == row_block[x0]:
                x1 += 1
            for x in range(x0, x1):
                for j in range(sinks):
                    w = kept[head * t + x, sink_place + j] * feeds[head * t + x]
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
                            part = _sum(scratch[at - start : end - start])
                            pooled[head, row_block[x0], at // pool] += part
                            at = end
                    start = stop
            x0 = x1
