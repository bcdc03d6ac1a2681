"""Where in a model an attention module stands."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["AttentionModule"]


@dataclass(frozen=True)
class AttentionModule:
    """One attention module: where it is, which stack runs it, and its number there."""

    path: str
    stack: str  # path of the stack above it
    number: int
    named_cross: bool  # its name or a flag says that it is cross-attention
