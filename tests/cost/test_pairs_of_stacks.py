"""Encoder–decoders: parameters and FLOPs to the unit, with a source of another length."""

from __future__ import annotations

import pytest
import torch
import transformers as tf
from torch.utils.flop_counter import FlopCounterMode

from headwise.cost.config import parts_of
from headwise.cost.parts import Component
from headwise.cost.workload import Workload
from headwise.errors import HeadwiseError
from tests.cost.flop_counter import built, counted, flops, planned, stored
from tests.cost.pair_sizes import BART, SOURCE, T5, WHISPER

BATCH, LENGTH = 3, 11
PAIR = Workload(length=LENGTH, source=SOURCE, batch=BATCH, attention="materialised")
ALIKE = Workload(length=SOURCE, batch=BATCH, attention="materialised")
GATED = {**T5, "feed_forward_proj": "gated-gelu"}
APART = {"tie_word_embeddings": False}
PAIRS = [
    ("T5Model", tf.T5Config(**T5)),
    ("T5ForConditionalGeneration", tf.T5Config(**T5)),
    ("T5ForConditionalGeneration", tf.T5Config(**GATED)),
    ("MT5ForConditionalGeneration", tf.MT5Config(**T5)),
    ("MT5Model", tf.MT5Config(**T5)),
    ("UMT5ForConditionalGeneration", tf.UMT5Config(**T5)),
    ("T5ForQuestionAnswering", tf.T5Config(**{**T5, "num_labels": 2})),
    ("BartModel", tf.BartConfig(**BART)),
    ("BartForConditionalGeneration", tf.BartConfig(**BART)),
    ("BartForConditionalGeneration", tf.BartConfig(**BART, **APART)),
    ("BartForQuestionAnswering", tf.BartConfig(**BART)),
    ("MBartForConditionalGeneration", tf.MBartConfig(**BART)),
    ("PegasusForConditionalGeneration", tf.PegasusConfig(**BART)),
    ("MarianModel", tf.MarianConfig(**BART)),
    ("MarianMTModel", tf.MarianConfig(**BART)),
    ("MarianMTModel", tf.MarianConfig(**BART, **APART)),
    (
        "MarianMTModel",
        tf.MarianConfig(**BART, share_encoder_decoder_embeddings=False, decoder_vocab_size=89),
    ),
    (
        "MarianMTModel",
        tf.MarianConfig(**BART, **APART, share_encoder_decoder_embeddings=False),
    ),
    ("WhisperModel", tf.WhisperConfig(**WHISPER)),
    ("WhisperForConditionalGeneration", tf.WhisperConfig(**WHISPER)),
    ("WhisperForConditionalGeneration", tf.WhisperConfig(**WHISPER, **APART)),
]
ALONE = [
    ("T5EncoderModel", tf.T5Config(**T5)),
    ("UMT5EncoderModel", tf.UMT5Config(**T5)),
    ("T5ForTokenClassification", tf.T5Config(**T5)),
    ("BartForCausalLM", tf.BartConfig(**BART)),
    ("MBartForCausalLM", tf.MBartConfig(**BART)),
    ("PegasusForCausalLM", tf.PegasusConfig(**BART)),
    ("MarianForCausalLM", tf.MarianConfig(**BART)),
    ("WhisperForCausalLM", tf.WhisperConfig(**WHISPER)),
    ("WhisperForAudioClassification", tf.WhisperConfig(**WHISPER)),
    ("WhisperForAudioClassification", tf.WhisperConfig(**WHISPER, use_weighted_layer_sum=True)),
]
CLASSIFIERS = [
    ("T5ForSequenceClassification", tf.T5Config(**T5)),
    ("BartForSequenceClassification", tf.BartConfig(**BART)),
    ("BartForSequenceClassification", tf.BartConfig(**BART, num_labels=5)),
    ("MBartForSequenceClassification", tf.MBartConfig(**BART)),
]


def names(of: list[tuple[str, object]]) -> list[str]:
    return [f"{name}-{number}" for number, (name, _) in enumerate(of)]


def sound(config) -> dict[str, torch.Tensor]:
    frames = 2 * config.max_source_positions
    return {"input_features": torch.zeros(BATCH, config.num_mel_bins, frames)}


def source(config, length: int = SOURCE) -> dict[str, torch.Tensor]:
    if config.model_type == "whisper":
        return sound(config)
    return {"input_ids": torch.full((BATCH, length), 5)}


def pair(config, length: int = LENGTH) -> dict[str, torch.Tensor]:
    return {**source(config), "decoder_input_ids": torch.full((BATCH, length), 5)}


def agrees(name, config, inputs, workload):
    found = counted(name, config, workload)
    assert found.parameters == stored(built(name, config))
    forward, both = flops(built(name, config, "cpu"), inputs)
    assert (found.flops, found.training_flops) == (forward, both)


