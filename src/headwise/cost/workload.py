"""What is asked of a model: how many tokens, in which convention they are counted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from headwise.cost.pairs import all_pairs, visible_pairs
from headwise.cost.parts import Attention, Matrix, Rows, Stack
from headwise.errors import OptionError

__all__ = ["Workload"]

_MOST: Final = 10**12  # tokens; beyond it a number is a slip of the keyboard
_WORDS: Final = {
    "pairs": ("all", "visible"),
    "logits": ("all", "last"),
    "attention": ("fused", "materialised"),
    "recompute": ("none", "selective", "full"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One pass: ``batch`` sequences of ``length`` new tokens after ``cached`` earlier ones.

    Attributes:
        source: tokens that the encoder of an encoder–decoder reads; None: as many as ``length``.
        documents: lengths of the documents packed into one sequence, which see only themselves.
        pairs: "all" n², as dense kernels and counters have it, or "visible": those the mask shows.
        logits: of "all" positions, or of the "last" one.
        attention: "fused" keeps no n × n matrix and computes the scores again in the backward pass;
            "materialised" keeps it.
        recompute: what the backward pass computes again: "none", "selective" (the products of
            attention) or "full" (every block).
        absorbed: MLA with W_UK and W_UV moved to the side of the query, as engines decode.

    Example:
        >>> Workload(length=5, pairs="visible").batch
        1
    """

    length: int
    batch: int = 1
    cached: int = 0
    source: int | None = None
    documents: tuple[int, ...] = ()
    pairs: str = "all"
    logits: str = "all"
    attention: str = "fused"
    recompute: str = "none"
    absorbed: bool = False

    def __post_init__(self) -> None:
        for name, least in (("length", 1), ("batch", 1), ("cached", 0), ("source", 1)):
            value = getattr(self, name)
            if value is not None and not least <= value <= _MOST:
                raise OptionError(f"{name} is {value}", allowed=f"{least} to {_MOST:,}")
        for name, words in _WORDS.items():
            if getattr(self, name) not in words:
                raise OptionError(f"{name} is {getattr(self, name)!r}", allowed=" or ".join(words))
        if self.documents and (min(self.documents) < 1 or sum(self.documents) != self.length):
            raise OptionError(
                f"documents of {sum(self.documents)} tokens in a sequence of {self.length}",
                allowed="lengths of 1 or more that add up to the length",
            )
        if self.documents and self.cached:
            raise OptionError("packed documents after a cache", allowed="one of the two")

    @property
    def encoded(self) -> int:
        """Tokens that an encoder beside a decoder reads."""
        return self.length if self.source is None else self.source

    def queries(self, stack: Stack) -> int:
        """New tokens of each sequence in a stack; 0 where an earlier pass has done it."""
        if not stack.decodes and self.cached:
            return 0
        if stack.tokens is not None:
            return stack.tokens
        return self.encoded if stack.name == "encoder" else self.length

    def rows(self, matrix: Matrix, stack: Stack, source: int) -> int:
        """Rows of each sequence that pass a matrix; ``source`` tokens come from the encoder."""
        new = self.queries(stack)
        if new == 0:
            return 0
        if matrix.positions is not None:
            return matrix.positions
        of = {
            Rows.TOKENS: new,
            Rows.KEYS: new if self.absorbed else new + self.cached,
            Rows.SOURCE: 0 if self.cached else source,
            Rows.LOGITS: new if self.logits == "all" else 1,
            Rows.SEQUENCE: 1,
            Rows.BATCH: self.batch,
            Rows.NONE: 0,
        }
        return of[matrix.rows]

    def pair_count(self, attention: Attention, stack: Stack, source: int) -> int:
        """Pairs of a query and a key of each sequence, in the convention ``pairs``."""
        new = self.queries(stack)
        if attention.role == "cross":
            return new * source
        window = attention.window
        kept = self.cached if stack.decodes else 0
        if window is not None and self.pairs == "all":
            kept = min(kept, window - 1)  # what a cache of that layer still holds
        if self.pairs == "all":
            return all_pairs(new, new + kept)
        parts = self.documents if self.documents and stack.tokens is None else (new,)
        return sum(
            visible_pairs(n, n + kept, causal=attention.causal, window=window) for n in parts
        )
