"""What a transformers mask function means, as a pattern.

transformers describes every attention pattern as a Python function of (batch, head, query, key)
and only then builds an array from it. The pattern is read off the function itself: each builder in
``transformers.masking_utils`` returns closures of one code object, so identity of the code object
says which pattern it is and the closure cells hold its parameters.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from transformers import masking_utils

from headwise.observation.rule import MaskFunction, Pattern

__all__ = ["read"]

_ONE = torch.zeros(1, 1, dtype=torch.long)
_SLIDING = masking_utils.sliding_window_overlay(1).__code__
_TWO_SIDED = masking_utils.sliding_window_bidirectional_overlay(1).__code__
_CHUNKED = masking_utils.chunked_overlay(1, _ONE).__code__
_PACKED = masking_utils.packed_sequence_mask_function(_ONE).__code__
_REMAPPED = masking_utils.remap_positions_for_packed_sequence(
    masking_utils.causal_mask_function, _ONE
).__code__
_PADDING = masking_utils.padding_mask_function(_ONE.bool()).__code__
_AND = masking_utils.and_masks(masking_utils.causal_mask_function).__code__


def read(function: MaskFunction) -> Pattern | None:
    """The pattern of a mask function, or None when any part of it is unknown."""
    parts = _parts(function)
    if parts is None:
        return None
    pattern = Pattern()
    for part in parts:
        together = pattern.joined(part)
        if together is None:
            return None
        pattern = together
    return pattern


def _parts(function: MaskFunction) -> list[Pattern] | None:
    """The members of a conjunction, each as a pattern of its own."""
    if function is masking_utils.causal_mask_function:
        return [Pattern(after=0)]
    if function is masking_utils.bidirectional_mask_function:
        return []
    code = getattr(function, "__code__", None)
    cells = _cells(function)
    if code is _SLIDING:
        return [Pattern(before=cells["sliding_window"] - 1)]
    if code is _TWO_SIDED:
        return [Pattern(before=cells["sliding_window"], after=cells["sliding_window"])]
    if code is _CHUNKED:
        return [Pattern(chunk=(cells["chunk_size"], cells["left_padding"]))]
    if code is _PACKED:
        return [Pattern(documents=cells["packed_sequence_mask"])]
    if code is _PADDING:
        return [Pattern(padding=cells["padding_mask"])]
    if code is _REMAPPED:
        inner = read(cells["mask_function"])
        return None if inner is None else [replace(inner, positions=cells["position_ids"])]
    if code is _AND:
        lists = [_parts(member) for member in cells["mask_functions"]]
        return None if None in lists else [part for parts in lists for part in parts or []]
    return None


def _cells(function: MaskFunction) -> dict[str, Any]:
    code = getattr(function, "__code__", None)
    closure = getattr(function, "__closure__", None)
    if code is None or closure is None:
        return {}
    return dict(zip(code.co_freevars, (cell.cell_contents for cell in closure), strict=True))
