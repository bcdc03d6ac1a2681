"""Headwise: an exact measuring instrument for transformers.

The public names, resolved on first use (PEP 562) so that ``import headwise`` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# Public name -> module that defines it. A module that is public itself maps to itself.
_WHERE = {
    "attention": "headwise.attention",
    "errors": "headwise.errors",
    "masks": "headwise.attention.masks",
}

__all__ = sorted(_WHERE)

if TYPE_CHECKING:
    from headwise import attention, errors
    from headwise.attention import masks


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'headwise' has no attribute {name!r}")
    module = importlib.import_module(_WHERE[name])
    return module if _WHERE[name].rsplit(".", 1)[-1] == name else getattr(module, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_WHERE})
