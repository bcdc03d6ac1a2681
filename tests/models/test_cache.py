"""The key-value cache: what it holds, and what does not go into it."""

from __future__ import annotations

import pytest
import torch

from headwise.errors import InputError, OptionError, ShapeError
from headwise.models import Architecture, Cache, Stack, build, preset
from headwise.models.cache import Slot
from tests.attention.problems import rand
from tests.models.architectures import sharp, some_ids
from tests.models.oracle import model_bound
from tests.tolerance import assert_close, finite_max

TINY = preset("tiny")


def small(**more: object) -> Architecture:
    stack = Stack(layers=2, heads=4, kv_heads=2, d_head=5, d_ff=7)
    return Architecture(vocab=17, d_model=12, context=13, decoder=stack, **more)  # type: ignore[arg-type]


def test_it_is_filled_from_the_left_and_read_as_a_view() -> None:
    slot = Slot(torch.zeros(2, 3, 7, 5), torch.zeros(2, 3, 7, 5))
    k, v = rand(2, 3, 4, 5), rand(2, 3, 4, 5, seed=1)
    keys, values = slot.append(k[:, :, :3], v[:, :, :3])
    assert torch.equal(keys, k[:, :, :3])
    keys, values = slot.append(k[:, :, 3:], v[:, :, 3:])
    assert torch.equal(keys, k)
    assert torch.equal(values, v)
    assert keys.data_ptr() == slot.keys.data_ptr()
    assert slot.length == 4


def test_its_memory_is_that_of_the_kv_heads() -> None:
    cache = Cache.empty(small(), batch=3, capacity=11, dtype=torch.bfloat16)
    assert [tuple(s.keys.shape) for s in cache.slots] == [(3, 2, 11, 5)] * 2
    assert {s.values.dtype for s in cache.slots} == {torch.bfloat16}
    assert (cache.length, cache.capacity) == (0, 11)


def test_rows_are_kept_in_the_order_that_is_asked_for() -> None:
    model, ids = sharp(small()), some_ids(3, 7)
    cache = Cache.empty(small(), batch=3, capacity=13, dtype=torch.float64)
    rows = torch.tensor([2, 0])
    cache.slots[0].source = (rand(3, 1, 1, 1), rand(3, 1, 1, 1, seed=1))
    with torch.no_grad():
        whole = model(ids)
        model(ids[:, :6], cache=cache)
        cache.reorder(rows)
        got = model(ids[rows, 6:], cache=cache)
    assert_close(got, whole[rows, 6:], model_bound(model, whole))
    assert finite_max(got - whole[:2, 6:]) > 1e6 * model_bound(model, whole)
    assert cache.slots[0].source[0].shape[0] == 2  # type: ignore[index]


def refused(kind: type[InputError], words: str, cache: Cache, batch: int = 2) -> None:
    with torch.no_grad(), pytest.raises(kind) as caught:
        build(TINY)(some_ids(batch, 7), cache=cache)
    assert str(caught.value).startswith(words)
    assert cache.length == 0


def test_what_does_not_fit_is_refused_before_anything_is_written() -> None:
    def empty(batch: int = 2, capacity: int = 16, **more: torch.dtype) -> Cache:
        return Cache.empty(TINY, batch=batch, capacity=capacity, **more)

    refused(
        OptionError,
        "position 6 in a cache of 5 positions; allowed: 0 to 4; make the cache as long as prompt",
        empty(capacity=5),
    )
    refused(ShapeError, "keys (1, 2, 7, 8) of torch.float32 for a cache (2, 2, 16, 8)", empty(), 1)
    refused(
        ShapeError,
        "keys (2, 2, 7, 8) of torch.float32 for a cache (2, 2, 16, 8) of torch.bfloat16; allowed:",
        empty(dtype=torch.bfloat16),
    )
    other = Cache.empty(preset("gpt2-small"), batch=2, capacity=16)
    refused(ShapeError, "a cache of 12 layers for 2 blocks; allowed: one slot for each", other)
    with pytest.raises(OptionError, match="a cache of 0 positions for 2 sequences; allowed: 1 or"):
        empty(capacity=0)


def test_gradients_and_a_cache_exclude_each_other() -> None:
    cache = Cache.empty(TINY, batch=2, capacity=16)
    with pytest.raises(OptionError) as caught:
        build(TINY)(some_ids(2, 7), cache=cache)
    assert str(caught.value) == (
        "a key-value cache while gradients are recorded; allowed: a pass under torch.no_grad() or"
        " inference_mode(); leave the cache out where gradients are needed"
    )
    assert cache.length == 0


def test_more_than_the_context_is_refused_with_a_cache_too() -> None:
    cache = Cache.empty(TINY, batch=1, capacity=100)
    model = build(TINY)
    with torch.no_grad():
        model(some_ids(1, 60), cache=cache)
        with pytest.raises(OptionError, match="a sequence of 65 tokens for a context of 64; allow"):
            model(some_ids(1, 5), cache=cache)
        assert cache.length == 60
        model.allow_long = True
        assert model(some_ids(1, 5), cache=cache).shape == (1, 5, 257)
