"""Compiled sweeps over one row of logits, for the strip pass on the CPU in float32.

Between the two matrix products of a strip (q kᵀ and A v, which stay torch's) every statistic is a
handful of sums over a row that is already in the cache. As separate tensor operations each of them
would stream the strip from memory again; compiled together they cost a fraction of the products.
Numba compiles them on first use and keeps the result.

Everything is in base 2, as in ``strips.py``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, njit, types
from numba.extending import intrinsic

from headwise.attention.caching import CACHE

__all__ = [
    "add_bands",
    "bare",
    "exp2",
    "extremes_with_holes",
    "find",
    "peek",
    "total_of",
    "weigh",
    "weigh_holes",
    "wide",
]

# Sums may be reordered (that is what makes them vectors) and products fused; NaN and infinity keep
# their meaning. The exponential must not be reordered: it rounds by adding a large number.
_SUMS: Any = {"reassoc", "contract", "nsz", "arcp"}
_EXACT: Any = {"contract"}

_INF = np.float32(np.inf)
_ZERO, _ONE = np.float32(0), np.float32(1)
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
_PEEK = 64
_LARGEST_KEY, _LEAST_KEY = np.int32(2**31 - 1), np.int32(-(2**31))
_HIDDEN_KEY = np.int32(-0x7F800001)  # what -inf becomes
_HIDDEN_FLIP = np.int32(_HIDDEN_KEY ^ np.int32(0x7F800000))  # turns it into what +inf becomes


@intrinsic
def wide(typingctx):
    """Ask LLVM for the widest vectors in this function; on some processors it prefers half."""

    def build(context, builder, signature, args):
        # llvmlite only knows flag attributes; this one has a value.
        set.add(builder.function.attributes, '"prefer-vector-width"="512"')
        return context.get_dummy_value()

    return types.none(), build


@intrinsic
def _float_from_bits(typingctx, bits):
    """The float32 with these 32 bits."""

    def build(context, builder, signature, args):
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.int32), build


@intrinsic
def _bits_from_float(typingctx, x):
    """The 32 bits of a float32."""

    def build(context, builder, signature, args):
        return builder.bitcast(args[0], ir.IntType(32))

    return types.int32(types.float32), build


@intrinsic
def _pointer(typingctx, array):
    """The address of an array's first element, typed."""
    kind = types.CPointer(array.dtype)

    def build(context, builder, signature, args):
        return context.make_array(array)(context, builder, args[0]).data

    return kind(array), build


@njit
def bare(array):
    """The same memory as an array that nobody counts references to.

    Every slice of a counted array costs two locked instructions; a row of a strip has a dozen. The
    caller keeps the memory alive.
    """
    return carray(_pointer(array), array.shape)


def _llvm_binary(name: str):
    """An LLVM intrinsic of two float32: unlike a comparison, it can become a vector reduction."""

    @intrinsic
    def operation(typingctx, x, y):
        def build(context, builder, signature, args):
            kind = ir.FunctionType(ir.FloatType(), [ir.FloatType(), ir.FloatType()])
            function = builder.module.declare_intrinsic(name, [ir.FloatType()], kind)
            return builder.call(function, args)

        return types.float32(types.float32, types.float32), build

    return operation


_max = _llvm_binary("llvm.maximum")  # NaN if either is
_min = _llvm_binary("llvm.minimum")


@njit(fastmath=_EXACT)
def exp2(x):
    """2^x for x < 128: exactly 1 at 0, 2^-126 below the normal numbers; NaN stays NaN."""
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


@njit(nogil=True, cache=CACHE)
def extremes_with_holes(s):
    """Largest logit, and the least one that is not hidden (-inf).

    Floats are compared as integers of the same order, where "hidden" can be moved to the far end
    without a branch: a branch would keep the loop from becoming a vector loop.
    """
    wide()
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


@njit(fastmath=_SUMS, nogil=True, cache=CACHE)
def peek(s):
    """A reference for a row not yet seen: the largest of its first logits."""
    top = -_INF
    for j in range(min(_PEEK, s.shape[0])):
        top = _max(top, s[j])
    return top


@njit(nogil=True, cache=CACHE)
def find(e, value):
    """The first column that holds ``value``; -1 if none does."""
    wide()
    for start in range(0, e.shape[0], _BLOCK):
        block = e[start : start + _BLOCK]
        here = np.int32(0)
        for j in range(block.shape[0]):
            here |= np.int32(block[j] == value)
        if here:
            for j in range(block.shape[0]):
                if block[j] == value:
                    return start + j
    return -1


@njit(fastmath=_SUMS, nogil=True, cache=CACHE)
def weigh(s, e, peak, ahead):
    """e = 2^x with x = s - peak, the sums over the row, and the largest and least x.

    ``peak`` is any reference near the largest logit. ``ahead`` = query position - key of column 0.
    """
    wide()
    total, weighted, square, distance, sum_x, sum_xx = _ZERO, _ZERO, _ZERO, _ZERO, _ZERO, _ZERO
    top, low, apart = -_INF, _INF, ahead
    for j in range(s.shape[0]):
        x = s[j] - peak
        w = exp2(x)
        e[j] = w
        top = _max(top, x)
        low = _min(low, x)
        total += w
        weighted += w * x
        square += w * w
        distance += w * abs(apart)
        apart -= _ONE
        sum_x += x
        sum_xx += x * x
    return total, weighted, square, distance, sum_x, sum_xx, np.float32(s.shape[0]), top, low


@njit(fastmath=_SUMS, nogil=True, cache=CACHE)
def weigh_holes(s, e, peak, ahead):
    """As ``weigh`` without the extremes, where a logit of -inf means a hidden key."""
    wide()
    total, weighted, square, distance = _ZERO, _ZERO, _ZERO, _ZERO
    sum_x, sum_xx, count = _ZERO, _ZERO, _ZERO
    for j in range(s.shape[0]):
        hidden = s[j] == -_INF
        x = _ZERO if hidden else s[j] - peak
        w = _ZERO if hidden else exp2(x)
        e[j] = w
        total += w
        weighted += w * x
        square += w * w
        distance += w * abs(ahead - np.float32(np.int32(j)))
        sum_x += x
        sum_xx += x * x
        count += _ZERO if hidden else _ONE
    return total, weighted, square, distance, sum_x, sum_xx, count


@njit(fastmath=_SUMS, nogil=True, cache=CACHE)
def total_of(e):
    """Σ_j e_j."""
    wide()
    total = _ZERO
    for j in range(e.shape[0]):
        total += e[j]
    return total


@njit(nogil=True, cache=CACHE)
def add_bands(bands, e, a, b, own):
    """Sums of e over the distance bands around column ``own``, within [a, b)."""
    if a <= own < b:
        bands[0] += e[own]
    low = 1
    for band in range(1, bands.shape[0]):
        left_a, left_b = max(a, own - 2 * low + 1), min(b, own - low + 1)
        if left_a < left_b:
            bands[band] += total_of(e[left_a:left_b])
        right_a, right_b = max(a, own + low), min(b, own + 2 * low)
        if right_a < right_b:
            bands[band] += total_of(e[right_a:right_b])
        low *= 2
