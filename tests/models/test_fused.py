"""Every way of computing a layer's attention gives the definition's output and gradients."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from headwise.attention import definition
from headwise.attention.bias import as_function
from headwise.attention.masks import (
    Band,
    Causal,
    Chunked,
    Documents,
    Everything,
    KeyPadding,
    Mask,
    Window,
)
from headwise.models import Context, fused
from headwise.models.fused import Attending
from tests.attention.problems import rand
from tests.tolerance import Tolerance, assert_close, finite_max

BATCH, HEADS, KV, D, DV = 2, 6, 2, 5, 5
KEYS = 13
F64 = torch.float64

_SEEN = torch.ones(BATCH, KEYS, dtype=torch.bool)
_SEEN[1, :4] = False
PADDING = KeyPadding(_SEEN)
PACKED = Documents((torch.arange(KEYS)[None] // torch.tensor([[5], [7]])).long())


def call_of(
    queries: int = KEYS, pattern: Mask | None = None, visible: Mask | None = None, **more: Any
) -> Attending:
    q = 2 * rand(BATCH, HEADS, queries, D, seed=1, dtype=F64)
    k = rand(BATCH, KV, KEYS, D, seed=2, dtype=F64)
    v = rand(BATCH, KV, KEYS, DV, seed=3, dtype=F64)
    return Attending(
        module=nn.Identity(), q=q, k=k, v=v, pattern=pattern or Causal(), visible=visible,
        context=Context(BATCH, queries, KEYS - queries, q.device, F64, visible=visible),
        scale=more.pop("scale", 0.4), **more,
    )  # fmt: skip


BIAS = 2 * rand(1, HEADS, KEYS, KEYS, seed=4, dtype=F64)
SINKS = rand(HEADS, seed=5, dtype=F64)
SIMPLE, ARRAY, STREAM = "simple", "array", "streaming"

CALLS: dict[str, tuple[Callable[[], Attending], str]] = {
    "everything": (lambda: call_of(pattern=Everything()), SIMPLE),
    "everything, fewer queries": (lambda: call_of(5, pattern=Everything()), SIMPLE),
    "causal": (lambda: call_of(), SIMPLE),
    "causal, one query": (lambda: call_of(1), SIMPLE),
    "causal behind a cache": (lambda: call_of(5), ARRAY),
    "window": (lambda: call_of(pattern=Window(3)), ARRAY),
    "window as wide as the keys": (lambda: call_of(pattern=Window(KEYS)), SIMPLE),
    "window one narrower": (lambda: call_of(pattern=Window(KEYS - 1)), ARRAY),
    "window, one query": (lambda: call_of(1, pattern=Window(3)), SIMPLE),
    "window of one, one query": (lambda: call_of(1, pattern=Window(1)), SIMPLE),
    "band ahead, one query": (lambda: call_of(1, pattern=Band(2, 1)), ARRAY),
    "moved diagonal": (lambda: call_of(pattern=Causal(-2)), ARRAY),
    "chunks": (lambda: call_of(pattern=Chunked(5)), ARRAY),
    "padding": (lambda: call_of(visible=PADDING), ARRAY),
    "padding, both ways": (lambda: call_of(pattern=Everything(), visible=PADDING), ARRAY),
    "padding, one query": (lambda: call_of(1, visible=PADDING), ARRAY),
    "documents and a window": (lambda: call_of(pattern=Window(3), visible=PACKED), ARRAY),
    "bias": (lambda: call_of(bias=BIAS), ARRAY),
    "bias and padding": (lambda: call_of(bias=BIAS, visible=PADDING), ARRAY),
    "bias behind a cache": (lambda: call_of(5, bias=BIAS[:, :, -5:]), ARRAY),
    "softcap": (lambda: call_of(softcap=1.5), STREAM),
    "softcap, padding, bias": (
        lambda: call_of(softcap=1.5, visible=PADDING, bias=BIAS), STREAM,
    ),
    "sinks": (lambda: call_of(sinks=SINKS), STREAM),
    "sinks and padding": (lambda: call_of(sinks=SINKS, visible=PADDING), STREAM),
    "bias as a function": (
        lambda: call_of(bias=as_function(BIAS, BATCH, HEADS, KEYS, KEYS)), STREAM,
    ),
}  # fmt: skip
each = pytest.mark.parametrize(("make", "way"), CALLS.values(), ids=CALLS.keys())


def wanted(call: Attending, leaves: dict[str, Tensor] | None = None) -> Tensor:
    """The definition on one side, with the mask as a matrix made from its own predicate."""
    use = {"q": call.q, "k": call.k, "v": call.v, "bias": call.bias, "sinks": call.sinks}
    use.update(leaves or {})
    bias = BIAS if callable(use["bias"]) else use["bias"]
    return definition.attention(
        use["q"], use["k"], use["v"], mask=call.mask, scale=call.scale,  # type: ignore[arg-type]
        softcap=call.softcap, bias=bias, sinks=use["sinks"],  # type: ignore[arg-type]
    )  # fmt: skip


def bound_of(call: Attending) -> Tolerance:
    bias = BIAS if callable(call.bias) else call.bias
    return Tolerance.of(call.q.detach(), call.k.detach(), call.scale, bias, call.sinks)


def leaves_of(call: Attending) -> dict[str, Tensor]:
    """The tensors of a call, made to require gradients."""
    found = {"q": call.q, "k": call.k, "v": call.v, "bias": call.bias, "sinks": call.sinks}
    tensors = {name: x.clone() for name, x in found.items() if isinstance(x, Tensor)}
    return {name: x.requires_grad_() for name, x in tensors.items()}


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which way was gone, in words."""
    ways: list[str] = []
    kernel, attend, dense = fused._fused, fused.attend, fused._dense

    def watched(*args: Any, **kwargs: Any) -> Tensor:
        ways.append(ARRAY if kwargs.get("mask") is not None else SIMPLE)
        return kernel(*args, **kwargs)

    def streamed(*args: Any, **kwargs: Any) -> Tensor:
        ways.append(STREAM)
        return attend(*args, **kwargs)

    def whole(call: Attending) -> Tensor:
        ways.append("dense")
        return dense(call)

    monkeypatch.setattr(fused, "_fused", watched)
    monkeypatch.setattr(fused, "attend", streamed)
    monkeypatch.setattr(fused, "_dense", whole)
    return ways


