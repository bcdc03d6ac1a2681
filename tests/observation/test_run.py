"""The main loop: what it measures is what observing by hand gives, and what stops it is said."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from headwise.errors import ModelError, OptionError, ResourceError, TextError
from headwise.observation.architecture import model_class
from headwise.observation.attach import observe
from headwise.observation.loading import LoadedModel, load_model, wrap_model
from headwise.observation.run import scan
from headwise.observation.scan import Scan
from headwise.results.records import LayerRecord
from tests.observation import tiny_models
from tests.observation.tiny_models import CONTEXT
from tests.parity import families

TEXT = "To be, or not to be, that is the question: whether 'tis nobler in the mind to suffer " * 3
HEADS = {"bert": "masked", "t5": "seq2seq"}
# Sums of float32 statistics in another order: n terms of relative rounding 2^-24 each.
CLOSE = {"rtol": CONTEXT * 2.0**-24, "atol": CONTEXT * 2.0**-24}


def loaded(architecture: str = "llama", **changes: Any) -> LoadedModel:
    built = tiny_models.build(architecture, HEADS.get(architecture, "causal"), **changes)
    return wrap_model(built, tiny_models.tokenizer(around=architecture == "bert"), name="tiny")


def assert_same(found: Scan, expected: Scan) -> None:
    """Every reduction of every layer, and the token streams."""
    assert len(found.record.layers) == len(expected.record.layers) > 0
    for a, b in zip(found.record.layers, expected.record.layers, strict=True):
        assert (a.module, a.role, a.rows, a.rows_total) == (b.module, b.role, b.rows, b.rows_total)
        for name in ("values", "quantiles", "profiles"):
            _assert_mapping(name, a, b)
        torch.testing.assert_close(a.received, b.received, **CLOSE)
        torch.testing.assert_close(a.bands, b.bands, **CLOSE)
        assert torch.equal(a.received_visible, b.received_visible)
    for s, t in zip(found.record.tokens, expected.record.tokens, strict=True):
        assert s.texts == t.texts
        assert torch.equal(s.document, t.document)
        assert torch.equal(s.position, t.position)


def _assert_mapping(name: str, a: LayerRecord, b: LayerRecord) -> None:
    mine, theirs = getattr(a, name), getattr(b, name)
    assert set(mine) == set(theirs)
    for key, value in mine.items():
        if key not in ("max_logit_query", "max_logit_key"):  # which of equal maxima is free
            torch.testing.assert_close(value, theirs[key], equal_nan=True, **CLOSE)


def test_a_scan_is_what_observing_by_hand_gives(tmp_path: Path) -> None:
    folder = tiny_models.save(tmp_path / "llama-tiny")
    found = scan(folder, TEXT, tokens=53, device="cpu")
    model = tiny_models.build("llama")
    ids = torch.tensor([tiny_models.tokenizer()(TEXT)["input_ids"][:53]])
    with observe(model, tokenizer=tiny_models.tokenizer()) as expected, torch.no_grad():
        model(ids)
    assert_same(found, expected)
    about = found.record.about
    assert about["model"] == "llama-tiny"
    assert (about["architecture"], about["tokens"], about["documents"]) == ("llama", 53, 1)
    assert about["context"] == CONTEXT
    assert about["exactness"] == "exact over all rows"
    assert about["interrupted"] is False
    assert about["seconds"] > 0
    assert about["peak_memory_bytes"] > 10_000_000
    assert found.dataset.sizes["layer"] == 3


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "bert", "t5"])
def test_the_scan_of_two_texts_is_the_merge_of_two_scans(architecture: str) -> None:
    model = loaded(architecture)
    first, second = TEXT[:41], TEXT[50:81]
    whole = scan(model, [first, second])
    assert_same(whole, scan(model, [first]).merge(scan(model, [second])))


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gemma2", "bert", "t5"])
def test_a_padded_batch_is_its_single_runs(architecture: str) -> None:
    model = loaded(architecture)
    texts = [TEXT[:41], TEXT[50:73], TEXT[7:60]]
    assert_same(scan(model, texts, batch=3), scan(model, texts, batch=1))
    assert_same(scan(model, texts, batch=2), scan(model, texts, batch=1))


def test_windows_are_documents() -> None:
    found = scan(loaded(), TEXT, tokens=61, window=23)
    assert found.record.about["documents"] == 3
    (stream,) = found.record.tokens
    assert stream.position.tolist() == [*range(23), *range(23), *range(15)]
    assert "".join(stream.texts) == TEXT[:61]
    assert_same(scan(loaded(), TEXT, tokens=61, window=23, batch=3), found)


def test_an_encoder_reads_windows_with_special_tokens() -> None:
    found = scan(loaded("bert"), TEXT, tokens=101)
    (stream,) = found.record.tokens
    assert stream.ids.tolist().count(1) == stream.ids.tolist().count(2) == 2
    assert {layer.role for layer in found.record.layers} == {"encoder"}
    assert found.record.about["tokens"] == 101 + 4


def test_an_encoder_decoder_reads_source_and_target() -> None:
    found = scan(loaded("t5"), TEXT, tokens=43)
    roles = [layer.role for layer in found.record.layers]
    assert sorted(roles) == ["cross"] * 2 + ["decoder"] * 2 + ["encoder"] * 2
    streams = {stream.name: len(stream.texts) for stream in found.record.tokens}
    assert streams == {"source": 21, "target": 1 + 22}


def test_no_logits_over_the_vocabulary_are_computed() -> None:
    model = loaded()
    calls: list[int] = []
    model.model.lm_head.register_forward_hook(lambda m, i, o: calls.append(1))
    scan(model, TEXT, tokens=13)
    assert calls == []


def test_without_a_text_the_packaged_one_is_read() -> None:
    (stream,) = scan(loaded()).record.tokens
    assert "".join(stream.texts).startswith("HAMLET, PRINCE OF DENMARK")
    assert len(stream.texts) == CONTEXT


def test_a_model_in_memory_reads_ids_and_keeps_its_mode() -> None:
    model = tiny_models.build("llama").train()
    model.model.layers[1].eval()
    modes = [module.training for module in model.modules()]
    found = scan(model, torch.arange(5, 5 + 17))
    assert [module.training for module in model.modules()] == modes
    assert found.record.about["model"] == "LlamaForCausalLM"
    assert found.record.layers[0].rows == 17


def test_offloaded_weights_are_measured_and_gradients_refused() -> None:
    from accelerate import cpu_offload

    model = tiny_models.build("llama")
    ids = torch.arange(5, 5 + 17)
    expected = scan(model, ids)
    cpu_offload(model, execution_device=torch.device("cpu"))
    assert all(parameter.is_meta for parameter in model.parameters())
    assert_same(scan(model, ids), expected)
    with pytest.raises(OptionError, match=r"^--gradients needs all weights"):
        scan(model, ids, gradients=True)


def test_selections() -> None:
    found = scan(loaded(), TEXT, tokens=53, layers=[1], heads=[0, 3], rows=7)
    (layer,) = found.record.layers
    assert (layer.number, layer.rows, layer.rows_total) == (1, 7, 53)
    assert layer.values["entropy"].isnan().tolist() == [False, True, True, False]
    assert found.record.about["exactness"] == "exact on 7 of 53 rows"


def test_rows_are_kept_when_asked() -> None:
    assert scan(loaded(), TEXT, tokens=13).record.layers[0].row_values == {}
    kept = scan(loaded(), TEXT, tokens=13, keep_rows=True).record.layers[0].row_values
    assert kept["entropy"].shape == (4, 13)


# Gradients


@pytest.mark.parametrize("architecture", ["llama", "bert", "t5"])
def test_gradients_stand_beside_the_statistics(architecture: str) -> None:
    model = loaded(architecture)
    found = scan(model, TEXT, tokens=61, gradients=True)
    assert_same(found, scan(model, TEXT, tokens=61))
    assert 0 < found.record.about["loss"] < 20
    assert all((block.stream_gradient_rms or 0) > 0 for block in found.record.blocks)
    assert {record.projection for record in found.record.gradients} >= {"q", "k", "v", "o", "mlp"}
    assert "gradient_norm" in found.dataset


def test_gradients_without_a_loss_are_refused_before_anything_runs() -> None:
    model = wrap_model(tiny_models.build("llama", None), name="tiny")
    model.model.forward = None  # a run would fail otherwise
    with pytest.raises(OptionError, match=r"^--gradients needs a loss"):
        scan(model, [5, 6, 7], gradients=True)


@pytest.mark.parametrize(
    "family",
    [
        "gptj",
        "codegen",
        "gpt_neox",
        "gpt_bigcode",
        "qwen3",
        "phi3",
        "cohere",
        "granite",
        "mixtral",
        "gemma3_text",
        "gpt_oss",
        "deepseek_v3",
        "jamba",
        "recurrent_gemma",
        "bart",
        "marian",
        "mt5",
        "albert",
        "distilbert",
        "modernbert",
    ],
)
def test_a_folder_of_each_family_is_read_measured_and_differentiated(
    family: str, tmp_path: Path
) -> None:
    config = families.build(family).config
    config.architectures = None  # the class is chosen as for a checkpoint that names none
    model_class(config)(config).save_pretrained(tmp_path / "m")
    model = load_model(tmp_path / "m", device="cpu")
    ids = torch.arange(5, 5 + 29)
    given = (ids, ids[:11]) if model.kind == "encoder-decoder" else ids
    headed = model.kind != "encoder"
    found = scan(model, given, gradients=headed)
    assert {layer.rows for layer in found.record.layers} <= {29, 11}
    if not headed:
        return
    with torch.no_grad():
        if model.kind == "encoder-decoder":
            logits = model.model(input_ids=ids[None], decoder_input_ids=ids[None, :11]).logits[0]
        else:
            logits = model.model(input_ids=ids[None]).logits[0]
    loss = torch.nn.functional.cross_entropy(logits[:-1].float(), ids[1 : len(logits)])
    assert found.record.about["loss"] == pytest.approx(float(loss), rel=1e-5)


# Progress and interruption


def test_progress_is_told_per_layer_and_batch() -> None:
    told: list[tuple[int, int, str]] = []
    scan(loaded(), TEXT, tokens=41, window=21, progress=lambda *news: told.append(news))
    assert [done for done, _, _ in told] == list(range(7))
    assert {total for _, total, _ in told} == {6}
    assert told[0][2] == told[3][2] == "batch 1 of 2"
    assert told[4][2] == "batch 2 of 2"


def interrupt_after(calls: int) -> Any:
    def progress(done: int, total: int, what: str) -> None:
        if done == calls:
            raise KeyboardInterrupt

    return progress


@pytest.mark.parametrize("after", [1, 2, 3, 4, 5])
def test_ctrl_c_keeps_what_is_done(after: int) -> None:
    model = loaded()
    found = scan(model, TEXT, tokens=41, window=21, progress=interrupt_after(after))
    assert found.record.about["interrupted"] is True
    rows = [layer.rows for layer in found.record.layers]
    assert rows == [21 if i >= after - 3 else 41 for i in range(min(after, 3))]
    whole = scan(model, TEXT, tokens=21)
    last = len(rows) - 1
    if rows[last] == 21:
        torch.testing.assert_close(
            found.record.layers[last].values["entropy"],
            whole.record.layers[last].values["entropy"],
            **CLOSE,
        )
    assert found.dataset.sizes["layer"] == len(rows)
    # The model is as it was: another scan works and is whole.
    assert len(scan(model, TEXT, tokens=21).record.layers) == 3


def test_ctrl_c_with_nothing_done_goes_on() -> None:
    with pytest.raises(KeyboardInterrupt):
        scan(loaded(), TEXT, tokens=41, progress=interrupt_after(0))


# Refused, or said


def test_options_are_checked_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    model = loaded()
    monkeypatch.setattr(type(model.model.model), "forward", None)
    for options, expected in (
        ({"layers": [40]}, "40"),
        ({"heads": [4]}, "4"),
        ({"rows": 0}, "rows is 0"),
        ({"tokens": 98}, "a piece of 98 tokens, but tiny was trained on at most 97"),
        ({"tokens": 1000}, "--tokens is 1000, but the text has 255 tokens"),
        ({"batch": 0}, "--batch is 0; allowed: 1 or more"),
        ({"device": "cpu"}, "dtype and device were given with a model that is in memory already"),
    ):
        with pytest.raises(OptionError, match=expected):
            scan(model, TEXT, **options)  # type: ignore[arg-type]
    with pytest.raises(TextError, match="the text has 1 token; at least 2 are needed"):
        scan(model, "a")
    with pytest.raises(ModelError, match=r"^Linear has no transformers configuration"):
        scan(torch.nn.Linear(2, 3), [1, 2])


def test_going_on_beyond_the_context_is_noted() -> None:
    found = scan(loaded(), TEXT, tokens=101, allow_long=True)
    assert found.record.about["notes"] == [
        "pieces of 101 tokens, beyond the 97 the model was trained on"
    ]


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:1] DefaultCPUAllocator: not enough memory"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
        MemoryError(),
    ],
)
def test_out_of_memory_names_the_settings(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = loaded()

    def forward(*args: Any, **options: Any) -> None:
        raise error

    monkeypatch.setattr(model.model.model.layers[1].mlp, "forward", forward)
    with pytest.raises(ResourceError) as caught:
        scan(model, TEXT, tokens=13)
    assert str(caught.value) == (
        "out of memory on cpu while tiny was measured; lower --tokens or --batch, cut the text with"
        " --window, or take --dtype bfloat16"
    )


def test_other_errors_are_not_taken_for_lack_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    model = loaded()

    def forward(*args: Any, **options: Any) -> None:
        raise RuntimeError("shapes do not fit")

    monkeypatch.setattr(model.model.model.layers[1].mlp, "forward", forward)
    with pytest.raises(RuntimeError, match="shapes do not fit"):
        scan(model, TEXT, tokens=13)


def test_broken_weights_leave_the_healthy_part(tmp_path: Path) -> None:
    folder = tiny_models.save(tmp_path / "m")
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][2, 3] = float("nan")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    found = scan(folder, TEXT, tokens=31, device="cpu")
    assert (
        "the weights model.layers.1.mlp.up_proj.weight hold NaN or infinity"
        in (found.record.about["notes"])
    )
    assert found.record.about["non_finite_weights"] == ["model.layers.1.mlp.up_proj.weight"]
    healthy = [layer.non_finite is None for layer in found.record.layers]
    assert healthy == [True, True, False]
    assert "layer 2 (model.layers.2.self_attn)" in (found.record.layers[2].non_finite or "")
    assert bool(found.record.layers[1].values["entropy"].isfinite().all())


@pytest.mark.real_model
def test_the_real_models() -> None:
    folder = Path(os.environ["HEADWISE_MODELS"])
    found = scan(next((folder / "smollm2").glob("*.gguf")), tokens=211, device="cpu")
    assert len(found.record.layers) == 30
    assert found.record.layers[0].rows == 211
    found = scan(folder / "minilm", tokens=600, device="cpu")
    assert [layer.rows for layer in found.record.layers] == [600 + 4] * 6
