"""The rules and the choice: their laws, the distribution of draws, and transformers' processors."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from headwise.errors import OptionError
from headwise.models.sampling import (
    Choice,
    Draw,
    RepetitionPenalty,
    Temperature,
    TopK,
    TopP,
    choice,
    greedy,
)

UNIT = 2.0**-24
rows = st.lists(st.floats(-20, 20, width=32), min_size=1, max_size=31).map(
    lambda row: torch.tensor([row])
)
shares = st.floats(0.01, 1.0)


def nothing_seen(logits: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(logits, dtype=torch.bool)


def apply(rule, logits: torch.Tensor) -> torch.Tensor:
    return rule(logits, nothing_seen(logits))


@given(rows, shares)
def test_top_p_keeps_the_smallest_set_with_that_mass(logits, p):
    kept = apply(TopP(p), logits).isfinite()[0]
    probabilities = logits.double().softmax(-1)[0]
    # Each of the n additions in float32 moves the sum by at most a unit in the last place of 1.
    tolerance = 4 * len(kept) * UNIT
    mass = probabilities[kept]
    assert kept.any()
    assert float(mass.sum()) >= p - tolerance
    assert float(mass.sum() - mass.min()) < p + tolerance
    assert not (~kept).any() or float(probabilities[~kept].max()) <= float(mass.min())


@given(rows, st.integers(1, 40))
def test_top_k_keeps_the_largest_and_their_equals(logits, k):
    kept = apply(TopK(k), logits).isfinite()[0]
    ranked = logits[0].sort(descending=True).values
    assert torch.equal(kept, logits[0] >= ranked[min(k, len(ranked)) - 1])


@given(rows)
def test_rules_that_change_nothing(logits):
    seen = torch.ones_like(logits, dtype=torch.bool)
    for rule in (Temperature(1.0), TopK(31), TopP(1.0), RepetitionPenalty(1.0)):
        kept = rule(logits, seen)
        assert torch.equal(kept[kept.isfinite()], logits[kept.isfinite()])
        # What top-p of 1 may drop is what float32 cannot add to 1.
        assert float(logits.double().softmax(-1)[kept.isinf()].sum()) <= 31 * UNIT


@given(rows.filter(lambda row: row.shape[1] > 1), st.floats(0.001, 1.0))
def test_temperature_to_zero_tends_to_greedy(logits, temperature):
    best, second = logits[0].double().topk(2).values.tolist()
    share = apply(Temperature(temperature), logits).double().softmax(-1)[0, greedy(logits)[0]]
    # Every other token has at most exp(−gap / T) of the winner's weight; z / T has error u |z| / T.
    slack = 1 + 2 * UNIT * 2 * 20 / temperature
    least = 1 / (1 + (logits.shape[1] - 1) * math.exp(-(best - second) / temperature) * slack)
    assert float(share) >= least * (1 - 2 * UNIT * 2 * 20 / temperature)


@given(rows, st.floats(1.0, 3.0))
def test_the_penalty_lowers_what_was_seen_and_nothing_else(logits, theta):
    seen = nothing_seen(logits)
    seen[0, ::2] = True
    out = RepetitionPenalty(theta)(logits, seen)
    assert torch.equal(out[~seen], logits[~seen])
    assert bool((out[seen] <= logits[seen]).all())


def chi_square(counts: torch.Tensor, probabilities: torch.Tensor) -> float:
    """The probability of counts at least this far off: 1 − F(χ²), with cells − 1 degrees."""
    expected = probabilities * counts.sum()
    statistic = ((counts - expected).square() / expected).sum()
    half = torch.tensor((len(counts) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(half, statistic / 2))


def counts_of(choose: Choice, logits: torch.Tensor, draws: int) -> torch.Tensor:
    many = logits.expand(draws, -1)
    return choose(many, nothing_seen(many)).bincount(minlength=logits.shape[1]).double()


SEVEN = torch.tensor([[1.0, 0.3, -0.2, 2.0, 0.0, 1.5, -1.0]])


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.9])
def test_draws_have_the_distribution_of_the_softmax(temperature):
    counts = counts_of(choice(temperature=temperature, seed=3), SEVEN, 20011)
    assert chi_square(counts, (SEVEN[0].double() / temperature).softmax(-1)) > 1e-6
    # The same counts against a temperature a fifth away: the check can fail.
    other = (SEVEN[0].double() / (1.2 * temperature)).softmax(-1)
    assert chi_square(counts, other) < 1e-6


def test_draws_behind_rules():
    counts = counts_of(choice(top_k=5, top_p=0.8, seed=5), SEVEN, 20011)
    # Of the five largest (1, .3, 2, 0, 1.5), renormalised, 2 + 1.5 + 1 pass 0.8 and no two do.
    kept = torch.tensor([0, 3, 5])
    assert int(counts[kept].sum()) == 20011
    assert chi_square(counts[kept], SEVEN[0, kept].double().softmax(-1)) > 1e-6


def test_a_seed_fixes_the_draws():
    def drawn(seed: int) -> list[int]:
        choose = choice(temperature=1.0, seed=seed)
        return [int(choose(SEVEN, nothing_seen(SEVEN))) for _ in range(31)]

    assert drawn(7) == drawn(7)
    assert drawn(7) != drawn(8)


def test_the_same_as_the_processors_of_transformers():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(5, 257, generator=generator) * 3
    logits[:, 100:120] = logits[:, :1]  # ties
    ids = torch.randint(257, (5, 31), generator=generator)
    seen = torch.zeros(5, 257, dtype=torch.bool).scatter_(1, ids, True)
    pairs = [
        (RepetitionPenalty(1.3), RepetitionPenaltyLogitsProcessor(1.3)),
        (RepetitionPenalty(0.8), RepetitionPenaltyLogitsProcessor(0.8)),
        (Temperature(0.7), TemperatureLogitsWarper(0.7)),
        *((TopK(k), TopKLogitsWarper(k)) for k in (1, 17, 1000)),
        *((TopP(p), TopPLogitsWarper(p)) for p in (0.001, 0.3, 0.9, 0.9999)),
    ]
    for ours, theirs in pairs:
        assert torch.equal(ours(logits, seen), theirs(ids, logits)), ours


def test_the_choice_in_words():
    assert choice() == Choice()
    assert choice(temperature=0, top_k=3).pick is greedy
    assert isinstance(choice(top_k=3).pick, Draw)
    rules = choice(temperature=0.5, top_k=3, top_p=0.5, repetition_penalty=2.0).rules
    assert rules == (RepetitionPenalty(2.0), Temperature(0.5), TopK(3), TopP(0.5))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": -1.0}, "a temperature of -1; allowed: 0 (the most likely token), or"),
        ({"temperature": math.nan}, "a temperature of nan"),
        ({"temperature": math.inf}, "a temperature of inf"),
        ({"temperature": 1e-9}, "a temperature of 1e-09"),
        ({"top_k": 0}, "a top-k of 0; allowed: 1 or more"),
        ({"top_p": 0.0}, "a top-p of 0; allowed: above 0, up to 1"),
        ({"top_p": 1.5}, "a top-p of 1.5"),
        ({"top_p": math.nan}, "a top-p of nan"),
        ({"repetition_penalty": 0.0}, "a repetition penalty of 0; allowed: above 0"),
        ({"repetition_penalty": -2.0}, "a repetition penalty of -2"),
        ({"temperature": 1.0, "seed": 1 << 65}, "a seed of 36893488147419103232"),
    ],
)
def test_values_that_are_not_allowed(settings, message):
    with pytest.raises(OptionError) as error:
        choice(**settings)
    assert str(error.value).startswith(message)
