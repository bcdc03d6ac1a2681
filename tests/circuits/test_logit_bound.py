"""The bound on logits by norms of queries and keys: never exceeded, and reached."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import headwise as hw
from headwise.circuits.head_weights import HeadNorm, LayerWeights, RotaryUse, head_weights
from headwise.circuits.logit_bound import logit_bound
from headwise.positions import Layout, rotate
from tests.circuits.known_heads import DIRECTIONS, shown, tiny

F64 = torch.float64
HEADS, GROUPS, D_HEAD, D_MODEL, SCALE = 6, 2, 11, 13, 0.7
# Products of at most 64 numbers whose norms are computed in float32 by transformers.
ROUNDED = 1 + 2.0**-18


def layer(
    across: bool = False, kind: Any = "rms", rotary: RotaryUse | None = None, rows: bool = True
) -> LayerWeights:
    """Gains of both signs, of every head (``rows``) or one row for all; ε is 0."""
    generator = torch.Generator().manual_seed(2)

    def norm(heads: int) -> HeadNorm:
        gain = torch.randn(heads if rows else 1, D_HEAD, generator=generator, dtype=F64)
        return HeadNorm(kind, gain, None, 0.0, across)

    empty = torch.zeros(HEADS, D_MODEL, D_HEAD, dtype=F64)
    few = empty[:GROUPS]
    return LayerWeights(
        "attention", "decoder", 0, empty, few, few, empty.mT, SCALE,
        rotary=rotary, query_norm=norm(HEADS), key_norm=norm(GROUPS), fixed=False,
    )  # fmt: skip


def logits(w: LayerWeights, q: Tensor, k: Tensor, distance: int = 0) -> Tensor:
    """Of queries ``batch head 1 d_head`` and keys ``batch kv_head 1 d_head`` before their norms."""
    q, k = w.query_norm(q), w.key_norm(k)
    if w.rotary is not None:
        where = {"layout": w.rotary.layout, "factor": w.rotary.factor}
        q = rotate(q, torch.tensor([distance]), w.rotary.inv_freq, **where)
        k = rotate(k, torch.tensor([0]), w.rotary.inv_freq, **where)
    k = k.repeat_interleave(HEADS // GROUPS, 1)
    return w.scale * (q * k).sum(-1)[..., 0]


ROTATIONS = {
    "none": None,
    "half": RotaryUse(torch.tensor([1.0, 0.3, 0.05], dtype=F64), 6, Layout.HALF, 1.3),
    "interleaved": RotaryUse(torch.tensor([1.0, 0.3], dtype=F64), 4, Layout.INTERLEAVED, 1.1),
}


def search(w: LayerWeights) -> Tensor:
    """The largest |logit| of every head: random directions, spread and sparse ones."""
    generator = torch.Generator().manual_seed(5)
    best = torch.zeros(HEADS, dtype=F64)
    for distance in range(23):
        shape = (199, HEADS, 1, D_HEAD), (199, GROUPS, 1, D_HEAD)
        q, k = (torch.randn(s, generator=generator, dtype=F64) for s in shape)
        sharp = torch.randint(1, 9, (199, 1, 1, 1), generator=generator)
        q, k = (x.sign() * x.abs() ** sharp for x in (q, k))
        if w.query_norm.across:  # all of the norm's entries on one head
            chosen = torch.randint(HEADS, (199,), generator=generator)
            q = q * torch.nn.functional.one_hot(chosen, HEADS)[:, :, None, None]
            group = torch.nn.functional.one_hot(chosen // (HEADS // GROUPS), GROUPS)
            k = k * group[:, :, None, None]
        best = torch.maximum(best, logits(w, q, k, distance).abs().amax(0))
    return best


@pytest.mark.parametrize("rotation", ROTATIONS)
@pytest.mark.parametrize("across", [False, True])
@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_a_search_never_exceeds_it_and_exceeds_less(rotation, across, kind):
    w = layer(across, kind, ROTATIONS[rotation])
    bound, best = logit_bound(w), search(w)
    assert bool((best <= bound * (1 + 1e-12)).all())
    # a bound without the gains, or without the width of the norm, would be exceeded
    ones = [replace(norm, gain=None) for norm in (w.query_norm, w.key_norm)]
    assert bool((best > logit_bound(replace(w, query_norm=ones[0], key_norm=ones[1]))).any())
    if across:
        alone = [replace(norm, across=False) for norm in (w.query_norm, w.key_norm)]
        assert bool((best > logit_bound(replace(w, query_norm=alone[0], key_norm=alone[1]))).any())


@pytest.mark.parametrize("across", [False, True])
@pytest.mark.parametrize("rows", [False, True])
def test_without_rotation_one_entry_reaches_it(across, rows):
    w = layer(across, rows=rows)
    bound = logit_bound(w)
    for head in range(HEADS):
        group = head // (HEADS // GROUPS)
        gains = [n.gain[i if rows else 0] for n, i in ((w.query_norm, head), (w.key_norm, group))]
        entry = int((gains[0] * gains[1]).abs().argmax())
        q, k = (torch.zeros(1, heads, 1, D_HEAD, dtype=F64) for heads in (HEADS, GROUPS))
        q[0, head, 0, entry], k[0, group, 0, entry] = 3.0, 5.0
        got = logits(w, q, k)[0, head]
        assert abs(got.item()) == pytest.approx(bound[head].item(), rel=1e-12)


@pytest.mark.parametrize("layout", list(Layout))
def test_a_quarter_turn_reaches_it(layout):
    """The largest gains of a pair at its two entries: one step turns the one into the other."""
    rotary = RotaryUse(torch.tensor([math.pi / 2, 0.0], dtype=F64), 4, layout, 1.5)
    w = layer(rotary=rotary, rows=False)
    a, b = (0, 2) if layout is Layout.HALF else (0, 1)
    gains = [torch.full((1, D_HEAD), 0.25, dtype=F64) for _ in range(2)]
    gains[0][0, a], gains[1][0, b] = 4.0, -3.0
    norms = [replace(w.query_norm, gain=gain) for gain in gains]
    w = replace(w, query_norm=norms[0], key_norm=norms[1])
    q, k = (torch.zeros(1, heads, 1, D_HEAD, dtype=F64) for heads in (HEADS, GROUPS))
    q[..., a], k[..., b] = 1.0, 1.0
    bound = logit_bound(w)
    assert bound.tolist() == pytest.approx([SCALE * D_HEAD * 1.5**2 * 12.0] * HEADS)
    got = logits(w, q, k, distance=1).abs()
    torch.testing.assert_close(got[0], bound, rtol=1e-12, atol=0)
    assert float(logits(w, q, k, distance=0).abs().max()) < 1e-9


@pytest.mark.parametrize("name", DIRECTIONS)
def test_logits_of_models_keep_to_it(name):
    model = tiny(name)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0)  # logits that would be large
    seen, found = shown(model), head_weights(model)
    held = hw.circuits(model, behaviours=False).dataset
    for i, w in enumerate(found.layers):
        call = seen.calls[w.module].call
        values = call.scale * call.q[0].double() @ w.shared(call.k[0].double()).mT
        most = values.abs().amax((-2, -1))
        bound = logit_bound(w)
        assert bool((most <= bound * ROUNDED).all())
        np.testing.assert_array_equal(held["qk_logit_bound"].values[i], bound.numpy())
        share = held["qk_relative_singular_values_folded"].values[i]
        values = torch.linalg.svdvals(w.qk(folded=True).dense())[:, : share.shape[1]].numpy()
        np.testing.assert_allclose(share, values / values[:, :1], atol=1e-6)
        assert (share[:, 0] == 1).all()


def test_none_without_both_norms_or_with_biases():
    w = layer()
    biased = replace(w.key_norm, bias=torch.ones(GROUPS, D_HEAD, dtype=F64))
    for change in ({"query_norm": None}, {"key_norm": None}, {"key_norm": biased}):
        assert logit_bound(replace(w, **change)) is None
    plain = hw.circuits(tiny("llama"), behaviours=False).dataset
    assert "qk_logit_bound" not in plain
    assert "qk_relative_singular_values_folded" in plain
