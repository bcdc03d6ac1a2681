"""Bad input of ``headwise circuits`` ends in one line on stderr, exit code 2, and no file."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import huggingface_hub
import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from headwise.circuits.head_weights import head_weights
from headwise.cli.app import run
from headwise.errors import NonFiniteError

NEED = "circuits need finite weights; check the checkpoint"
ELSEWHERE = "it belongs to another model, or is of another kind"
SUFFIXES = (
    ".nc (NetCDF), .zarr (a folder) or .csv (a row per head); for the page, name an .html file"
)


def llama(**sizes: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = {
        "vocab_size": 97, "hidden_size": 20, "intermediate_size": 29, "num_hidden_layers": 5,
        "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 61,
        "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    return LlamaForCausalLM(LlamaConfig(**{**config, **sizes}))


def gpt2() -> GPT2LMHeadModel:
    sizes = {"n_embd": 20, "n_layer": 5, "n_head": 2, "vocab_size": 97, "n_positions": 61}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=1, eos_token_id=2))


def holding(model: Any, name: str, place: tuple[int, ...], value: float) -> Any:
    with torch.no_grad():
        model.get_parameter(name)[place] = value
    return model


@pytest.fixture(scope="module")
def there(tmp_path_factory):
    """Folders of models and of adapters, by what is the matter with them."""
    folder = tmp_path_factory.mktemp("models")
    nan = float("nan")
    models = {
        "right": llama(),
        "narrow": llama(hidden_size=12),
        "short": llama(num_hidden_layers=3),
        "grouped": llama(num_key_value_heads=2),
        "gpt2": gpt2(),
        "key": holding(llama(), "model.layers.2.self_attn.k_proj.weight", (3, 5), nan),
        "mlp": holding(llama(), "model.layers.1.mlp.up_proj.weight", (7, 11), nan),
        "last": holding(llama(), "model.layers.4.mlp.down_proj.weight", (2, 13), float("inf")),
        "position": holding(gpt2(), "transformer.wpe.weight", (60, 3), nan),
    }
    for name, model in models.items():
        model.save_pretrained(folder / name)
    chosen = {"r": 3, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False}
    adapters = {
        "adapter": (llama(), peft.LoraConfig(**chosen)),
        "narrow adapter": (llama(hidden_size=12), peft.LoraConfig(**chosen)),
        "long adapter": (llama(num_hidden_layers=7), peft.LoraConfig(**chosen)),
        "LoHa": (llama(), peft.LoHaConfig(r=3, target_modules=["q_proj"])),
        "broken adapter": (llama(), peft.LoraConfig(**chosen)),
    }
    with warnings.catch_warnings():
        # The library reads a property of transformers under its old name.
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
        for name, (model, config) in adapters.items():
            peft.get_peft_model(model, config).save_pretrained(folder / name)
    file = folder / "broken adapter" / "adapter_model.safetensors"
    factors = load_file(file)
    factors["base_model.model.model.layers.3.self_attn.v_proj.lora_B.weight"][1, 2] = nan
    save_file(factors, file)
    (folder / "saved.nc").write_bytes(b"\x89HDF\r\n\x1a\n")
    return folder


def refused(capsys, monkeypatch, here: Path, arguments: list[str]) -> str:
    """The one line that is said, after making sure that nothing else happened."""
    monkeypatch.chdir(here)
    monkeypatch.delenv("HEADWISE_TRACEBACK", raising=False)
    code = run(arguments)
    captured = capsys.readouterr()
    assert code == 2
    assert captured.out == ""
    assert captured.err.startswith("headwise: ")
    assert captured.err.count("\n") == 1
    assert "Traceback" not in captured.err
    assert list(here.iterdir()) == []
    return captured.err.removeprefix("headwise: ").removesuffix("\n")


# {} is the folder of the models, ~ anything.
MODELS = {
    "right --adapter {}/narrow adapter": "lora_A of model.layers.0.self_attn.q_proj has the shape"
    " (3, 12) where the model and {}/narrow adapter/adapter_config.json give (3, 20); the adapter"
    " belongs to a model of another size",
    "right --adapter {}/long adapter": "the adapter {}/long adapter has base_model.model.model"
    f".layers.5.self_attn.q_proj.lora_A.weight, ~ which the model has no place for; {ELSEWHERE}",
    "gpt2 --adapter {}/adapter": "the adapter {}/adapter has base_model.model.model.layers.0"
    f".self_attn.q_proj.lora_A.weight, ~ which the model has no place for; {ELSEWHERE}",
    "right --adapter {}/LoHa": "{}/LoHa/adapter_config.json is an adapter of the type LOHA;"
    " allowed: LORA",
    "right --adapter {}/right": "{}/right has no adapter_config.json, so it is not a PEFT adapter"
    " folder",
    "right --adapter {}/broken adapter": "lora_B of model.layers.3.self_attn.v_proj in {}/broken"
    f" adapter holds nan at [1, 2]; {NEED}",
    "right --base {}/narrow": "compared with the base narrow: model.layers.0.self_attn has decoder"
    " query weights (head, …) (2, 12, 6), and model.layers.0.self_attn of the other checkpoint"
    " decoder ones (2, 20, 10); allowed: two checkpoints of one model",
    "right --base {}/short": "compared with the base short: 3 attention modules in the base and 5"
    " in the other checkpoint; allowed: two checkpoints of one model",
    "right --base {}/grouped": "compared with the base grouped: model.layers.0.self_attn has"
    " decoder key weights (head, …) (2, 20, 10), ~ allowed: two checkpoints of one model",
    "right --base {}/gpt2": "compared with the base gpt2: transformer.h.0.attn has decoder key"
    " weights ~ allowed: two checkpoints of one model",
    "right --base {}/key": "compared with the base key: model.layers.2.self_attn.k_proj.weight"
    f" holds nan at [3, 5]; {NEED}",
    "right --base {}/adapter": "{}/adapter has no config.json, so it is not a Hugging Face model"
    " folder",
    "right --base {}/right --adapter {}/adapter": "a base and an adapter were given; allowed: one"
    " of the two",
    "key": f"model.layers.2.self_attn.k_proj.weight holds nan at [3, 5]; {NEED}",
    "mlp": f"model.layers.1.mlp.up_proj.weight holds nan at [7, 11]; {NEED}",
    "last": f"model.layers.4.mlp.down_proj.weight holds inf at [2, 13]; {NEED}",
    "position": f"transformer.wpe.weight holds nan at [60, 3]; {NEED}",
    "right --layers 9": "the model has no layer 9; allowed: 0 to 4",
    "right --layers 3,7-9 --base {}/right": "the model has no layer 7; allowed: 0 to 4",
    "adapter": "{}/adapter has no config.json, so it is not a Hugging Face model folder",
    "saved.nc": "{}/saved.nc is a file, but not a GGUF file; allowed: a Hugging Face folder, a hub"
    " id or a GGUF file; for the page of what was saved: headwise show {}/saved.nc",
    "right --out {}/right": "{}/right is read, so it cannot be written over; name another file",
}


@pytest.mark.parametrize("asked", MODELS)
def test_models_and_adapters_that_do_not_fit(asked, there, capsys, monkeypatch, tmp_path):
    model, *options = asked.replace("{}", str(there)).split(" --")
    arguments = ["circuits", str(there / model)]
    for option in options:
        name, _, value = option.partition(" ")
        arguments += [f"--{name}", value]
    said = refused(capsys, monkeypatch, tmp_path, arguments)
    start, _, end = MODELS[asked].replace("{}", str(there)).partition("~")
    assert said.startswith(start)
    assert said.endswith(end)


LINES = {
    "--layers all": "--layers 'all'; allowed: numbers and ranges from 0 on, such as 0,3-5",
    "--layers ,": "--layers ','; allowed: numbers and ranges from 0 on, such as 0,3-5",
    "--layers -1": "--layers '-1'; allowed: numbers and ranges from 0 on, such as 0,3-5",
    "--layers 3-1": "--layers '3-1'; allowed: numbers and ranges from 0 on, such as 0,3-5",
    "--layers": "option '--layers' requires an argument; see headwise circuits --help",
    "/no/such": "there is no file or folder /no/such",
    "--base /no/such": "there is no file or folder /no/such",
    "--adapter nope": "nope has no adapter_config.json, so it is not a PEFT adapter folder",
    "--out x.txt": f"cannot save circuits as x.txt; allowed: {SUFFIXES}",
    "--out x": f"cannot save circuits as x; allowed: {SUFFIXES}",
    "--out .": "cannot write .: a folder has that name; name another file",
    "--out -": "--out is -; allowed: the name of a file",
    "--out /dev/null": "cannot write /dev/null: it is a device or a pipe; name a file",
    "--json no/f.json": "cannot write no/f.json: there is no folder no; make it or name another",
    "--dtype float8": "--dtype is 'float8'; allowed: float32, bfloat16, float16, float64",
    "one two": "got unexpected extra argument(s) (two); see headwise circuits --help",
}


@pytest.mark.parametrize("asked", LINES)
def test_what_cannot_be_read_or_written(asked, capsys, monkeypatch, tmp_path):
    said = refused(capsys, monkeypatch, tmp_path, ["circuits", *asked.split()])
    assert said == LINES[asked]


@pytest.mark.parametrize("suffix", ["html", "nc", "zarr", "csv"])
def test_folders_that_are_missing_or_read_only(suffix, capsys, monkeypatch, tmp_path):
    said = refused(capsys, monkeypatch, tmp_path, ["circuits", "--out", f"no/x.{suffix}"])
    assert said == f"cannot write no/x.{suffix}: there is no folder no; make it or name another"

    def denied(self: Path, *_: Any, **__: Any) -> None:  # who runs the tests may write everywhere
        raise PermissionError(13, os.strerror(13), str(self))

    monkeypatch.setattr(Path, "touch", denied)
    said = refused(capsys, monkeypatch, tmp_path, ["circuits", "--out", f"x.{suffix}"])
    assert said == f"cannot write x.{suffix}: permission denied"


@pytest.mark.parametrize("option", [[], ["--base"]])
def test_a_name_that_the_hub_does_not_have(option, capsys, monkeypatch, tmp_path):
    def nothing(*_: Any, **__: Any) -> str:
        raise OSError("404: nope is not there\nRepository Not Found")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", nothing)
    said = refused(capsys, monkeypatch, tmp_path, ["circuits", *option, "nope"])
    assert said.startswith("nope is neither a file nor a folder here, and it could not be fetched")
    assert said.endswith("check the name, or give the path of a folder or a GGUF file")


@pytest.mark.parametrize("suffix", ["html", "nc", "zarr", "csv"])
def test_a_full_disk_leaves_nothing(suffix, capsys, monkeypatch, tmp_path):
    """Refused as late as can be: when everything is computed and half of it is written."""
    kept = os.replace

    def full(source: Any, target: Any) -> None:
        if str(target).endswith(f"x.{suffix}"):
            raise OSError(28, os.strerror(28), str(target))
        kept(source, target)

    monkeypatch.setattr(os, "replace", full)
    arguments = ["circuits", "--layers", "0", "--out", f"x.{suffix}"]
    said = refused(capsys, monkeypatch, tmp_path, arguments)
    assert said == f"cannot write x.{suffix}: no space left on device"


@pytest.mark.parametrize("name", ["mlp", "last"])
def test_weights_beside_the_heads_are_named_where_the_heads_are_checked(name, there):
    model = LlamaForCausalLM.from_pretrained(there / name)
    with pytest.raises(NonFiniteError, match=r"mlp\.(up|down)_proj\.weight holds"):
        head_weights(model)
    assert len(head_weights(model, validate=False).layers) == 5  # the heads' own are finite
