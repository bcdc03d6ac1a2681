"""Every figure of every head against whole matrices: models, padding, packing, accumulation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from headwise.attention.statistics import choose_rows
from headwise.monitoring.head_sums import HeadSums, sums_of
from headwise.monitoring.monitor import Monitor
from headwise.observation.survey import survey
from headwise.observation.tap import Seen, tapped
from tests.monitoring.dense import (
    NOISE,
    SINGLE,
    assert_figures,
    expected,
    heard,
    one_record,
    one_step,
    trained,
)
from tests.observation.own_models import VOCABULARY, own
from tests.parity.families import WORDS

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning:transformers.*")

LONG, SHORT, TARGET = 41, 29, 19
Batch = dict[str, Any]


def words(*shape: int, seed: int = 3, most: int = WORDS) -> Tensor:
    return torch.randint(3, most, shape, generator=torch.Generator().manual_seed(seed))


def padded(side: str) -> tuple[Batch, list[list[list[int]]]]:
    """Two sequences, the second padded; and where the tokens are."""
    mask = torch.ones(2, LONG, dtype=torch.long)
    at = slice(SHORT, None) if side == "right" else slice(0, LONG - SHORT)
    mask[1, at] = 0
    given = {
        "input_ids": words(2, LONG) * mask,
        "attention_mask": mask,
        "position_ids": (mask.cumsum(-1) - 1).clamp(min=0),
    }
    return given, [[row.nonzero()[:, 0].tolist()] for row in mask]


def whole(batch: int, length: int) -> list[list[list[int]]]:
    return [[list(range(length))] for _ in range(batch)]


def check(
    model: nn.Module, batches: list[Batch], places: list[Any], *, noise: float = NOISE
) -> None:
    """The record of one step of these micro-batches, all of self-attention."""
    calls = heard(model, *batches)
    record = one_record(model, *batches)
    assert record.non_finite == ""
    paths = {m: path for path, m in model.named_modules()}
    assert len(record.layers) == len(calls[0])
    for number, first in enumerate(calls[0]):
        [layer] = [each for each in record.layers if each.module == paths[first.module]]
        want = expected([of_batch[number] for of_batch in calls], places, places)
        assert_figures(layer, want, noise)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2", "bert", "gpt_oss", "llama4_text"])
def test_padded_batches(name: str, side: str, attention: str) -> None:
    if name in ("gemma2", "gpt_oss") and attention == "sdpa":
        pytest.skip("transformers has no sdpa attention for it")
    model = trained(name, attn_implementation=attention)
    if attention == "eager":  # its softmax in float32 makes NaN of a float64 row without a key
        model = model.float()
    given, places = padded(side)
    if name == "bert":
        del given["position_ids"]
    noise = NOISE if model.config._attn_implementation == "sdpa" else SINGLE
    check(model, [given], [places], noise=noise)


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss"])
def test_micro_batches_of_different_lengths_are_one_step(name: str) -> None:
    lengths = ((1, LONG), (2, SHORT), (1, TARGET))
    batches = [{"input_ids": words(*shape, seed=i)} for i, shape in enumerate(lengths)]
    places = [whole(*shape) for shape in lengths]
    check(trained(name), batches, places, noise=NOISE if name == "llama" else SINGLE)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_packed_documents_are_measured_apart(name: str) -> None:
    lengths = (17, 5, 19)
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    given = {"input_ids": words(1, LONG), "position_ids": positions, "use_cache": False}
    documents = [list(range(a, b)) for a, b in ((0, 17), (17, 22), (22, LONG))]
    noise = NOISE if name == "llama" else SINGLE
    check(trained(name), [given], [[documents]], noise=noise)


def test_float32_is_float64_within_its_rounding() -> None:
    model = trained("llama").float()
    check(model, [{"input_ids": words(2, LONG)}], [whole(2, LONG)], noise=SINGLE)


@pytest.mark.parametrize("pad", [False, True])
def test_t5_with_its_bias_and_cross_attention(pad: bool) -> None:
    model = trained("t5")
    given: Batch = {"input_ids": words(2, LONG), "decoder_input_ids": words(2, TARGET, seed=5)}
    source, target = whole(2, LONG), whole(2, TARGET)
    if pad:
        given["attention_mask"] = torch.ones(2, LONG, dtype=torch.long)
        given["attention_mask"][1, SHORT:] = 0
        given["decoder_attention_mask"] = torch.ones(2, TARGET, dtype=torch.long)
        given["decoder_attention_mask"][0, 13:] = 0
        source, target = [[[*range(LONG)]], [[*range(SHORT)]]], [[[*range(13)]], [[*range(TARGET)]]]
    [calls] = heard(model, given)
    record = one_record(model, given)
    paths = {m: path for path, m in model.named_modules()}
    for call in calls:
        path = paths[call.module]
        q = source if path.startswith("encoder") else target
        k = target if path.startswith("decoder") and "EncDec" not in path else source
        [layer] = [each for each in record.layers if each.module == path]
        assert layer.role == ("cross" if "EncDec" in path else "self")
        assert_figures(layer, expected([call], [q], [k]))


@pytest.mark.parametrize("kind", ["grouped", "window", "softcap", "sinks", "alibi", "relative"])
def test_decoders_of_our_own(kind: str) -> None:
    model = own(kind).train()
    batches = [{"ids": words(2, n, seed=n, most=VOCABULARY)} for n in (LONG, SHORT)]
    check(model, batches, [whole(2, LONG), whole(2, SHORT)])


def test_an_encoder_of_our_own_with_padding() -> None:
    model = own("encoder").train()
    keep = torch.ones(2, LONG, dtype=torch.bool)
    keep[1, SHORT:] = False
    places = [[[*range(LONG)]], [[*range(SHORT)]]]
    check(model, [{"ids": words(2, LONG, most=VOCABULARY), "mask": keep}], [places])


def test_an_encoder_decoder_of_our_own() -> None:
    model = own("encoder-decoder").train()
    given = {
        "source_ids": words(2, LONG, most=VOCABULARY),
        "ids": words(2, TARGET, seed=5, most=VOCABULARY),
    }
    [calls] = heard(model, given)
    record = one_record(model, given)
    paths = {m: path for path, m in model.named_modules()}
    assert {layer.role for layer in record.layers} == {"self", "cross"}
    for call in calls:
        [layer] = [each for each in record.layers if each.module == paths[call.module]]
        q, k = whole(2, call.logits.shape[2]), whole(2, call.logits.shape[3])
        assert_figures(layer, expected([call], [q], [k]))


# ------------------------------------------------------------------------------- sampled rows


def calls_of(model: nn.Module, given: Batch) -> list[Seen]:
    seen: list[Seen] = []
    with torch.no_grad(), tapped(model, survey(model), seen.append):
        model(**given)
    return seen


def test_sampled_rows_are_unbiased_also_over_sequences_of_different_lengths() -> None:
    model = trained("llama")
    given, places = padded("right")
    seen = calls_of(model, given)[1]
    [calls] = heard(model, given)
    want = expected([calls[1]], [places], [places])
    draws = 400
    parts = [sums_of(seen, 7, seed) for seed in range(draws)]
    exact = sums_of(seen, None)
    assert exact is not None
    sums = torch.stack([part.sums for part in parts if part is not None])
    counts = torch.stack([part.counts for part in parts if part is not None])
    for drawn, whole_sum in ((sums, exact.sums), (counts, exact.counts)):
        error = (drawn.mean(0) - whole_sum).abs()
        # Five standard errors of the mean of 400 draws: 1 in 10^6 for each of 48 figures.
        assert bool((error <= 5 * drawn.std(0) / draws**0.5 + 1e-9).all())
    assert bool((sums.std(0)[:9].amax(-1) > 0).any())  # rows are drawn, not always the same
    largest = torch.stack([part.max_logit for part in parts if part is not None])
    assert bool((largest <= want["max_logit"] + NOISE).all())
    assert bool((largest.amax(0) >= want["max_logit"] - NOISE).all())


def test_a_sampled_maximum_is_that_of_the_rows_that_were_seen() -> None:
    model = trained("llama")
    given = {"input_ids": words(1, LONG)}
    seen = calls_of(model, given)[0]
    [[first, *_]] = heard(model, given)
    rows = choose_rows(7, LONG, seed=11)
    found = sums_of(seen, 7, seed=11)
    assert found is not None
    torch.testing.assert_close(found.max_logit, first.logits[0][:, rows].amax((1, 2)))


def test_a_monitor_draws_new_rows_in_every_step() -> None:
    model = trained("llama")
    frozen = torch.optim.SGD(model.parameters(), lr=0.0)
    with Monitor(model, every=1, rows=5, spectra=0) as monitor:
        for _ in range(3):
            one_step(model, {"input_ids": words(1, LONG)}, optimizer=frozen)
    entropies = {tuple(r.layers[0].figures["entropy"]) for r in monitor.records}
    assert len(entropies) == 3


# ------------------------------------------------------------------------------------- pieces


def test_merging_does_not_depend_on_order() -> None:
    generator = torch.Generator().manual_seed(2)
    a, b = (
        HeadSums(*(torch.rand(n, 3, dtype=torch.float64, generator=generator) for n in (2, 12, 12)))
        for _ in range(2)
    )
    assert a.merged(b).figures() == b.merged(a).figures()
    assert HeadSums.empty(3).merged(a).figures() == a.figures()


def test_nothing_seen_is_nan() -> None:
    figures = HeadSums.empty(2).figures()
    assert all(value != value for values in figures.values() for value in values)


def test_nan_logits_give_a_nan_maximum() -> None:
    model = trained("llama")
    seen = calls_of(model, {"input_ids": words(1, LONG)})[0]
    seen.call.q[0, 1, 7] = float("nan")
    found = sums_of(seen)
    assert found is not None
    assert found.max_logit.isnan().tolist() == [False, True, False, False]
