"""Implicit masks: who may attend to whom, without ever holding an n×n array.

A mask is a predicate over (sequence, query position, key position) together with what can be said
about it for whole runs of keys. Positions are indices on the key axis: query row i of m stands at
position ``i + offset``, and unless told otherwise the last query stands at the last key
(``offset = n - m``, "bottom-right"), which is what a key-value cache means.

Conventions, in one place:

* ``True`` means *may attend*.
* A window of W is W keys, the query's own included.
* A row that may attend to nothing is legal; the attention functions define what it yields.

Two questions are enough for every algorithm in this package:

``visible(batch, query, key)``
    the definition: index tensors in, a boolean tensor out (broadcast);
``segments(batch, first, last, keys)``
    for the query positions first..last, the runs of keys that any of them may see, each marked
    *full* when all of them see all of it. Keys outside every run are hidden from all.

``tile`` puts the two together: EMPTY, FULL, or the boolean block.
"""

from __future__ import annotations

from headwise.attention.masks.base import EMPTY, FULL, Mask, Segment
from headwise.attention.masks.positional import (
    Band,
    Causal,
    Chunked,
    Everything,
    Prefix,
    Window,
)
from headwise.attention.masks.tabular import Dense, Documents, KeyPadding, Predicate
from headwise.attention.masks.words import describe

__all__ = [
    "EMPTY",
    "FULL",
    "Band",
    "Causal",
    "Chunked",
    "Dense",
    "Documents",
    "Everything",
    "KeyPadding",
    "Mask",
    "Predicate",
    "Prefix",
    "Segment",
    "Window",
    "describe",
]
