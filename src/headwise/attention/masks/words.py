"""Masks in words."""

from __future__ import annotations

from headwise.attention.masks.base import Both, Either, Mask
from headwise.attention.masks.positional import Band, Causal, Chunked, Everything, Prefix
from headwise.attention.masks.tabular import Documents, KeyPadding

__all__ = ["describe"]


def describe(mask: Mask) -> str:
    """A mask in words, for reports.

    Example:
        >>> from headwise.attention.masks import Causal, Window
        >>> describe(Causal() & Window(128))
        'causal and window of 128 keys'
    """
    match mask:
        case Everything():
            return "full"
        case Causal(shift=0):
            return "causal"
        case Causal(shift=shift):
            return f"causal shifted by {shift}"
        case Band(before=before, after=0):
            return f"window of {before + 1} keys"
        case Band(before=before, after=after):
            return f"band of {before} keys before and {after} after"
        case Chunked(size=size):
            return f"chunks of {size}"
        case Prefix(length=length):
            return f"prefix of {length}"
        case KeyPadding():
            return "padding"
        case Documents():
            return "packed documents"
        case Both(left=left, right=right):
            return f"{describe(left)} and {describe(right)}"
        case Either(left=left, right=right):
            return f"{describe(left)} or {describe(right)}"
        case _:
            return "custom"
