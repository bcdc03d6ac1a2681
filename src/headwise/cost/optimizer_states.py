"""What an optimizer keeps of every parameter, in exact bytes.

    sgd         nothing
    momentum    one number for each: the velocity
    adam(w)     two: the running means of the gradient and of its square
    adafactor   of a matrix one number for each row and each column, of a vector one for each
    adam8bit    adam's two in one byte each, and a float32 for each 256 of them; tensors of fewer
                than 4096 numbers in float32

Step counters, one number for each tensor, are left out. Sources: Kingma and Ba 2015
(arXiv:1412.6980); Shazeer and Stern 2018 (arXiv:1804.04235), section 3; Dettmers et al. 2022
(arXiv:2110.02861), section 2.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from headwise.cost.formats import format_of
from headwise.cost.parts import Component, Matrix, Parts, Rows
from headwise.errors import OptionError

__all__ = ["OPTIMIZERS", "optimizer_bytes", "trained_parameters"]

_PER_PARAMETER: Final = {"sgd": 0, "momentum": 1, "adam": 2, "adamw": 2}
OPTIMIZERS: Final = (*_PER_PARAMETER, "adafactor", "adam8bit")
_BLOCK: Final = 256
_LEAST: Final = 4096

# Families of transformers whose queries, keys and values, or gate and up, are one stored matrix.
# Gate and up of experts are in all of them, and what MLA makes of its latent.
_ONE_QKV: Final = ("gpt2", "gpt_bigcode", "gpt_neox", "phi3")
_ONE_GATE: Final = ("phi3", "glm", "glm4")


@dataclass(frozen=True, slots=True)
class _Tensor:
    """A stored parameter: ``copies`` matrices of ``rows`` × ``columns``, or a vector."""

    rows: int
    columns: int | None = None
    copies: int = 1

    @property
    def size(self) -> int:
        return self.copies * self.rows * (self.columns or 1)

    @property
    def factors(self) -> int:
        return self.copies * (self.rows + (self.columns or 0))


def trained_parameters(parts: Parts) -> int:
    """Parameters that get a gradient: stored and learned ones, tied ones once.

    Example:
        >>> from headwise.cost.explicit import explicit
        >>> trained_parameters(explicit(d_model=64, layers=2, heads=4, vocab=257))
        131520
    """
    return sum(each.size for each in _tensors(parts))


def optimizer_bytes(parts: Parts, optimizer: str, dtype: str = "float32") -> int:
    """Bytes of the states of all parameters; ``dtype`` is the type that they are kept in.

    Raises:
        OptionError: an optimizer that is not known.

    Example:
        >>> from headwise.cost.explicit import explicit
        >>> parts = explicit(d_model=64, layers=2, heads=4, vocab=257)
        >>> optimizer_bytes(parts, "adamw"), optimizer_bytes(parts, "adafactor")
        (1052160, 13064)
    """
    if optimizer not in OPTIMIZERS:
        raise OptionError(f"the optimizer {optimizer!r}", allowed=", ".join(OPTIMIZERS))
    size = format_of(dtype).size
    if optimizer in _PER_PARAMETER:
        return _PER_PARAMETER[optimizer] * size * trained_parameters(parts)
    if optimizer == "adafactor":
        return size * sum(each.factors for each in _tensors(parts))
    return sum(_eight_bits(each) for each in _tensors(parts))


def _eight_bits(tensor: _Tensor) -> int:
    if tensor.size < _LEAST:
        return 2 * 4 * tensor.size
    return 2 * (tensor.size + 4 * -(-tensor.size // _BLOCK))


def _tensors(parts: Parts) -> Iterator[_Tensor]:
    """Every parameter as it is stored, with its bias beside it."""
    for stack in parts.stacks:
        for matrices in (stack.matrices, *(layer.matrices for layer in stack.layers)):
            yield from _stored(matrices, parts.family)
    for stack, _, vector in parts.vectors():
        two = vector.component is Component.NORMS and vector.size == 2 * stack.d_model
        yield from [_Tensor(vector.size // (1 + two))] * (1 + two)


def _stored(matrices: tuple[Matrix, ...], family: str) -> Iterator[_Tensor]:
    joined: dict[str, list[Matrix]] = {}
    for number, matrix in enumerate(matrices):
        if matrix.learned and not matrix.tied:
            joined.setdefault(_place(matrix, family) or str(number), []).append(matrix)
    for group in joined.values():
        first = group[0]
        row = first.rows is Rows.NONE and first.d_in == 1  # a bias that stands alone
        columns = None if row else first.d_in
        yield _Tensor(sum(each.d_out for each in group), columns, first.copies)
        bias = sum(each.bias for each in group)
        if bias:
            many = first.copies > 1
            yield _Tensor(first.copies, bias) if many else _Tensor(bias)


def _place(matrix: Matrix, family: str) -> str | None:
    """What a matrix is stored together with; None: alone."""
    if matrix.name in ("W_Q", "W_K", "W_V") and family in _ONE_QKV:
        return f"queries, keys and values {matrix.role}"
    if matrix.name in ("W_UK", "W_UV"):
        return "keys and values of the latent"
    gate = matrix.name in ("W_gate", "W_up")
    if gate and (matrix.component is Component.EXPERTS or family in _ONE_GATE):
        return f"gate and up {matrix.component}"
    return None
