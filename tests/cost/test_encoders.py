"""Encoders and towers: parameters and FLOPs to the unit, for every class of every family."""

from __future__ import annotations

import importlib

import pytest
import torch
import transformers as tf

from headwise.cost.config import parts_of
from headwise.cost.counting import count
from headwise.cost.workload import Workload
from headwise.errors import HeadwiseError
from tests.cost.flop_counter import built, counted, flops, planned, stored
from tests.cost.pair_sizes import BART, T5, WHISPER

BATCH, LENGTH = 3, 17
PLAIN = Workload(length=LENGTH, batch=BATCH, attention="materialised")
BERT = {
    "vocab_size": 97, "hidden_size": 22, "num_hidden_layers": 3, "num_attention_heads": 2,
    "intermediate_size": 37, "max_position_embeddings": 41, "type_vocab_size": 5,
    "num_labels": 7,
}  # fmt: skip
DISTILBERT = {
    "vocab_size": 97, "dim": 22, "n_layers": 3, "n_heads": 2, "hidden_dim": 37,
    "max_position_embeddings": 41, "num_labels": 7,
}  # fmt: skip
VIT = {
    "hidden_size": 22, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 37,
    "image_size": [35, 21], "patch_size": [7, 3], "num_channels": 5, "num_labels": 11,
    "encoder_stride": 2,
}  # fmt: skip
CLIP = {
    "text_config": {
        "vocab_size": 97, "hidden_size": 22, "intermediate_size": 37, "num_hidden_layers": 2,
        "num_attention_heads": 2, "max_position_embeddings": 41, "bos_token_id": 0,
        "eos_token_id": 2, "pad_token_id": 1, "projection_dim": 13,
    },
    "vision_config": {
        "hidden_size": 26, "intermediate_size": 31, "num_hidden_layers": 3,
        "num_attention_heads": 2, "image_size": 21, "patch_size": 7, "num_channels": 5,
        "projection_dim": 19,
    },
    "projection_dim": 11, "num_labels": 5,
}  # fmt: skip
TASKS = (
    "Model", "ForMaskedLM", "ForSequenceClassification", "ForMultipleChoice",
    "ForTokenClassification", "ForQuestionAnswering",
)  # fmt: skip


def textual() -> list[tuple[str, object]]:
    """Every class that reads one text, with a configuration."""
    found: list[tuple[str, object]] = []
    for name, config, sizes, more in (
        ("Bert", tf.BertConfig, BERT, ("ForPreTraining", "ForNextSentencePrediction")),
        ("Bert", tf.BertConfig, {**BERT, "is_decoder": True}, ("LMHeadModel",)),
        ("Roberta", tf.RobertaConfig, BERT, ()),
        ("Roberta", tf.RobertaConfig, {**BERT, "is_decoder": True}, ("ForCausalLM",)),
        ("XLMRoberta", tf.XLMRobertaConfig, BERT, ()),
        ("Camembert", tf.CamembertConfig, BERT, ()),
        ("Electra", tf.ElectraConfig, {**BERT, "embedding_size": 13}, ("ForPreTraining",)),
        ("Electra", tf.ElectraConfig, {**BERT, "embedding_size": 22}, ("ForPreTraining",)),
        ("DistilBert", tf.DistilBertConfig, DISTILBERT, ()),
    ):
        alone = sizes.get("is_decoder", False)
        for task in more if alone else (*TASKS, *more):
            spans = {"num_labels": 2} if task == "ForQuestionAnswering" else {}
            found.append((name + task, config(**{**sizes, **spans})))
    return found


def names(of: list[tuple[str, object]]) -> list[str]:
    return [f"{name}-{number}" for number, (name, _) in enumerate(of)]


TEXTUAL = textual()
OTHER = [
    ("BertForMaskedLM", tf.BertConfig(**BERT, tie_word_embeddings=False)),
    ("DistilBertForMaskedLM", tf.DistilBertConfig(**DISTILBERT, tie_word_embeddings=False)),
    ("DistilBertModel", tf.DistilBertConfig(**DISTILBERT, sinusoidal_pos_embds=True)),
    ("ElectraForMultipleChoice", tf.ElectraConfig(**BERT, summary_use_proj=False)),
]
PICTURES = [
    *((f"ViT{end}", tf.ViTConfig(**VIT)) for end in ("Model", "ForImageClassification")),
    ("ViTModel", tf.ViTConfig(**VIT, qkv_bias=False, pooler_output_size=29)),
    (
        "ViTForMaskedImageModeling",
        tf.ViTConfig(**{**VIT, "image_size": 21, "patch_size": 7, "encoder_stride": 7}),
    ),
    ("CLIPVisionModel", tf.CLIPConfig(**CLIP).vision_config),
    ("CLIPVisionModelWithProjection", tf.CLIPConfig(**CLIP).vision_config),
    ("CLIPForImageClassification", tf.CLIPConfig(**CLIP)),
]
TEXTS = [
    ("CLIPTextModel", tf.CLIPConfig(**CLIP).text_config),
    ("CLIPTextModelWithProjection", tf.CLIPConfig(**CLIP).text_config),
]