def check(call: Attending) -> None:
    """Output without and with gradients, and the gradients."""
    t = bound_of(call)
    with torch.no_grad():
        assert_close(fused.output(call), wanted(call), t.output(call.v))
    leaves = leaves_of(call)
    got = fused.output(replace(call, **leaves))
    want = wanted(call, leaves)
    assert_close(got, want, t.output(call.v))
    up = rand(*got.shape, seed=11, dtype=F64)
    upstream = float(up.norm(dim=-1).max())
    bounds = t.gradients(call.q, call.k, call.v, upstream, call.scale)
    a = torch.autograd.grad((got * up).sum(), tuple(leaves.values()))
    b = torch.autograd.grad((want * up).sum(), tuple(leaves.values()))
    for name, x, y in zip(leaves, a, b, strict=True):
        assert_close(x, y, bounds[name])
    assert finite_max(b[2]) > 1e6 * bounds["v"]  # the bounds could see something


@each
def test_output_and_gradients_are_the_definitions(
    make: Callable[[], Attending], way: str, taken: list[str]
) -> None:
    check(make())
    assert set(taken) == {way}


@each
def test_streaming_where_the_mask_is_too_large(
    make: Callable[[], Attending], way: str, taken: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused, "ARRAY_LIMIT", 0)
    check(make())
    assert set(taken) == {STREAM if way == ARRAY else way}


