"""Learned positions read their table, and say where it ends."""

from __future__ import annotations

import pytest
import torch

from headwise.errors import OptionError, ShapeError
from headwise.positions import LearnedPositions


def test_rows_are_read_by_explicit_ids():
    positions = LearnedPositions(5, 3)
    ids = torch.tensor([[0, 4, 4], [2, 0, 1]])
    assert torch.equal(positions(ids), positions.weight[ids])
    positions(ids).sum().backward()
    assert positions.weight.grad is not None
    assert positions.weight.grad[:, 0].tolist() == [2.0, 1.0, 1.0, 0.0, 2.0]
    assert positions(torch.empty(2, 0, dtype=torch.long)).shape == (2, 0, 3)
    assert list(positions.state_dict()) == ["weight"]
    assert repr(positions) == "LearnedPositions(5, 3)"


@pytest.mark.parametrize("position", [5, -1])
def test_positions_beyond_the_table_are_refused(position):
    message = rf"position {position} in a learned table of 5 positions; allowed: 0 to 4; shorten"
    with pytest.raises(OptionError, match=message):
        LearnedPositions(5, 3)(torch.tensor([0, position, 4]))


def test_other_bad_input_is_refused():
    with pytest.raises(ShapeError, match=r"type torch.float32; allowed: int64 or int32; number"):
        LearnedPositions(5, 3)(torch.zeros(2))
    with pytest.raises(OptionError, match=r"0 positions of width 3; allowed: 1 or more of each; g"):
        LearnedPositions(0, 3)
