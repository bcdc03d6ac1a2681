"""The attention module: concatenated = sum over heads = the definition, values and gradients."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from headwise.attention.masks import Everything, Window
from headwise.errors import ModelError, ShapeError
from headwise.models import Context, MultiHeadAttention, Rotary
from headwise.models.cache import Slot
from tests.attention.problems import rand
from tests.models.oracle import Rule, by_definition, context_of, output_bound
from tests.models.variants import LENGTH, VARIANTS, WIDTH, Variant
from tests.tolerance import UNIT, assert_close, finite_max

every = pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS.keys())


def both(variant: Variant, rule: Rule | None = None) -> tuple[Tensor, Tensor, float]:
    module = variant.build()
    x, context = variant.inputs()
    want = by_definition(module, x, rule or variant.law(), context.source)
    return module(x, context), want, output_bound(module, x, context)


@every
def test_forward_is_the_definition(variant: Variant) -> None:
    got, want, bound = both(variant)
    assert_close(got, want, bound)


@every
def test_concatenated_is_the_sum_over_heads(variant: Variant) -> None:
    module = variant.build(seed=3)
    x, context = variant.inputs(seed=23)
    got, bound = module(x, context), output_bound(module, x, context)
    assert_close(module.sum_over_heads(x, context), got, bound)
    parts = module.head_outputs(x, context)
    assert parts.shape == (*x.shape[:1], variant.heads, *x.shape[1:])
    one_missing = parts[:, 1:].sum(1) + (0 if module.output.bias is None else module.output.bias)
    assert finite_max(one_missing - got) > 1e6 * bound


@every
def test_gradients_are_those_of_the_definition(variant: Variant) -> None:
    module = variant.build(seed=5)
    x, context = variant.inputs(seed=31)
    x.requires_grad_()
    up = rand(*x.shape, seed=9, dtype=torch.float64)
    leaves = (x, *module.parameters())
    got = torch.autograd.grad((module(x, context) * up).sum(), leaves)
    plain = by_definition(module, x, variant.law(), context.source)
    want = torch.autograd.grad((plain * up).sum(), leaves)
    # A gradient sums over batch, rows and width what the output's bound allows for one entry, and
    # one more product with the upstream gradient, keys or inputs (each at most ~4 in size).
    terms = up.numel() * 4 * 4 * max(1.0, module.scale)
    bound = output_bound(module, x.detach(), context) * terms
    for name, a, b in zip(("x", *dict(module.named_parameters())), got, want, strict=True):
        # (The bias of the keys of one softmax moves nothing: its gradient is 0 up to rounding.)
        assert not a.isnan().any(), name
        assert_close(a, b, bound)
    assert max(finite_max(b) for b in want) > 1e6 * bound


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("plain", {"scale": WIDTH**-0.5}),
        ("plain", {"keep": lambda b, i, j: j <= i + 1}),
        ("softcap", {"cap": None}),
        ("scale", {"scale": 0.3 / math.sqrt(5)}),
        ("window", {"keep": lambda b, i, j: i - 4 < j <= i}),
        ("rotary", {"interleaved": True}),
        ("rotary", {"turning": 2}),
        ("rotary", {"base": 101.0}),
        ("norm of each head", {"norm": None}),
        ("ALiBi", {"bias": None}),
        ("left padding", {"keep": lambda b, i, j: j <= i}),
        ("documents", {"keep": lambda b, i, j: j <= i}),
        ("cross, padded source", {"keep": lambda b, i, j: True}),
    ],
)
def test_the_reference_sees_another_rule(name: str, change: dict[str, object]) -> None:
    got, want, bound = both(VARIANTS[name], VARIANTS[name].law(**change))
    assert finite_max(got - want) > 1e6 * bound


def test_query_heads_share_by_neighbours_not_by_turns() -> None:
    """Tiling the kv heads is another function; the bound tells them apart."""
    variant = VARIANTS["grouped"]
    module, (x, context) = variant.build(), variant.inputs()
    tiled = torch.cat([module.output_of_heads()[:, h] for h in (0, 3, 1, 4, 2, 5)], -1)
    order = module.query.weight.unflatten(0, (6, 3))[[0, 3, 1, 4, 2, 5]].flatten(0, 1)  # type: ignore[operator,union-attr]
    want = module(x, context)
    with torch.no_grad():
        module.output.weight.copy_(tiled)  # type: ignore[operator,union-attr]
        module.query.weight.copy_(order)  # type: ignore[operator,union-attr]
    assert finite_max(module(x, context) - want) > 1e6 * output_bound(module, x, context)


def test_weights_are_the_softmax_and_rows_sum_to_one() -> None:
    module, (x, context) = VARIANTS["grouped"].build().train(), VARIANTS["grouped"].inputs()
    module.dropout = 0.5
    a = module.weights(x, context)
    assert a.shape == (2, 6, LENGTH, LENGTH)
    assert_close(a.sum(-1), torch.ones(2, 6, LENGTH), LENGTH * UNIT[torch.float64])
    assert torch.equal(a.triu(1), torch.zeros_like(a))


def test_it_stands_alone() -> None:
    module, (x, context) = VARIANTS["rotary"].build(), VARIANTS["rotary"].inputs()
    assert torch.equal(module(x), module(x, context))
    assert torch.equal(module.weights(x), module.weights(x, context))


@pytest.mark.parametrize("softcap", [None, 1.5], ids=["fused kernel", "definition"])
def test_dropout_is_unbiased_in_training_and_absent_in_evaluation(softcap: float | None) -> None:
    variant = replace(
        VARIANTS["grouped"], module={"softcap": softcap, "dropout": 0.3}, rule={"cap": softcap}
    )
    module, (x, context) = variant.build(), variant.inputs()
    want = by_definition(module, x, variant.law())
    bound = output_bound(module, x, context)
    assert_close(module(x, context), want, bound)
    module.train()
    draws = 1500
    torch.manual_seed(0)
    with torch.no_grad():
        outs = torch.stack([module(x, context) for _ in range(draws)])
    assert float(outs.std(0).min()) > 1e6 * bound  # it does drop
    # The mean of n draws has standard error s/√n; of 286 entries none is beyond 5 of them
    # (probability 2e-4 in all), and with rows that are not rescaled by 1/(1 − p) nearly all are.
    error = outs.std(0) / math.sqrt(draws)
    assert bool(((outs.mean(0) - want).abs() <= 5 * error).all())
    unscaled = ((0.7 * outs.mean(0) - want).abs() > 5 * error).double().mean()
    assert unscaled > 0.5


def parts(q: int = 12, k: int = 12, v: int = 12, o: int = 12) -> list[nn.Linear]:
    return [nn.Linear(6, n, bias=False) for n in (q, k, v)] + [nn.Linear(o, 6, bias=False)]


@pytest.mark.parametrize(
    ("sizes", "heads", "kv_heads", "words"),
    [
        ({}, 5, 5, "a query projection to 12 entries for 5 heads; allowed: a number of heads that"),
        ({}, 6, 4, "6 query heads cannot share 4 key-value heads; allowed: a number of key-value"),
        ({"k": 6}, 3, 3, "keys of width 2 and queries of width 4; allowed: one width d_head"),
        ({"v": 7}, 3, 3, "a value projection to 7 entries for 3 heads"),
    ],
)
def test_parts_that_do_not_fit_are_refused(
    sizes: dict[str, int], heads: int, kv_heads: int, words: str
) -> None:
    with pytest.raises(ShapeError) as caught:
        MultiHeadAttention(*parts(**sizes), heads=heads, kv_heads=kv_heads)
    assert str(caught.value).startswith(words)


def test_cross_attention_without_a_source_is_refused() -> None:
    module = MultiHeadAttention(*parts(), heads=3, kv_heads=3, cross=True)
    with pytest.raises(ShapeError, match="cross-attention without a source; allowed: a context"):
        module(torch.zeros(1, 2, 6))
    assert isinstance(module.mask, Everything)


def test_an_odd_rotary_width_is_refused() -> None:
    with pytest.raises(ModelError, match="a rotary width of 3, which cannot be cut into pairs"):
        Rotary(width=3)


def test_a_row_that_sees_nothing_is_zero_and_sends_no_gradient() -> None:
    variant = VARIANTS["left padding"]
    module, (x, context) = variant.build(), variant.inputs()
    x.requires_grad_()
    out = module(x, context)
    assert torch.equal(out[0, :3], torch.zeros(3, WIDTH))
    (dx,) = torch.autograd.grad(out.square().sum(), x)
    assert torch.equal(dx[0, :3], torch.zeros(3, WIDTH))
    assert bool((dx[0, 3:] != 0).any(-1).all())


def test_one_query_with_a_window_reads_the_window() -> None:
    """The last row alone, behind a cache, equals the last row of the whole."""
    variant = replace(VARIANTS["grouped"], module={"mask": Window(3)})
    module, (x, context) = variant.build(), variant.inputs()
    whole = module(x, context)
    slot = Slot(torch.zeros(2, 2, 17, 3).double(), torch.zeros(2, 2, 17, 3).double())
    with torch.no_grad():
        module(x[:, :-1], context_of(x[:, :-1]), slot)
        step = Context(2, 1, LENGTH - 1, x.device, x.dtype)
        last = module(x[:, -1:], step, slot)
    assert_close(last, whole[:, -1:], output_bound(module, x, context))
