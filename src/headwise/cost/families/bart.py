"""BART, Marian and their kin: an encoder and a decoder of LayerNorms and biases.

They differ in what stands before and after the blocks, and in whether positions are learned.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from headwise.cost.blocks import blocks
from headwise.cost.families.biased import (
    Keys,
    biased_block,
    norms,
    of_sequence,
    without_source,
)
from headwise.cost.families.outside import class_of, labels, linear, shared, table, unembedding
from headwise.cost.parts import Component, Matrix, Parts, Stack
from headwise.cost.settings import Settings

__all__ = ["DECODER", "ENCODER", "FAMILIES", "NO_SOURCE"]

ENCODER: Final = Keys(
    width="d_model",
    layers="encoder_layers",
    heads="encoder_attention_heads",
    d_ff="encoder_ffn_dim",
)
DECODER: Final = Keys(
    width="d_model",
    layers="decoder_layers",
    heads="decoder_attention_heads",
    d_ff="decoder_ffn_dim",
)
NO_SOURCE: Final = "the decoder alone: its cross-attention is stored, but reads nothing"
_HEADS: Final = {
    "ForConditionalGeneration": "logits",
    "ForSequenceClassification": "classes",
    "ForQuestionAnswering": "span",
    "ForCausalLM": "alone",
    "Model": "",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Manner:
    """How a family differs from BART.

    Attributes:
        name: the start of its class names.
        default: the end of the class that is counted where the configuration names none.
        unused: rows of the table of positions before the first.
        learned: whether positions are learned; sinusoids are stored with the weights.
        before, after: LayerNorms before and after the blocks.
    """

    name: str
    default: str = "ForConditionalGeneration"
    classes: dict[str, str] = field(default_factory=lambda: dict(_HEADS))
    unused: int = 0
    learned: bool = True
    before: bool = False
    after: bool = False


_PAIR: Final = {"ForConditionalGeneration": "logits", "ForCausalLM": "alone", "Model": ""}
MANNERS: Final[dict[str, Manner]] = {
    "bart": Manner(name="Bart", unused=2, before=True),
    "mbart": Manner(name="MBart", unused=2, before=True, after=True),
    "pegasus": Manner(name="Pegasus", classes=_PAIR, learned=False, after=True),
    "marian": Manner(
        name="Marian",
        default="MTModel",
        classes={"MTModel": "logits", "ForCausalLM": "alone", "Model": ""},
        learned=False,
    ),
}


def _stack(settings: Settings, manner: Manner, name: str, matrices: list[Matrix]) -> Stack:
    decoder = name == "decoder"
    keys = DECODER if decoder else ENCODER
    d, context = settings.size("d_model"), settings.size("max_position_embeddings")
    block = biased_block(settings, keys, causal=decoder, source=d if decoder else None)
    rows = context + manner.unused
    vectors = norms(d, "norm of the embedding") if manner.before else []
    vectors += norms(d, "final norm") if manner.after else []
    return Stack(
        name=name,
        d_model=d,
        layers=blocks([block] * settings.layers(keys.layers)),
        matrices=(
            table("positions", Component.POSITIONS, rows, d, learned=manner.learned),
            *matrices,
        ),
        vectors=tuple(vectors),
        context=context,
        decodes=decoder,
    )


def _after(settings: Settings, head: str, d: int, vocab: int) -> list[Matrix]:
    if head in ("logits", "alone"):
        return unembedding(d, vocab, tied=shared(settings, True))
    if head == "classes":
        said = "id2label" in settings or "num_labels" in settings
        return [
            of_sequence("layer before the classes", d, d),
            of_sequence("classes", d, labels(settings) if said else 3),
        ]
    return [linear("span", d, 2, bias=True)] if head == "span" else []


def _alone(settings: Settings, manner: Manner, name: str, vocab: int) -> Parts:
    d = settings.size("d_model")
    tokens = table("tokens", Component.EMBEDDING, vocab, d)
    whole = _stack(settings, manner, "decoder", [tokens, *_after(settings, "alone", d, vocab)])
    stack = Stack(
        name=whole.name,
        d_model=d,
        layers=without_source(whole.layers),
        matrices=whole.matrices,
        vectors=whole.vectors,
        context=whole.context,
    )
    return Parts(
        family=settings.family,
        model_class=name,
        vocab=vocab,
        stacks=(stack,),
        notes=(NO_SOURCE,),
    )


def _read(settings: Settings, manner: Manner) -> Parts:
    d, vocab = settings.size("d_model"), settings.size("vocab_size")
    name, head = class_of(settings, manner.name + manner.default, manner.classes)
    if head == "alone":
        return _alone(settings, manner, name, vocab)
    one_table = settings.flag("share_encoder_decoder_embeddings", True)
    tied = shared(settings, True) and one_table
    own = vocab if one_table else settings.size("decoder_vocab_size", default=vocab)
    read = [table("tokens", Component.EMBEDDING, vocab, d)]
    if one_table and not tied:  # what transformers ties the others to is then a table of its own
        read.append(table("shared tokens", Component.EMBEDDING, vocab, d))
    written = table("tokens", Component.EMBEDDING, own, d, tied=tied)
    return Parts(
        family=settings.family,
        model_class=name,
        vocab=own,
        stacks=(
            _stack(settings, manner, "encoder", read),
            _stack(settings, manner, "decoder", [written, *_after(settings, head, d, own)]),
        ),
    )


def _reader(manner: Manner) -> Callable[[Settings], Parts]:
    return lambda settings: _read(settings, manner)


FAMILIES: Final[dict[str, Callable[[Settings], Parts]]] = {
    family: _reader(manner) for family, manner in MANNERS.items()
}
