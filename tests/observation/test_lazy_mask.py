"""Masks without storage: recognised patterns, slices, and what must not happen silently."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import masking_utils

from headwise.attention.masks import Causal, Everything, Predicate, describe
from headwise.errors import MeasurementError
from headwise.observation import lazy_mask as lazy
from headwise.observation.lazy_mask import LazyMask, lazy_mask
from headwise.observation.rule import MaskFunction, Pattern, evaluate
from headwise.observation.structure import read

Q, K, B = 13, 17, 3


def reference(function: MaskFunction, padding: Tensor | None, q0: int, k0: int) -> Tensor:
    """What transformers itself builds for its sdpa."""
    built = masking_utils.sdpa_mask(
        batch_size=B, q_length=Q, kv_length=K, q_offset=q0, kv_offset=k0, mask_function=function,
        attention_mask=padding, allow_is_causal_skip=False, allow_is_bidirectional_skip=False,
    )  # fmt: skip
    return built


def packed() -> MaskFunction:
    position = torch.cat([torch.arange(5), torch.arange(8), torch.arange(4)]).expand(B, -1)
    names = masking_utils.find_packed_sequence_indices(position)
    inner = masking_utils.sliding_window_causal_mask_function(3)
    return masking_utils.and_masks(
        masking_utils.remap_positions_for_packed_sequence(inner, position),
        masking_utils.packed_sequence_mask_function(names),
    )


PATTERNS: dict[str, tuple[Callable[[], MaskFunction], str]] = {
    "causal": (lambda: masking_utils.causal_mask_function, "causal"),
    "full": (lambda: masking_utils.bidirectional_mask_function, "full"),
    "window": (
        lambda: masking_utils.sliding_window_causal_mask_function(5),
        "window of 5 keys",
    ),
    "band": (
        lambda: masking_utils.sliding_window_bidirectional_mask_function(4),
        "band of 4 keys before and 4 after",
    ),
    "chunks": (
        lambda: masking_utils.chunked_causal_mask_function(4, torch.tensor([0, 2, 5])),
        "causal and chunks of 4",
    ),
}


@pytest.mark.parametrize("name", PATTERNS)
@given(q0=st.integers(0, 9), k0=st.integers(0, 4), left=st.integers(0, 6), pad=st.booleans())
def test_what_is_read_off_is_the_mask(name: str, q0: int, k0: int, left: int, pad: bool) -> None:
    function = PATTERNS[name][0]()
    padding = None
    if pad:
        padding = torch.ones(B, K + k0, dtype=torch.bool)
        padding[1, :left] = False
    spec = lazy_mask(B, Q, K, q0, k0, function, padding).spec
    want = reference(function, padding, q0, k0)
    assert torch.equal(spec.dense(), want.expand(B, 1, Q, K))
    assert spec.pattern is not None
    for b in range(B):
        mask = spec.mask(b, k0)
        if b == 0:
            assert describe(mask) == PATTERNS[name][1]
        real = torch.ones(K, dtype=torch.bool) if padding is None else padding[b, k0:]
        assert torch.equal(mask.dense(b, Q, K, q0 - k0) & real, want[b, 0])


def test_packed_documents_are_read_off() -> None:
    function = packed()
    spec = lazy_mask(B, K, K, mask_function=function).spec
    assert [(e.start, e.stop) for e in spec.extents(1)] == [(0, 5), (5, 13), (13, 17)]
    whole = spec.dense()[1, 0]
    for extent in spec.extents(1):
        run = slice(extent.start, extent.stop)
        size = extent.stop - extent.start
        assert torch.equal(spec.mask(1, extent.start).dense(1, size, size, 0), whole[run, run])
        assert int(whole[run].sum()) == int(whole[run, run].sum())


def test_what_is_not_known_is_evaluated() -> None:
    """Prefix-LM by an or-mask of the user, which only works on single numbers."""

    def image(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return k < 4

    function = masking_utils.or_masks(masking_utils.causal_mask_function, image)
    spec = lazy_mask(B, Q, K, mask_function=function, use_vmap=True).spec
    assert spec.pattern is None
    assert isinstance(spec.mask(0, 0), Predicate)
    causal = torch.arange(K)[None] <= torch.arange(Q)[:, None]
    assert torch.equal(spec.mask(2, 0).dense(2, Q, K, 0), causal | (torch.arange(K) < 4))


def test_a_wrong_reading_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a builder meant something else than what is read off, the samples disagree, and the mask
    is evaluated instead."""
    monkeypatch.setattr(lazy, "read", lambda function: Pattern(before=5, after=0))
    spec = lazy_mask(
        B, Q, K, mask_function=PATTERNS["window"][0]()
    ).spec  # a window of 5 is before=4
    assert spec.pattern is None
    assert torch.equal(spec.mask(0, 0).dense(0, Q, K, 0), spec.dense()[0, 0])


def test_a_lookalike_is_not_recognised() -> None:
    def causal_mask_function(b: int, h: int, q: Tensor, k: Tensor) -> Tensor:
        return k < q

    assert read(causal_mask_function) is None


def test_slices_stay_without_storage_and_exact() -> None:
    before = lazy.materialised()
    mask = lazy_mask(B, Q, K, 4, 2, masking_utils.sliding_window_causal_mask_function(5))
    whole = mask.spec.dense()
    part = mask[:, :, 3:-2, :11]
    assert isinstance(part, LazyMask)
    assert torch.equal(part.spec.dense(), whole[:, :, 3:-2, :11])
    assert isinstance(mask.to("cpu"), LazyMask)
    assert isinstance(mask.detach(), LazyMask)
    assert lazy.materialised() == before


def test_operations_on_the_numbers_are_right_and_counted() -> None:
    before = lazy.materialised()
    mask = lazy_mask(B, Q, K)
    whole = mask.spec.dense()
    assert torch.equal(~mask, ~whole)
    assert torch.equal(mask[:, 0], whole[:, 0])
    assert torch.equal(torch.zeros(Q, K).masked_fill(mask, 1.0)[0, 0], whole[0, 0].float())
    assert lazy.materialised() == before + 3


@pytest.mark.parametrize("operation", [torch.add, torch.sub, torch.mul])
def test_a_mask_added_to_logits_is_stopped(operation: Callable[[Tensor, Tensor], Tensor]) -> None:
    with pytest.raises(MeasurementError, match="attention mask, which is boolean here"):
        operation(torch.zeros(B, 1, Q, K), lazy_mask(B, Q, K))


def test_a_tensor_offset_is_a_number() -> None:
    spec = lazy_mask(B, 1, K, torch.tensor(9), 0).spec
    assert spec.q_offset == 9
    assert int(spec.dense()[0].sum()) == 10


def test_evaluate_broadcasts() -> None:
    query, key = torch.arange(3)[:, None], torch.arange(5)[None]
    keep = evaluate(masking_utils.bidirectional_mask_function, 0, query, key)
    assert keep.shape == (3, 5)
    assert Everything() == Pattern().mask(0)
    assert Causal() == Pattern(after=0).mask(0)
