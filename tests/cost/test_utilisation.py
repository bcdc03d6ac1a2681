"""Utilisation: PaLM's published figures, and the two conventions against each other."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwise.cost.explicit import explicit
from headwise.cost.hardware import hardware
from headwise.cost.utilisation import hardware_flops, mfu, model_flops, palm_flops
from headwise.cost.workload import Workload
from headwise.errors import OptionError

# Chowdhery et al. 2022 (arXiv:2204.02311), tables 1 and 3 and appendix B: the sizes, 238.3 thousand
# tokens per second on 6144 TPU v4, and the shares of the peak, printed with one decimal.
PALM_540B = explicit(
    d_model=18_432, layers=118, heads=48, kv_heads=1, d_head=256, d_ff=4 * 18_432, gated=True,
    vocab=256_000, tied=True,
)  # fmt: skip
TOKENS_PER_SECOND, CHIPS, LENGTH = 238_300, 6144, 2048
MFU, MFU_WITHOUT_ATTENTION, HFU, HFU_FLOPS = 46.2, 45.7, 57.8, 4.10e12


def percent(flops: float) -> float:
    peak = hardware("tpu-v4").peak("bfloat16")
    return round(100 * mfu(flops, TOKENS_PER_SECOND, peak, CHIPS), 1)


def test_palm_540b():
    flops = palm_flops(PALM_540B, LENGTH)
    attention = 12 * 118 * 48 * 256 * LENGTH
    matrices = sum(matrix.parameters for _, _, matrix in PALM_540B.matrices())
    assert round(matrices / 1e9, 2) == 540.35  # as printed: without the norms
    assert round(flops / 1e12, 2) == 3.28
    assert percent(flops) == MFU
    assert percent(flops - attention) == MFU_WITHOUT_ATTENTION
    assert percent(HFU_FLOPS) == HFU


def test_a_wrong_convention_misses_the_published_figure():
    # Forward pass alone, the embedding left out, the causal half: none of them gives 46.2.
    flops = palm_flops(PALM_540B, LENGTH)
    embedding = 6 * 256_000 * 18_432
    half = 6 * 118 * 48 * 256 * LENGTH
    for wrong in (flops / 3, flops - embedding, flops - half):
        assert percent(wrong) != MFU


@given(n=st.integers(1, 300), batch=st.integers(1, 5), tied=st.booleans(), gated=st.booleans())
def test_the_conventions_differ_by_what_multiplies_nothing(n, batch, tied, gated):
    parts = explicit(d_model=44, layers=3, heads=4, vocab=101, tied=tied, gated=gated)
    vectors = sum(vector.size for _, _, vector in parts.vectors())
    workload = Workload(length=n, batch=batch)
    assert palm_flops(parts, n) - model_flops(parts, workload) == 6 * vectors
    visible = model_flops(parts, Workload(length=n, batch=batch, pairs="visible"))
    unseen = Fraction(n - 1, 2)  # of n keys, the mean that a causal mask hides
    assert model_flops(parts, workload) - visible == 12 * 3 * 44 * unseen


def test_only_experts_that_are_used_count():
    sizes = {"d_model": 44, "layers": 3, "heads": 4, "vocab": 101, "experts_used": 2}
    seven, eleven = (explicit(**sizes, experts=experts) for experts in (7, 11))
    assert palm_flops(eleven, 5) - palm_flops(seven, 5) == 6 * 3 * 44 * 4  # the router's rows


def test_what_is_computed_again_counts_for_the_hardware_alone():
    parts = explicit(d_model=44, layers=3, heads=4, vocab=101)
    plain, fused, full = (
        Workload(length=13, **more)
        for more in ({"attention": "materialised"}, {}, {"recompute": "full"})
    )
    assert model_flops(parts, plain) == model_flops(parts, full) == hardware_flops(parts, plain)
    scores = 2 * 3 * 44 * 13
    assert hardware_flops(parts, fused) - hardware_flops(parts, plain) == scores
    assert hardware_flops(parts, full) > hardware_flops(parts, fused)


@pytest.mark.parametrize("at", range(4))
@pytest.mark.parametrize("wrong", [0, -1, float("nan")])
def test_numbers_that_are_not_above_0_are_refused(at, wrong):
    given = [1e9, 1e3, 1e12, 2]
    given[at] = wrong
    with pytest.raises(OptionError, match="allowed: above 0"):
        mfu(*given)


def test_length_0_is_refused():
    with pytest.raises(OptionError, match="length is 0"):
        palm_flops(PALM_540B, 0)
