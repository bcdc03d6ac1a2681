"""Encoders of BERT's make: learned positions, LayerNorms after each sublayer, biases everywhere.

Which pooler and which head there is depends on the class that the configuration names.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from headwise.cost.blocks import blocks
from headwise.cost.families.biased import Keys, biased_block, norms, of_sequence, vector
from headwise.cost.families.outside import class_of, labels, linear, shared, table, unembedding
from headwise.cost.parts import Component, Matrix, Parts, Rows, Stack, Vector
from headwise.cost.settings import Settings
from headwise.errors import ModelError

__all__ = ["FAMILIES"]

_COMMON: Final = {
    "ForMaskedLM": "logits",
    "ForSequenceClassification": "classes",
    "ForMultipleChoice": "choice",
    "ForTokenClassification": "tags",
    "ForQuestionAnswering": "span",
}


_KEYS: Final = Keys()


@dataclass(frozen=True, slots=True, kw_only=True)
class Manner:
    """How a family differs from BERT.

    Attributes:
        name: the start of its class names.
        classes: the ends of class names that only it has.
        pooled: heads that read a pooler.
        dense: heads of the whole sequence that have a layer of their own before the classes.
        types: whether there is a table of segments.
        padded: whether positions begin after the number of the padding token.
        spare: whether an untied unembedding leaves a second bias, stored and not used.
    """

    name: str
    classes: dict[str, str] = field(default_factory=dict)
    pooled: tuple[str, ...] = ()
    dense: tuple[str, ...] = ()
    types: bool = True
    padded: bool = False
    spare: bool = False
    keys: Keys = _KEYS


_ROBERTA: Final = Manner(
    name="Roberta",
    classes={"ForCausalLM": "logits"},
    pooled=("", "choice"),
    dense=("classes",),
    padded=True,
    spare=True,
)
MANNERS: Final[dict[str, Manner]] = {
    "bert": Manner(
        name="Bert",
        classes={
            "ForPreTraining": "pretraining",
            "ForNextSentencePrediction": "next",
            "LMHeadModel": "logits",
        },
        pooled=("", "pretraining", "next", "classes", "choice"),
        spare=True,
    ),
    "roberta": _ROBERTA,
    "xlm-roberta": _ROBERTA,
    "camembert": _ROBERTA,
    "electra": Manner(
        name="Electra",
        classes={"ForPreTraining": "detection", "ForCausalLM": "logits"},
        dense=("classes", "choice"),
    ),
    "distilbert": Manner(
        name="DistilBert",
        dense=("classes", "choice"),
        types=False,
        keys=Keys(width="dim", layers="n_layers", heads="n_heads", d_ff="hidden_dim"),
    ),
}
_NAMES: Final = {"xlm-roberta": "XLMRoberta", "camembert": "Camembert"}


def _logits(
    settings: Settings, spare: bool, d: int, inner: int, vocab: int
) -> tuple[list[Matrix], list[Vector]]:
    """A layer, a LayerNorm and the unembedding with a bias."""
    tied = shared(settings, True)
    matrices = [
        linear("layer before the unembedding", d, inner, bias=True, rows=Rows.LOGITS),
        *unembedding(inner, vocab, tied=tied, bias=True),
    ]
    vectors = norms(inner, "norm before the unembedding")
    if spare and not tied:
        vectors.append(vector("bias that is not used", Component.UNEMBEDDING, vocab))
    return matrices, vectors


def _heads(
    settings: Settings, manner: Manner, head: str, sizes: tuple[int, int, int]
) -> tuple[list[Matrix], list[Vector]]:
    d, inner, vocab = sizes
    matrices: list[Matrix] = []
    vectors: list[Vector] = []
    if head in manner.pooled:
        matrices.append(of_sequence("pooler", d, d))
    if head in ("logits", "pretraining"):
        more, vectors = _logits(settings, manner.spare, d, inner, vocab)
        matrices += more
    if head in manner.dense and (head != "choice" or settings.flag("summary_use_proj", True)):
        matrices.append(of_sequence("layer before the classes", d, d))
    if head in ("pretraining", "next"):
        matrices.append(of_sequence("next sentence", d, 2))
    if head in ("classes", "choice"):
        matrices.append(of_sequence(head, d, labels(settings) if head == "classes" else 1))
    if head in ("tags", "span"):
        matrices.append(linear(head, d, labels(settings), bias=True))
    if head == "detection":
        matrices += [
            linear("layer before the detection", d, d, bias=True),
            linear("detection", d, 1, bias=True),
        ]
    return matrices, vectors


def _tables(settings: Settings, manner: Manner, vocab: int, inner: int) -> list[Matrix]:
    positions = settings.size("max_position_embeddings")
    learned = not settings.flag("sinusoidal_pos_embds", False)
    found = [
        table("tokens", Component.EMBEDDING, vocab, inner),
        table("positions", Component.POSITIONS, positions, inner, learned=learned),
    ]
    if manner.types:
        types = settings.size("type_vocab_size")
        found.append(table("segments", Component.EMBEDDING, types, inner))
    return found


def _context(settings: Settings, manner: Manner) -> int:
    """Positions that tokens can have: RoBERTa counts them from after its padding token."""
    positions = settings.size("max_position_embeddings")
    if not manner.padded:
        return positions
    return positions - settings.size("pad_token_id", default=1, least=0) - 1


def _read(settings: Settings, manner: Manner) -> Parts:
    if settings.flag("add_cross_attention", False):
        raise ModelError(
            f"add_cross_attention is true in {settings.where}",
            allowed="false",
            to_do="give the sizes of the pair of stacks as a BART or T5 configuration",
        )
    keys = manner.keys
    d, vocab = settings.size(keys.width), settings.size("vocab_size")
    inner = settings.size("embedding_size") if manner.name == "Electra" else d
    causal = settings.flag("is_decoder", False)
    title = _NAMES.get(settings.family, manner.name)
    known = {**_COMMON, **manner.classes, "Model": ""}
    name, head = class_of(settings, f"{title}Model", known)
    heads, vectors = _heads(settings, manner, head, (d, inner, vocab))
    matrices = _tables(settings, manner, vocab, inner)
    if inner != d:
        matrices.append(linear("from the embedding", inner, d, bias=True))
    stack = Stack(
        name="decoder" if causal else "encoder",
        d_model=d,
        layers=blocks([biased_block(settings, keys, causal=causal)] * settings.layers(keys.layers)),
        matrices=(*matrices, *heads),
        vectors=(*norms(inner, "norm of the embedding"), *vectors),
        context=_context(settings, manner),
        decodes=causal,
    )
    return Parts(family=settings.family, model_class=name, vocab=vocab, stacks=(stack,))


def _reader(manner: Manner) -> Callable[[Settings], Parts]:
    return lambda settings: _read(settings, manner)


FAMILIES: Final[dict[str, Callable[[Settings], Parts]]] = {
    family: _reader(manner) for family, manner in MANNERS.items()
}
