"""The encoder: padding is never read, and order enters only through positions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from headwise.attention.masks import KeyPadding
from headwise.errors import ModelError
from headwise.models import (
    Architecture,
    Encoder,
    Relative,
    Stack,
    build,
    encoder_sizes,
)
from tests.tolerance import assert_close

VOCAB, LENGTH, HIDDEN_KEYS = 61, 13, 5
# Sums of at most 100 terms of size 1 through 3 layers, in float64.
NEAR = 1e-11


def sizes(**others: Any) -> Architecture:
    return encoder_sizes(vocab=VOCAB, d_model=21, layers=3, heads=3, d_ff=29, context=37, **others)


def model(architecture: Architecture) -> Encoder:
    made = build(architecture, seed=11, dtype=torch.float64)
    assert isinstance(made, Encoder)
    noise = torch.Generator().manual_seed(13)
    with torch.no_grad():
        for parameter in made.parameters():  # every bias and gain takes part
            drawn = torch.randn(parameter.shape, generator=noise, dtype=torch.float64)
            parameter.add_(drawn, alpha=0.3)
    return made


def tokens(seed: int = 3) -> Tensor:
    return torch.randint(VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(seed))


def relative() -> Architecture:
    """T5's encoder: no vector of a position, only biases of distances."""
    stack = Stack(
        layers=3, heads=3, kv_heads=3, d_head=5, d_ff=29, causal=False, scales=(1.0,),
        relative=Relative(buckets=8, max_distance=7),
    )  # fmt: skip
    return Architecture(vocab=VOCAB, d_model=21, context=37, encoder=stack, unembedding=None)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("make", [sizes, relative])
def test_what_padding_holds_changes_nothing(make: Any, side: str) -> None:
    encoder, ids = model(make()), tokens()
    keep = torch.ones(2, LENGTH, dtype=torch.bool)
    hidden = slice(0, HIDDEN_KEYS) if side == "left" else slice(LENGTH - HIDDEN_KEYS, LENGTH)
    keep[1, hidden] = False
    other = ids.clone()
    other[1, hidden] = (other[1, hidden] + 1) % VOCAB
    one, two = (encoder.hidden(x, mask=keep)[keep] for x in (ids, other))
    assert torch.equal(one, two)
    assert not torch.equal(*(encoder.hidden(x)[1] for x in (ids, other)))


@pytest.mark.parametrize("make", [sizes, relative])
def test_right_padding_equals_the_short_sequence(make: Any) -> None:
    encoder, ids, length = model(make()), tokens(), LENGTH - HIDDEN_KEYS
    keep = torch.ones(2, LENGTH, dtype=torch.bool)
    keep[1, length:] = False
    padded = encoder.hidden(ids, mask=KeyPadding(keep))[1, :length]
    assert_close(padded, encoder.hidden(ids[1:, :length])[0], NEAR)


def test_left_padding_needs_only_other_position_ids() -> None:
    encoder, ids = model(sizes()), tokens()
    keep = torch.ones(2, LENGTH, dtype=torch.bool)
    keep[1, :HIDDEN_KEYS] = False
    places = (torch.arange(LENGTH) - torch.tensor([[0], [HIDDEN_KEYS]])).clamp_min(0)
    padded = encoder.hidden(ids, mask=keep, position_ids=places)[1, HIDDEN_KEYS:]
    assert_close(padded, encoder.hidden(ids[1:, HIDDEN_KEYS:])[0], NEAR)


def test_without_positions_a_permutation_of_tokens_permutes_the_outputs() -> None:
    plain = sizes()
    bare = plain.model_copy(
        update={"embedding": plain.embedding.model_copy(update={"positions": None})}
    )
    order = torch.randperm(LENGTH, generator=torch.Generator().manual_seed(2))
    ids = tokens()

    def moved(encoder: Encoder) -> Tensor:
        return (encoder.hidden(ids[:, order]) - encoder.hidden(ids)[:, order]).abs().max()

    assert moved(model(bare)) < NEAR
    assert moved(model(plain)) > 1e-3
    assert moved(model(relative())) > 1e-3


def test_every_position_reads_every_position() -> None:
    encoder, ids = model(sizes()), tokens()
    changed = ids.clone()
    changed[:, -1] = (changed[:, -1] + 1) % VOCAB
    difference = (encoder.hidden(ids) - encoder.hidden(changed)).abs().amax(-1)
    assert bool((difference > 1e-6).all())


def test_segments_are_read_and_default_to_the_first() -> None:
    encoder, ids = model(sizes(segments=3)), tokens()
    zeros = torch.zeros_like(ids)
    assert torch.equal(encoder.hidden(ids), encoder.hidden(ids, segment_ids=zeros))
    assert not torch.equal(encoder.hidden(ids), encoder.hidden(ids, segment_ids=zeros + 2))


def test_heads() -> None:
    architecture = Architecture.checked(**{**dict(sizes()), "pooler": True, "classes": 7})
    encoder, ids = model(architecture), tokens()
    hidden = encoder.hidden(ids)
    first = hidden[:, 0]
    pooled = torch.tanh(first @ encoder.pooler.dense.weight.T + encoder.pooler.dense.bias)
    assert_close(encoder.pooled(hidden), pooled, NEAR)
    want = pooled @ encoder.classifier.weight.T + encoder.classifier.bias
    assert_close(encoder.classify(hidden), want, NEAR)
    assert encoder(ids).shape == (2, LENGTH, VOCAB)


def test_heads_that_are_not_there_are_named() -> None:
    encoder = model(sizes())
    hidden = encoder.hidden(tokens())
    with pytest.raises(ModelError, match="no pooler"):
        encoder.pooled(hidden)
    with pytest.raises(ModelError, match="no classes"):
        encoder.classify(hidden)
    with pytest.raises(ModelError, match="classes without a pooler"):
        Architecture.checked(**{**dict(sizes()), "classes": 7})


def test_without_an_unembedding_the_hidden_states_come_back() -> None:
    encoder, ids = model(relative()), tokens()
    assert torch.equal(encoder(ids), encoder.hidden(ids))


def test_the_relative_table_learns() -> None:
    encoder = model(relative())
    encoder.hidden(tokens()).square().sum().backward()
    gradient = encoder.encoder.bias.weight.grad
    # Distances up to 12 on both sides reach every bucket but that of "0 to the right".
    reached = (gradient.abs() > 0).all(1).tolist()
    assert reached == [True] * 4 + [False] + [True] * 3
    # The same number for every distance changes no softmax.
    assert_close(gradient.sum(0), torch.zeros(3), NEAR * float(gradient.abs().max()))
