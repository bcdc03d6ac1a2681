"""Comparing two records: every number of every layer and block."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from headwise.results.records import ScanRecord

__all__ = ["NOISE", "assert_same"]

# Runs of one float64 model that group rows differently differ by float64 rounding (2^-53), which a
# few layers magnify; a row too many or too few changes means by more than 1/1000.
NOISE = 2.0**-33


def assert_same(got: ScanRecord, want: ScanRecord, *, blocks: bool = True) -> None:
    """Layers, blocks and tokens agree: counts exactly, numbers within NOISE."""
    assert len(got.layers) == len(want.layers)
    for a, b in zip(got.layers, want.layers, strict=True):
        for field in fields(a):
            same(getattr(a, field.name), getattr(b, field.name), f"{b.module}: {field.name}")
    if blocks:
        assert len(got.blocks) == len(want.blocks)
        for x, y in zip(got.blocks, want.blocks, strict=True):
            for field in fields(x):
                same(getattr(x, field.name), getattr(y, field.name), f"{y.module}: {field.name}")
    assert len(got.tokens) == len(want.tokens)
    for s, t in zip(got.tokens, want.tokens, strict=True):
        assert s.name == t.name
        for name in ("ids", "document", "position"):
            assert torch.equal(getattr(s, name), getattr(t, name)), f"{s.name}: {name}"


def same(a: Any, b: Any, what: str) -> None:
    if isinstance(b, Tensor):
        assert a.shape == b.shape, f"{what}: shape {tuple(a.shape)}, expected {tuple(b.shape)}"
        assert torch.equal(a.isnan(), b.isnan()), f"{what}: NaN in different places"
        scale = 1 + b.double().nan_to_num(0.0).abs()
        error = ((a - b).double().abs() / scale).nan_to_num(0.0)
        assert not error.numel() or float(error.max()) <= NOISE, f"{what}: off by {error.max():.2e}"
    elif isinstance(b, dict):
        assert a.keys() == b.keys(), what
        for name in b:
            same(a[name], b[name], f"{what}[{name}]")
    elif isinstance(b, float):
        both = math.isnan(a) and math.isnan(b)
        assert both or abs(a - b) <= NOISE * (1 + abs(b)), f"{what}: {a} is not {b}"
    else:
        assert a == b, f"{what}: {a} is not {b}"
