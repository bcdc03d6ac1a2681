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

__all__ = ["STATE", "absorb_tile", "close_rows", "open_rows", "sum_columns"]

# Columns of a row's running state.
PEAK, TOTAL, WEIGHTED, SQUARE, DISTANCE, LEAST, SUM_X, SUM_XX, COUNT = range(9)
STATE = 9

# Sums may be reordered (that is what makes them vectors) and products fused; NaN and infinity keep
# their meaning. The exponential must not be reordered: it rounds by adding a large number.
_SUMS: Any = {"reassoc", "contract", "nsz", "arcp"}
_EXACT: Any = {"contract"}
# The search for extremes alone assumes that there is no NaN: the sums of the row will tell.
_EXTREMES: Any = {"reassoc", "contract", "nsz", "arcp", "nnan"}

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
_LARGEST_KEY, _LEAST_KEY = np.int32(2**31 - 1), np.int32(-(2**31))
_HIDDEN_KEY = np.int32(-0x7F800001)  # what -inf becomes
_HIDDEN_FLIP = np.int32(_HIDDEN_KEY ^ np.int32(0x7F800000))  # turns it into what +inf becomes


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


@njit(fastmath=_EXTREMES, nogil=True, cache=True)
def _extremes_of_block(s):  # type: ignore[no-untyped-def]
    """Largest and least logit."""
    _wide()
    top, low = -_INF, _INF
    for j in range(s.shape[0]):
        x = s[j]
        top = _max(top, x)
        low = _min(low, x)
    return top, low


@njit(nogil=True, cache=True)
def _extremes_of_block_with_holes(s):  # type: ignore[no-untyped-def]
    """Largest logit, and the least one that is not hidden (-inf).

    Floats are compared as integers of the same order, where "hidden" can be moved to the far end
    without a branch: a branch would keep the loop from becoming a vector loop.
    """
    _wide()
    top, low = _LEAST_KEY, _LARGEST_KEY
    for j in range(s.shape[0]):
        bits = _bits_from_float(s[j])
        key = np.int32(bits ^ ((bits >> np.int32(31)) & _LARGEST_KEY))
        top = max(top, key)
        low = min(low, np.int32(key ^ (-np.int32(key == _HIDDEN_KEY) & _HIDDEN_FLIP)))
    return (
        _float_from_bits(np.int32(top ^ ((top >> np.int32(31)) & _LARGEST_KEY))),
        _float_from_bits(np.int32(low ^ ((low >> np.int32(31)) & _LARGEST_KEY))),
    )


@njit(nogil=True, cache=True)
def _extremes(s, holes):  # type: ignore[no-untyped-def]
    """Largest and least visible logit, and where the largest is."""
    _wide()
    best, least, where = -_INF, _INF, 0
    for start in range(0, s.shape[0], _BLOCK):
        block = s[start : start + _BLOCK]
        if holes:
            top, low = _extremes_of_block_with_holes(block)
        else:
            top, low = _extremes_of_block(block)
        if top > best or top != top:
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
def open_rows(state, top, sink_logits, bands, output):  # type: ignore[no-untyped-def]
    """The empty state: no key seen yet."""
    state[:] = _ZERO
    state[:, PEAK] = -_INF
    top[:] = -1
    sink_logits[:] = -_INF
    bands[:] = _ZERO
    output[:] = _ZERO


@njit(nogil=True, cache=True)
def absorb_tile(  # type: ignore[no-untyped-def]
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
            best, least, at = _extremes(s[a:b], holes)
        if a >= b or (holes and best == -_INF):
            e[a:b] = _ZERO
            peaks[x] = old
            continue
        if best > old:
            top[x] = at + a + j0
        peak = max(old, best)
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
        top_out[head, target] = top[x]
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


@njit(nogil=True, cache=True)
def _denominator(row, sink_logits, null):  # type: ignore[no-untyped-def]
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


@njit(nogil=True, cache=True)
def _weight_at(key, x, a_sink, kept, tiles, factors):  # type: ignore[no-untyped-def]
    """The weight of row x on one key."""
    if 0 <= key < a_sink.shape[0]:
        return a_sink[key]
    for y in range(tiles.shape[0]):
        if tiles[y, 0] <= key < tiles[y, 1]:
            return kept[x, tiles[y, 2] + key - tiles[y, 0]] * factors[y, x]
    return _ZERO


@njit(nogil=True, cache=True)
def _power(x):  # type: ignore[no-untyped-def]
    """2^x for x <= 0, and 0 below the normal numbers."""
    return _ZERO if x < _FLOOR else _exp2(x)


@njit(nogil=True, cache=True)
def _share(peak, total):  # type: ignore[no-untyped-def]
    """2^(peak - total); 0 where nothing is visible."""
    return _ZERO if total == -_INF else _power(peak - total)


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
                            part = _sum(scratch[at - start : end - start])
                            pooled[head, row_block[x0], at // pool] += part
                            at = end
                    start = stop
            x0 = x1
