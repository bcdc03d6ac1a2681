"""Batches of token windows, each a pure function of the seed, the step and the place in the batch.

So a resumed run and a run over several processes see exactly the sequences of one uninterrupted
process, however the global batch is cut. A marked share of the sequences are repeated random
tokens, on which only looking back at an earlier copy can predict the next token (Olsson et al.
2022, "In-context Learning and Induction Heads").
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from headwise.errors import OptionError, TextError

__all__ = ["Batch", "Batches", "Repeats", "is_repeated", "split", "validation_windows"]


class Batch(NamedTuple):
    """Inputs and targets, ``batch position``; which targets count; which sequences are text."""

    ids: Tensor
    targets: Tensor
    counted: Tensor
    text: Tensor  # (batch,) bool: False for repeated random tokens
    documents: Tensor  # (batch, position) int64: attention stays inside a document


@dataclass(frozen=True)
class Repeats:
    """Random tokens in blocks; each block repeats a period of ``shortest`` to ``longest`` tokens.

    A block holds 2 to ``copies`` copies of its period; the next block draws a new one, and is a
    document of its own: among many periods the first step to an induction head, attending to
    what was there at all, lowers the loss too little to be found. The period varies, since with a
    fixed period a fixed offset would do and no head would have to look for the token. Only tokens
    from the second copy on can be predicted: the others do not count.
    """

    tokens: tuple[int, ...]
    shortest: int = 8
    longest: int = 64
    copies: int = 4

    def sequence(self, generator: np.random.Generator, length: int) -> tuple[np.ndarray, ...]:
        """``length`` tokens; for each whether it repeats an earlier one; the number of its block.

        Example:
            >>> repeats = Repeats(tokens=tuple(range(100)), shortest=3, longest=3, copies=2)
            >>> ids, known, blocks = repeats.sequence(np.random.default_rng(0), 6)
            >>> bool((ids[:3] == ids[3:]).all()), known.tolist(), blocks.tolist()
            (True, [False, False, False, True, True, True], [0, 0, 0, 0, 0, 0])
        """
        parts: list[np.ndarray] = []
        marks: list[np.ndarray] = []
        blocks: list[np.ndarray] = []
        total = 0
        tokens = np.asarray(self.tokens, dtype=np.int64)
        while total < length:
            period = int(generator.integers(self.shortest, self.longest + 1))
            copies = int(generator.integers(2, self.copies + 1))
            block = tokens[generator.integers(0, len(tokens), period)]
            parts.append(np.tile(block, copies))
            marks.append(np.arange(period * copies) >= period)
            blocks.append(np.full(period * copies, len(blocks)))
            total += period * copies
        return tuple(np.concatenate(made)[:length] for made in (parts, marks, blocks))


@dataclass(frozen=True)
class Batches:
    """The training batches of a run: ``size`` sequences of ``context`` tokens at every step."""

    tokens: np.ndarray  # (position,) int32
    context: int
    size: int
    seed: int
    repeated: float = 0.0
    repeats: Repeats | None = None

    def at(self, step: int, sequences: range | None = None) -> Batch:
        """The sequences of a step that stand at ``sequences`` in the global batch (all of them).

        Example:
            >>> batches = Batches(np.arange(50, dtype=np.int32), context=4, size=3, seed=0)
            >>> whole = batches.at(7)
            >>> bool((whole.targets == whole.ids + 1).all())
            True
            >>> bool((batches.at(7, range(1, 2)).ids == whole.ids[1:2]).all())
            True
        """
        rows, counted, text, documents = [], [], [], []
        for place in range(self.size) if sequences is None else sequences:
            made, counts, is_text, blocks = self._sequence(step, place)
            rows.append(made)
            counted.append(counts)
            text.append(is_text)
            documents.append(blocks)
        both = torch.from_numpy(np.stack(rows))
        return Batch(
            both[:, :-1].contiguous(),
            both[:, 1:].contiguous(),
            torch.from_numpy(np.stack(counted)),
            torch.tensor(text),
            torch.from_numpy(np.stack(documents)),
        )

    def _sequence(self, step: int, place: int) -> tuple[np.ndarray, np.ndarray, bool, np.ndarray]:
        # A counter-based generator: its key alone decides what it draws.
        key = np.array([self.seed, (step << 24) + place], dtype=np.uint64)
        generator = np.random.Generator(np.random.Philox(key=key))
        if self.repeats is not None and is_repeated(step * self.size + place, self.repeated):
            ids, known, blocks = self.repeats.sequence(generator, self.context + 1)
            return ids, known[1:], False, blocks[:-1]
        start = int(generator.integers(0, len(self.tokens) - self.context))
        window = self.tokens[start : start + self.context + 1].astype(np.int64)
        whole = np.zeros(self.context, dtype=np.int64)
        return window, np.ones(self.context, dtype=bool), True, whole


def is_repeated(number: int, share: float) -> bool:
    """Whether sequence ``number`` of the run is one of repeated tokens: an even share of them.

    Example:
        >>> sum(is_repeated(number, 0.15) for number in range(100))
        15
    """
    return int((number + 1) * share + 1e-9) > int(number * share + 1e-9)


def split(tokens: np.ndarray, share: float, context: int) -> tuple[np.ndarray, np.ndarray]:
    """The training part and, from the end, the contiguous ``share`` kept for validation.

    Raises:
        OptionError: the share is not in [0, 1).
        TextError: a part is shorter than one window with its target.

    Example:
        >>> training, validation = split(np.arange(100), 0.1, context=7)
        >>> len(training), validation[:3].tolist()
        (90, [90, 91, 92])
    """
    if not 0 <= share < 1:
        raise OptionError(f"a validation share of {share}", allowed="0 (none) to below 1")
    cut = len(tokens) - round(len(tokens) * share)
    for name, part in (("training", tokens[:cut]), ("validation", tokens[cut:])):
        if len(part) <= context and (name == "training" or share):
            raise TextError(
                f"the text is too short: its {name} part has {len(part):,} tokens",
                allowed=f"more than the context of {context:,}",
                to_do="use more text or a smaller context"
                + (", or another validation share" if share else ""),
            )
    return tokens[:cut], tokens[cut:]


def validation_windows(tokens: np.ndarray, context: int, most: int) -> Iterator[np.ndarray]:
    """At most ``most`` windows of ``context + 1`` tokens, evenly spread and the same in every run.

    Example:
        >>> [window.tolist() for window in validation_windows(np.arange(10), 2, most=2)]
        [[0, 1, 2], [6, 7, 8]]
    """
    there = (len(tokens) - 1) // context
    number = min(there, most)
    for i in range(number):
        start = (i * (there - 1) // max(number - 1, 1)) * context
        yield tokens[start : start + context + 1]
