"""Loading: every kind of model opens whole, and every broken one is refused in one clear line."""

from __future__ import annotations

import json
import os
import re
import struct
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from headwise.errors import ModelError, OptionError
from headwise.observation.architecture import model_class, position_limit
from headwise.observation.loading import load_model, wrap_model
from headwise.observation.quiet import quiet
from tests.observation import tiny_models


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.save(tmp_path_factory.mktemp("models") / "llama-tiny")


def refused(path: object, **options: object) -> str:
    with pytest.raises(ModelError) as caught:
        load_model(path, **options)  # type: ignore[arg-type]
    message = str(caught.value)
    assert "\n" not in message
    return message


def copy(folder: Path, to: Path) -> Path:
    to.mkdir()
    for file in folder.iterdir():
        (to / file.name).write_bytes(file.read_bytes())
    return to


def edit_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


# What opens


def test_a_decoder_opens_with_its_head_in_evaluation_mode(llama: Path) -> None:
    loaded = load_model(llama, device="cpu")
    assert type(loaded.model).__name__ == "LlamaForCausalLM"
    assert (loaded.kind, loaded.architecture, loaded.name) == ("decoder", "llama", "llama-tiny")
    assert (loaded.context, loaded.position_limit) == (tiny_models.CONTEXT, None)
    assert not loaded.model.training
    assert loaded.tokenizer is not None
    assert loaded.notes == loaded.non_finite == ()
    original = tiny_models.build("llama")
    ids = torch.arange(5, 5 + 13)[None]
    with torch.no_grad():
        assert torch.equal(loaded.model(ids).logits, original(ids).logits)


@pytest.mark.parametrize(
    ("architecture", "head", "name", "kind"),
    [
        ("gpt2", "causal", "GPT2LMHeadModel", "decoder"),
        ("llama", None, "LlamaModel", "decoder"),
        ("bert", "masked", "BertForMaskedLM", "encoder"),
        ("bert", None, "BertModel", "encoder"),
        ("t5", "seq2seq", "T5ForConditionalGeneration", "encoder-decoder"),
    ],
)
def test_the_class_follows_the_checkpoint(
    tmp_path: Path, architecture: str, head: str | None, name: str, kind: str
) -> None:
    loaded = load_model(tiny_models.save(tmp_path / "m", architecture, head), device="cpu")
    assert type(loaded.model).__name__ == name
    assert loaded.kind == kind


