"""The roofline: its algebra by hand, agreement with the counts, and where it must move."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwise.cost.blocks import Block, FeedForward, Latent, blocks, norm
from headwise.cost.config import parts_of
from headwise.cost.counting import count
from headwise.cost.explicit import explicit
from headwise.cost.families.outside import table, unembedding
from headwise.cost.hardware import Figure, Hardware, Rate, Shape, hardware, machines
from headwise.cost.parts import Component, Parts, Stack
from headwise.cost.roofline import PassTime, roofline
from headwise.cost.traffic import Widths, experts_touched, pass_products
from headwise.cost.workload import Workload
from headwise.errors import OptionError

ONE = Fraction(16)
BF16 = Widths(weight=ONE, cache=ONE, activation=ONE)


def machine(flops: int = 10**12, bandwidth: int = 10**10, rates: tuple[Rate, ...] = ()) -> Hardware:
    def figure(value: int) -> Figure:
        return Figure(value, "made up", "2026-11-30")

    return Hardware(
        name="mine",
        title="mine",
        kind="CPU",
        memory=figure(10**9),
        bandwidth=figure(bandwidth),
        peaks=(("bfloat16", figure(flops)),),
        rates=rates,
    )


def small(**more) -> Parts:
    sizes = {"d_model": 44, "layers": 3, "heads": 4, "vocab": 101, "kv_heads": 2, "d_ff": 59}
    return explicit(**{**sizes, **more})


def latent() -> Parts:
    block = Block(
        d_model=44, heads=3, kv_heads=3, d_qk=17, d_value=13, feed_forward=FeedForward(d_ff=59),
        latent=Latent(rank=19, rotary=6),
    )  # fmt: skip
    stack = Stack(
        name="decoder",
        d_model=44,
        layers=blocks([block] * 2),
        matrices=(
            table("tokens", Component.EMBEDDING, 101, 44),
            *unembedding(44, 101, tied=False),
        ),
        vectors=(norm("final norm", 44, bias=False),),
    )
    return Parts(family="mine", model_class="", vocab=101, stacks=(stack,))


MODELS = {
    "plain": small(),
    "gated and tied": small(gated=True, tied=True, bias=True),
    "window": small(window=5),
    "experts": small(experts=7, experts_used=3, shared_experts=1),
    "encoder": small(causal=False),
    "latent": latent(),
}
WORKLOADS = [
    Workload(length=11, batch=3),
    Workload(length=11, batch=3, attention="materialised", pairs="visible"),
    Workload(length=1, batch=3, cached=23, logits="last"),
    Workload(length=11, recompute="full"),
    Workload(length=11, recompute="selective", attention="materialised"),
    Workload(length=11, documents=(4, 7), pairs="visible"),
]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("workload", WORKLOADS, ids=str)
def test_flops_are_those_of_the_counts(model, workload):
    if model == "encoder" and workload.cached:
        with pytest.raises(OptionError, match="a model that does not decode"):
            roofline(MODELS[model], workload, machine())
        return
    counts = count(MODELS[model], workload)
    found = roofline(MODELS[model], workload, machine())
    expected = {component: 2 * macs for component, macs in counts.by_component().items()}
    assert {each.component: each.flops for each in found.prefill.components} == expected
    if found.training is not None:
        assert found.training.flops == counts.training_flops


@pytest.mark.parametrize("model", MODELS)
def test_every_weight_is_read_once_in_a_long_forward_pass(model):
    workload = Workload(length=1009)  # more tokens than rows of the table, and all experts
    whole, none = (
        sum(each.moved_bytes for each in pass_products(MODELS[model], workload, widths))
        for widths in (BF16, replace(BF16, weight=Fraction(1, 10**9)))
    )
    tied = sum(m.d_in * m.d_out for _, _, m in MODELS[model].matrices() if m.tied)
    numbers = count(MODELS[model], workload).parameters + tied  # the head reads a tied table again
    pieces = sum(1 for _ in pass_products(MODELS[model], workload, BF16))
    assert 0 <= 2 * numbers - (whole - none) <= pieces  # a part of a byte is a whole one


def test_bytes_of_a_forward_pass_by_hand():
    d, f, n, b, vocab, kv = 44, 59, 11, 3, 101, 22
    found = roofline(small(), Workload(length=n, batch=b), machine()).prefill
    t = n * b

    def product(d_in, d_out):
        return d_in * d_out + t * (d_in + d_out)

    numbers = {
        Component.EMBEDDING: min(t, vocab) * d + t * d,
        Component.QUERY: 3 * product(d, d),
        Component.KEY: 3 * product(d, kv),
        Component.VALUE: 3 * product(d, kv),
        Component.SCORES: 3 * t * (d + kv),
        Component.MIX: 3 * t * (d + kv),
        Component.OUTPUT: 3 * product(d, d),
        Component.MLP: 3 * 2 * product(d, f),
        Component.NORMS: (3 * 2 + 1) * d,
        Component.UNEMBEDDING: product(d, vocab),
    }
    assert {each.component: each.moved_bytes for each in found.components} == {
        component: 2 * number for component, number in numbers.items()
    }


def test_materialised_scores_are_written_and_read_and_fused_ones_never():
    fused, kept = (
        roofline(small(), Workload(length=11, batch=3, attention=how), machine())
        for how in ("fused", "materialised")
    )
    square = 3 * 3 * 4 * 11 * 11 * 2  # layers, batch, heads, n, n, bytes
    for component, forward, training in ((Component.SCORES, 2, 7), (Component.MIX, 2, 4)):
        for name, times in (("prefill", forward), ("training", training)):
            more = getattr(kept, name).of(component).moved_bytes
            assert more - getattr(fused, name).of(component).moved_bytes == times * square


def test_a_decode_step_reads_weights_and_cache():
    found = roofline(small(), Workload(length=23, batch=3), machine())
    assert found.decode.tokens == 3
    assert found.decode.of(Component.SCORES).moved_bytes == 3 * 2 * (3 * 44 + 3 * 24 * 22)
    half = roofline(small(), Workload(length=23, batch=3), machine(), cache_bits=8)
    assert half.decode.of(Component.SCORES).moved_bytes == 3 * (2 * 3 * 44 + 3 * 24 * 22)
    assert half.decode.of(Component.MLP) == found.decode.of(Component.MLP)


def test_a_window_bounds_the_cache_that_a_step_reads():
    found = roofline(small(window=5), Workload(length=23), machine())
    assert found.decode.of(Component.SCORES).moved_bytes == 3 * 2 * (44 + 5 * 22)


def test_absorbed_attention_reads_one_latent_for_all_heads():
    plain, absorbed = (
        roofline(latent(), Workload(length=23, absorbed=how), machine()).decode
        for how in (False, True)
    )
    assert absorbed.of(Component.SCORES).moved_bytes == 2 * 2 * (3 * 25 + 24 * 25)
    assert absorbed.of(Component.MIX).moved_bytes == 2 * 2 * 3 * 19
    assert plain.of(Component.SCORES).moved_bytes == 2 * 2 * (3 * 17 + 24 * 3 * 17)


def test_quantised_weights_move_fewer_bytes_and_nothing_else_changes():
    whole = roofline(small(), Workload(length=11), machine())
    small_weights = roofline(small(), Workload(length=11), machine(), weight_bits=4.5)
    assert small_weights.prefill.flops == whole.prefill.flops
    less = whole.prefill.of(Component.UNEMBEDDING).moved_bytes
    less -= small_weights.prefill.of(Component.UNEMBEDDING).moved_bytes
    assert less == 2 * 44 * 101 - -(-44 * 101 * 9 // 16)


def test_seconds_are_the_larger_of_arithmetic_and_bandwidth():
    found = roofline(small(), Workload(length=11), machine(10**9, 10**9)).prefill
    for each in found.components:
        arithmetic, bandwidth = each.flops / 10**9, each.moved_bytes / 10**9
        assert each.seconds == pytest.approx(max(arithmetic, bandwidth), rel=1e-12)
        assert each.bound == ("arithmetic" if arithmetic >= bandwidth else "bandwidth")
    assert found.seconds == pytest.approx(sum(each.seconds for each in found.components))
    assert found.tokens_per_second == pytest.approx(11 / found.seconds)


def test_the_bound_switches_at_the_ridge():
    intensity = roofline(small(), Workload(length=11), machine()).prefill.of(Component.MLP)
    flops, moved = intensity.flops, intensity.moved_bytes
    for more, bound in ((0, "arithmetic"), (1, "bandwidth")):
        # P / W = F / B exactly, then a hair above it
        found = roofline(small(), Workload(length=11), machine(flops + more, moved))
        assert found.prefill.of(Component.MLP).bound == bound
        assert (found.prefill.of(Component.MLP).intensity >= found.ridge) == (bound == "arithmetic")


@given(n=st.integers(1, 400), batch=st.integers(1, 9), model=st.sampled_from(sorted(MODELS)))
def test_more_tokens_never_take_less_time(n, batch, model):
    one, longer, wider = (
        roofline(MODELS[model], Workload(length=length, batch=b), machine())
        for length, b in ((n, batch), (n + 1, batch), (n, batch + 1))
    )
    for name in ("prefill", "training", "decode"):
        less = getattr(one, name)
        if less is None:
            continue
        assert less.seconds <= getattr(longer, name).seconds
        assert less.seconds <= getattr(wider, name).seconds


def test_training_takes_longer_than_prefill_and_recomputation_longer_still():
    seconds = [roofline(small(), Workload(length=11), machine()).prefill.seconds]
    for how in ("none", "selective", "full"):
        time = roofline(small(), Workload(length=11, recompute=how), machine())
        seconds.append(time.training.seconds)
    assert seconds == sorted(set(seconds))


def test_faster_machines_take_less_time():
    names = ["t4", "v100-sxm2-32gb", "a100-sxm4-80gb", "h100-sxm", "b200"]
    parts = explicit(d_model=4096, layers=2, heads=32, vocab=32_003)
    times = [
        roofline(parts, Workload(length=2048), hardware(name), dtype="float16") for name in names
    ]
    for phase in ("prefill", "decode", "training"):
        seconds = [getattr(time, phase).seconds for time in times]
        assert seconds == sorted(set(seconds), reverse=True)


@pytest.mark.parametrize("name", machines())
def test_every_machine_of_the_table_gives_a_time(name):
    of = hardware(name)
    for dtype in of.dtypes:
        time = roofline(small(), Workload(length=11), of, dtype=dtype)
        assert 0 < time.decode.seconds < time.training.seconds
        assert time.ridge == of.ridge(dtype)


def test_efficiency_slows_arithmetic_alone():
    full = roofline(small(), Workload(length=11), machine())
    half = roofline(small(), Workload(length=11), machine(), efficiency=0.5)
    for a, b in zip(full.prefill.components, half.prefill.components, strict=True):
        assert b.arithmetic_seconds == pytest.approx(2 * a.arithmetic_seconds)
        assert b.bandwidth_seconds == a.bandwidth_seconds
    assert half.ridge == full.ridge / 2


def test_a_measured_machine_uses_the_rate_of_the_nearest_shape():
    rates = (
        Rate("bfloat16", Shape(1, 1, 44, 44), 10**6, 10**6, 10**6),
        Rate("bfloat16", Shape(1, 33, 44, 59), 10**7, 10**7, 10**7),
    )
    found = roofline(small(), Workload(length=11, batch=3), machine(rates=rates))
    mlp, step = found.prefill.of(Component.MLP), found.decode.of(Component.QUERY)
    assert mlp.arithmetic_seconds == pytest.approx(mlp.flops / 10**7)
    assert step.arithmetic_seconds == pytest.approx(step.flops / 10**6)
    with pytest.raises(OptionError, match="whose rates are measured"):
        roofline(small(), Workload(length=11), machine(rates=rates), efficiency=0.5)


def test_experts_that_are_touched():
    assert experts_touched(8, 8, 1) == 8
    for tokens in range(1, 60):
        found = experts_touched(7, 3, tokens)
        expected = 7 * (1 - Fraction(4, 7) ** tokens)
        assert abs(found - expected) <= Fraction(1, 2)
        assert 3 <= found <= min(7, 3 * tokens)
    assert experts_touched(256, 8, 10**12) == 256


def test_one_token_reads_the_experts_it_uses_and_many_read_all():
    parts = small(experts=7, experts_used=3)
    for length, read in ((1, 3), (1009, 7)):
        found = roofline(parts, Workload(length=length), machine()).prefill.of(Component.EXPERTS)
        activations = 3 * 2 * length * 3 * (44 + 59)  # layers, matrices, tokens, used
        assert found.moved_bytes == 2 * (3 * 2 * read * 44 * 59 + activations)
    assert len(roofline(parts, Workload(length=1), machine()).notes) == 2
    assert len(roofline(small(), Workload(length=1), machine()).notes) == 1


def test_what_is_not_there_is_none():
    assert roofline(small(causal=False), Workload(length=11), machine()).decode is None
    assert roofline(small(), Workload(length=1, cached=5), machine()).training is None
    assert roofline(small(), Workload(length=11, documents=(4, 7)), machine()).decode is None
    assert roofline(small(), Workload(length=1), machine()).prefill.of(Component.ROUTER) is None


def test_a_long_context_makes_attention_the_largest_part():
    parts = explicit(d_model=1024, layers=2, heads=16, vocab=1009)

    def largest(time: PassTime) -> Component:
        return max(time.components, key=lambda each: each.seconds).component

    of = hardware("a100-sxm4-80gb")
    assert largest(roofline(parts, Workload(length=1024), of).prefill) is Component.MLP
    assert largest(roofline(parts, Workload(length=65_536), of).prefill) in (
        Component.SCORES,
        Component.MIX,
    )


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"dtype": "float64"}, "no rate of float64 is known for mine"),
        ({"efficiency": 0}, "efficiency is 0"),
        ({"efficiency": 1.5}, "efficiency is 1.5"),
        ({"efficiency": float("nan")}, "efficiency is nan"),
        ({"weight_bits": 0}, "weight_bits is 0"),
        ({"cache_bits": 65}, "cache_bits is 65"),
        ({"weight_bits": float("nan")}, "weight_bits is nan"),
    ],
)
def test_wrong_options_are_refused(more, said):
    with pytest.raises(OptionError, match=said):
        roofline(small(), Workload(length=11), machine(), **more)


def test_the_published_step_time_of_a_bandwidth_bound_decode():
    # 70 GB of weights over 3.35 TB/s: what every token costs at the least, whatever the rest.
    parts = explicit(d_model=8192, layers=80, heads=64, kv_heads=8, d_ff=28_672, gated=True,
                     vocab=128_256)  # fmt: skip
    time = roofline(parts, Workload(length=1), hardware("h100-sxm"), weight_bits=8).decode
    table_bytes = 128_256 * 8192  # of which a token picks one row
    weights = count(parts, Workload(length=1)).parameters - table_bytes
    assert time.seconds >= weights / 3.35e12
    assert time.seconds == pytest.approx(weights / 3.35e12, rel=0.01)
    assert time.bound == "bandwidth"


def test_a_decoder_step_reads_the_source_and_runs_no_encoder():
    config = {
        "model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "d_model": 44,
        "d_kv": 7, "d_ff": 59, "num_layers": 3, "num_heads": 5, "vocab_size": 101,
        "relative_attention_num_buckets": 11,
    }  # fmt: skip
    parts = parts_of(config)
    for source in (None, 17):
        workload = Workload(length=13, source=source, batch=3)
        read = source or 13  # as many as there were new tokens, not as there are in the step
        step = Workload(length=1, cached=13, source=read, batch=3)
        found = roofline(parts, workload, machine())
        assert found.prefill.flops == count(parts, workload).flops
        assert found.decode.flops == count(parts, step).flops
        assert found.decode.of(Component.SCORES).flops == 2 * 3 * 3 * 35 * (14 + read)
        assert (found.prefill.tokens, found.decode.tokens) == (39, 3)
