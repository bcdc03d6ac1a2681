"""The encoder–decoder: nothing leaks from the future or from padding; a cache changes nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from headwise.errors import ModelError, ShapeError
from headwise.models import (
    Architecture,
    Cache,
    Context,
    EncoderDecoder,
    Relative,
    Stack,
    build,
    transformer_sizes,
)
from headwise.models import relative as relative_bias
from tests.tolerance import assert_close

VOCAB, SOURCE, TARGET = 61, 13, 11
# Sums of at most 100 terms of size 1 through 5 layers, in float64.
NEAR = 1e-11


def original() -> Architecture:
    """The Transformer of 2017."""
    return transformer_sizes(vocab=VOCAB, d_model=21, layers=2, heads=3, d_ff=29, context=37)


def relative() -> Architecture:
    """T5's: other numbers of layers and heads on the two sides, a table of biases each."""
    common: dict[str, Any] = {
        "d_head": 5, "scales": (1.0,), "relative": Relative(buckets=8, max_distance=7),
    }  # fmt: skip
    return Architecture(
        vocab=VOCAB, d_model=21, context=37,
        encoder=Stack(layers=2, heads=3, kv_heads=3, d_ff=29, causal=False, **common),
        decoder=Stack(layers=3, heads=7, kv_heads=7, d_ff=31, cross=True, **common),
    )  # fmt: skip


KINDS = pytest.mark.parametrize("make", [original, relative])


def model(architecture: Architecture) -> EncoderDecoder:
    made = build(architecture, seed=11, dtype=torch.float64)
    assert isinstance(made, EncoderDecoder)
    noise = torch.Generator().manual_seed(13)
    with torch.no_grad():
        for parameter in made.parameters():  # every bias and gain takes part
            drawn = torch.randn(parameter.shape, generator=noise, dtype=torch.float64)
            parameter.add_(drawn, alpha=0.3)
    return made


def tokens(length: int, seed: int = 3) -> Tensor:
    return torch.randint(VOCAB, (2, length), generator=torch.Generator().manual_seed(seed))


def padding(side: str, hidden: int = 5) -> Tensor:
    keep = torch.ones(2, SOURCE, dtype=torch.bool)
    keep[1, slice(0, hidden) if side == "left" else slice(SOURCE - hidden, SOURCE)] = False
    return keep


@KINDS
def test_a_later_target_token_changes_no_earlier_output(make: Any) -> None:
    both, source, ids = model(make()), tokens(SOURCE), tokens(TARGET, 5)
    before = both(source, ids)
    for t in range(TARGET - 1):
        changed = ids.clone()
        changed[:, t + 1] = (changed[:, t + 1] + 1) % VOCAB
        after = both(source, changed)
        assert torch.equal(after[:, : t + 1], before[:, : t + 1])
        assert not torch.equal(after[:, t + 1], before[:, t + 1])


@KINDS
def test_every_output_reads_every_source_token(make: Any) -> None:
    both, source, ids = model(make()), tokens(SOURCE), tokens(TARGET, 5)
    before = both(source, ids)
    for j in range(SOURCE):
        changed = source.clone()
        changed[:, j] = (changed[:, j] + 1) % VOCAB
        difference = (both(changed, ids) - before).abs().amax(-1)
        assert bool((difference > 1e-9).all())


@KINDS
@pytest.mark.parametrize("side", ["left", "right"])
def test_what_the_padding_of_the_source_holds_changes_nothing(make: Any, side: str) -> None:
    both, source, ids, keep = model(make()), tokens(SOURCE), tokens(TARGET, 5), padding(side)
    other = torch.where(keep, source, (source + 1) % VOCAB)
    one, two = (both(x, ids, source_mask=keep) for x in (source, other))
    assert torch.equal(one, two)
    # Both halves of the mask are needed: the encoder's and that of cross-attention.
    read = both.unembed(both.hidden(ids, both.encode(other, mask=keep)))
    assert not torch.equal(read[1], two[1])


@KINDS
def test_a_padded_source_equals_the_short_one(make: Any) -> None:
    both, source, ids, keep = model(make()), tokens(SOURCE), tokens(TARGET, 5), padding("right")
    padded = both(source, ids, source_mask=keep)[1]
    assert_close(padded, both(source[1:, : SOURCE - 5], ids[1:])[0], NEAR)


