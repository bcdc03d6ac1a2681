"""Whether Numba can keep compiled code on disk.

It tries the package's own folder and the user's cache; where neither can be written, as in a
read-only container, it raises instead of compiling anew each time.
"""

from __future__ import annotations

from typing import Final

from numba import njit

__all__ = ["CACHE", "can_cache"]


def _probe() -> int:
    return 0


def can_cache() -> bool:
    """True if a compiled function of this package finds a place on disk."""
    try:
        njit(cache=True)(_probe)
    except RuntimeError:
        return False
    return True


CACHE: Final = can_cache()
