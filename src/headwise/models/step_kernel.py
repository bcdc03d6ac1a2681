"""One decoding step of a stack in one compiled call, matrix products included.

Between the products of a step stand small sums over vectors of d_model. As calls from Python each
of them finds its code and data gone from the nearer caches, which the weights have just streamed
through; compiled together they cost next to nothing. The products are torch's own (``sgemm``).
"""

from __future__ import annotations

import numpy as np
from numba import carray, njit

from headwise.attention.caching import CACHE
from headwise.attention.fortran import floats_at, sgemm
from headwise.attention.kernels import exp2

__all__ = ["step"]

_LOG2E = np.float32(1.4426950408889634)
_SUMS = {"reassoc", "contract", "nsz", "arcp"}


@njit(fastmath=_SUMS, nogil=True, cache=CACHE)
def _rms(x, gain, eps, out):
    """x / √(mean x² + ε) · gain."""
    total = np.float32(0)
    for i in range(x.shape[0]):
        total += x[i] * x[i]
    factor = np.float32(1) / np.sqrt(total / np.float32(x.shape[0]) + eps)
    for i in range(x.shape[0]):
        out[i] = x[i] * factor * gain[i]


@njit(fastmath=_SUMS, nogil=True, cache=CACHE)
def _turn(x, cos, sin, heads, width):
    """Turn the first entries of every head, pairs half a width apart, in place."""
    half = cos.shape[0] // 2
    for h in range(heads):
        for i in range(half):
            a, b = x[h * width + i], x[h * width + half + i]
            x[h * width + i] = a * cos[i] + b * sin[i]
            x[h * width + half + i] = b * cos[half + i] + a * sin[half + i]


@njit(fastmath=_SUMS, nogil=True, cache=CACHE)
def _softmax(s):
    """The weights of one row of logits, in place."""
    top = s[0]
    for j in range(s.shape[0]):
        top = max(top, s[j])
    total = np.float32(0)
    for j in range(s.shape[0]):
        s[j] = exp2((s[j] - top) * _LOG2E)
        total += s[j]
    for j in range(s.shape[0]):
        s[j] /= total


@njit(fastmath=_SUMS, nogil=True, cache=CACHE)
def _gated(y, width):
    """silu(gate) · up, into the first half of ``(gate up)``."""
    for i in range(width):
        y[i] = y[i] / (np.float32(1) + exp2(min(-y[i] * _LOG2E, np.float32(126)))) * y[width + i]


@njit(nogil=True, cache=CACHE)
def step(address, layers, firsts, sizes, floats, cos, sin, x, work, size, number, words):
    """Add every block to the stream ``x`` (d_model) for the position after the filled ones.

    ``layers`` holds for each layer the addresses of: gain, (query key value), output, gain,
    (gate up), down, cached keys, cached values; ``firsts`` the first key it sees. ``sizes``:
    d_model, heads, kv_heads, d_head, d_ff, capacity, filled positions. ``floats``: ε, scale.
    ``work`` has room for what a layer makes; ``size``, ``number``, ``words`` for what Fortran reads
    by address.
    """
    d, heads, kv_heads, width, d_ff, capacity, filled = sizes
    group = heads // kv_heads
    rows = (heads + 2 * kv_heads) * width
    y, qkv = work[:d], work[d : d + rows]
    mixed = work[d + rows : d + rows + heads * width]
    rest = work[d + rows + heads * width :]
    one, zero, scale = number.ctypes.data, number.ctypes.data + 4, number.ctypes.data + 8
    plain, turned = words.ctypes.data, words.ctypes.data + 1
    at = size.ctypes.data
    size[0], size[1], size[2], size[3], size[4] = d, rows, heads * width, 2 * d_ff, d_ff
    size[5], size[6], size[8] = 1, width, group
    number[2] = floats[1]
    eps = floats[0]
    for layer in range(layers.shape[0]):
        gain_1, w_qkv, w_o, gain_2, w_up, w_down, keys, values = layers[layer]
        first = firsts[layer]
        seen = filled + 1 - first
        size[7] = seen
        _rms(x, carray(floats_at(gain_1), (d,)), eps, y)
        _product(address, turned, plain, at + 4, at, one, zero, w_qkv, y, qkv, at + 20)
        _turn(qkv, cos, sin, heads + kv_heads, width)
        for h in range(kv_heads):
            k = carray(floats_at(keys + 4 * h * capacity * width), (capacity, width))
            v = carray(floats_at(values + 4 * h * capacity * width), (capacity, width))
            k[filled] = qkv[(heads + h) * width : (heads + h + 1) * width]
            v[filled] = qkv[(heads + kv_heads + h) * width : (heads + kv_heads + h + 1) * width]
            s = rest[: group * seen]
            sgemm(
                address, turned, plain, at + 28, at + 32, at + 24, scale,
                k[first:].ctypes.data, at + 24, qkv[h * group * width :].ctypes.data, at + 24,
                zero, s.ctypes.data, at + 28,
            )  # fmt: skip
            for i in range(group):
                _softmax(s[i * seen : (i + 1) * seen])
            sgemm(
                address, plain, plain, at + 24, at + 32, at + 28, one,
                v[first:].ctypes.data, at + 24, s.ctypes.data, at + 28,
                zero, mixed[h * group * width :].ctypes.data, at + 24,
            )  # fmt: skip
        _product(address, turned, plain, at, at + 8, one, one, w_o, mixed, x, at + 20)
        _rms(x, carray(floats_at(gain_2), (d,)), eps, y)
        up = rest[: 2 * d_ff]
        _product(address, turned, plain, at + 12, at, one, zero, w_up, y, up, at + 20)
        _gated(up, d_ff)
        _product(address, turned, plain, at, at + 16, one, one, w_down, up, x, at + 20)


@njit(nogil=True, cache=CACHE)
def _product(address, turned, plain, rows, columns, one, add, weights, x, out, single):
    """out = W x (+ out), for W ``rows columns`` row after row."""
    sgemm(
        address, turned, plain, rows, single, columns, one, weights, columns, x.ctypes.data,
        columns, add, out.ctypes.data, rows,
    )  # fmt: skip
