"""Sinusoidal positions against loops over the formula, and their shift map."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers.models.marian.modeling_marian import MarianSinusoidalPositionalEmbedding

from headwise.errors import OptionError
from headwise.positions import Layout, half_order, shift_matrix, sinusoidal, sinusoidal_table

F64 = torch.float64
U32 = 2.0**-24


def by_formula(length: int, width: int) -> Tensor:
    wave = (math.sin, math.cos)
    rows = [
        [wave[j % 2](p / 10000 ** (2 * (j // 2) / width)) for j in range(width)]
        for p in range(length)
    ]
    return torch.tensor(rows, dtype=F64)


# codertimo/BERT-pytorch#78, gc-os-ai/pyaptamer#607, SamLynnEvans/Transformer#25,
# jadore801120/attention-is-all-you-need-pytorch#32, maxjcohen/transformer#62
@pytest.mark.parametrize(("length", "width"), [(4, 5), (8, 6), (3, 1), (0, 4)])
def test_the_table_is_the_formula(length, width):
    want = by_formula(length, width).view(length, width)
    assert torch.allclose(sinusoidal_table(length, width, dtype=F64), want, rtol=0, atol=1e-14)
    table = sinusoidal_table(length, width)
    assert table.dtype == torch.float32
    assert torch.allclose(table.double(), want, rtol=0, atol=U32)


def test_dot_products_depend_on_the_lag_alone():
    table = sinusoidal_table(8, 6, dtype=F64)
    for lag in range(4):
        want = sum(math.cos(lag / 10000 ** (2 * i / 6)) for i in range(3))
        dots = (table[: 8 - lag] * table[lag:]).sum(-1)
        assert torch.allclose(dots, torch.full_like(dots, want), rtol=0, atol=1e-12)


def test_far_positions_are_rounded_once():
    row = sinusoidal(torch.tensor([131071]), 2)[0]
    assert row.tolist() == pytest.approx([math.sin(131071), math.cos(131071)], abs=U32)


@pytest.mark.parametrize("width", [5, 6])
def test_half_layout_is_marians(width):
    theirs = MarianSinusoidalPositionalEmbedding(11, width)
    weight = theirs.create_weight()
    ours = sinusoidal_table(11, width, layout=Layout.HALF)
    assert torch.allclose(ours, weight, rtol=0, atol=2 * U32)


@given(
    pairs=st.integers(1, 5),
    delta=st.integers(-300, 300),
    start=st.integers(-300, 300),
    layout=st.sampled_from(list(Layout)),
)
def test_one_matrix_moves_every_position(pairs, delta, start, layout):
    width = 2 * pairs
    p = torch.arange(start, start + 7)
    matrix = shift_matrix(width, delta, layout=layout)
    moved = sinusoidal(p, width, dtype=F64, layout=layout) @ matrix.T
    want = sinusoidal(p + delta, width, dtype=F64, layout=layout)
    assert torch.allclose(moved, want, rtol=0, atol=1e-12)
    assert torch.allclose(matrix @ matrix.T, torch.eye(width, dtype=F64), rtol=0, atol=1e-14)
    back = shift_matrix(width, -delta, layout=layout) @ matrix
    assert torch.allclose(back, torch.eye(width, dtype=F64), rtol=0, atol=1e-14)


def test_the_matrix_of_another_layout_or_step_does_not_move_them():
    table = sinusoidal_table(9, 6, dtype=F64)
    for wrong in (shift_matrix(6, 2, layout=Layout.HALF), shift_matrix(6, 3)):
        assert (table[:7] @ wrong.T - table[2:]).abs().max() > 0.1


def test_half_order_sorts_columns():
    assert half_order(6).tolist() == [0, 2, 4, 1, 3, 5]
    assert half_order(5).tolist() == [0, 2, 4, 1, 3]


def test_bad_input_is_refused():
    with pytest.raises(OptionError, match=r"odd width 5, .*; allowed: an even width; widen"):
        shift_matrix(5, 1)
    with pytest.raises(OptionError, match=r"width 0; allowed: 1 or more; give the model's width"):
        sinusoidal_table(3, 0)
    with pytest.raises(OptionError, match=r"base -1.0; allowed: a positive number; leave it out"):
        sinusoidal_table(3, 4, base=-1.0)
    with pytest.raises(OptionError, match=r"a table of -1 positions; allowed: 0 or more; give"):
        sinusoidal_table(-1, 4)
    with pytest.raises(OptionError, match=r"width of 0 has no columns; allowed: 1 or more; give"):
        half_order(0)
    with pytest.raises(OptionError, match=r"is 'both'; allowed: 'half' or 'interleaved'; take"):
        sinusoidal_table(3, 4, layout="both")
