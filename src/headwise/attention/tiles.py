"""Tiles: which keys a strip of queries must look at, and which pairs of a tile are hidden.

The mask is asked for whole runs of keys; runs that nobody sees are never visited, and only the
pieces that some queries see and others do not carry a boolean block. A strip of T queries costs
O(T n) booleans at the very most, whatever the mask.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from headwise.attention.masks import Mask, Segment

__all__ = ["Tile", "hide", "strips", "tiles"]

# A hidden gap narrower than this is cheaper to compute and hide than to split a matrix product at.
_BRIDGE = 32


class Piece(NamedTuple):
    """Keys ``[start, stop)`` of a tile with the pairs that are hidden: boolean ``query key``."""

    start: int
    stop: int
    hidden: Tensor


class Tile(NamedTuple):
    """A run of keys ``[start, stop)`` to compute, and the pieces of it that hold hidden pairs."""

    start: int
    stop: int
    pieces: tuple[Piece, ...]


def strips(queries: int, rows: int) -> Iterator[range]:
    """Cut the query rows into strips of at most ``rows``.

    Example:
        >>> list(strips(7, 3))
        [range(0, 3), range(3, 6), range(6, 7)]
    """
    for start in range(0, queries, rows):
        yield range(start, min(queries, start + rows))


def tiles(
    mask: Mask, batch: int, query: range, keys: int, width: int, device: torch.device | None = None
) -> list[Tile]:
    """The tiles of at most ``width`` keys that the query positions ``query`` must look at.

    Every pair outside the tiles is hidden; inside a tile, exactly the pairs marked in its pieces.

    Example:
        >>> from headwise.attention.masks import Causal
        >>> [(t.start, t.stop, len(t.pieces)) for t in tiles(Causal(), 0, range(4, 6), 9, width=3)]
        [(0, 3, 0), (3, 6, 1)]
    """
    out = []
    for run in _runs(mask.segments(batch, query[0], query[-1], keys)):
        start, stop = run[0].start, run[-1].stop
        parts = -(-(stop - start) // width)
        step = -(-(stop - start) // parts)
        for a in range(start, stop, step):
            b = min(stop, a + step)
            pieces = _pieces(mask, batch, query, a, b, run, device)
            if pieces is not None:
                out.append(Tile(a, b, pieces))
    return out


def hide(values: Tensor, tile: Tile, fill: float) -> None:
    """Overwrite the hidden pairs of ``values`` (``head query key`` of one tile), in place."""
    for piece in tile.pieces:
        values[..., piece.start - tile.start : piece.stop - tile.start].masked_fill_(
            piece.hidden, fill
        )


def _runs(segments: list[Segment]) -> list[list[Segment]]:
    """Group segments that touch, or nearly touch, into runs; a gap becomes a segment not full."""
    runs: list[list[Segment]] = []
    for s in segments:
        if runs and s.start - runs[-1][-1].stop <= _BRIDGE:
            gap = s.start - runs[-1][-1].stop
            if gap:
                runs[-1].append(Segment(s.start - gap, s.start, False))
            runs[-1].append(s)
        else:
            runs.append([s])
    return runs


def _pieces(
    mask: Mask,
    batch: int,
    query: range,
    start: int,
    stop: int,
    run: list[Segment],
    device: torch.device | None,
) -> tuple[Piece, ...] | None:
    """The pieces of the tile [start, stop) that hold hidden pairs; None when nothing is visible."""
    rows = torch.arange(query.start, query.stop, device=device)[:, None]
    out = []
    seen = False
    for s in _joined(run):
        a, b = max(s.start, start), min(s.stop, stop)
        if a >= b:
            continue
        if s.full:
            seen = True
            continue
        columns = torch.arange(a, b, device=device)[None, :]
        visible = mask.visible(batch, rows, columns).expand(len(query), b - a)
        seen = seen or bool(visible.any())
        if not visible.all():
            out.append(Piece(a, b, ~visible))
    return tuple(out) if seen else None


def _joined(run: list[Segment]) -> list[Segment]:
    """Neighbouring segments that are not full become one: one block instead of several."""
    out: list[Segment] = []
    for s in run:
        if out and not s.full and not out[-1].full:
            out[-1] = Segment(out[-1].start, s.stop, False)
        else:
            out.append(s)
    return out
