"""Where the norms stand: each placement is its formula; a block is its parts, one by one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from headwise.models import Block, Branch, ParallelBlock, PostNorm, PreNorm, RMSNorm, Sandwich
from tests.attention.problems import rand
from tests.models.oracle import context_of

F64 = torch.float64


class Shift(nn.Module):
    """f(x) = a x + c, and it notes what else it was given."""

    def __init__(self, a: float, c: float) -> None:
        super().__init__()
        self.a, self.c, self.given = a, c, ()

    def forward(self, x: Tensor, *rest: Any) -> Tensor:
        self.given = rest
        return self.a * x + self.c


NORM, AFTER, F = Shift(2, 1), Shift(5, -1), Shift(3, 7)
FORMULAS: dict[str, tuple[nn.Module, Callable[[Tensor], Tensor]]] = {
    "pre": (PreNorm(NORM, F), lambda x: x + F(NORM(x))),
    "post": (PostNorm(NORM, F), lambda x: NORM(x + F(x))),
    "sandwich": (Sandwich(NORM, F, AFTER), lambda x: x + AFTER(F(NORM(x)))),
    "branch": (Branch(NORM, F), lambda x: x + NORM(F(x))),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_placements(name: str) -> None:
    placement, formula = FORMULAS[name]
    x = rand(3, dtype=F64)
    assert torch.equal(placement(x), formula(x))
    for other in set(FORMULAS) - {name}:
        assert not torch.allclose(FORMULAS[other][1](x), formula(x))


@pytest.mark.parametrize("name", FORMULAS)
def test_what_else_is_given_reaches_the_branch(name: str) -> None:
    FORMULAS[name][0](torch.ones(2), "context", "slot")
    assert F.given == ("context", "slot")


@pytest.mark.parametrize(
    ("kind", "seen"),
    [(PreNorm, {0, 2}), (PostNorm, {1, 3}), (Branch, {0, 4}), (Sandwich, {0, 4})],
)
def test_dropout_is_on_what_is_written_and_only_in_training(
    kind: Callable[..., nn.Module], seen: set[int]
) -> None:
    """f writes 1, the norm adds 1; with probability 1/2 what is written is 0, else doubled."""
    parts = [Shift(1, 1), Shift(0, 1)] + [Shift(1, 1)] * (kind is Sandwich)
    placement = kind(*parts, dropout=0.5)
    x = torch.zeros(1009)
    whole = 1.0 if kind is PreNorm else 2.0
    assert torch.equal(placement.eval()(x), torch.full((1009,), whole))
    torch.manual_seed(0)
    assert set(placement.train()(x).unique().tolist()) == seen


def test_a_block_runs_its_parts_in_order() -> None:
    parts = [PreNorm(nn.Identity(), Shift(a, c)) for a, c in ((1, 2), (3, 5), (7, 11))]
    x = rand(2, 3, 5, dtype=F64)
    context = context_of(x)
    attention, cross, feed_forward = parts
    without = Block(attention, feed_forward)
    assert torch.equal(without(x, context), feed_forward(attention(x)))
    got = Block(attention, feed_forward, cross)(x, context, "slot")  # type: ignore[arg-type]
    assert attention.branch.given == cross.branch.given == (context, "slot")
    assert feed_forward.branch.given == ()
    assert torch.equal(got, feed_forward(cross(attention(x))))


def test_a_parallel_block_reads_one_stream() -> None:
    attention, feed_forward = (PreNorm(RMSNorm(5).double(), Shift(a, 1)) for a in (2, 3))
    block = ParallelBlock(attention, feed_forward)
    x = rand(2, 3, 5, dtype=F64)
    want = x + attention.write(x) + feed_forward.write(x)
    assert torch.allclose(block(x, context_of(x)), want, rtol=0, atol=1e-14)
    assert not torch.allclose(Block(attention, feed_forward)(x, context_of(x)), want)
