"""What a scan keeps is filled as asked and can be written like any other tensor."""

from __future__ import annotations

import pytest
import torch

from headwise.observation.lasting import lasting


@pytest.mark.parametrize("shape", [(0,), (3, 5), (7, 11, 1009)], ids=str)
@pytest.mark.parametrize("fill", [0, -1])
def test_filled_and_writable(shape: tuple[int, ...], fill: int) -> None:
    x = lasting(*shape, dtype=torch.float64, fill=fill)
    assert x.shape == shape
    assert torch.equal(x, torch.full(shape, fill, dtype=torch.float64))
    x += 1
    assert torch.equal(x, torch.full(shape, fill + 1, dtype=torch.float64))


def test_large_ones_do_not_come_from_the_heap() -> None:
    """Neighbours in the heap would be neighbours in memory; pages of their own are aligned."""
    x = lasting(1 << 20, dtype=torch.uint8)
    assert x.data_ptr() % 4096 == 0
