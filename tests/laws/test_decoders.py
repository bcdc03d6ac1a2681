"""What holds for every decoder that an ``Architecture`` can name, in float64.

Whole = in pieces through the cache; a padded row = the row alone; packed documents = documents
alone; the future changes nothing; rotary positions count only by their differences.
"""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from headwise.attention.masks import Causal, Documents, KeyPadding
from headwise.models import Architecture, Cache, Rotary, Stack, build
from headwise.models.architecture import Embedding
from tests.models.architectures import CONTEXT, SCALINGS, VOCAB, decoders, sharp, some_ids
from tests.models.oracle import model_bound
from tests.tolerance import assert_close, finite_max

F64 = torch.float64
few = settings(max_examples=60)


def empty(architecture: Architecture, batch: int, capacity: int = CONTEXT) -> Cache:
    return Cache.empty(architecture, batch=batch, capacity=capacity, dtype=F64)


def pieces(length: int, cuts: set[int]) -> list[slice]:
    edges = [0, *sorted(c for c in cuts if 0 < c < length), length]
    return [slice(a, b) for a, b in pairwise(edges)]


@given(decoders(), st.integers(0, 10))
@few
def test_the_future_changes_nothing(architecture: Architecture, t: int) -> None:
    model, ids = sharp(architecture), some_ids(2, 11)
    changed = ids.clone()
    changed[:, t:] = (ids[:, t:] + 1 + torch.arange(11 - t)) % VOCAB
    with torch.no_grad():
        before, after = model(ids), model(changed)
    bound = model_bound(model, before)
    assert_close(after[:, :t], before[:, :t], bound)
    assert finite_max(after[:, t] - before[:, t]) > 1e4 * bound


@given(decoders(), st.sets(st.integers(1, 10)), st.booleans(), st.booleans())
@few
def test_in_pieces_through_the_cache(
    architecture: Architecture, cuts: set[int], padded: bool, as_matrix: bool
) -> None:
    """Every chunking, also of left-padded rows, also with the mask given as pairs."""
    model, ids = sharp(architecture), some_ids(2, 11, seed=1)
    keep = torch.ones(2, 11, dtype=torch.bool)
    keep[0, : 3 if padded else 0] = False
    places = (keep.cumsum(-1) - 1).clamp_min(0)
    pairs = keep[:, None].expand(2, 11, 11)
    cache = empty(architecture, 2)
    with torch.no_grad():
        want = model(ids, mask=keep, position_ids=places)
        parts = []
        for part in pieces(11, cuts):
            mask = pairs[:, part, : part.stop] if as_matrix else keep[:, : part.stop]
            parts.append(model(ids[:, part], mask=mask, position_ids=places[:, part], cache=cache))
    assert cache.length == 11
    real = keep[..., None].expand_as(want)
    got = torch.cat(parts, 1)
    assert_close(got[real], want[real], model_bound(model, want))


@given(decoders(), st.sets(st.integers(1, 12)))
@few
def test_positions_count_on_from_the_cache(architecture: Architecture, cuts: set[int]) -> None:
    model, ids = sharp(architecture), some_ids(3, 13, seed=2)
    cache = empty(architecture, 3)
    with torch.no_grad():
        want = model(ids)
        got = torch.cat([model(ids[:, part], cache=cache) for part in pieces(13, cuts)], 1)
    assert_close(got, want, model_bound(model, want))


@given(decoders(), st.integers(1, 5))
@few
def test_a_left_padded_row_is_the_row_alone(architecture: Architecture, padding: int) -> None:
    model, ids = sharp(architecture), some_ids(2, 11, seed=3)
    keep = torch.ones(2, 11, dtype=torch.bool)
    keep[1, :padding] = False
    places = (keep.cumsum(-1) - 1).clamp_min(0)
    with torch.no_grad():
        got = model(ids, mask=KeyPadding(keep), position_ids=places)
        unmasked = model(ids, position_ids=places)
        alone = model(ids[1:, padding:])
        first = model(ids[:1])
    bound = model_bound(model, got)
    assert not got.isnan().any()
    assert_close(got[1:, padding:], alone, bound)
    assert_close(got[:1], first, bound)
    window = max((w or 99) for w in architecture.stack.windows)
    if window > padding:  # a row that may look into the padding would be another one
        assert finite_max(unmasked[1:, padding:] - alone) > 1e4 * bound


@given(decoders(), st.integers(1, 10))
@few
def test_packed_documents_are_the_documents_alone(architecture: Architecture, cut: int) -> None:
    model, ids = sharp(architecture), some_ids(1, 11, seed=4)
    document = (torch.arange(11) >= cut).long()
    places = torch.cat((torch.arange(cut), torch.arange(11 - cut)))
    with torch.no_grad():
        got = model(ids, mask=Documents(document[None]), position_ids=places)
        want = torch.cat((model(ids[:, :cut]), model(ids[:, cut:])), 1)
    assert_close(got, want, model_bound(model, got))


