"""Laws that tie observation of own models to other ways: transformers, generation, memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

import headwise as hw
from headwise.models import Cache
from headwise.models.generation import generate
from headwise.observation.attach import observe
from headwise.observation.loading import load_model, wrap_model
from headwise.observation.run import scan
from tests.observation import tiny_models
from tests.observation.own_models import ids, own, watched
from tests.observation.records import NOISE, assert_same, same
from tests.parity.watching import SquareTensors

LONG, SHORT = 41, 23
TEXT = "To be, or not to be, that is the question: whether 'tis nobler in the mind"
HEADS = {"bert": "masked", "t5": "seq2seq"}
# transformers' norms and rotations are computed in float32 whatever the model's type: rounding of
# 2^-24, once for each of the tokens that a mean is over at most.
CLOSE = {"rtol": LONG * 2.0**-24, "atol": LONG * 2.0**-24, "equal_nan": True}


@pytest.mark.filterwarnings("ignore::FutureWarning:transformers.*")
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "bert", "t5"])
def test_both_ways_in_give_the_same_scan(family: str, tmp_path: Path) -> None:
    """One checkpoint as transformers' modules and as our own: the same numbers, layer by layer."""
    folder = tiny_models.save(tmp_path / family, family, HEADS.get(family, "causal"))
    theirs = load_model(folder, dtype="float64")
    found = hw.load(folder, dtype="float64")
    ours = wrap_model(found.model, found.tokenizer)
    if family == "t5":
        text = tuple(torch.arange(5, 5 + n) for n in (37, 19))
    else:
        text = torch.arange(5, 5 + LONG)
    mine, wanted = scan(ours, text).record, scan(theirs, text).record
    assert len(mine.layers) == len(wanted.layers) > 0
    for a, b in zip(mine.layers, wanted.layers, strict=True):
        assert (a.role, a.number, a.mask, a.window) == (b.role, b.number, b.mask, b.window)
        for name in ("values", "quantiles", "profiles", "bands", "received", "pooled"):
            torch.testing.assert_close(getattr(a, name), getattr(b, name), **CLOSE)
        assert a.scale == pytest.approx(b.scale, rel=1e-12)
    for x, y in zip(mine.blocks, wanted.blocks, strict=True):
        for name in ("stream_in_rms", "stream_out_rms", "stream_out_rms_first"):
            assert getattr(x, name) == pytest.approx(getattr(y, name), rel=CLOSE["rtol"])


@pytest.mark.parametrize("kind", ["grouped", "window", "alibi", "relative", "sinks"])
def test_generate_gives_the_same_tokens_and_the_same_scan(kind: str) -> None:
    model, (first, second) = own(kind), ids(SHORT, 17)
    words, keep = torch.zeros(2, SHORT, dtype=torch.long), torch.zeros(2, SHORT, dtype=torch.bool)
    words[0], keep[0] = first[0], True
    words[1, -17:], keep[1, -17:] = second[0], True

    def unseen(logits: Tensor, seen: Tensor) -> Tensor:
        """The likeliest token that is new: a repeated pair would make the largest logit a tie."""
        return logits.masked_fill(seen, -torch.inf).argmax(-1)

    plain = generate(model, words, tokens=7, mask=keep, choose=unseen).ids
    with observe(model) as measured:
        observed = generate(model, words, tokens=7, mask=keep, choose=unseen).ids
    assert torch.equal(plain, observed)
    # The last token is never read; what was read is two documents without their padding.
    rows = [torch.cat([row, new[None, :-1]], 1) for row, new in zip((first, second), plain)]  # noqa: B905
    single = watched(model, *(lambda row=row: model(row) for row in rows))
    assert measured.record.about["notes"] == []
    assert_same(measured.record, single.record)


@pytest.mark.parametrize("kind", ["grouped", "window", "softcap", "sinks"])
def test_nothing_as_large_as_the_matrix_is_made(kind: str) -> None:
    n = 331
    model = own(kind)
    model.allow_long = True
    words = torch.randint(1, 131, (2, n), generator=torch.Generator().manual_seed(1))
    keep = torch.ones(2, n, dtype=torch.bool)
    keep[1, 211:] = False
    with observe(model) as measured, SquareTensors(n) as squares, torch.no_grad():
        model.hidden(words, mask=keep)
    assert squares.found == []
    assert measured.record.layers[0].rows == n + 211


def test_inference_mode_and_ordinary_calls_mix() -> None:
    model, (first, second) = own("grouped"), ids(LONG, SHORT)
    both = watched(model, lambda: model(first), lambda: model(second))
    with observe(model) as measured:
        with torch.inference_mode():
            model(first)
        model(second)
    assert_same(measured.record, both.record)


def test_a_cache_whose_rows_change_places_is_said() -> None:
    model, (words,) = own("grouped"), ids(LONG)
    pair = torch.cat([words, words.flip(1)])
    cache = Cache.empty(model.architecture, batch=2, capacity=LONG, dtype=torch.float64)
    with observe(model) as measured, torch.no_grad():
        model(pair[:, :17], cache=cache)
        cache.reorder(torch.tensor([1, 0]))
        model(pair[:, 17:18], cache=cache)
    assert any("changed places" in note for note in measured.record.about["notes"])


def test_only_some_layers_and_heads_and_rows() -> None:
    model, (words,) = own("grouped"), ids(LONG)
    whole = watched(model, lambda: model(words)).record
    with torch.no_grad():
        plain = model(words)
    with observe(model, layers=[1], heads=[0, 3]) as measured, torch.no_grad():
        assert (model(words) - plain).abs().max() <= NOISE * plain.abs().max()
    (layer,) = measured.record.layers
    assert layer.number == 1
    some = torch.tensor([0, 3])
    same(layer.values["entropy"][some], whole.layers[1].values["entropy"][some], "entropy")
    assert bool(layer.values["entropy"][[1, 2]].isnan().all())
    sampled = watched(model, lambda: model(words), rows=11).record
    assert (sampled.layers[0].rows, sampled.layers[0].rows_total) == (11, LONG)