def tokens(name: str, batch: int = BATCH) -> dict[str, torch.Tensor]:
    """Numbers of tokens; multiple choice reads them as one question of ``batch`` choices."""
    ids = torch.full((batch, LENGTH), 5)
    return {"input_ids": ids[None] if name.endswith("ForMultipleChoice") else ids}


def pixels(config) -> dict[str, torch.Tensor]:
    config = getattr(config, "vision_config", config)
    size = config.image_size
    height, width = (size, size) if isinstance(size, int) else size
    return {"pixel_values": torch.zeros(BATCH, config.num_channels, height, width)}


def agrees(name, config, inputs, workload=PLAIN):
    found = counted(name, config, workload)
    assert found.parameters == stored(built(name, config))
    forward, both = flops(built(name, config, "cpu"), inputs)
    assert (found.flops, found.training_flops) == (forward, both)


@pytest.mark.parametrize(("name", "config"), TEXTUAL, ids=names(TEXTUAL))
def test_encoders_of_text(name, config):
    agrees(name, config, tokens(name))


@pytest.mark.parametrize(("name", "config"), OTHER, ids=names(OTHER))
def test_less_usual_settings(name, config):
    agrees(name, config, tokens(name))


@pytest.mark.parametrize(("name", "config"), TEXTS, ids=names(TEXTS))
def test_towers_of_text(name, config):
    agrees(name, config, tokens(name))


@pytest.mark.parametrize(("name", "config"), PICTURES, ids=names(PICTURES))
def test_towers_of_pictures(name, config):
    agrees(name, config, pixels(config))


FAMILIES = {
    "bert": BERT, "roberta": BERT, "xlm_roberta": BERT, "camembert": BERT, "electra": BERT,
    "distilbert": {**DISTILBERT, "num_labels": 2}, "vit": {**VIT, "image_size": 21, "patch_size": 7,
    "encoder_stride": 7}, "clip": CLIP, "t5": T5, "mt5": T5, "umt5": T5, "bart": BART,
    "mbart": BART, "pegasus": BART, "marian": BART, "whisper": WHISPER,
}  # fmt: skip
NO_MODEL = ("PreTrainedModel", "PretrainedModel", "PretrainedBartModel", "Layer")


@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_of_every_class_that_transformers_has(family):
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    classes = [name for name in module.__all__ if not name.endswith(NO_MODEL)]
    assert len(classes) >= 3
    for name in classes:
        kind = getattr(module, name).config_class
        config = kind(**FAMILIES[family].get(kind.base_config_key, FAMILIES[family]))
        assert counted(name, config, PLAIN).parameters == stored(built(name, config)), name


@pytest.mark.parametrize(
    ("name", "inputs"),
    [
        ("BertForPreTraining", {"input_ids": torch.zeros(2, 128, dtype=torch.int64)}),
        ("DistilBertForMaskedLM", {"input_ids": torch.zeros(2, 128, dtype=torch.int64)}),
        ("ElectraForPreTraining", {"input_ids": torch.zeros(2, 128, dtype=torch.int64)}),
        ("ViTForImageClassification", {"pixel_values": torch.zeros(2, 3, 224, 224)}),
        ("T5EncoderModel", {"input_ids": torch.zeros(2, 128, dtype=torch.int64)}),
        ("CLIPVisionModelWithProjection", {"pixel_values": torch.zeros(2, 3, 224, 224)}),
    ],
)
def test_published_sizes(name, inputs):
    """The sizes that transformers takes where none are given are those of a published model."""
    kind = getattr(tf, name).config_class
    found = counted(name, kind(), Workload(length=128, batch=2, attention="materialised"))
    model = built(name, kind())
    assert found.parameters == stored(model)
    given = {key: value.to("meta") for key, value in inputs.items()}
    assert flops(model, given) == (found.flops, found.training_flops)


