"""Which form of the strip pass a call takes, and the matrix product that compiled code calls."""

from __future__ import annotations

import ctypes

import pytest
import torch

from headwise.attention import blas, caching, measure, sharing
from headwise.attention.masks import (
    Causal,
    Dense,
    Everything,
    KeyPadding,
    Mask,
    Window,
    describe,
)
from headwise.attention.plan import Form, Problem


def chosen(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype = torch.float32, **options) -> Form:  # type: ignore[no-untyped-def]
    """The form that ``measure`` takes for these options."""
    seen: list[Problem] = []
    real = sharing.run_strips
    monkeypatch.setattr(
        "headwise.attention.statistics.run_strips",
        lambda p, *rest: (seen.append(p), real(p, *rest))[1],
    )
    q, k, v = (torch.randn(1, 2, 5, 3, dtype=dtype) for _ in range(3))
    measure(q, k, options.pop("v", v), **{"mask": Causal(), **options})
    return seen[0].form


@pytest.mark.parametrize("mask", [Causal(), Causal() & Window(2), Everything()], ids=describe)
def test_plain_masks_are_compiled_whole(monkeypatch: pytest.MonkeyPatch, mask: Mask) -> None:
    if blas.sgemm_address() is None:
        pytest.skip("this build of torch does not export its matrix product")
    assert chosen(monkeypatch, mask=mask) is Form.WHOLE


def test_without_an_exported_product_torch_multiplies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blas, "sgemm_address", lambda: None)
    assert chosen(monkeypatch) is Form.LOOPS


def bias(batch: int, heads: slice, query: torch.Tensor, key: range) -> torch.Tensor:
    return torch.zeros(1, len(query), len(key))


HOLES = torch.tensor([[True, False, True, True, True]])


@pytest.mark.parametrize(
    "options",
    [
        {"bias": bias},
        {"softcap": 5.0},
        {"v": torch.full((1, 2, 5, 3), torch.nan)},
        {"mask": Causal() & KeyPadding(HOLES)},
        {"mask": Dense(torch.ones(1, 5, 5, dtype=torch.bool))},
    ],
    ids=["bias", "softcap", "NaN", "holes", "dense"],
)
def test_what_needs_torch_between_the_products(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Mask]
) -> None:
    assert chosen(monkeypatch, **options) is Form.LOOPS


def test_float64_takes_tensor_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    assert chosen(monkeypatch, torch.float64) is Form.TENSORS


def test_the_product_is_checked_before_it_is_used() -> None:
    """A routine of that name with other arguments is not taken for sgemm."""
    signature = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * 13)
    assert not blas._multiplies(signature(lambda *arguments: None))


def test_a_read_only_disk_compiles_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere(**options: object) -> None:
        raise RuntimeError("cannot cache function: no locator available")

    assert caching.can_cache()
    monkeypatch.setattr(caching, "njit", nowhere)
    assert not caching.can_cache()
