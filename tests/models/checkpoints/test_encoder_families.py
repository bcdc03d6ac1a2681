"""BERT, Marian and T5 checkpoints: old names, tables and copies are known, all else is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from headwise.errors import ModelError
from headwise.models import Architecture
from headwise.models.checkpoints import load, save
from headwise.models.checkpoints.bert import BERT
from headwise.models.checkpoints.family import Family
from headwise.models.checkpoints.marian import MARIAN
from headwise.models.checkpoints.settings import Settings
from headwise.models.checkpoints.t5 import T5
from headwise.positions import sinusoidal_table
from tests.parity.loaded_checks import saved
from tests.parity.loaded_encoders import ENCODER_CASES

Tensors = dict[str, Tensor]
Changed = Callable[..., Path]
WEIGHTS = "model.safetensors"
NAMES = ("bert", "bert, classes", "marian", "marian, bare", "t5", "t5, second form", "t5, encoder")
TABLE = {"bert": "bert.embeddings.word_embeddings.weight", "marian": "model.shared.weight"}
EVERY = pytest.mark.parametrize("name", NAMES)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One saved model of each kind."""
    place = tmp_path_factory.mktemp("saved")
    makers = {case.name: case.make for case in ENCODER_CASES}
    return {name: saved(makers[name](), place / str(i)) for i, name in enumerate(NAMES)}


@pytest.fixture
def change(folders: dict[str, Path], tmp_path: Path) -> Changed:
    """A copy of a saved model with other tensors or settings."""

    def changed(
        name: str, edit: Callable[[Tensors], object] | None = None, **settings: Any
    ) -> Path:
        folder = Path(shutil.copytree(folders[name], tmp_path / "m", dirs_exist_ok=True))
        if edit is not None:
            tensors = load_file(folder / WEIGHTS)
            edit(tensors)
            save_file(tensors, folder / WEIGHTS)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **settings}))
        return folder

    return changed


def refused(folder: Path) -> str:
    with pytest.raises(ModelError) as caught:
        load(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def same(one: Path, two: Path) -> bool:
    """Whether two folders hold one model, bit for bit."""
    a, b = load(one).model, load(two).model
    left, right = a.state_dict(), b.state_dict()
    equal = left.keys() == right.keys() and all(torch.equal(left[k], right[k]) for k in left)
    return equal and a.architecture == b.architecture


@EVERY
def test_every_tensor_is_needed(name: str, change: Changed, folders: dict[str, Path]) -> None:
    stored = load_file(folders[name] / WEIGHTS)
    computed = [each for each in stored if each.endswith("embed_positions.weight")]
    assert bool(computed) == (name == "marian, bare")
    for each in sorted(set(stored) - {*computed, "final_logits_bias"})[::7]:
        message = refused(change(name, lambda tensors, each=each: tensors.pop(each)))
        assert each.rsplit(".", 2)[0] in message


@EVERY
def test_a_left_over_tensor_is_named(name: str, change: Changed) -> None:
    folder = change(name, lambda tensors: tensors.update({"encoder.layer.97.k": torch.ones(3)}))
    assert "encoder.layer.97.k" in refused(folder)


@EVERY
def test_a_wrong_shape_is_named(name: str, change: Changed, folders: dict[str, Path]) -> None:
    stored = load_file(folders[name] / WEIGHTS)
    norm = next(n for n in sorted(stored) if "norm" in n.lower() and n.endswith("weight"))
    folder = change(name, lambda tensors: tensors.update({norm: torch.ones(19)}))
    assert f"{norm} (19,)" in refused(folder)


@EVERY
def test_an_unknown_setting_is_named(name: str, change: Changed) -> None:
    assert "clip_qkv = 8.0" in refused(change(name, clip_qkv=8.0))


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("bert", "is_decoder", True),
        ("bert", "add_cross_attention", True),
        ("bert", "position_embedding_type", "relative_key"),
        ("bert", "hidden_act", "quick_gelu"),
        ("marian", "share_encoder_decoder_embeddings", False),
        ("marian", "decoder_vocab_size", 67),
        ("marian", "normalize_before", True),
        ("marian", "normalize_embedding", True),
        ("marian", "add_final_layer_norm", True),
        ("marian", "static_position_embeddings", False),
        ("marian", "num_hidden_layers", 5),
        ("marian", "activation_function", "tanh"),
        ("t5", "feed_forward_proj", "gated-tanh"),
        ("t5", "is_gated_act", True),
        ("t5", "dense_act_fn", "silu"),
        ("t5", "is_decoder", True),
        ("t5", "tie_encoder_decoder", True),
        ("t5", "d_kv", 0),
    ],
)
def test_another_mathematics_is_refused(name: str, key: str, value: Any, change: Changed) -> None:
    assert f"{key} = {value!r}" in refused(change(name, **{key: value}))