@each
def test_dropout_keeps_the_mean(make: Callable[[], Attending], way: str, taken: list[str]) -> None:
    """Weights are dropped with probability p and the others divided by 1 − p."""
    call = replace(make(), dropout=0.4)
    want = wanted(call)
    draws = 400
    torch.manual_seed(1)
    outs = torch.stack([fused.output(call) for _ in range(draws)])
    error = outs.std(0) / math.sqrt(draws) + bound_of(call).output(call.v)
    # At most 1560 entries: beyond 6 standard errors, probability 2e-9 each if they were normal.
    assert bool(((outs.mean(0) - want).abs() <= 6 * error).all())
    assert bool(((0.6 * outs.mean(0) - want).abs() > 6 * error).any())
    assert set(taken) == {"dense" if way == STREAM else way}


def test_dropout_where_the_mask_is_too_large(
    taken: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused, "ARRAY_LIMIT", 0)
    torch.manual_seed(2)
    fused.output(call_of(visible=PADDING, dropout=0.4))
    assert taken == ["dense"]


def test_rows_that_see_nothing_are_zero_on_every_way(monkeypatch: pytest.MonkeyPatch) -> None:
    for limit in (1 << 24, 0):
        monkeypatch.setattr(fused, "ARRAY_LIMIT", limit)
        for more in ({}, {"bias": BIAS}, {"softcap": 1.5}, {"sinks": SINKS}):
            out = fused.output(call_of(visible=PADDING, **more))
            assert torch.equal(out[1, :, :4], torch.zeros(HEADS, 4, DV, dtype=F64))


@pytest.mark.parametrize(
    "wrong",
    [{"pattern": Window(4)}, {"visible": None}, {"scale": 0.41}, {"bias": None}],
    ids=["window", "padding", "scale", "bias"],
)
def test_the_bound_sees_another_rule(wrong: dict[str, Any]) -> None:
    settings: dict[str, Any] = {"pattern": Window(3), "visible": PADDING, "bias": BIAS}
    call, other = call_of(**settings), call_of(**{**settings, **wrong})
    assert finite_max(fused.output(call) - wanted(other)) > 1e6 * bound_of(call).output(call.v)


def test_the_watcher_sees_every_call_and_answers() -> None:
    seen: list[Attending] = []

    def watcher(call: Attending) -> Tensor:
        seen.append(call)
        return fused.output(call) + 1

    call = call_of()
    token = fused.WATCHER.set(watcher)
    try:
        got = fused.compute(call)
    finally:
        fused.WATCHER.reset(token)
    assert len(seen) == 1
    assert seen[0] is call
    assert torch.equal(got, fused.output(call) + 1)
    assert torch.equal(fused.compute(call), fused.output(call))
    assert len(seen) == 1


def test_weights_are_the_definitions_also_with_a_bias_function() -> None:
    call = call_of(bias=as_function(BIAS, BATCH, HEADS, KEYS, KEYS), sinks=SINKS, softcap=2.0)
    s = definition.scores(call.q, call.k, scale=call.scale, softcap=2.0, bias=BIAS)
    keep = torch.ones(KEYS, KEYS, dtype=torch.bool).tril()
    want = definition.weights(s, keep, SINKS)
    assert_close(fused.weights(call), want, 0.0, bound_of(call).weight)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_as_good_as_torchs(dtype: torch.dtype) -> None:
    """Dao et al.: an exact form errs at most twice as much as torch's own in the same precision.

    Both against float64 of the same rounded inputs; where torch's kernel is what is called, its
    error is the rounding of the result.
    """
    for make, _ in CALLS.values():
        call = make()
        if callable(call.bias):
            continue
        low = {name: getattr(call, name).to(dtype) for name in ("q", "k", "v")}
        bias = None if call.bias is None else call.bias.to(dtype)
        small = replace(
            call, **low, bias=bias, context=replace(call.context, dtype=dtype, _blocks={})
        )
        exact = {name: x.double() for name, x in low.items()}
        want = wanted(replace(call, **exact, bias=None if bias is None else bias.double()))
        s = definition.scores(low["q"], low["k"], scale=call.scale, softcap=call.softcap, bias=bias)
        keep = call.context.block(call.mask, KEYS)
        sinks = None if call.sinks is None else call.sinks.to(dtype)
        naive = definition.output(definition.weights(s, keep, sinks), low["v"])
        error = finite_max(fused.output(small).double() - want)
        assert error <= 2 * finite_max(naive.double() - want)
