"""What compiled code calls by address: torch's own matrix product, and memory."""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

__all__ = ["floats_at", "sgemm"]


@intrinsic
def sgemm(typingctx, address, trans_a, trans_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc):
    """Call Fortran's sgemm at this address; every argument is the address of its value.

    C = α op(A) op(B) + β C in columns: for rows, give the factors in the other order.
    """

    def build(context, builder, signature, args):
        word = ir.IntType(64)
        kind = ir.FunctionType(ir.VoidType(), [word] * 13)
        builder.call(builder.inttoptr(args[0], kind.as_pointer()), args[1:])
        return context.get_dummy_value()

    return types.none(*[types.int64] * 14), build


@intrinsic
def floats_at(typingctx, address):
    """A pointer to the float32 at an address."""
    kind = types.CPointer(types.float32)

    def build(context, builder, signature, args):
        return builder.inttoptr(args[0], ir.FloatType().as_pointer())

    return kind(types.int64), build
