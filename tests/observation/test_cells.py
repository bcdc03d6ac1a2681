"""A triangle of cells behaves like the square, and becomes one when it must."""

from __future__ import annotations

import pytest
import torch

from headwise.observation.cells import Cells

HEADS = 3


@pytest.mark.parametrize("heads", [slice(None), slice(1, 3), torch.tensor([2, 0])], ids=str)
@pytest.mark.parametrize("ahead", [False, True])
def test_cells_are_a_square_matrix(heads: slice | torch.Tensor, ahead: bool) -> None:
    torch.manual_seed(0)
    cells, square = Cells(HEADS), torch.zeros(HEADS, 7, 7, dtype=torch.float64)
    for side, row, column, shape in ((5, 2, 0, (3, 3)), (7, 6, 1, (1, 6)), (7, 0, 0, (7, 7))):
        cells.resize(side)
        sums = torch.rand(HEADS, *shape, dtype=torch.float64)[heads]
        if not ahead:
            i, j = torch.meshgrid(torch.arange(shape[0]), torch.arange(shape[1]), indexing="ij")
            sums = sums * (column + j <= row + i)
        cells.add(sums, row, column, heads)
        square[heads, row : row + shape[0], column : column + shape[1]] += sums
        assert torch.equal(cells.dense(), square[:, :side, :side])
    assert cells.square is ahead


def test_a_triangle_takes_half_the_memory() -> None:
    cells = Cells(HEADS)
    cells.resize(128)
    assert cells._data.numel() == HEADS * 128 * 129 // 2
