"""The feed-forward layers against their formulas, activations against theirs."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import nn

from headwise.models import MLP, GatedMLP
from headwise.models.feed_forward import ACTIVATIONS
from tests.attention.problems import rand
from tests.tolerance import UNIT, assert_close, finite_max

F64 = torch.float64
WIDTH, INNER = 5, 11


def gelu_tanh(x: float) -> float:
    return 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


FORMULAS: dict[str, Callable[[float], float]] = {
    "relu": lambda x: max(0.0, x),
    "gelu": lambda x: 0.5 * x * (1 + math.erf(x / math.sqrt(2))),
    "gelu_tanh": gelu_tanh,
    "silu": lambda x: x / (1 + math.exp(-x)),
}


def test_every_activation_has_a_formula_here() -> None:
    assert set(ACTIVATIONS) == set(FORMULAS)


@pytest.mark.parametrize("word", ACTIVATIONS)
def test_activations(word: str) -> None:
    x = torch.linspace(-6, 6, 97, dtype=F64)
    want = torch.tensor([FORMULAS[word](float(t)) for t in x], dtype=F64)
    assert_close(ACTIVATIONS[word](x), want, 16 * UNIT[F64] * 6)
    for other in set(ACTIVATIONS) - {word}:
        assert finite_max(ACTIVATIONS[other](x) - want) > 1e-4  # the two forms of GELU included


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("gated", [False, True])
def test_layers(gated: bool, bias: bool) -> None:
    torch.manual_seed(3)
    gate, up = nn.Linear(WIDTH, INNER, bias), nn.Linear(WIDTH, INNER, bias)
    down = nn.Linear(INNER, WIDTH, bias)
    f = ACTIVATIONS["silu"]
    layer = (GatedMLP(gate, up, down, f) if gated else MLP(up, down, f)).double()
    x = 3 * rand(2, 3, WIDTH, dtype=F64)

    def linear(part: nn.Linear, row: list[float]) -> list[float]:
        shift = [0.0] * part.out_features if part.bias is None else part.bias.tolist()
        rows = zip(part.weight.tolist(), shift, strict=True)
        return [sum(w * t for w, t in zip(line, row, strict=True)) + b for line, b in rows]

    def by_hand(row: list[float]) -> list[float]:
        inner = linear(up, row)
        silu = FORMULAS["silu"]
        if gated:
            inner = [silu(g) * u for g, u in zip(linear(gate, row), inner, strict=True)]
        else:
            inner = [silu(u) for u in inner]
        return linear(down, inner)

    rows = [by_hand(row) for row in x.view(-1, WIDTH).tolist()]
    want = torch.tensor(rows, dtype=F64).view(x.shape)
    largest = max(finite_max(part.double()(x)) for part in (gate, up)) ** 2 + 1
    limit = 4 * (WIDTH + INNER) * UNIT[F64] * largest
    assert_close(layer(x), want, limit)
    assert finite_max(layer(x) - layer(x + 1e-6)) > 1e3 * limit