@given(decoders(rotary_only=True), st.integers(1, 40))
@few
def test_rotary_positions_count_by_their_differences(
    architecture: Architecture, shift: int
) -> None:
    scaling = architecture.stack.rotary.scaling  # type: ignore[union-attr]
    if scaling in (SCALINGS["dynamic"], SCALINGS["longrope"]):
        return  # these look at how far the positions go
    model, ids = sharp(architecture), some_ids(2, 11, seed=5)
    places = torch.arange(11)
    with torch.no_grad():
        want = model(ids, position_ids=places)
        got = model(ids, position_ids=places + shift)
        stretched = model(ids, position_ids=2 * places)
    bound = model_bound(model, want)
    # An angle of p radians is rounded to p · u.
    assert_close(got, want, bound * (1 + shift))
    if all(w is None or w > 1 for w in architecture.stack.windows):
        assert finite_max(stretched - want) > 1e4 * bound


@given(decoders())
@few
def test_json_gives_it_back(architecture: Architecture) -> None:
    text = architecture.model_dump_json()
    again = Architecture.from_json(text)
    assert again == architecture
    assert hash(again) == hash(architecture)
    assert again.model_dump_json() == text


@given(decoders(), st.integers(0, 99))
@settings(max_examples=20)
def test_the_same_seed_gives_the_same_weights(architecture: Architecture, seed: int) -> None:
    one, two, other = (
        dict(build(architecture, seed=s).named_parameters()) for s in (seed, seed, seed + 1)
    )
    assert list(one) == list(two)
    assert all(torch.equal(a, b) for a, b in zip(one.values(), two.values(), strict=True))
    assert not torch.equal(one["embedding.tokens.weight"], other["embedding.tokens.weight"])


@given(decoders())
@few
def test_evaluation_is_without_dropout(architecture: Architecture) -> None:
    model, ids = sharp(architecture), some_ids(2, 7, seed=6)
    with torch.no_grad():
        first, second = model(ids), model(ids)
    assert torch.equal(first, second)
    stack = architecture.stack
    settings_ = {**dict(stack), "dropout": 0.0, "attention_dropout": 0.0}
    quiet = architecture.model_copy(update={"decoder": Stack(**settings_)})
    with torch.no_grad():
        assert_close(sharp(quiet)(ids), first, model_bound(model, first))


def test_the_leak_law_can_fail() -> None:
    """A diagonal moved by one shows the next token."""
    stack = Stack(layers=1, heads=3, kv_heads=3, d_head=4, d_ff=7)
    architecture = Architecture(vocab=VOCAB, d_model=12, context=CONTEXT, decoder=stack)
    model, ids = sharp(architecture, seed=1), some_ids(1, 11)
    model.decoder.blocks[0].attention.branch.mask = Causal(1)  # type: ignore[union-attr]
    changed = ids.clone()
    changed[0, 5] = (ids[0, 5] + 1) % VOCAB
    with torch.no_grad():
        before, after = model(ids), model(changed)
    bound = model_bound(model, before)
    assert_close(after[:, :4], before[:, :4], bound)
    assert finite_max(after[:, 4] - before[:, 4]) > 1e6 * bound


def test_the_cache_law_can_fail() -> None:
    """Keys whose positions start at 0 again in every piece are seen."""
    stack = Stack(layers=2, heads=3, kv_heads=3, d_head=4, d_ff=7, rotary=Rotary(width=4))
    architecture = Architecture(vocab=VOCAB, d_model=12, context=CONTEXT, decoder=stack)
    model, ids = sharp(architecture), some_ids(2, 11)
    cache = empty(architecture, 2)
    with torch.no_grad():
        want = model(ids)
        model(ids[:, :5], cache=cache)
        wrong: Tensor = model(ids[:, 5:], cache=cache, position_ids=torch.arange(6))
    assert finite_max(wrong - want[:, 5:]) > 1e6 * model_bound(model, want)


def test_the_padding_law_can_fail() -> None:
    """Positions that count the padding are seen where positions are learned."""
    stack = Stack(layers=2, heads=3, kv_heads=3, d_head=4, d_ff=7)
    architecture = Architecture(
        vocab=VOCAB, d_model=12, context=CONTEXT, decoder=stack,
        embedding=Embedding(positions="learned"),
    )  # fmt: skip
    model, ids = sharp(architecture), some_ids(1, 11)
    keep = torch.arange(11)[None] >= 3
    with torch.no_grad():
        alone, wrong = model(ids[:, 3:]), model(ids, mask=keep)[:, 3:]
    assert finite_max(wrong - alone) > 1e6 * model_bound(model, alone)


@pytest.mark.parametrize("word", SCALINGS)
def test_every_scaling_survives_json_and_runs(word: str) -> None:
    rotary = Rotary(width=4, scaling=SCALINGS[word])
    assert Rotary.from_json(rotary.model_dump_json()) == rotary
    stack = Stack(layers=1, heads=1, kv_heads=1, d_head=4, d_ff=7, rotary=rotary)
    a = Architecture(vocab=VOCAB, d_model=12, context=CONTEXT, decoder=stack)
    plain = a.model_copy(update={"decoder": stack.model_copy(update={"rotary": Rotary(width=4)})})
    assert Architecture.from_json(a.model_dump_json()) == a
    ids = some_ids(1, CONTEXT)
    with torch.no_grad():
        scaled, want = sharp(a)(ids), sharp(plain)(ids)
    changes = finite_max(scaled - want) > 1e6 * model_bound(sharp(a), want)
    assert changes == (word != "dynamic")  # dynamic NTK changes nothing within the trained length
