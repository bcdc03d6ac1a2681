"""Number formats: how many bytes a matrix takes, as exact integers.

A format stores runs of ``block`` numbers in ``size`` bytes, scales and zeros included, so that one
number takes 8 · size / block bits, an exact fraction. A block never crosses the end of a row (the
numbers that meet one input vector): a row of w numbers takes ⌈w / block⌉ blocks. Plain types have
blocks of one number.

Sources: the block types of GGUF are the structs of ggml (github.com/ggml-org/ggml,
src/ggml-common.h); mxfp4: OCP Microscaling Formats v1.0, table 1 (32 numbers of 4 bits and one
scale of 8); nf4: Dettmers et al. 2023 (arXiv:2305.14314), section 3 (blocks of 64, one float32
scale; doubly quantised 8 bits a scale and a float32 for 256 of them, 0.127 bits a number); int4:
Frantar et al. 2022 (arXiv:2210.17323), section 4, and Lin et al. 2023 (arXiv:2306.00978), groups of
128 with a float16 scale, with or without a zero of 4 bits; int8: Dettmers et al. 2022
(arXiv:2208.07339), section 3, one float32 scale for each row.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Final

from headwise.cost.parts import Matrix, Parts, Rows, Vector
from headwise.errors import OptionError

__all__ = ["FORMATS", "Format", "format_of", "stored_bytes", "weight_bytes"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """How numbers are stored.

    Attributes:
        block, size: numbers of one block and its bytes; ``row`` bytes more for each row.
        super_blocks, super_size: ``super_size`` bytes more for so many blocks of a matrix.
        scope: what is stored so: "all" parts; "matrices" (GGUF: matrices and tables; vectors and
            biases are float32); "layers" (matrices of the blocks; everything else is bfloat16).

    Example:
        >>> FORMATS["q4_0"].bits, FORMATS["q4_0"].bytes(rows=3, width=33)
        (Fraction(9, 2), 108)
    """

    name: str
    block: int
    size: int
    row: int = 0
    super_blocks: int = 1
    super_size: int = 0
    scope: str = "all"

    @property
    def plain(self) -> bool:
        """Whether every number is stored alone."""
        return self.block == 1 and self.row == 0

    @property
    def bits(self) -> Fraction:
        """Bits of one number of a long row."""
        each = Fraction(self.size) + Fraction(self.super_size, self.super_blocks)
        return 8 * each / self.block

    def bytes(self, *, rows: int, width: int) -> int:
        """Bytes of a matrix of ``rows`` rows with ``width`` numbers each."""
        blocks = rows * -(-width // self.block)
        scales = -(-blocks // self.super_blocks) * self.super_size
        return blocks * self.size + rows * self.row + scales


def _plain(name: str, size: int) -> Format:
    return Format(name=name, block=1, size=size)


def _gguf(name: str, block: int, size: int) -> Format:
    return Format(name=name, block=block, size=size, scope="matrices")


def _layers(
    name: str, block: int, size: int, row: int = 0, super_blocks: int = 1, super_size: int = 0
) -> Format:
    return Format(
        name=name, block=block, size=size, row=row, super_blocks=super_blocks,
        super_size=super_size, scope="layers",
    )  # fmt: skip


FORMATS: Final[dict[str, Format]] = {
    each.name: each
    for each in (
        _plain("float64", 8),
        _plain("float32", 4),
        _plain("bfloat16", 2),
        _plain("float16", 2),
        _plain("float8", 1),
        _layers("int8", 1, 1, row=4),
        _layers("int4", 128, 66),  # 64 bytes of numbers, a float16 scale
        _layers("int4_zero", 256, 133),  # two groups: 128 of numbers, two scales, two zeros
        _layers("nf4", 64, 36),
        _layers("nf4_double", 64, 33, super_blocks=256, super_size=4),
        _layers("mxfp4", 32, 17),
        _gguf("q4_0", 32, 18),
        _gguf("q4_1", 32, 20),
        _gguf("q5_0", 32, 22),
        _gguf("q5_1", 32, 24),
        _gguf("q8_0", 32, 34),
        _gguf("q2_k", 256, 84),
        _gguf("q3_k", 256, 110),
        _gguf("q4_k", 256, 144),
        _gguf("q5_k", 256, 176),
        _gguf("q6_k", 256, 210),
        _gguf("iq4_nl", 32, 18),
        _gguf("iq4_xs", 256, 136),
    )
}
_OTHER: Final = {"matrices": "float32", "layers": "bfloat16"}  # what the scope leaves out


def format_of(name: str) -> Format:
    """The format of that name.

    Raises:
        OptionError: no format is called so.

    Example:
        >>> format_of("bfloat16").size
        2
    """
    if name not in FORMATS:
        raise OptionError(f"the number format {name!r}", allowed=", ".join(FORMATS))
    return FORMATS[name]


def weight_bytes(matrix: Matrix, form: Format, *, layer: bool = True) -> int:
    """Bytes of a matrix and its bias; 0 where it is tied to another.

    Rows are those of the stored tensor: d_out rows of d_in numbers, and for tables one row of d_out
    numbers for each entry. ``layer``: whether the matrix belongs to a block.

    Example:
        >>> from headwise.cost.parts import Component
        >>> matrix = Matrix(name="W_Q", component=Component.QUERY, d_in=64, d_out=48)
        >>> weight_bytes(matrix, FORMATS["q4_0"]), weight_bytes(matrix, FORMATS["bfloat16"])
        (1728, 6144)
    """
    if matrix.tied:
        return 0
    inside = form.scope != "layers" or (layer and matrix.rows is not Rows.NONE)
    used = form if inside else FORMATS[_OTHER["layers"]]
    rows, width = matrix.d_out, matrix.d_in
    if matrix.rows is Rows.NONE:
        rows, width = width, rows
    bias = FORMATS[_OTHER.get(form.scope, form.name)]
    each = used.bytes(rows=rows, width=width) + bias.bytes(rows=1, width=matrix.bias)
    return matrix.copies * each


def stored_bytes(parts: Parts, name: str) -> int:
    """Bytes of all weights of a model in a format.

    Example:
        >>> from headwise.cost.explicit import explicit
        >>> parts = explicit(d_model=64, layers=2, heads=4, vocab=257)
        >>> stored_bytes(parts, "float32"), stored_bytes(parts, "q8_0")
        (526080, 140680)
    """
    form = format_of(name)
    matrices = sum(
        weight_bytes(matrix, form, layer=layer is not None) for _, layer, matrix in parts.matrices()
    )
    return matrices + sum(_vector_bytes(each, form) for _, _, each in parts.vectors())


def _vector_bytes(vector: Vector, form: Format) -> int:
    return FORMATS[_OTHER.get(form.scope, form.name)].bytes(rows=1, width=vector.size)
