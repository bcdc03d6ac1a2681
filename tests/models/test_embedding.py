"""From ids to the stream and from the stream to logits, with what must be refused."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from headwise.errors import InputError, OptionError, ShapeError
from headwise.models import LayerNorm
from headwise.models.embedding import (
    Pooler,
    SinusoidalPositions,
    TokenEmbedding,
    Transform,
    Unembedding,
)
from headwise.positions import Layout, LearnedPositions
from tests.attention.problems import rand
from tests.tolerance import ROUNDING, UNIT, assert_close, finite_max

F64 = torch.float64
VOCAB, WIDTH, LENGTH = 11, 6, 7
IDS = torch.tensor([[3, 0, 10], [1, 1, 2]])
PLACES = torch.tensor([[2, 0, 6], [0, 1, 2]])


def table(rows: int) -> nn.Embedding:
    made = nn.Embedding(rows, WIDTH).double()
    with torch.no_grad():
        made.weight.copy_(rand(rows, WIDTH, seed=rows))
    return made


def test_the_sum_of_its_parts() -> None:
    tokens, segments, norm = table(VOCAB), table(2), LayerNorm(WIDTH).double()
    positions = LearnedPositions(LENGTH, WIDTH).double()
    whole = TokenEmbedding(tokens, positions, segments, scale=3.0, norm=norm)
    kinds = torch.tensor([[0, 1, 1], [0, 0, 0]])
    want = torch.stack(
        [
            torch.stack(
                [
                    norm(3 * tokens.weight[i] + segments.weight[s] + positions.weight[p])
                    for i, p, s in zip(*rows, strict=True)
                ]
            )
            for rows in zip(IDS, PLACES, kinds, strict=True)
        ]
    )
    got = whole(IDS, PLACES, kinds)
    # A sum of three and a norm of six terms, entries up to √6.
    assert_close(got, want, 16 * WIDTH * UNIT[F64] * 3)
    assert torch.equal(whole(IDS, PLACES), whole(IDS, PLACES, torch.zeros_like(IDS)))
    assert finite_max(whole(IDS, PLACES) - want) > 0.1
    assert torch.equal(TokenEmbedding(tokens)(IDS, PLACES), tokens.weight[IDS])


def test_sinusoids_are_computed_for_the_positions_that_are_asked_for() -> None:
    model = TokenEmbedding(table(VOCAB), SinusoidalPositions(WIDTH, Layout.INTERLEAVED))
    got = model(IDS, PLACES) - model.tokens.weight[IDS]
    want = [
        [
            [
                (math.sin if c % 2 == 0 else math.cos)(p / 10000 ** (2 * (c // 2) / WIDTH))
                for c in range(WIDTH)
            ]
            for p in row
        ]
        for row in PLACES.tolist()
    ]
    # Angles up to 6; the sum with table entries up to 3 is rounded.
    assert_close(got, torch.tensor(want, dtype=F64), 16 * 6 * UNIT[F64])
    assert not list(model.positions.parameters())  # type: ignore[union-attr]


def test_the_factor_is_rounded_to_the_tables_precision() -> None:
    """As Gemma was trained: √d_model in bfloat16."""
    model = TokenEmbedding(table(VOCAB).to(torch.bfloat16), scale=math.sqrt(6))
    factor = torch.tensor(math.sqrt(6)).bfloat16().double()
    want = model.tokens.weight[IDS].double() * factor
    assert_close(model(IDS, PLACES), want, 0.0, ROUNDING[torch.bfloat16])


def test_dropout_only_in_training() -> None:
    model = TokenEmbedding(table(VOCAB), dropout=0.5)
    assert torch.equal(model.eval()(IDS, PLACES), model.tokens.weight[IDS])
    torch.manual_seed(0)
    assert bool((model.train()(IDS, PLACES) == 0).any())


@pytest.mark.parametrize(
    ("ids", "kind", "words"),
    [
        (IDS + 1, OptionError, "token id 11; allowed: 0 to 10; encode the text"),
        (IDS - 1, OptionError, "token id -1; allowed: 0 to 10"),
        (IDS.double(), ShapeError, "token ids of shape (2, 3) and type torch.float64; allowed: wh"),
        (IDS.bool(), ShapeError, "token ids of shape (2, 3) and type torch.bool"),
    ],
)
def test_ids_that_no_row_has_are_refused(ids: Tensor, kind: type[InputError], words: str) -> None:
    with pytest.raises(kind) as caught:
        TokenEmbedding(table(VOCAB))(ids, PLACES)
    assert str(caught.value).startswith(words)


@pytest.mark.parametrize(
    ("segments", "given", "words"),
    [
        (2, torch.full_like(IDS, 2), "segment id 2; allowed: 0 to 1"),
        (2, torch.zeros(3, 3).long(), "segment ids of shape (3, 3) and type torch.int64; allowed"),
        (0, torch.zeros_like(IDS), "segment ids for a model without segments; allowed: a model"),
    ],
)
def test_segments_that_do_not_fit_are_refused(segments: int, given: Tensor, words: str) -> None:
    model = TokenEmbedding(table(VOCAB), segments=table(2) if segments else None)
    with pytest.raises(InputError) as caught:
        model(IDS, PLACES, given)
    assert str(caught.value).startswith(words)


def test_a_position_beyond_the_table_is_refused() -> None:
    model = TokenEmbedding(table(VOCAB), LearnedPositions(LENGTH, WIDTH).double())
    with pytest.raises(OptionError, match="position 7 in a learned table of 7 positions; allowed"):
        model(IDS, PLACES + 1)


def test_logits() -> None:
    own, x = nn.Parameter(rand(VOCAB, WIDTH, dtype=F64)), rand(2, 3, WIDTH, seed=1, dtype=F64)
    other, bias = rand(VOCAB, WIDTH, seed=2, dtype=F64), nn.Parameter(rand(VOCAB, dtype=F64))
    bound = 4 * WIDTH * UNIT[F64] * 30  # sums of 6 products of at most 4 · 4, a cap of slope 1
    assert_close(Unembedding(None)(x, other), x @ other.T, bound)
    assert_close(Unembedding(own)(x, other), x @ own.T, bound)
    got = Unembedding(own, bias=bias, scale=0.5, softcap=3.0)(x, other)
    assert_close(got, 3 * torch.tanh((0.5 * x @ own.T + bias) / 3), bound)
    assert finite_max(got - (3 * torch.tanh(0.5 * x @ own.T / 3) + bias)) > 1e6 * bound
    dense, norm = nn.Linear(WIDTH, WIDTH).double(), LayerNorm(WIDTH).double()
    head = Unembedding(None, transform=Transform(dense, nn.ReLU(), norm))
    assert_close(head(x, other), norm(torch.relu(dense(x))) @ other.T, bound)


def test_the_pooler_reads_the_first_position() -> None:
    dense, x = nn.Linear(WIDTH, WIDTH).double(), rand(2, 3, WIDTH, dtype=F64)
    got = Pooler(dense)(x)
    assert_close(got, torch.tanh(dense(x[:, 0])), 4 * WIDTH * UNIT[F64])
    assert finite_max(got - torch.tanh(dense(x[:, 1]))) > 0.1