@pytest.mark.parametrize(("name", "config"), PAIRS, ids=names(PAIRS))
def test_both_stacks(name, config):
    agrees(name, config, pair(config), PAIR)


@pytest.mark.parametrize(("name", "config"), ALONE, ids=names(ALONE))
def test_one_stack(name, config):
    ids = {"input_ids": torch.full((BATCH, SOURCE), 5), "use_cache": False}
    agrees(name, config, ids if name.endswith("ForCausalLM") else source(config), ALIKE)


@pytest.mark.parametrize(("name", "config"), CLASSIFIERS, ids=names(CLASSIFIERS))
def test_classes_of_a_sequence(name, config):
    ids = torch.full((BATCH, SOURCE), 5)
    ids[:, -1] = config.eos_token_id
    agrees(name, config, {"input_ids": ids}, ALIKE)


@pytest.mark.parametrize(
    ("name", "config"),
    [case for case in PAIRS if case[0].endswith(("Generation", "MTModel"))],
)
def test_one_token_after_a_cache(name, config):
    model = built(name, config, "cpu")
    with torch.no_grad():
        first = model(**pair(config), use_cache=True)
        encoded = (first.encoder_last_hidden_state,)
        with FlopCounterMode(display=False) as counter:
            model(
                encoder_outputs=encoded,
                decoder_input_ids=torch.full((BATCH, 1), 5),
                cache=first.past_key_values,
            )
    step = Workload(length=1, cached=LENGTH, source=SOURCE, batch=BATCH)
    found = counted(name, config, step)
    assert found.flops == counter.get_total_flops()
    assert sum(line.macs for line in found.lines if line.stack == "encoder") == 0
    again = [line.macs for line in found.lines if line.role == "cross" and line.name in "W_K W_V"]
    assert len(again) == 2 * 5
    assert set(again) == {0}


def test_a_sound_is_always_as_long():
    name, config = PAIRS[-2]
    one, other = (
        counted(name, config, Workload(length=LENGTH, source=n, batch=BATCH)).macs
        for n in (1, 5000)
    )
    assert one == other == counted(name, config, PAIR).macs


def test_cross_attention_reads_the_source():
    found = counted(*PAIRS[1], PAIR).lines
    scores = {
        (line.stack, line.role): line.macs
        for line in found
        if line.component is Component.SCORES and line.layer == 0
    }
    assert scores == {
        ("encoder", "self"): BATCH * 3 * SOURCE * SOURCE * 7,
        ("decoder", "self"): BATCH * 3 * LENGTH * LENGTH * 7,
        ("decoder", "cross"): BATCH * 3 * LENGTH * SOURCE * 7,
    }


def test_an_untied_t5_is_counted_as_its_files_hold_it():
    config = {**tf.T5Config(**GATED).to_dict(), "tie_word_embeddings": False}
    apart = parts_of(config)
    together = planned("T5ForConditionalGeneration", tf.T5Config(**GATED))
    more = sum(m.parameters for *_, m in apart.matrices()) - sum(
        m.parameters for *_, m in together.matrices()
    )
    assert more == 97 * 23
    assert "unties it" in apart.notes[0]
    assert together.notes == ()


def test_sinusoids_are_stored_and_not_learned():
    def fixed(name, config):
        return [m.name for *_, m in planned(name, config).matrices() if not m.learned]

    assert fixed("MarianMTModel", tf.MarianConfig(**BART)) == ["positions"] * 2
    assert fixed("WhisperModel", tf.WhisperConfig(**WHISPER)) == ["positions"]
    assert fixed("BartModel", tf.BartConfig(**BART)) == []


def test_a_decoder_alone_says_what_it_does_not_read():
    assert "reads nothing" in planned("BartForCausalLM", tf.BartConfig(**BART)).notes[0]


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({**T5, "model_type": "t5", "architectures": ["T5Stack"]}, "T5Stack"),
        ({**T5, "model_type": "t5", "feed_forward_proj": "a-b"}, "feed_forward_proj"),
        ({**BART, "model_type": "bart", "decoder_attention_heads": 7}, "7 heads do not divide"),
        ({**BART, "model_type": "marian", "architectures": ["MarianForTea"]}, "MarianForTea"),
        ({**WHISPER, "model_type": "whisper", "encoder_layers": None}, "no encoder_layers"),
        ({**WHISPER, "model_type": "whisper", "architectures": ["WhisperTurbo"]}, "WhisperTurbo"),
    ],
)
def test_refused(config, said):
    with pytest.raises(HeadwiseError, match=said):
        parts_of(config)


def test_another_source_is_noticed():
    name, config = PAIRS[1]
    longer = counted(name, config, Workload(length=LENGTH, source=SOURCE + 1, batch=BATCH))
    assert longer.flops != flops(built(name, config, "cpu"), pair(config))[0]
