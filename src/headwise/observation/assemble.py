"""The output of a call, put together from its pieces: ``batch query head d_value``."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from headwise.observation.call import Call
from headwise.observation.pieces import Piece, leftover, self_pieces
from headwise.observation.tokens import Layout, Reader, Stream

__all__ = ["assemble", "plain"]


def plain(call: Call) -> Tensor:
    """The output of a call that nobody measures: ``batch query head d_value``."""
    reader = Reader(Stream(""))
    spec = call.spec
    if spec.queries == spec.keys or spec.pattern is None or spec.looks_ahead is False:
        extents = [spec.extents(b) for b in range(spec.batch)]
        layout = reader.read(extents, spec.queries, spec.q_offset, None)
        return assemble(call, layout, self_pieces(spec, layout), call.output)
    layout = reader.read([[]] * spec.batch, spec.queries, 0, None)
    return assemble(call, layout, [], call.output)


def assemble(
    call: Call, layout: Layout, pieces: list[Piece], compute: Callable[[Piece], Tensor]
) -> Tensor:
    """Put the outputs of pieces and of left-over rows together, ``batch query head d_value``."""
    batch, heads, queries = call.q.shape[:3]
    if len(pieces) == 1 and pieces[0].queries == queries and pieces[0].batch == (0, batch):
        return compute(pieces[0]).transpose(1, 2).contiguous()
    out = call.q.new_zeros(batch, queries, heads, call.v.shape[-1])
    for piece in pieces:
        out[slice(*piece.batch), piece.rows] = compute(piece).transpose(1, 2).to(out.dtype)
    for b, rows in leftover(layout, pieces):
        out[b, rows] = call.output_of_rows(b, rows)[0].transpose(0, 1).to(out.dtype)
    return out
