"""Implicit masks: what is said about runs and tiles agrees with the predicate, for every mask."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headwise.attention.masks import (
    EMPTY,
    FULL,
    Band,
    Causal,
    Chunked,
    Dense,
    Documents,
    Everything,
    KeyPadding,
    Mask,
    Predicate,
    Prefix,
    Segment,
    Window,
    describe,
)
from headwise.attention.tiles import strips, tiles
from headwise.errors import OptionError, ShapeError
from tests.attention.problems import masks

KEYS = 17


@st.composite
def asked(draw: st.DrawFn) -> tuple[Mask, int, range]:
    """A mask for two sequences of 17 keys, a sequence, and a run of query positions."""
    mask = draw(masks(2, KEYS, queries=KEYS + 6, offset=-3))
    first = draw(st.integers(-3, KEYS + 2))
    return mask, draw(st.integers(0, 1)), range(first, draw(st.integers(first, KEYS + 2)) + 1)


def block(mask: Mask, batch: int, query: range, key: range) -> torch.Tensor:
    rows = torch.arange(query.start, query.stop)[:, None]
    columns = torch.arange(key.start, key.stop)[None]
    return mask.visible(batch, rows, columns).expand(len(query), len(key))


def check_segments(mask: Mask, batch: int, query: range) -> None:
    runs = mask.segments(batch, query[0], query[-1], KEYS)
    seen = block(mask, batch, query, range(KEYS))
    covered = torch.zeros(KEYS, dtype=torch.bool)
    last = 0
    for start, stop, full in runs:
        assert last <= start < stop <= KEYS, "in order, apart, inside, not empty"
        last = stop
        covered[start:stop] = True
        if full:
            assert seen[:, start:stop].all(), "a full run hides a pair"
    assert not seen[:, ~covered].any(), "a visible pair lies outside every run"


@settings(max_examples=300)
@given(asked())
def test_segments_cover_what_is_visible(question: tuple[Mask, int, range]) -> None:
    check_segments(*question)


@settings(max_examples=200)
@given(asked(), st.integers(0, KEYS), st.integers(0, KEYS))
def test_a_tile_is_the_block(question: tuple[Mask, int, range], a: int, b: int) -> None:
    mask, batch, query = question
    key = range(min(a, b), max(a, b))
    want = block(mask, batch, query, key)
    got = mask.tile(batch, query, key)
    if isinstance(got, str):
        assert got in (EMPTY, FULL)
        assert want.numel() == 0 or bool((want == (got == FULL)).all())
    else:
        assert torch.equal(got, want)
        assert want.any()
        assert not want.all(), "a block that is all visible is FULL"


@settings(max_examples=200)
@given(asked(), st.sampled_from([1, 4, 100]))
def test_tiles_hide_exactly_what_is_hidden(question: tuple[Mask, int, range], width: int) -> None:
    mask, batch, query = question
    want = block(mask, batch, query, range(KEYS))
    got = torch.zeros(len(query), KEYS, dtype=torch.bool)
    last = 0
    for tile in tiles(mask, batch, query, KEYS, width):
        assert last <= tile.start < tile.stop <= KEYS
        assert tile.stop - tile.start <= width
        last = tile.stop
        got[:, tile.start : tile.stop] = True
        for piece in tile.pieces:
            assert tile.start <= piece.start < piece.stop <= tile.stop
            got[:, piece.start : piece.stop] = ~piece.hidden
    assert torch.equal(got, want)


@given(asked(), asked())
def test_and_or_are_those_of_the_predicates(
    one: tuple[Mask, int, range], two: tuple[Mask, int, range]
) -> None:
    a, b = one[0], two[0]
    args = (one[1], one[2], range(KEYS))
    assert torch.equal(block(a & b, *args), block(a, *args) & block(b, *args))
    assert torch.equal(block(a | b, *args), block(a, *args) | block(b, *args))


@settings(max_examples=200)
@given(masks(2, KEYS, queries=KEYS, offset=0), st.integers(0, 1))
def test_promises_about_the_shape_of_a_mask(mask: Mask, batch: int) -> None:
    """relative: the block depends on differences alone; looks_ahead is False only when sure."""
    whole = block(mask, batch, range(KEYS), range(KEYS))
    if mask.relative():
        assert torch.equal(whole[:-1, :-1], whole[1:, 1:])
    if not mask.looks_ahead():
        assert not whole.triu(1).any()


def test_the_checks_can_fail() -> None:
    class Wrong(Causal):
        def segments(self, batch: int, first: int, last: int, keys: int) -> list[Segment]:
            return [Segment(0, min(keys, first + 2), True)]

    check_segments(Causal(), 0, range(3, 9))
    with pytest.raises(AssertionError):
        check_segments(Wrong(), 0, range(3, 9))


@pytest.mark.parametrize("width", [1, 3, 6])
def test_a_window_of_w_is_w_keys_its_own_included(width: int) -> None:
    seen = (Causal() & Window(width)).dense(0, 11, 11)
    assert seen.sum(-1).tolist() == [min(i + 1, width) for i in range(11)]
    assert seen.diagonal().all()
    assert torch.equal(seen, Window(width).dense(0, 11, 11))


def test_causal_is_bottom_right() -> None:
    for m, n in ((2, 5), (5, 5), (5, 2)):
        want = [[j <= i + n - m for j in range(n)] for i in range(m)]
        assert Causal().dense(0, m, n).tolist() == want
    assert Causal().dense(0, 3, 5, offset=0).tolist() == [
        [j <= i for j in range(5)] for i in range(3)
    ]


def test_packed_documents_and_padding() -> None:
    ids = torch.tensor([[4, 4, 7, 7, 7], [1, 2, 1, 2, 2]])
    packed = Causal() & Documents(ids)
    for b in range(2):
        want = [[j <= i and bool(ids[b, i] == ids[b, j]) for j in range(5)] for i in range(5)]
        assert packed.dense(b, 5, 5).tolist() == want
    keep = torch.tensor([[True, False, True]])
    assert KeyPadding(keep).dense(0, 2, 3).tolist() == [[True, False, True]] * 2


def test_chunks_and_prefix() -> None:
    assert Chunked(2, 1).dense(0, 4, 4).int().tolist() == [
        [1, 0, 0, 0],
        [0, 1, 1, 0],
        [0, 1, 1, 0],
        [0, 0, 0, 1],
    ]
    assert (Causal() | Prefix(2)).dense(0, 3, 3).int().tolist() == [[1, 1, 0], [1, 1, 0], [1, 1, 1]]


def test_long_masks_skip_what_nobody_sees() -> None:
    window = Causal() & Window(100)
    runs = window.segments(0, 5000, 5010, 10000)
    assert (runs[0].start, runs[-1].stop) == (4901, 5011)
    packed = Causal() & Documents((torch.arange(10000) // 500)[None])
    assert packed.segments(0, 5100, 5200, 10000)[0].start == 5000
    assert tiles(packed, 0, range(5100, 5201), 10000, 4096)[0].start == 5000


def test_strips_cut_all_rows_once() -> None:
    assert [i for s in strips(23, 5) for i in s] == list(range(23))


def test_batches() -> None:
    two = KeyPadding(torch.ones(2, 3, dtype=torch.bool))
    three = Documents(torch.zeros(3, 3, dtype=torch.long))
    assert Causal().batches() is None
    assert (Causal() & two).batches() == 2
    assert (two | Causal()).batches() == 2
    assert Dense(torch.ones(1, 2, 2, dtype=torch.bool)).batches() is None
    assert Dense(torch.ones(4, 2, 2, dtype=torch.bool)).batches() == 4
    with pytest.raises(ShapeError, match="one batch size"):
        (two & three).batches()


@pytest.mark.parametrize(
    ("mask", "words"),
    [
        (Everything(), "full"),
        (Causal(), "causal"),
        (Causal(2), "causal shifted by 2"),
        (Window(7), "window of 7 keys"),
        (Band(3, 2), "band of 3 keys before and 2 after"),
        (Chunked(8), "chunks of 8"),
        (Causal() | Prefix(3), "causal or prefix of 3"),
        (Causal() & KeyPadding(torch.ones(1, 1, dtype=torch.bool)), "causal and padding"),
        (Causal() & Documents(torch.ones(1, 1).long()), "causal and packed documents"),
        (Predicate(lambda b, i, j: i > j), "custom"),
    ],
)
def test_words(mask: Mask, words: str) -> None:
    assert describe(mask) == words


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: Window(0), OptionError),
        (lambda: Band(-1), OptionError),
        (lambda: Chunked(0), OptionError),
        (lambda: KeyPadding(torch.ones(2, 3)), ShapeError),
        (lambda: KeyPadding(torch.ones(3, dtype=torch.bool)), ShapeError),
        (lambda: Documents(torch.ones(2, 3)), ShapeError),
        (lambda: Dense(torch.ones(2, 3, 3)), ShapeError),
    ],
)
def test_masks_that_cannot_be_are_refused(make, error: type) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(error) as caught:
        make()
    assert "\n" not in str(caught.value)