@pytest.mark.parametrize(
    "name",
    [
        "T5ForConditionalGeneration", "MT5ForConditionalGeneration", "CLIPModel",
        "BartForConditionalGeneration", "MBartForConditionalGeneration", "MarianMTModel",
        "PegasusForConditionalGeneration", "WhisperForConditionalGeneration",
    ],
)  # fmt: skip
def test_parameters_of_published_sizes(name):
    config = getattr(tf, name).config_class()
    assert counted(name, config, PLAIN).parameters == stored(built(name, config))


def test_both_towers_and_their_similarities():
    config = tf.CLIPConfig(**CLIP)
    agrees("CLIPModel", config, {**tokens("CLIPModel"), **pixels(config)})
    similar = [
        line.macs
        for line in counted("CLIPModel", config, PLAIN).lines
        if line.name == "similarities"
    ]
    assert similar == [BATCH * BATCH * 11]


def test_a_tower_named_by_the_configuration_of_both():
    config = tf.CLIPConfig(**CLIP)
    whole = counted("CLIPTextModelWithProjection", config, PLAIN)
    assert (
        whole.parameters
        == counted("CLIPTextModelWithProjection", config.text_config, PLAIN).parameters
    )


def test_a_tower_that_says_only_what_differs():
    said = {"text_config": {"num_hidden_layers": 2}, "vision_config": {}, "projection_dim": 512}
    parts = parts_of({**said, "model_type": "clip"})
    model = built("CLIPModel", tf.CLIPConfig(**said))
    assert count(parts, PLAIN).parameters == stored(model)
    assert "hidden_size = 512" in parts.notes[0]
    assert "num_hidden_layers = 12" in parts.notes[1]


def test_a_picture_has_as_many_tokens_as_patches_and_one():
    for length in (1, 17, 5000):
        found = counted(*PICTURES[0], Workload(length=length, batch=BATCH))
        assert found.macs == counted(*PICTURES[0], PLAIN).macs
    (stack,) = planned(*PICTURES[0]).stacks
    assert stack.tokens == 5 * 7 + 1


def test_roberta_never_uses_its_first_positions():
    contexts = [planned(name, config).stacks[0].context for name, config in TEXTUAL]
    assert contexts[0] == 41
    assert planned("RobertaModel", tf.RobertaConfig(**BERT)).stacks[0].context == 41 - 2


def test_logits_of_one_position():
    config = tf.BertConfig(**BERT)
    one = counted("BertForMaskedLM", config, Workload(length=LENGTH, logits="last"))
    every = counted("BertForMaskedLM", config, Workload(length=LENGTH))
    assert every.macs - one.macs == (LENGTH - 1) * (22 * 22 + 22 * 97)


def test_a_sinusoid_is_stored_and_not_learned():
    matrices = planned(*OTHER[2]).stacks[0].matrices
    assert [m.name for m in matrices if not m.learned] == ["positions"]


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({**BERT, "model_type": "bert", "architectures": ["BertForRanking"]}, "BertForRanking"),
        ({**BERT, "model_type": "bert", "add_cross_attention": True}, "add_cross_attention"),
        ({**BERT, "model_type": "bert", "num_attention_heads": 3}, "3 heads do not divide"),
        ({"model_type": "bert", "hidden_size": 22}, "has no vocab_size"),
        ({**DISTILBERT, "model_type": "distilbert", "n_layers": 0}, "n_layers is 0"),
        ({**VIT, "model_type": "vit", "patch_size": 22}, "patches of 22 × 22"),
        ({**VIT, "model_type": "vit", "image_size": [1, 2, 3]}, "image_size"),
        ({**VIT, "model_type": "vit", "image_size": [21, "a"]}, "image_size is 'a'"),
        ({"model_type": "clip", "architectures": ["CLIPSegModel2"]}, "CLIPSegModel2"),
        ({"model_type": "clip_text_model", "architectures": ["CLIPModel"]}, "CLIPModel"),
    ],
)
def test_refused(config, said):
    with pytest.raises(HeadwiseError, match=said):
        parts_of(config)


def test_a_wider_block_is_noticed():
    config = tf.BertConfig(**BERT)
    wrong = counted("BertModel", tf.BertConfig(**{**BERT, "intermediate_size": 38}), PLAIN)
    assert wrong.parameters != stored(built("BertModel", config))
    assert wrong.flops != flops(built("BertModel", config, "cpu"), tokens("BertModel"))[0]
