"""The length from which on attention outweighs the rest, against counts at that length."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwise.cost.counting import count
from headwise.cost.crossovers import crossovers, shares
from headwise.cost.explicit import explicit
from headwise.cost.parts import Component
from headwise.cost.workload import Workload

PRODUCTS = (Component.SCORES, Component.MIX)
OTHERS = {
    "MLP": (Component.MLP, Component.ROUTER, Component.EXPERTS, Component.SHARED_EXPERTS),
    "projections": (Component.QUERY, Component.KEY, Component.VALUE, Component.OUTPUT),
}
OTHERS["all linear layers"] = (*OTHERS["MLP"], *OTHERS["projections"])


def counted(parts, length, pairs):
    """(products of attention, everything else) by the name of what they are held against."""
    found = count(parts, Workload(length=length, pairs=pairs)).by_component()
    products = sum(found[c] for c in PRODUCTS)
    return products, {name: sum(found.get(c, 0) for c in of) for name, of in OTHERS.items()}


def by_name(parts):
    return {(each.other, each.pairs): each for each in crossovers(parts)}


# Sizes of published configurations; the figures follow from them by the formulas of the module.
PUBLISHED = {
    "gpt2": ({"d_model": 768, "heads": 12}, (3072, 4608, 1536, 6143, 9215)),
    "gpt3-175b": ({"d_model": 12288, "heads": 96}, (49152, 73728, 24576, 98303, 147455)),
    "smollm2-135m": (
        {"d_model": 576, "heads": 9, "kv_heads": 3, "d_ff": 1536, "gated": True},
        (2304, 3072, 768, 4607, 6143),
    ),
    "llama2-7b": (
        {"d_model": 4096, "heads": 32, "d_ff": 11008, "gated": True},
        (16512, 24704, 8192, 33023, 49407),
    ),
    "llama3-8b": (
        {"d_model": 4096, "heads": 32, "kv_heads": 8, "d_ff": 14336, "gated": True},
        (21504, 26624, 5120, 43007, 53247),
    ),
    "llama3-70b": (
        {"d_model": 8192, "heads": 64, "kv_heads": 8, "d_ff": 28672, "gated": True},
        (43008, 52224, 9216, 86015, 104447),
    ),
    "llama3.1-405b": (
        {"d_model": 16384, "heads": 128, "kv_heads": 8, "d_ff": 53248, "gated": True},
        (79872, 97280, 17408, 159743, 194559),
    ),
    "palm-540b": (
        {"d_model": 18432, "heads": 48, "kv_heads": 1, "d_head": 256, "d_ff": 73728, "gated": True},
        (165888, 184704, 18816, 331775, 369407),
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_sizes(name):
    sizes, figures = PUBLISHED[name]
    found = by_name(explicit(layers=2, vocab=257, **sizes))
    names = ("MLP", "all linear layers", "projections")
    wanted = [*((n, "all") for n in names), *((n, "causal") for n in names[:2])]
    assert tuple(found[key].value for key in wanted) == figures


@given(
    heads=st.integers(1, 5),
    width=st.integers(1, 7),
    d_ff=st.integers(1, 40),
    gated=st.booleans(),
    window=st.none() | st.integers(1, 9),
)
def test_the_first_length_is_the_first(heads, width, d_ff, gated, window):
    parts = explicit(
        d_model=heads * width, layers=2, heads=heads, d_ff=d_ff, vocab=7, gated=gated, window=window
    )
    for (other, pairs), found in by_name(parts).items():
        if other == "MLP activation":
            assert found.value == Fraction(d_ff, heads)
            continue
        if pairs == "causal" and window is not None:
            continue
        if found.first is None:
            products, rest = counted(parts, 10_000, "visible")
            assert products < rest[other]
            continue
        kind = "all" if pairs == "all" else "visible"
        products, rest = counted(parts, found.first, kind)
        assert products >= rest[other]
        if found.first > 1:
            products, rest = counted(parts, found.first - 1, kind)
            assert products < rest[other]


def test_a_narrow_window_never_gets_there():
    # At most W keys for a query: 2 W a < m d f for ever.
    found = by_name(explicit(d_model=64, layers=2, heads=4, vocab=7, window=100))
    assert found["MLP", "visible"].first is None
    assert found["MLP", "visible"].value is None
    wide = by_name(explicit(d_model=64, layers=2, heads=4, vocab=7, window=300))
    assert wide["MLP", "visible"].first is not None


def test_an_encoder_has_no_causal_crossover():
    found = crossovers(explicit(d_model=64, layers=2, heads=4, vocab=7, causal=False))
    assert {each.pairs for each in found} == {"all"}


def test_doubling_the_expansion_moves_the_mlp_alone():
    one = by_name(explicit(d_model=64, layers=2, heads=4, vocab=7, d_ff=256))
    two = by_name(explicit(d_model=64, layers=2, heads=4, vocab=7, d_ff=512))
    assert two["MLP", "all"].value == 2 * one["MLP", "all"].value
    assert two["projections", "all"] == one["projections", "all"]


@pytest.mark.parametrize("experts", [None, 5])
def test_the_formula_in_numbers_is_the_value(experts):
    parts = explicit(
        d_model=24, layers=3, heads=4, kv_heads=2, vocab=7, experts=experts, gated=True, window=11
    )
    for each in crossovers(parts):
        if each.numbers:
            written = each.numbers.replace("·", "*").replace("−", "-").replace(",", "")
            assert eval(written) == pytest.approx(float(each.value), rel=1e-12)


def test_shares_of_the_popular_claim():
    # "A factor of 30 at d = 4096 and n = 128,000" is n / d; the rest is another matter.
    found = shares(explicit(d_model=4096, layers=1, heads=32, vocab=7).stacks[0], 128_000)
    assert found.ratio_of_widths == Fraction(125, 4)
    assert found.over_mlp == Fraction(125, 16)
    assert found.over_linear == Fraction(125, 24)
    assert float(found.over_mlp_causal) == pytest.approx(3.906280517578125, rel=1e-15)
    assert float(found.over_linear_causal) == pytest.approx(2.60418701171875, rel=1e-15)
    assert "31.25" in found.sentence()
    assert "7.8 times the MLP (3.9 with the causal mask) and 84 % (72 %)" in found.sentence()


def test_layers_that_differ_are_added_up():
    parts = explicit(d_model=24, layers=2, heads=4, vocab=7, d_ff=48)
    stack = parts.stacks[0]
    other = explicit(d_model=24, layers=2, heads=4, vocab=7, d_ff=96).stacks[0]
    mixed = replace(parts, stacks=(replace(stack, layers=(stack.layers[0], other.layers[1])),))
    found = by_name(mixed)["MLP", "all"]
    assert found.value == Fraction(24 * 2 * (48 + 96), 2 * 2 * 24)
    assert found.formula.startswith("n* = Σ")
