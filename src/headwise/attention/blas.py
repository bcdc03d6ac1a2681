"""The address of the matrix product that torch itself uses, to be called from compiled code.

On a CPU torch multiplies float32 matrices with the ``sgemm`` of its BLAS library. Where that
library exports it, compiled loops can call it directly, and a strip need not return to Python
between its products. Where it does not, ``sgemm_address`` is None and torch's own calls are used:
the same products, with more overhead.
"""

from __future__ import annotations

import ctypes
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

__all__ = ["sgemm_address"]


@lru_cache(maxsize=1)
def sgemm_address() -> int | None:
    """Where Fortran's ``sgemm`` is in memory, if torch's library has one that multiplies right."""
    suffix = {"darwin": "dylib"}.get(sys.platform, "so")
    library = Path(torch.__file__).parent / "lib" / f"libtorch_cpu.{suffix}"
    try:
        function = ctypes.CDLL(str(library)).sgemm_
    except (OSError, AttributeError):
        return None
    return ctypes.cast(function, ctypes.c_void_p).value if _multiplies(function) else None


def _multiplies(function: Any) -> bool:
    """Whether it is the BLAS routine with 32-bit sizes: a small product tells."""
    rows, inner, columns = 3, 5, 2
    a = np.arange(rows * inner, dtype=np.float32).reshape(rows, inner)
    b = np.arange(inner * columns, dtype=np.float32).reshape(inner, columns) - 4
    c = np.zeros((rows, columns), np.float32)
    no, one, zero = ctypes.c_char(b"N"), ctypes.c_float(1), ctypes.c_float(0)
    m, n, k = (ctypes.c_int(x) for x in (columns, rows, inner))
    here, at = ctypes.byref, ctypes.c_void_p
    # Column-major: cᵀ = bᵀ aᵀ.
    function.restype = None
    function(
        here(no), here(no), here(m), here(n), here(k), here(one), at(b.ctypes.data), here(m),
        at(a.ctypes.data), here(k), here(zero), at(c.ctypes.data), here(m),
    )  # fmt: skip
    return bool(np.array_equal(c, a @ b))