def test_a_start_token_outside_the_vocabulary_is_refused(change: Changed) -> None:
    assert "start token of 61" in refused(change("marian", decoder_start_token_id=61))


@pytest.mark.parametrize("name", ["bert", "bert, classes"])
def test_the_first_names_of_norms(name: str, change: Changed, folders: dict[str, Path]) -> None:
    def older(tensors: Tensors) -> None:
        for each in [each for each in tensors if "LayerNorm" in each]:
            stem, _, last = each.rpartition(".")
            tensors[f"{stem}.{'gamma' if last == 'weight' else 'beta'}"] = tensors.pop(each)

    assert same(change(name, older), folders[name])


def test_position_ids_are_known_and_checked(change: Changed, folders: dict[str, Path]) -> None:
    key, ids = "bert.embeddings.position_ids", torch.arange(37)[None]
    assert same(change("bert", lambda tensors: tensors.update({key: ids})), folders["bert"])
    for wrong in (ids + 1, ids[:, 1:], ids[0]):
        folder = change("bert", lambda tensors, wrong=wrong: tensors.update({key: wrong.clone()}))
        assert f"{key} that is not what the model computes" in refused(folder)


@pytest.mark.parametrize("name", ["marian", "marian, bare"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_stored_sinusoids_are_known_and_checked(
    name: str, dtype: torch.dtype, change: Changed, folders: dict[str, Path]
) -> None:
    prefix = "" if name == "marian, bare" else "model."
    key = f"{prefix}decoder.embed_positions.weight"
    table = sinusoidal_table(37, 42, layout="half", dtype=torch.float64).to(dtype)
    assert same(change(name, lambda tensors: tensors.update({key: table})), folders[name])
    moved = table.clone()
    moved[36, 41] += 4 * torch.finfo(dtype).eps
    for wrong in (sinusoidal_table(37, 42).to(dtype), table[1:].clone(), moved):
        folder = change(name, lambda tensors, wrong=wrong: tensors.update({key: wrong}))
        assert f"{key} that is not what the model computes" in refused(folder)


@pytest.mark.parametrize(
    ("name", "table", "copies"),
    [
        ("bert", TABLE["bert"], ["cls.predictions.decoder.weight"]),
        (
            "marian",
            TABLE["marian"],
            ["lm_head.weight"]
            + [f"model.{side}.embed_tokens.weight" for side in ("encoder", "decoder")],
        ),
        (
            "t5",
            "shared.weight",
            ["lm_head.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight"],
        ),
    ],
)
def test_copies_of_the_table_are_known(
    name: str, table: str, copies: list[str], change: Changed, folders: dict[str, Path]
) -> None:
    def add(tensors: Tensors) -> None:
        tensors.update({copy: tensors[table].clone() for copy in copies})

    assert same(change(name, add), folders[name])

    def other(tensors: Tensors) -> None:
        tensors[copies[0]] = tensors[table] + 1

    untied = load(change(name, other)).model.architecture.unembedding
    assert untied is not None
    assert not untied.tied
    for copy in copies[1:]:
        folder = change(name, lambda tensors, copy=copy: tensors.update({copy: tensors[table] + 1}))
        assert copy in refused(folder)


@pytest.mark.parametrize(("name", "prefix"), [("marian", "model."), ("t5", "")])
def test_the_table_under_another_of_its_names(
    name: str, prefix: str, change: Changed, folders: dict[str, Path]
) -> None:
    def renamed(tensors: Tensors) -> None:
        table = tensors.pop(f"{prefix}shared.weight")
        tensors[f"{prefix}encoder.embed_tokens.weight"] = table

    assert same(change(name, renamed), folders[name])


def test_without_a_bias_of_logits_marian_has_none(change: Changed) -> None:
    model = load(change("marian", lambda tensors: tensors.pop("final_logits_bias"))).model
    assert model.unembedding.bias is None


def test_biases_of_cross_attention_in_old_t5_are_left_out(
    change: Changed, folders: dict[str, Path]
) -> None:
    key = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
    assert same(
        change("t5", lambda tensors: tensors.update({key: torch.ones(8, 3)})), folders["t5"]
    )
    other = key.replace("block.0", "block.1")
    assert other in refused(change("t5", lambda tensors: tensors.update({other: torch.ones(8, 3)})))


@EVERY
def test_saved_as_our_own_and_loaded_again(
    name: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    assert same(save(load(folders[name]).model, tmp_path / "own"), folders[name])


@EVERY
def test_half_precision_stays(name: str, change: Changed) -> None:
    def half(tensors: Tensors) -> None:
        tensors.update({k: t.bfloat16() for k, t in tensors.items() if t.is_floating_point()})

    model = load(change(name, half)).model
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


def described(family: Family, names: set[str], **config: Any) -> Architecture:
    settings = Settings(config)
    architecture = family.architecture(settings, names)
    settings.finish()
    return architecture


# The settings of configurations as they were released, with what they mean.


def test_bert_base_as_released() -> None:
    architecture = described(
        BERT,
        {TABLE["bert"], "bert.pooler.dense.weight", "cls.seq_relationship.weight",
         "cls.predictions.bias", "cls.predictions.transform.dense.weight"},
        architectures=["BertForMaskedLM"], attention_probs_dropout_prob=0.1,
        gradient_checkpointing=False, hidden_act="gelu", hidden_dropout_prob=0.1, hidden_size=768,
        initializer_range=0.02, intermediate_size=3072, layer_norm_eps=1e-12,
        max_position_embeddings=512, model_type="bert", num_attention_heads=12,
        num_hidden_layers=12, pad_token_id=0, position_embedding_type="absolute",
        transformers_version="4.6.0.dev0", type_vocab_size=2, use_cache=True, vocab_size=30522,
    )  # fmt: skip
    assert (architecture.pooler, architecture.classes, architecture.context) == (True, 2, 512)


def test_marian_as_released() -> None:
    architecture = described(
        MARIAN,
        {"model.shared.weight", "final_logits_bias"},
        activation_dropout=0.0, activation_function="swish", add_bias_logits=False,
        add_final_layer_norm=False, architectures=["MarianMTModel"], attention_dropout=0.0,
        bad_words_ids=[[58100]], bos_token_id=0, classif_dropout=0.0, classifier_dropout=0.0,
        d_model=512, decoder_attention_heads=8, decoder_ffn_dim=2048, decoder_layerdrop=0.0,
        decoder_layers=6, decoder_start_token_id=58100, decoder_vocab_size=58101, dropout=0.1,
        encoder_attention_heads=8, encoder_ffn_dim=2048, encoder_layerdrop=0.0, encoder_layers=6,
        eos_token_id=0, forced_eos_token_id=0, gradient_checkpointing=False,
        id2label={"0": "LABEL_0"}, init_std=0.02, is_encoder_decoder=True,
        label2id={"LABEL_0": 0}, max_length=512, max_position_embeddings=512, model_type="marian",
        normalize_before=False, normalize_embedding=False, num_beams=4, num_hidden_layers=6,
        pad_token_id=58100, scale_embedding=True, share_encoder_decoder_embeddings=True,
        static_position_embeddings=True, transformers_version="4.22.0.dev0", use_cache=True,
        vocab_size=58101,
    )  # fmt: skip
    assert (architecture.start_token, architecture.embedding.scale) == (58100, 512**0.5)


def test_t5_as_released() -> None:
    common = {
        "architectures": ["T5ForConditionalGeneration"], "d_kv": 64, "d_model": 512,
        "decoder_start_token_id": 0, "dropout_rate": 0.1, "eos_token_id": 1,
        "initializer_factor": 1.0, "is_encoder_decoder": True, "layer_norm_epsilon": 1e-06,
        "model_type": "t5", "n_positions": 512, "output_past": True, "pad_token_id": 0,
        "relative_attention_num_buckets": 32, "vocab_size": 32128,
        "task_specific_params": {"summarization": {"num_beams": 4}},
    }  # fmt: skip
    decoding = {"shared.weight", "decoder.block.0.layer.0.SelfAttention.q.weight"}
    first = described(T5, decoding, **common, d_ff=2048, num_heads=8, num_layers=6)
    second = described(
        T5, decoding | {"lm_head.weight"}, **common, d_ff=1024, num_heads=6, num_layers=8,
        num_decoder_layers=8, feed_forward_proj="gated-gelu", tie_word_embeddings=False,
        relative_attention_max_distance=128, tokenizer_class="T5Tokenizer",
    )  # fmt: skip
    for architecture, tied, scale, activation in (
        (first, True, 512**-0.5, "relu"),
        (second, False, 1.0, "gelu_tanh"),
    ):
        unembedding = architecture.unembedding
        assert unembedding is not None
        assert (unembedding.tied, unembedding.scale) == (tied, scale)
        assert (architecture.stack.activation, architecture.stack.gated) == (activation, not tied)
        assert (architecture.start_token, architecture.stack.d_head) == (0, 64)
