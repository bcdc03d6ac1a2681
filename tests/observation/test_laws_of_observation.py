"""The laws: a batch is its rows, a packed row its documents, a cached run one run, a whole its
halves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from headwise.observation.attach import observe
from headwise.observation.scan import Scan
from tests.observation.records import assert_same
from tests.parity.families import WORDS, build, in_double
from tests.parity.watching import run

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning:transformers.*")

LONG, MIDDLE, SHORT = 41, 29, 23
DECODERS = ("llama", "mistral", "llama4_text", "gemma2", "gpt_oss", "gpt2")


def ids(*lengths: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(13)
    return [torch.randint(3, WORDS, (1, n), generator=generator) for n in lengths]


def watched(model: PreTrainedModel, *batches: dict[str, Any], **options: Any) -> Scan:
    with observe(model, **options) as scan:
        for batch in batches:
            run(model, batch)
    return scan


def padded(rows: list[Tensor], side: str) -> dict[str, Tensor]:
    """One batch, padded to the longest row, with positions that count real tokens."""
    width = max(row.shape[1] for row in rows)
    words = torch.zeros(len(rows), width, dtype=torch.long)
    mask = torch.zeros_like(words)
    for i, row in enumerate(rows):
        at = slice(0, row.shape[1]) if side == "right" else slice(width - row.shape[1], width)
        words[i, at], mask[i, at] = row[0], 1
    return {
        "input_ids": words,
        "attention_mask": mask,
        "position_ids": (mask.cumsum(-1) - 1).clamp(min=0),
    }


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", DECODERS)
def test_a_padded_batch_is_its_single_runs(name: str, side: str) -> None:
    model = in_double(build(name))
    rows = ids(LONG, SHORT, MIDDLE)
    single = watched(model, *({"input_ids": row} for row in rows))
    batch = watched(model, padded(rows, side))
    assert_same(batch.record, single.record)


@pytest.mark.parametrize("name", ["bert", "modernbert", "t5"])
def test_a_padded_batch_of_an_encoder_is_its_single_runs(name: str) -> None:
    model = in_double(build(name))
    rows = ids(LONG, SHORT)
    target = {"decoder_input_ids": ids(17)[0]} if name == "t5" else {}
    given = padded(rows, "right")
    given.pop("position_ids")
    if target:
        given["decoder_input_ids"] = target["decoder_input_ids"].expand(2, -1)
    single = watched(model, *({"input_ids": row, **target} for row in rows))
    batch = watched(model, given)
    assert_same(batch.record, single.record)


def test_the_comparison_can_fail() -> None:
    model = in_double(build("llama"))
    rows = ids(LONG, SHORT)
    single = watched(model, *({"input_ids": row} for row in rows))
    batch = padded(rows, "right")
    batch["attention_mask"][1, SHORT - 1] = 0
    with pytest.raises(AssertionError):
        assert_same(watched(model, batch).record, single.record)


@pytest.mark.parametrize("name", ["llama", "mistral", "llama4_text", "gemma3_text"])
def test_a_packed_row_is_its_documents(name: str) -> None:
    model = in_double(build(name))
    rows = ids(LONG, SHORT, MIDDLE)
    position = torch.cat([torch.arange(row.shape[1]) for row in rows])[None]
    packed = {"input_ids": torch.cat(rows, 1), "position_ids": position, "use_cache": False}
    single = watched(model, *({"input_ids": row, "use_cache": False} for row in rows))
    assert_same(watched(model, packed).record, single.record)


@pytest.mark.parametrize("name", [*DECODERS, "deepseek_v32", "t5", "bert", "whisper"])
def test_merged_halves_are_the_whole(name: str) -> None:
    model = in_double(build(name))
    first, second = ids(SHORT, 2 * LONG)
    if name == "whisper":
        sound = torch.randn(2, 8, 100, generator=torch.Generator().manual_seed(3)).double()
        halves = [
            {"input_features": sound[i : i + 1], "decoder_input_ids": words[:, :19]}
            for i, words in enumerate((first, second))
        ]
    else:
        target = {"decoder_input_ids": ids(17)[0]} if name == "t5" else {}
        halves = [{"input_ids": first, **target}, {"input_ids": second, **target}]
    whole = watched(model, *halves, keep_rows=True)
    merged = watched(model, halves[0], keep_rows=True).merge(
        watched(model, halves[1], keep_rows=True)
    )
    assert_same(merged.record, whole.record)
    assert merged.record.about["tokens"] == whole.record.about["tokens"]


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt_oss", "gpt2", "llama4_text"])
def test_a_cached_run_is_one_run(name: str) -> None:
    """Prefill, another chunk, then token by token; windows let the cache forget keys."""
    model = in_double(build(name))
    (words,) = ids(LONG)
    plain = watched(model, {"input_ids": words}, keep_rows=True)
    cache = DynamicCache(config=model.config)
    with observe(model, keep_rows=True) as scan:
        for a, b in ((0, 17), (17, 36), *((i, i + 1) for i in range(36, LONG))):
            run(model, {"input_ids": words[:, a:b], "cache": cache, "use_cache": True})
    assert_same(scan.record, plain.record)


def test_a_cached_decoder_with_cross_attention_is_one_run() -> None:
    model = in_double(build("t5"))
    source, target = ids(LONG, 19)
    plain = watched(model, {"input_ids": source, "decoder_input_ids": target, "use_cache": False})
    with observe(model) as scan:
        out = run(model, {"input_ids": source, "decoder_input_ids": target[:, :7]})
        states = (out.encoder_last_hidden_state,)
        for i in range(7, 19):
            given = {
                "encoder_outputs": states, "decoder_input_ids": target[:, i : i + 1],
                "cache": out.past_key_values,
            }  # fmt: skip
            out = run(model, given)
    assert_same(scan.record, plain.record)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2"])
def test_generate_gives_the_same_tokens_and_the_same_scan(name: str, cache: str) -> None:
    from transformers import AutoModelForCausalLM

    model = build(name, AutoModelForCausalLM)
    given = padded(ids(SHORT, 17), "left")
    given.pop("position_ids")
    more: dict[str, Any] = {"max_new_tokens": 7, "do_sample": False, "pad_token_id": 0}
    if cache == "static":
        more |= {"cache_implementation": "static", "disable_compile": True}
    plain = model.generate(**given, **more)
    with observe(model):
        observed = model.generate(**given, **more)
    assert torch.equal(plain, observed)
    model = in_double(model)
    with observe(model) as scan:
        written = model.generate(**given, **more)
    assert scan.record.about["notes"] == []
    # The last token is never read; what was read is two documents without their padding.
    documents = [written[:1, :-1], written[1:, SHORT - 17 : -1]]
    forward = watched(model, *({"input_ids": row} for row in documents))
    assert_same(scan.record, forward.record)


def test_holes_in_a_padding_mask_are_left_out() -> None:
    """Padding between real tokens: as if the tokens stood side by side (without positions, gpt2
    would place them elsewhere, so they are given)."""
    model = in_double(build("gpt2"))
    (words,) = ids(MIDDLE)
    mask = torch.ones_like(words)
    mask[0, 5:11] = 0
    position = (mask.cumsum(-1) - 1).clamp(min=0)
    holes = {"input_ids": words, "attention_mask": mask, "position_ids": position}
    dense = {"input_ids": words[:, mask[0].bool()]}
    assert_same(watched(model, holes).record, watched(model, dense).record)
