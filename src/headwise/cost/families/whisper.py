"""Whisper: two convolutions and an encoder of fixed length, and a decoder that reads it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Final

from headwise.cost.blocks import blocks
from headwise.cost.families.bart import DECODER, ENCODER, NO_SOURCE
from headwise.cost.families.biased import (
    biased_block,
    norms,
    of_sequence,
    vector,
    without_source,
)
from headwise.cost.families.outside import class_of, labels, linear, shared, table, unembedding
from headwise.cost.parts import Component, Matrix, Parts, Stack
from headwise.cost.settings import Settings

__all__ = ["FAMILIES"]

_CLASSES: Final = {
    "ForConditionalGeneration": "logits",
    "ForAudioClassification": "classes",
    "ForCausalLM": "alone",
    "Model": "",
}
_KERNEL: Final = 3  # frames that each convolution sees; the second moves by two


def _encoder(settings: Settings) -> Stack:
    d, layers = settings.size("d_model"), settings.layers(ENCODER.layers)
    tokens = settings.size("max_source_positions")
    sound = _KERNEL * settings.size("num_mel_bins")

    def convolution(name: str, d_in: int, positions: int, first: bool) -> Matrix:
        made = linear(name, d_in, d, bias=True, component=Component.PATCHES)
        return replace(made, positions=positions, input_gradient=not first)

    return Stack(
        name="encoder",
        d_model=d,
        layers=blocks([biased_block(settings, ENCODER, key_bias=False)] * layers),
        matrices=(
            convolution("convolution 1", sound, 2 * tokens, first=True),
            convolution("convolution 2", _KERNEL * d, tokens, first=False),
            table("positions", Component.POSITIONS, tokens, d, learned=False),
        ),
        vectors=tuple(norms(d, "final norm")),
        context=tokens,
        tokens=tokens,
        decodes=False,
    )


def _decoder(settings: Settings, head: str, vocab: int) -> Stack:
    d, layers = settings.size("d_model"), settings.layers(DECODER.layers)
    context = settings.size("max_target_positions")
    block = biased_block(settings, DECODER, causal=True, source=d, key_bias=False)
    made = blocks([block] * layers)
    after = unembedding(d, vocab, tied=shared(settings, True)) if head else []
    return Stack(
        name="decoder",
        d_model=d,
        layers=without_source(made) if head == "alone" else made,
        matrices=(
            table("tokens", Component.EMBEDDING, vocab, d),
            table("positions", Component.POSITIONS, context, d),
            *after,
        ),
        vectors=tuple(norms(d, "final norm")),
        context=context,
    )


def _classifier(settings: Settings) -> Stack:
    """The encoder, a projection of every token, and classes of their mean."""
    encoder = _encoder(settings)
    d, width = encoder.d_model, settings.size("classifier_proj_size", default=256)
    weighed = settings.flag("use_weighted_layer_sum", False)
    weights = [vector("weights of the layers", Component.HEAD, len(encoder.layers) + 1)]
    return replace(
        encoder,
        matrices=(
            *encoder.matrices,
            linear("projection", d, width, bias=True),
            of_sequence("classes", width, labels(settings)),
        ),
        vectors=(*encoder.vectors, *(weights if weighed else [])),
    )


def _whisper(settings: Settings) -> Parts:
    vocab = settings.size("vocab_size")
    name, head = class_of(settings, "WhisperForConditionalGeneration", _CLASSES)
    if head == "classes":
        stacks: tuple[Stack, ...] = (_classifier(settings),)
    elif head == "alone":
        stacks = (_decoder(settings, head, vocab),)
    else:
        stacks = (_encoder(settings), _decoder(settings, head, vocab))
    return Parts(
        family=settings.family,
        model_class=name,
        vocab=vocab,
        stacks=stacks,
        notes=(NO_SOURCE,) if head == "alone" else (),
    )


FAMILIES: Final[dict[str, Callable[[Settings], Parts]]] = {"whisper": _whisper}