@KINDS
@pytest.mark.parametrize("steps", [[1] * TARGET, [4, 1, 1, 5]])
@torch.no_grad()
def test_decoding_with_a_cache_equals_one_pass(make: Any, steps: list[int]) -> None:
    both, source, ids, keep = model(make()), tokens(SOURCE), tokens(TARGET, 5), padding("left")
    whole = both(source, ids, source_mask=keep)
    memory = both.encode(source, mask=keep)
    cache = Cache.empty(both.architecture, batch=2, capacity=TARGET, dtype=torch.float64)
    parts = []
    for part in ids.split(steps, 1):
        parts.append(both.unembed(both.hidden(part, memory, source_mask=keep, cache=cache)))
        memory = memory if cache.length <= steps[0] else torch.full_like(memory, torch.nan)
    # From the second step on the source is not read again: its keys and values are in the cache.
    assert_close(torch.cat(parts, 1), whole, NEAR)
    assert cache.length == TARGET


@KINDS
@torch.no_grad()
def test_a_reordered_cache_goes_on_as_the_other_sequence(make: Any) -> None:
    both, source, ids = model(make()), tokens(SOURCE), tokens(TARGET, 5)
    memory = both.encode(source)
    cache = Cache.empty(both.architecture, batch=2, capacity=TARGET, dtype=torch.float64)
    both.hidden(ids[:, :-1], memory, cache=cache)
    rows = torch.tensor([1, 1])
    cache.reorder(rows)
    last = both.hidden(ids[rows, -1:], memory[rows], cache=cache)
    assert_close(last[:, 0], both.hidden(ids, memory)[rows, -1], NEAR)


def test_both_relative_tables_learn() -> None:
    both = model(relative())
    both(tokens(SOURCE), tokens(TARGET, 5)).square().sum().backward()
    for gradient, heads, unused in (
        (both.encoder.bias.weight.grad, 3, [4]),  # "0 to the right"
        (both.decoder.bias.weight.grad, 7, []),
    ):
        assert [b for b in range(8) if not bool(gradient[b].abs().min() > 0)] == unused
        # The same number for every distance changes no softmax.
        assert_close(gradient.sum(0), torch.zeros(heads), NEAR * float(gradient.abs().max()))


def test_what_does_not_fit_is_named() -> None:
    both = model(original())
    with pytest.raises(ShapeError, match="mask"):
        both(tokens(SOURCE), tokens(TARGET), source_mask=padding("left").double())
    memory = both.encode(tokens(SOURCE))
    with pytest.raises(ShapeError, match="a mask of shape"):
        both.hidden(tokens(TARGET), memory, source_mask=padding("left")[:, 1:])
    with pytest.raises(ModelError, match="start token of 61"):
        Architecture.checked(**{**dict(original()), "start_token": VOCAB})
    with pytest.raises(ModelError, match="without an unembedding"):
        Architecture.checked(**{**dict(original()), "unembedding": None})


@pytest.mark.parametrize("side", ["left", "right"])
@torch.no_grad()
def test_biases_as_functions_of_tiles_give_the_same(
    side: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    both, source, ids, keep = model(relative()), tokens(SOURCE), tokens(TARGET, 5), padding(side)
    arrays = both(source, ids, source_mask=keep)
    monkeypatch.setattr(relative_bias, "_ARRAY_LIMIT", 0)
    assert callable(both.encoder.bias(Context(2, SOURCE, 0, ids.device, torch.float64)))
    assert_close(both(source, ids, source_mask=keep), arrays, NEAR)
    cache = Cache.empty(both.architecture, batch=2, capacity=TARGET, dtype=torch.float64)
    memory = both.encode(source, mask=keep)
    parts = [both.hidden(p, memory, source_mask=keep, cache=cache) for p in ids.split(4, 1)]
    assert_close(both.unembed(torch.cat(parts, 1)), arrays, NEAR)


@KINDS
def test_a_source_that_is_all_padding_is_as_if_there_were_none(make: Any) -> None:
    both, ids = model(make()), tokens(TARGET, 5)
    keep = torch.tensor([[True] * SOURCE, [False] * SOURCE])
    one, two = (both(tokens(SOURCE, seed), ids, source_mask=keep) for seed in (3, 4))
    assert bool(one.isfinite().all())
    assert torch.equal(one[1], two[1])
    assert not torch.equal(one[0], two[0])
