"""Arrays inside an HTML page: few bytes, decoded by the page itself.

Every array is packed to little-endian bytes, deflated and written as base64 (HTML holds no raw
bytes). Three ways to pack, told apart by ``dtype``:

- ``f4``: float32 as it is. For tables per head, whose numbers are exact.
- ``f2``: float16 after multiplication with a power of two that brings the largest magnitude
  between 2^14 and 2^15, high and low bytes in separate planes (they deflate better). Three
  significant digits over eight orders of magnitude below the largest value.
- ``u1``: 0 is zero, 255 is NaN, 1 to 254 are steps of equal ratio from ``low`` to ``high``; for
  shading. Values below ``low`` = 1e-7·``high`` become 1; the ratio of neighbours is at most 1.066.

JavaScript side: templates/decode.js.
"""

from __future__ import annotations

import base64
import json
import math
import zlib
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

__all__ = ["Packed", "json_for_html", "pack_coarse", "pack_exact", "pack_half", "pack_text"]

_LEVEL: Final = 6
_DECADES: Final = 7
_STEPS: Final = 253


@dataclass(frozen=True, kw_only=True, slots=True)
class Packed:
    """One array or text, ready to be written into the page."""

    meta: dict[str, Any]  # dtype, shape, and what the decoding needs
    base64: str


def pack_exact(values: np.ndarray) -> Packed:
    """float32, nothing lost beyond it.

    Example:
        >>> pack_exact(np.zeros((2, 3))).meta
        {'dtype': 'f4', 'shape': [2, 3]}
    """
    meta = {"dtype": "f4", "shape": list(values.shape)}
    return Packed(meta=meta, base64=_squeeze(values.astype("<f4").tobytes()))


def pack_half(values: np.ndarray) -> Packed:
    """float16 with a power-of-two scale; infinities become NaN.

    Example:
        >>> pack_half(np.array([1.0, 0.25])).meta
        {'dtype': 'f2', 'shape': [2], 'exponent': 14}
    """
    finite = np.where(np.isfinite(values), values, np.nan)
    largest = float(np.max(np.abs(finite), initial=0.0, where=np.isfinite(finite)))
    exponent = 15 - math.frexp(largest)[1] if largest > 0 else 0
    with np.errstate(under="ignore"):
        halves = np.ldexp(finite.astype(np.float64), exponent).astype("<f2")
    planes = halves.view(np.uint8).reshape(-1, 2).T
    meta = {"dtype": "f2", "shape": list(values.shape), "exponent": exponent}
    return Packed(meta=meta, base64=_squeeze(np.ascontiguousarray(planes).tobytes()))


def pack_coarse(values: np.ndarray) -> Packed:
    """One byte per number, on a logarithmic scale; for shading. Values must not be negative.

    Example:
        >>> pack_coarse(np.array([1.0, 0.0, np.nan])).meta
        {'dtype': 'u1', 'shape': [3], 'low': 1.0, 'high': 1.0}
    """
    positive = np.isfinite(values) & (values > 0)
    high = float(np.max(values, initial=0.0, where=positive)) or 1.0
    smallest = float(np.min(values, initial=math.inf, where=positive))
    low = max(high * 10.0**-_DECADES, min(smallest, high))
    span = math.log(high / low) or 1.0
    with np.errstate(divide="ignore", invalid="ignore"):
        steps = np.log(np.where(positive, values, low) / low) / span * _STEPS
    codes = np.clip(np.rint(steps), 0, _STEPS).astype(np.uint8) + 1
    codes = np.where(positive, codes, np.where(np.isnan(values), 255, 0)).astype(np.uint8)
    meta = {"dtype": "u1", "shape": list(values.shape), "low": low, "high": high}
    return Packed(meta=meta, base64=_squeeze(codes.tobytes()))


def pack_text(value: Any) -> Packed:
    """Anything that JSON can hold, deflated: the tokens.

    Example:
        >>> pack_text(["<script>"]).meta
        {'dtype': 'json', 'shape': []}
    """
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return Packed(meta={"dtype": "json", "shape": []}, base64=_squeeze(text.encode("utf-8")))


def json_for_html(value: Any) -> str:
    """JSON that may stand inside a ``<script>`` element: no ``<``, ``>`` or ``&`` is left.

    Example:
        >>> print(json_for_html({"token": "</script>"}))
        {"token":"\\u003c/script\\u003e"}
    """
    text = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _squeeze(raw: bytes) -> str:
    return base64.b64encode(zlib.compress(raw, _LEVEL)).decode("ascii")
