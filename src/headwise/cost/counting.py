"""Multiply-adds and parameters of every part, as exact integers.

Convention: matrix products only, 1 multiply-add = 2 FLOPs, picking rows of a table is free, a tied
matrix is stored once and multiplied every time. A backward pass costs two products for each of the
forward pass: the gradient of the weights and that of what came in.

Source: the closed forms agree to the unit with ``torch.utils.flop_counter`` on models whose every
product it sees; fused backward: Dao et al. 2022 (arXiv:2205.14135), algorithm 4.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from headwise.cost.parts import Attention, Component, Matrix, Parts, Stack
from headwise.cost.workload import Workload
from headwise.errors import OptionError

__all__ = ["Counts", "Line", "count"]


@dataclass(frozen=True, slots=True)
class Line:
    """One part of one layer: what is stored of it, and what one pass multiplies in it.

    ``active`` parameters work on one token; ``recomputed`` multiply-adds are those of the forward
    pass that the backward pass does once more.
    """

    stack: str
    layer: int | None
    role: str
    component: Component
    name: str
    parameters: int = 0
    active: int = 0
    macs: int = 0
    backward: int = 0
    recomputed: int = 0


@dataclass(frozen=True, slots=True)
class Counts:
    """The lines of a whole model under one workload, and their sums.

    Example:
        >>> from headwise.cost.explicit import explicit
        >>> from headwise.cost.workload import Workload
        >>> parts = explicit(d_model=64, layers=2, heads=4, vocab=257)
        >>> found = count(parts, Workload(length=8))
        >>> found.flops == 2 * found.macs, found.backward > 2 * found.macs  # fused attention
        (True, True)
    """

    lines: tuple[Line, ...]
    workload: Workload

    @property
    def parameters(self) -> int:
        """Stored numbers, tied ones once."""
        return sum(line.parameters for line in self.lines)

    @property
    def active(self) -> int:
        """Parameters that work on one token: all but the experts that were not chosen."""
        return sum(line.active for line in self.lines)

    @property
    def embedding(self) -> int:
        """Parameters of the tables of tokens and positions."""
        tables = (Component.EMBEDDING, Component.POSITIONS)
        return sum(line.parameters for line in self.lines if line.component in tables)

    @property
    def macs(self) -> int:
        """Multiply-adds of the forward pass."""
        return sum(line.macs for line in self.lines)

    @property
    def flops(self) -> int:
        """2 · multiply-adds of the forward pass."""
        return 2 * self.macs

    @property
    def backward(self) -> int:
        """Multiply-adds of the backward pass, without what is computed again."""
        return sum(line.backward for line in self.lines)

    @property
    def recomputed(self) -> int:
        """Multiply-adds of the forward pass that the backward pass does once more."""
        return sum(line.recomputed for line in self.lines)

    @property
    def training_flops(self) -> int:
        """2 · multiply-adds of one forward and one backward pass, recomputation included."""
        return 2 * (self.macs + self.backward + self.recomputed)

    def sums(self, key: Callable[[Line], str], of: str = "macs") -> dict[str, int]:
        """A number added up by a key of the lines, in their order.

        Example:
            >>> from headwise.cost.explicit import explicit
            >>> parts = explicit(d_model=64, layers=2, heads=4, vocab=257)
            >>> found = count(parts, Workload(length=8))
            >>> found.sums(lambda line: line.component, "macs")["mlp"]
            524288
        """
        out: dict[str, int] = {}
        for line in self.lines:
            out[key(line)] = out.get(key(line), 0) + int(getattr(line, of))
        return out

    def by_component(self, of: str = "macs") -> dict[Component, int]:
        """A number of each component, in the order of the tables."""
        found = self.sums(lambda line: line.component, of)
        return {component: found[component] for component in Component if component in found}


def count(parts: Parts, workload: Workload) -> Counts:
    """Count every part of a model under a workload.

    Raises:
        OptionError: tokens of a source where one stack reads all, or cached ones where no stack
            decodes.

    Example:
        >>> from headwise.cost.explicit import explicit
        >>> parts = explicit(d_model=64, layers=2, heads=4, vocab=257)
        >>> count(parts, Workload(length=8)).parameters
        131520
    """
    _check(parts, workload)
    encoder = parts.stack("encoder")
    source = 0 if encoder is None else (encoder.tokens or workload.encoded)
    lines = [
        *(_matrix(m, stack, layer, workload, source) for stack, layer, m in parts.matrices()),
        *(
            Line(stack.name, layer, v.role, v.component, v.name, v.size, v.size)
            for stack, layer, v in parts.vectors()
        ),
    ]
    for stack, layer, attention in parts.attentions():
        lines += _products(attention, stack, layer, workload, source)
    return Counts(tuple(lines), workload)


def _check(parts: Parts, workload: Workload) -> None:
    if workload.source is not None and len(parts.stacks) == 1:
        raise OptionError(
            f"{workload.source:,} tokens of a source for a model of one stack",
            to_do="give its tokens as the length",
        )
    if workload.cached and not any(stack.decodes for stack in parts.stacks):
        raise OptionError(
            f"{workload.cached:,} cached tokens in a model that does not decode", allowed="0"
        )


def _matrix(
    matrix: Matrix, stack: Stack, layer: int | None, workload: Workload, source: int
) -> Line:
    rows = workload.batch * workload.rows(matrix, stack, source)
    macs = rows * matrix.macs_per_row
    return Line(
        stack.name,
        layer,
        matrix.role,
        matrix.component,
        matrix.name,
        parameters=matrix.parameters,
        active=matrix.active,
        macs=macs,
        backward=macs * (1 + matrix.input_gradient),
        recomputed=macs if workload.recompute == "full" and layer is not None else 0,
    )


def _products(
    attention: Attention, stack: Stack, layer: int, workload: Workload, source: int
) -> Iterator[Line]:
    """Q Kᵀ and A V. Fused, the backward pass makes the scores again: five products for two."""
    pairs = workload.batch * attention.heads * workload.pair_count(attention, stack, source)
    d_qk, d_value = attention.d_qk, attention.d_value
    if attention.latent is not None and workload.absorbed:
        rank, rotary = attention.latent
        d_qk, d_value = rank + rotary, rank
    again = workload.recompute in ("selective", "full")
    for component, name, width, times in (
        (Component.SCORES, "Q Kᵀ", d_qk, 3 if workload.attention == "fused" else 2),
        (Component.MIX, "A V", d_value, 2),
    ):
        macs = pairs * width
        yield Line(
            stack.name,
            layer,
            attention.role,
            component,
            name,
            macs=macs,
            backward=macs * times,
            recomputed=macs if again else 0,
        )