def test_a_sharded_checkpoint_opens(tmp_path: Path) -> None:
    folder = tiny_models.save(tmp_path / "m", shard="20KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    assert load_model(folder, device="cpu").notes == ()


def test_a_dtype_is_taken_and_the_checkpoint_keeps_its_own(tmp_path: Path) -> None:
    model = tiny_models.build("llama").to(torch.bfloat16)
    model.save_pretrained(tmp_path / "m")
    assert load_model(tmp_path / "m", device="cpu").model.dtype == torch.bfloat16
    assert load_model(tmp_path / "m", dtype="float64", device="cpu").model.dtype == torch.float64


def test_a_gguf_file_gives_the_model_it_was_written_from(tmp_path: Path) -> None:
    original = tiny_models.save_gguf(tmp_path / "tiny.gguf")
    loaded = load_model(tmp_path / "tiny.gguf", device="cpu")
    assert (loaded.name, loaded.kind, loaded.context) == ("tiny", "decoder", tiny_models.CONTEXT)
    ids = torch.arange(5, 5 + 13)[None]
    with torch.no_grad():
        assert torch.equal(loaded.model(ids).logits, original(ids).logits)
    assert loaded.tokenizer("a?")["input_ids"] == tiny_models.tokenizer()("a?")["input_ids"]


def test_loading_is_silent(llama: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    tiny_models.save_gguf(tmp_path / "tiny.gguf")
    capfd.readouterr()
    load_model(llama, device="cpu")
    load_model(tmp_path / "tiny.gguf", device="cpu")
    assert capfd.readouterr() == ("", "")


def test_quiet_puts_the_settings_back() -> None:
    import transformers.utils.logging as chatter

    before = chatter.get_verbosity(), chatter.is_progress_bar_enabled()
    with quiet():
        assert not chatter.is_progress_bar_enabled()
    assert (chatter.get_verbosity(), chatter.is_progress_bar_enabled()) == before


def test_a_missing_tokenizer_is_a_note(tmp_path: Path) -> None:
    loaded = load_model(tiny_models.save(tmp_path / "m", with_tokenizer=False), device="cpu")
    assert loaded.tokenizer is None
    assert loaded.notes == (f"{tmp_path / 'm'} has no tokenizer",)


def test_a_checkpoint_without_a_pooler_is_read_without_it(tmp_path: Path) -> None:
    folder = tiny_models.save(tmp_path / "m", "bert", None)
    weights = load_file(folder / "model.safetensors")
    kept = {name: w for name, w in weights.items() if not name.startswith("pooler.")}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    loaded = load_model(folder, device="cpu")
    assert loaded.model.pooler is None
    assert loaded.notes == ("the checkpoint has no pooler; the model was read without it",)


def test_a_classifier_is_read_as_its_body_and_the_rest_is_said(tmp_path: Path) -> None:
    from transformers import BertForSequenceClassification

    model = tiny_models.build("bert", None)
    BertForSequenceClassification(model.config).save_pretrained(tmp_path / "m")
    loaded = load_model(tmp_path / "m", device="cpu")
    assert type(loaded.model).__name__ == "BertModel"
    assert "classifier.bias, classifier.weight" in loaded.notes[-1]


def test_broken_weights_are_named_and_the_model_still_opens(tmp_path: Path) -> None:
    folder = tiny_models.save(tmp_path / "m")
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.1.self_attn.k_proj.weight"][3, 5] = float("nan")
    weights["model.layers.2.mlp.up_proj.weight"][0, 1] = float("inf")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    loaded = load_model(folder, device="cpu")
    assert loaded.non_finite == (
        "model.layers.1.self_attn.k_proj.weight",
        "model.layers.2.mlp.up_proj.weight",
    )
    assert loaded.notes[0] == (
        "the weights model.layers.1.self_attn.k_proj.weight hold NaN or infinity"
    )


@pytest.mark.parametrize(("architecture", "limit"), [("gpt2", 97), ("opt", 97), ("llama", None)])
def test_position_tables_give_their_number_of_positions(
    architecture: str, limit: int | None
) -> None:
    model = tiny_models.build(architecture)
    assert position_limit(model) == limit
    if limit is not None:
        with torch.no_grad():
            model(torch.ones(1, limit, dtype=torch.long))
            with pytest.raises((IndexError, RuntimeError)):
                model(torch.ones(1, limit + 1, dtype=torch.long))


def test_a_table_behind_a_padding_index_has_fewer_positions() -> None:
    from transformers import RobertaConfig, RobertaModel

    config = RobertaConfig(
        hidden_size=24,
        num_hidden_layers=1,
        num_attention_heads=4,
        intermediate_size=31,
        vocab_size=53,
        max_position_embeddings=41,
        pad_token_id=1,
    )
    loaded = wrap_model(RobertaModel(config).eval())
    assert loaded.context == loaded.position_limit == 39
    with torch.no_grad():
        loaded.model(torch.full((1, 39), 5))
        with pytest.raises((IndexError, RuntimeError)):
            loaded.model(torch.full((1, 40), 5))


# What is refused


def test_no_such_file() -> None:
    assert refused("/no/such/model") == "there is no file or folder /no/such/model"
    assert refused("there.gguf") == "there is no file or folder there.gguf"


def test_a_hub_id_that_cannot_be_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def offline(*args: object, **options: object) -> str:
        raise FileNotFoundError("no connection\nand more lines")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    assert refused("someone/some-model") == (
        "someone/some-model is neither a file nor a folder here, and it could not be fetched from"
        " the Hugging Face hub (FileNotFoundError: no connection); check the name, or give the path"
        " of a folder or a GGUF file"
    )


def test_a_hub_id_is_fetched_without_code_or_pickles(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    asked: dict[str, object] = {}

    def download(hub_id: str, **options: object) -> str:
        asked.update(options, id=hub_id)
        return str(llama)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert load_model("someone/llama", device="cpu").name == "someone/llama"
    assert asked["id"] == "someone/llama"
    patterns = asked["allow_patterns"]
    assert isinstance(patterns, list)
    assert not {"*.py", "*.bin", "*.pt", "*"} & set(patterns)


def test_a_file_that_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    assert refused(tmp_path / "notes.txt").startswith(
        f"{tmp_path / 'notes.txt'} is a file, but not a GGUF file; allowed: a Hugging Face folder"
    )


def test_one_file_of_a_folder(llama: Path) -> None:
    assert refused(llama / "model.safetensors").endswith(f"; name its folder: {llama}")
    assert refused(llama / "config.json").endswith(f"; name its folder: {llama}")


def test_a_folder_without_configuration(tmp_path: Path) -> None:
    assert refused(tmp_path) == (
        f"{tmp_path} has no config.json, so it is not a Hugging Face model folder"
    )
    (tmp_path / "a.gguf").write_bytes(b"")
    assert refused(tmp_path).endswith(f"; name the file itself: {tmp_path / 'a.gguf'}")


def test_broken_configurations(llama: Path, tmp_path: Path) -> None:
    folder = copy(llama, tmp_path / "m")
    config = folder / "config.json"
    config.write_text('{"model_type": ')
    assert refused(folder) == (f"{config} is not valid JSON: Expecting value at line 1, column 16")
    config.write_bytes(b'{"model_type": "\xff"}')
    assert refused(folder) == f"{config} is not UTF-8 (byte 16)"
    config.write_text("[1]")
    assert refused(folder) == f"{config} holds list where a JSON object is expected"
    config.write_text("{}")
    assert refused(folder) == f"{config} does not name a model_type"


def test_an_unknown_architecture(llama: Path, tmp_path: Path) -> None:
    folder = copy(llama, tmp_path / "m")
    edit_config(folder, model_type="quuxformer")
    message = refused(folder)
    assert message.startswith("the architecture 'quuxformer' is not known to the installed")
    known = re.search(r"allowed: its (\d+) architectures, such as llama, qwen3, gemma3", message)
    assert known is not None
    assert int(known[1]) > 100


def test_an_architecture_that_does_not_route_is_refused_before_its_weights(tmp_path: Path) -> None:
    folder = tiny_models.save(tmp_path / "m", "bloom")
    (folder / "model.safetensors").unlink()
    assert refused(folder).startswith(
        "bloom (BloomForCausalLM) cannot be measured: its attention does not go through"
        " transformers' attention interface"
    )


def test_a_model_that_reads_no_text(tmp_path: Path) -> None:
    tiny_models.build("vit", None).save_pretrained(tmp_path / "m")
    assert refused(tmp_path / "m").startswith("ViTModel reads pixel_values, not text; allowed:")


def test_a_model_that_reads_pictures_with_its_text() -> None:
    from transformers import CLIPConfig

    with pytest.raises(ModelError, match=r"^clip reads pictures together with text; allowed"):
        model_class(CLIPConfig())


def test_code_in_the_folder_is_not_run_unasked(llama: Path, tmp_path: Path) -> None:
    folder = copy(llama, tmp_path / "m")
    edit_config(
        folder, model_type="quuxformer", auto_map={"AutoConfig": "evil.Config"}, architectures=None
    )
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n")
    assert refused(folder) == (
        f"{folder} brings its own Python code, which is not run unasked; add --trust-remote-code if"
        " you trust its author"
    )
    assert not (tmp_path / "ran").exists()


CODE = """
from transformers import LlamaConfig, LlamaForCausalLM

class QuuxConfig(LlamaConfig):
    model_type = "quuxformer"

class QuuxForCausalLM(LlamaForCausalLM):
    config_class = QuuxConfig
"""


def test_code_in_the_folder_runs_when_trusted(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import dynamic_module_utils

    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("sys.path", [*sys.path])
    folder = copy(llama, tmp_path / "m")
    (folder / "quux.py").write_text(CODE)
    auto_map = {"AutoConfig": "quux.QuuxConfig", "AutoModelForCausalLM": "quux.QuuxForCausalLM"}
    edit_config(
        folder, model_type="quuxformer", auto_map=auto_map, architectures=["QuuxForCausalLM"]
    )
    loaded = load_model(folder, trust_remote_code=True, device="cpu")
    assert type(loaded.model).__name__ == "QuuxForCausalLM"
    ids = torch.arange(5, 5 + 13)[None]
    with torch.no_grad():
        assert torch.equal(loaded.model(ids).logits, tiny_models.build("llama")(ids).logits)


def test_a_model_may_be_spread_over_devices(llama: Path) -> None:
    loaded = load_model(llama, device="auto")
    assert {p.device.type for p in loaded.model.parameters()} <= {"cpu", "cuda"}


def test_pickled_weights(llama: Path, tmp_path: Path) -> None:
    folder = copy(llama, tmp_path / "m")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert refused(folder) == (
        f"{folder} has its weights only as pytorch_model.bin, which can run code when it is opened;"
        " allowed: safetensors or GGUF; fetch the model's safetensors files, or save it again with"
        " save_pretrained"
    )


def test_no_weights(llama: Path, tmp_path: Path) -> None:
    folder = copy(llama, tmp_path / "m")
    (folder / "model.safetensors").rename(folder / "other.safetensors")
    assert "has other.safetensors but neither model.safetensors nor" in refused(folder)
    (folder / "other.safetensors").unlink()
    assert refused(folder) == f"{folder} has no weights; allowed: safetensors or GGUF"


@pytest.mark.parametrize("size", [0, 5, 8, 200, -1])
def test_truncated_safetensors(llama: Path, tmp_path: Path, size: int) -> None:
    folder = copy(llama, tmp_path / "m")
    file = folder / "model.safetensors"
    whole = file.stat().st_size
    os.truncate(file, size if size >= 0 else whole - 1)
    message = refused(folder)
    assert message.startswith(f"{file} is truncated")
    assert message.endswith("; fetch the file again")
    if size < 0:
        assert f"declares {whole} bytes and it has {whole - 1}" in message


def test_safetensors_of_other_content(llama: Path, tmp_path: Path) -> None:
    folder = copy(llama, tmp_path / "m")
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes() + b"x")
    assert f"{file} is too long" in refused(folder)
    file.write_bytes(struct.pack("<Q", 4) + b"nope")
    assert refused(folder) == f"the header of {file} cannot be read; fetch the file again"
    file.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    assert refused(folder) == f"{file} is a Git LFS pointer, not the weights; run git lfs pull"


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    folder = tiny_models.save(tmp_path / "m", shard="20KB")
    shards = sorted(folder.glob("*.safetensors"))
    shards[1].unlink()
    assert refused(folder) == (
        f"{folder} lacks {shards[1].name} of its {len(shards)} weight files; fetch the missing"
        " files"
    )
    shards[2].unlink()
    assert f"lacks {shards[1].name} and 1 more of its" in refused(folder)


def test_an_index_that_points_outside_its_folder(tmp_path: Path) -> None:
    folder = tiny_models.save(tmp_path / "m", shard="20KB")
    index = folder / "model.safetensors.index.json"
    raw = json.loads(index.read_text())
    raw["weight_map"] = dict.fromkeys(raw["weight_map"], "../secret.safetensors")
    index.write_text(json.dumps(raw))
    assert refused(folder) == f"{index} names files outside its folder"
    index.write_text("{}")
    assert refused(folder) == f"{index} does not hold a weight map; fetch the file again"


def test_tensors_that_are_missing_are_named(llama: Path, tmp_path: Path) -> None:
    folder = copy(llama, tmp_path / "m")
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.self_attn.q_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert refused(folder).startswith(
        "the weights of m do not fill the model: model.layers.1.self_attn.q_proj.weight;"
    )


def test_weights_of_another_configuration(llama: Path, tmp_path: Path) -> None:
    folder = copy(llama, tmp_path / "m")
    edit_config(folder, intermediate_size=37)
    assert refused(folder) == (
        "the weights of m do not fill the model: model.layers.0.mlp.down_proj.weight (shape),"
        " model.layers.0.mlp.gate_proj.weight (shape), model.layers.0.mlp.up_proj.weight (shape)"
        " and 6 more; the file does not belong to this configuration, or is incomplete"
    )


def test_a_configuration_that_names_what_does_not_exist(llama: Path, tmp_path: Path) -> None:
    folder = copy(llama, tmp_path / "m")
    edit_config(folder, hidden_act="nonesuch")
    assert refused(folder) == "m cannot be loaded (KeyError: 'nonesuch')"


@pytest.mark.parametrize("size", [6, 20, 300, -1])
def test_truncated_gguf(tmp_path: Path, size: int) -> None:
    file = tmp_path / "tiny.gguf"
    tiny_models.save_gguf(file)
    whole = file.stat().st_size
    os.truncate(file, size if size >= 0 else whole - 129)
    message = refused(file)
    assert "truncated" in message
    assert "buffer" not in message
    if size < 0:
        assert f"and it has {whole - 129}; fetch the file again" in message


def test_gguf_of_other_content(tmp_path: Path) -> None:
    file = tmp_path / "tiny.gguf"
    file.write_bytes(b"hello there, this is no model")
    assert refused(file) == f"{file} is not a GGUF file: it does not start with the letters GGUF"
    file.write_bytes(b"GGUF" + struct.pack(">I", 3) + bytes(64))
    assert "allowed: versions 2 and 3, little-endian" in refused(file)
    file.write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    assert refused(file).endswith("is a Git LFS pointer, not the weights; run git lfs pull")


def test_gguf_under_another_name(tmp_path: Path) -> None:
    file = tmp_path / "tiny.bin"
    tiny_models.save_gguf(file)
    assert refused(file) == (
        f"{file} is a GGUF file, but its name does not end in .gguf; rename it"
    )


def test_gguf_of_a_family_that_cannot_be_loaded(tmp_path: Path) -> None:
    file = tmp_path / "tiny.gguf"
    tiny_models.save_gguf(file, architecture="rwkv6")
    message = refused(file)
    assert message.startswith(f"{file} is a GGUF file of the family 'rwkv6', which transformers")
    assert "allowed: bloom, " in message
    assert "llama, " in message


def test_gguf_with_a_tensor_left_out(tmp_path: Path) -> None:
    file = tmp_path / "tiny.gguf"
    tiny_models.save_gguf(file, leave_out="blk.1.attn_k.weight")
    assert "do not fill the model: model.layers.1.self_attn.k_proj.weight" in refused(file)


def test_options(llama: Path) -> None:
    with pytest.raises(OptionError) as caught:
        load_model(llama, dtype="int3")
    assert str(caught.value) == ("--dtype is 'int3'; allowed: float32, bfloat16, float16, float64")
    with pytest.raises(OptionError, match=r"^--device is 'toaster', which cannot be used here"):
        load_model(llama, device="toaster")
    for device, reason in (("meta", "it holds no numbers"), ("mps", "torch was not built for it")):
        with pytest.raises(OptionError) as caught:
            load_model(llama, device=device)
        assert str(caught.value) == (
            f"--device is '{device}', which cannot be used here ({reason}); allowed: cpu, cuda,"
            " cuda:N, mps, auto"
        )


def test_a_name_that_would_move_the_cursor(llama: Path, tmp_path: Path) -> None:
    folder = copy(llama, tmp_path / "m\x1b[31m\nx")
    assert load_model(folder, device="cpu").name == "m\ufffd[31m\ufffdx"


def test_a_module_that_is_no_transformers_model() -> None:
    with pytest.raises(ModelError, match=r"^Linear has no transformers configuration; allowed"):
        wrap_model(torch.nn.Linear(2, 3))


@pytest.mark.real_model
def test_the_real_models() -> None:
    folder = Path(os.environ["HEADWISE_MODELS"])
    decoder = load_model(next((folder / "smollm2").glob("*.gguf")), device="cpu")
    assert (decoder.kind, decoder.context) == ("decoder", 8192)
    encoder = load_model(folder / "minilm", device="cpu")
    assert (encoder.kind, encoder.context, encoder.position_limit) == ("encoder", 512, 512)
