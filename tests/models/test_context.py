"""What a pass shares between its layers, and masks as a user gives them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from headwise.attention.masks import Causal, Dense, Documents, Everything, KeyPadding, Window
from headwise.errors import ShapeError
from headwise.models import Context, Rotary
from headwise.models.context import as_mask
from headwise.positions import frequencies, rotate, turn
from tests.attention.problems import rand
from tests.models.architectures import CONTEXT, SCALINGS
from tests.tolerance import UNIT, assert_close, finite_max


def context(past: int = 0, queries: int = 5, dtype: torch.dtype = torch.float64) -> Context:
    return Context(2, queries, past, torch.device("cpu"), dtype)


def test_positions_count_on_from_what_is_cached() -> None:
    assert context(past=3).positions().tolist() == [3, 4, 5, 6, 7]
    assert context(past=3).keys == 8


@pytest.mark.parametrize("word", [None, *SCALINGS])
def test_turns_are_those_of_the_positions_and_computed_once(word: str | None) -> None:
    rotary = Rotary(width=4, base=100.0, scaling=None if word is None else SCALINGS[word])
    made = context(past=CONTEXT)  # beyond the trained length of those that look at it
    turns = made.turns(rotary)
    assert made.turns(Rotary(**dict(rotary))) is turns
    inv_freq, factor = frequencies(4, base=100.0, scaling=rotary.scaling, length=CONTEXT + 5)
    x = rand(2, 3, 5, 7, dtype=torch.float64)
    want = rotate(x, torch.arange(CONTEXT, CONTEXT + 5), inv_freq, factor=factor)
    assert_close(turn(x, turns), want, 16 * UNIT[torch.float64] * finite_max(x))
    assert made.turns(Rotary(width=4, base=99.0)) is not turns


def test_angles_of_a_half_precision_model_are_float32() -> None:
    """huggingface/transformers#25681: bfloat16 positions collapse above 256."""
    made = Context(
        1, 2, 0, torch.device("cpu"), torch.bfloat16, position_ids=torch.tensor([15962, 15936])
    )
    cos = made.turns(Rotary(width=2)).cos
    assert cos.dtype == torch.float32
    want = torch.tensor([15962.0, 15936.0]).double().cos()
    assert_close(cos[:, 0], want, 4 * UNIT[torch.float32])
    assert finite_max(cos[0, 0] - cos[1, 0]) > 0.5


def test_a_block_is_the_mask_and_computed_once() -> None:
    keep = torch.tensor([[False, True, True], [True, True, True]])
    mask = Causal() & KeyPadding(keep)
    made = context(past=1, queries=2)
    block = made.block(mask, 3)
    want = [[[False, True, False], [False, True, True]], [[True, True, False], [True, True, True]]]
    assert block[:, 0].tolist() == want
    assert made.block(Causal() & mask.right, 3) is block
    assert made.block(Window(1), 3).shape == (1, 1, 2, 3)
    assert made.block(Everything(), 3) is not block


def test_masks_as_users_give_them() -> None:
    assert as_mask(None, 2, 3, 3) is None
    rule = Causal()
    assert as_mask(rule, 2, 3, 3) is rule
    keep = torch.tensor([[False, True], [True, True]])
    padding = as_mask(keep, 2, 1, 2)
    assert isinstance(padding, KeyPadding)
    assert torch.equal(padding.keep, keep)
    pairs = torch.rand(2, 3, 5, generator=torch.Generator().manual_seed(0)) > 0.5
    for given in (pairs, pairs[:1]):
        dense = as_mask(given, 2, 3, 5)
        assert isinstance(dense, Dense)
        for b in range(2):
            assert torch.equal(dense.dense(b, 3, 5), given[b if given.shape[0] > 1 else 0])


@pytest.mark.parametrize(
    ("mask", "words"),
    [
        (
            torch.ones(2, 5),
            "a mask of type torch.float32; allowed: a mask object, or a boolean ten",
        ),
        (torch.ones(2, 5).long(), "a mask of type torch.int64; allowed: a mask object, or a boo"),
        (np.ones((2, 5), dtype=bool), "a mask of type ndarray; allowed: a mask object, or a bool"),
        (torch.ones(2, 4).bool(), "a mask of shape (2, 4) for 2 sequences, 3 queries and 5 keys; "),
        (torch.ones(3, 5).bool(), "a mask of shape (3, 5) for 2 sequences, 3 queries and 5 keys; "),
        (torch.ones(2, 4, 5).bool(), "a mask of shape (2, 4, 5) for 2 sequences, 3 queries and "),
        (torch.ones(2, 1, 3, 5).bool(), "a mask of shape (2, 1, 3, 5) for 2 sequences, 3 querie"),
        (torch.ones(5).bool(), "a mask of shape (5,) for 2 sequences, 3 queries and 5 keys; allow"),
        (KeyPadding(torch.ones(3, 5).bool()), "a mask for 3 sequences and a batch of 2; allowed"),
        (KeyPadding(torch.ones(2, 4).bool()), "a mask of 4 keys for 5; allowed: 5 keys or more"),
        (Documents(torch.ones(2, 4).long()), "a mask of 4 keys for 5; allowed: 5 keys or more"),
    ],
)
def test_masks_that_do_not_fit_are_refused(mask: Any, words: str) -> None:
    with pytest.raises(ShapeError) as caught:
        as_mask(mask, 2, 3, 5)
    assert str(caught.value).startswith(words)


def test_a_mask_made_for_the_whole_answer_serves_every_step() -> None:
    keep = torch.ones(2, 9, dtype=torch.bool)
    assert isinstance(as_mask(KeyPadding(keep), 2, 1, 5), KeyPadding)


def test_a_float_mask_says_what_to_do() -> None:
    wrong: Tensor = torch.ones(2, 5)
    with pytest.raises(ShapeError, match=r"for a 0/1 mask: mask\.bool\(\)"):
        as_mask(wrong, 2, 3, 5)
    assert as_mask(wrong.bool(), 2, 3, 5) is not None
