"""Headwise's own models from a folder: loaded, scanned, with gradients, and what is refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import headwise as hw
from headwise.errors import ModelError, OptionError
from headwise.models import build, decoder_sizes, encoder_sizes
from headwise.models.checkpoints import save
from headwise.observation import gradients as module
from headwise.observation.driver import Document
from headwise.observation.gradients import check_loss, measure_gradients
from headwise.observation.loading import LoadedModel, load_model, wrap_model
from headwise.observation.projections import blocks, projection
from headwise.observation.run import scan
from headwise.observation.text import tokenize
from headwise.results.records import PROJECTIONS
from tests.observation import tiny_models
from tests.observation.own_models import KINDS, VOCABULARY, ids, own, watched
from tests.observation.records import assert_same

TEXT = "To be, or not to be, that is the question: whether 'tis nobler in the mind to suffer "
SIZES: dict[str, Any] = {
    "vocab": tiny_models.VOCABULARY, "d_model": 24, "layers": 2, "heads": 4, "d_ff": 31,
    "context": 101,
}  # fmt: skip


def tokenizer(*, around: bool = False) -> Any:
    return tiny_models.tokenizer(around=around).backend_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = build(decoder_sizes(**SIZES, kv_heads=2))
    return save(model, tmp_path_factory.mktemp("own") / "small", tokenizer())


def test_a_folder_is_loaded_with_what_is_known_of_it(folder: Path) -> None:
    found = load_model(folder)
    assert (found.name, found.architecture, found.context) == ("small", "headwise", 101)
    assert (found.kind, found.position_limit, found.notes) == ("decoder", None, ())
    assert not found.model.training
    with pytest.raises(OptionError, match="--device is 'auto'"):
        load_model(folder, device="auto")


def test_types_and_broken_folders(folder: Path, tmp_path: Path) -> None:
    assert next(load_model(folder, dtype="bfloat16").model.parameters()).dtype == torch.bfloat16
    (tmp_path / "architecture.json").write_text("{}")
    with pytest.raises(ModelError, match=r"architecture.json"):
        load_model(tmp_path)


def test_a_scan_is_what_observing_by_hand_gives(folder: Path) -> None:
    loaded = load_model(folder)
    measured = scan(folder, TEXT * 2, tokens=89)
    words = torch.tensor(loaded.tokenizer(TEXT * 2)["input_ids"])[None, :89]
    by_hand = watched(loaded.model, lambda: loaded.model(words))
    assert_same(measured.record, by_hand.record)
    about = measured.record.about
    assert (about["model"], about["tokens"], about["context"]) == ("small", 89, 101)
    assert "".join(measured.record.tokens[0].texts) == (TEXT * 2)[:89]
    assert "transformers" not in about["versions"]


def test_what_load_returned_is_scanned(folder: Path) -> None:
    found = hw.scan(hw.load(folder), TEXT, tokens=53)
    assert found.record.about["model"] == "small"
    assert_same(found.record, hw.scan(folder, TEXT, tokens=53).record)
    with pytest.raises(OptionError, match="a model that is in memory already"):
        hw.scan(hw.load(folder), TEXT, dtype="bfloat16")


def test_default_options_read_the_context(folder: Path) -> None:
    assert scan(folder, rows=3).record.about["tokens"] == 101


def test_windows_side_by_side_are_single_runs(folder: Path) -> None:
    loaded = load_model(folder, dtype="float64")
    together = scan(loaded, TEXT, tokens=83, window=31, batch=3)
    alone = scan(loaded, TEXT, tokens=83, window=31)
    assert_same(together.record, alone.record)


@pytest.mark.parametrize("kind", ["encoder", "encoder-decoder"])
def test_encoders_and_encoder_decoders(kind: str) -> None:
    model = own(kind)
    if kind == "encoder-decoder":
        documents = (ids(41)[0][0], ids(19)[0][0])
        measured = scan(model, documents)
        by_hand = watched(model, lambda: model(documents[0][None], documents[1][None]))
    else:
        measured = scan(model, ids(41)[0][0])
        by_hand = watched(model, lambda: model(ids(41)[0]))
    assert_same(measured.record, by_hand.record)


def test_an_encoder_decoder_starts_with_its_start_token(tmp_path: Path) -> None:
    sizes = KINDS["encoder-decoder"]().model_copy(update={"start_token": 7, "vocab": 263})
    loaded = wrap_model(build(sizes).eval(), tokenizer(around=True))
    (document,) = tokenize(loaded, TEXT, tokens=40)
    assert document.target is not None
    assert (int(document.target[0]), document.ids[0].item(), document.ids[-1].item()) == (7, 1, 2)
    without = wrap_model(build(sizes.model_copy(update={"start_token": None})), tokenizer())
    with pytest.raises(ModelError, match="names no token that its decoder starts with"):
        tokenize(without, TEXT)


def test_lengths_beyond_the_context(folder: Path) -> None:
    with pytest.raises(OptionError, match="trained on at most 101; add --allow-long"):
        scan(folder, TEXT * 3, tokens=113)
    loaded = load_model(folder)
    assert scan(loaded, TEXT * 3, tokens=113, allow_long=True).record.about["tokens"] == 113
    assert not loaded.model.allow_long
    learned = wrap_model(build(encoder_sizes(**SIZES)), tokenizer())
    with pytest.raises(OptionError, match="has positions for 101 only"):
        scan(learned, TEXT * 3, tokens=113, window=113, allow_long=True)


def plain_loss(loaded: LoadedModel, documents: list[Document]) -> Tensor:
    model, terms = loaded.model, []
    for d in documents:
        if d.target is not None:
            logits = model(d.ids[None], d.target[None])
            terms.append(F.cross_entropy(logits[0, :-1], d.target[1:], reduction="none"))
        elif loaded.kind == "encoder":
            hidden = torch.arange(len(d.ids)) % 7 == 3
            logits = model(torch.where(hidden, 3, d.ids)[None])
            terms.append(F.cross_entropy(logits[0, hidden], d.ids[hidden], reduction="none"))
        else:
            terms.append(F.cross_entropy(model(d.ids[None])[0, :-1], d.ids[1:], reduction="none"))
    return torch.cat(terms).mean()


@pytest.mark.parametrize("kind", ["grouped", "relative", "parallel", "encoder", "encoder-decoder"])
def test_gradients_equal_a_plain_backward_pass(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = wrap_model(own(kind), tokenizer())
    target = ids(17)[0][0] if kind == "encoder-decoder" else None
    read = [Document(row[0] % 120 + 5, target) for row in ids(41, 23)]
    monkeypatch.setattr(module, "LOGITS", 7 * VOCABULARY)  # runs of 7 tokens, ragged at the end
    found = measure_gradients(loaded, read)
    loss = plain_loss(loaded, read)
    loss.backward()
    parameters = dict(loaded.model.named_parameters())
    expected = {n: float(p.grad.norm()) for n, p in parameters.items() if p.grad is not None}
    assert found.loss == pytest.approx(float(loss.detach()), rel=1e-12)
    assert {r.parameter: r.norm for r in found.parameters} == pytest.approx(
        expected, rel=1e-9, abs=1e-15
    )
    assert set(found.stream_rms) == {name for name, _, _ in blocks(loaded.model)}


def test_gradients_are_in_the_scan(folder: Path) -> None:
    record = scan(folder, TEXT, tokens=53, gradients=True).record
    assert record.about["loss"] > 0
    assert all(block.stream_gradient_rms > 0 for block in record.blocks)
    assert {g.projection for g in record.gradients} >= {"q", "k", "v", "o", "mlp", "norm"}


def test_without_a_head_there_is_no_loss() -> None:
    sizes = encoder_sizes(**SIZES).model_copy(update={"unembedding": None})
    with pytest.raises(OptionError, match="has no language-model head"):
        check_loss(wrap_model(build(sizes), name="bare"))


@pytest.mark.parametrize(
    ("kind", "parameter", "expected"),
    [
        ("grouped", "decoder.blocks.1.attention.branch.query.weight", (1, "q")),
        ("grouped", "decoder.blocks.2.attention.branch.output.weight", (2, "o")),
        ("grouped", "decoder.blocks.0.feed_forward.branch.gate.weight", (0, "mlp")),
        ("grouped", "decoder.blocks.0.attention.norm.weight", (0, "norm")),
        ("qk_norm", "decoder.blocks.0.attention.branch.query_norm.weight", (0, "norm")),
        ("sinks", "decoder.blocks.0.attention.branch.sinks", (0, "other")),
        ("grouped", "embedding.tokens.weight", (None, "embedding")),
        ("encoder-decoder", "decoder.blocks.1.cross.branch.key.weight", (1, "k")),
    ],
)
def test_where_a_parameter_stands(
    kind: str, parameter: str, expected: tuple[int | None, str]
) -> None:
    model = own(kind)
    assert parameter in dict(model.named_parameters())
    assert projection(model, parameter) == expected
    assert expected[1] in PROJECTIONS


def test_a_bare_tokenizer_names_the_tokens(folder: Path) -> None:
    model = load_model(folder).model
    with hw.observe(model, tokenizer=tokenizer()) as measured:
        model(torch.tensor(tokenizer().encode("to be").ids)[None])
    assert measured.record.tokens[0].texts == ("t", "o", " ", "b", "e")


def test_special_tokens_keep_their_names() -> None:
    loaded = wrap_model(build(encoder_sizes(**SIZES)), tokenizer(around=True))
    assert loaded.tokenizer.decode([1]) == "<bos>"
    assert loaded.tokenizer.mask_token_id == 3
    assert sorted(loaded.tokenizer.all_special_ids) == [0, 1, 2, 3]


def test_a_folder_is_scanned_without_loading_transformers(folder: Path) -> None:
    code = (
        "import sys, headwise as hw\n"
        f"scan = hw.scan({str(folder)!r}, 'to be or not', gradients=True)\n"
        "assert scan.dataset.sizes['layer'] == 2\n"
        "assert 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
