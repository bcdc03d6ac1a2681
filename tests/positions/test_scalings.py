"""Rotary frequencies and attention factors against transformers', on tiny configurations."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from headwise.errors import OptionError, ShapeError
from headwise.positions import (
    DynamicNTK,
    Frequencies,
    Linear,
    Llama3,
    LongRope,
    Proportional,
    Scaling,
    YaRN,
    frequencies,
)

WIDTH = 22
# Theirs is computed in float32: a power with an exponent rounded to 2^-24, times ln(base) < 14,
# and a handful of operations.
RELATIVE = 32 * 2.0**-24
SHORT = tuple(1 + 0.1 * i for i in range(WIDTH // 2))
LONG = tuple(1 + 3.0 * i for i in range(WIDTH // 2))


def theirs(
    kind: str,
    base: float = 10000.0,
    length: int | None = None,
    context: int = 512,
    **parameters: Any,
) -> Frequencies:
    config = LlamaConfig(
        hidden_size=2 * WIDTH,
        num_attention_heads=2,
        head_dim=WIDTH,
        max_position_embeddings=context,
        rope_parameters={"rope_type": kind, "rope_theta": base, **parameters},
    )
    if kind == "default":
        return Frequencies(*LlamaRotaryEmbedding.compute_default_rope_parameters(config))
    return Frequencies(*ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), seq_len=length))


def agree(ours: Frequencies, want: Frequencies, relative: float = RELATIVE) -> None:
    assert ours.inv_freq.dtype == torch.float64
    torch.testing.assert_close(ours.inv_freq, want.inv_freq.double(), rtol=relative, atol=0)
    assert ours.attention_factor == pytest.approx(want.attention_factor, rel=1e-12)


@pytest.mark.parametrize("base", [10000.0, 500000.0])
def test_plain(base):
    agree(frequencies(WIDTH, base=base), theirs("default", base))
    want = [base ** (-2 * i / WIDTH) for i in range(WIDTH // 2)]
    assert frequencies(WIDTH, base=base).inv_freq.tolist() == pytest.approx(want, rel=1e-14)


def test_linear():
    agree(frequencies(WIDTH, scaling=Linear(factor=3.7)), theirs("linear", factor=3.7))


@pytest.mark.parametrize("length", [None, 100, 512, 513, 2048, 100_003])
def test_dynamic(length):
    ours = frequencies(WIDTH, scaling=DynamicNTK(factor=2.5, trained=512), length=length)
    agree(ours, theirs("dynamic", length=length, factor=2.5))
    unchanged = torch.equal(ours.inv_freq, frequencies(WIDTH).inv_freq)
    assert unchanged == (length is None or length <= 512)


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"beta_fast": 16.0, "beta_slow": 2.0},
        {"truncate": False},
        {"attention_factor": 1.3},
        {"mscale": 0.7, "mscale_all_dim": 0.4},
        {"mscale": 0.7},
        {"beta_fast": 1.5, "beta_slow": 1.4},  # the ramp is a step
    ],
)
@pytest.mark.parametrize("base", [10000.0, 150000.0])
@pytest.mark.parametrize("factor", [8.0, 1.0])
def test_yarn(more, base, factor):
    ours = frequencies(WIDTH, base=base, scaling=YaRN(factor=factor, trained=512, **more))
    want = theirs("yarn", base, factor=factor, original_max_position_embeddings=512, **more)
    # Their ramp subtracts float32 numbers: θ(1 − s + s/factor) loses up to factor · 2^-24.
    agree(ours, want, RELATIVE * (1 + factor))


@pytest.mark.parametrize("trained", [3, 131071])  # the ramp ends outside the pairs
@pytest.mark.parametrize("more", [{}, {"beta_fast": 2.0, "beta_slow": 2.0, "truncate": False}])
def test_yarn_at_the_ends_of_the_ramp(trained, more):
    ours = frequencies(WIDTH, scaling=YaRN(factor=8.0, trained=trained, **more))
    want = theirs("yarn", factor=8.0, original_max_position_embeddings=trained, **more)
    agree(ours, want, RELATIVE * (1 + 8.0))


@pytest.mark.parametrize("length", [None, 100, 512, 513])
@pytest.mark.parametrize("attention_factor", [None, 1.25])
def test_longrope(length, attention_factor):
    scaling = LongRope(
        short=SHORT, long=LONG, factor=8.0, trained=512, attention_factor=attention_factor
    )
    want = theirs(
        "longrope",
        length=length,
        context=4096,
        short_factor=list(SHORT),
        long_factor=list(LONG),
        original_max_position_embeddings=512,
        factor=8.0,
        **({} if attention_factor is None else {"attention_factor": attention_factor}),
    )
    agree(frequencies(WIDTH, scaling=scaling, length=length), want)


@pytest.mark.parametrize("base", [10000.0, 500000.0])
def test_llama3(base):
    scaling = Llama3(factor=8.0, trained=512, low_turns=1.0, high_turns=4.0)
    want = theirs(
        "llama3",
        base,
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=512,
    )
    ours = frequencies(WIDTH, base=base, scaling=scaling)
    agree(ours, want, RELATIVE * (1 + 8.0))
    kept = ours.inv_freq / frequencies(WIDTH, base=base).inv_freq
    assert kept.max() == 1
    assert kept.min() == 1 / 8
    assert ((kept > 1 / 8) & (kept < 1)).any()


@pytest.mark.parametrize("share", [0.0, 0.25, 0.5, 1.0])
def test_proportional(share):
    ours = frequencies(WIDTH, base=1e6, scaling=Proportional(share=share, factor=2.0))
    agree(ours, theirs("proportional", 1e6, partial_rotary_factor=share, factor=2.0))
    assert (ours.inv_freq > 0).sum() == int(share * WIDTH // 2)


def test_a_factor_of_one_changes_nothing():
    ones = (1.0,) * (WIDTH // 2)
    scalings: list[Scaling] = [
        Linear(factor=1.0),
        DynamicNTK(factor=1.0, trained=512),
        YaRN(factor=1.0, trained=512),
        Llama3(factor=1.0, trained=512),
        LongRope(short=ones, long=ones, factor=1.0, trained=512),
        Proportional(share=1.0),
    ]
    plain = frequencies(WIDTH)
    for scaling in scalings:
        got = frequencies(WIDTH, scaling=scaling, length=512)
        assert torch.allclose(got.inv_freq, plain.inv_freq, rtol=1e-15, atol=0)
        assert got.attention_factor == 1.0


@given(factor=st.floats(1, 64), trained=st.integers(7, 5000), pairs=st.integers(2, 40))
def test_stretching_scalings_never_speed_a_pair_up(factor, trained, pairs):
    plain = frequencies(2 * pairs).inv_freq
    for scaling in (
        Linear(factor=factor),
        DynamicNTK(factor=factor, trained=trained),
        YaRN(factor=factor, trained=trained),
        Llama3(factor=factor, trained=trained),
    ):
        got = frequencies(2 * pairs, scaling=scaling, length=3 * trained).inv_freq
        assert (got <= plain * (1 + 1e-14)).all()
        if not isinstance(scaling, DynamicNTK):
            assert (got >= plain / factor * (1 - 1e-14)).all()


@pytest.mark.parametrize("width", [7, 0, -2])
def test_odd_and_empty_widths_are_refused(width):
    message = rf"a rotary width of {width}, .*; allowed: an even number, 2 or more; rotate fewer"
    for scaling in (None, Linear(factor=2.0), YaRN(factor=2.0, trained=512)):
        with pytest.raises(OptionError, match=message):
            frequencies(width, scaling=scaling)


@pytest.mark.parametrize("factor", [0.0, -2.0, math.nan, math.inf])
def test_factors_that_are_not_positive_are_refused(factor):
    with pytest.raises(
        OptionError, match=r"factor of the rotary scaling Linear is .*; allowed: a p"
    ):
        Linear(factor=factor)
    with pytest.raises(OptionError, match=r"scaling YaRN is .*; allowed: a positive number; take"):
        YaRN(factor=factor, trained=512)


def test_other_bad_input_is_refused():
    with pytest.raises(OptionError, match=r"rotary base of 0.0; allowed: a positive number; take"):
        frequencies(4, base=0.0)
    with pytest.raises(OptionError, match=r"base of 1, .*; allowed: any other base; leave"):
        frequencies(4, base=1.0, scaling=YaRN(factor=2.0, trained=9))
    with pytest.raises(OptionError, match=r"width of 2, .*; allowed: a width of 4 or more; leave"):
        frequencies(2, scaling=DynamicNTK(factor=2.0, trained=9))
    with pytest.raises(
        OptionError, match=r"high_turns is 1 .*; allowed: high_turns above .*; take"
    ):
        Llama3(factor=2.0, trained=9, high_turns=1)
    with pytest.raises(OptionError, match=r"a share of 1.5 .*; allowed: 0 to 1; take"):
        Proportional(share=1.5)
    with pytest.raises(
        OptionError, match=r"pair that is 0 or negative; allowed: positive .*; take"
    ):
        LongRope(short=(1.0, 0.0), long=(1.0, 1.0), factor=2.0, trained=9)
    with pytest.raises(OptionError, match=r"trained length of 1, .*; allowed: 2 or more; give"):
        LongRope(short=(1.0,), long=(1.0,), factor=2.0, trained=1)
    scaling = LongRope(short=(1.0,) * 3, long=(1.0,) * 2, factor=2.0, trained=9)
    with pytest.raises(ShapeError, match=r"2 long factors .* width of 6; allowed: .*: 3; give"):
        frequencies(6, scaling=scaling, length=10)
