"""What many families have in common: tables, heads, and the class that a configuration names."""

from __future__ import annotations

from collections.abc import Mapping

from headwise.cost.parts import Component, Matrix, Rows
from headwise.cost.settings import Settings, brief
from headwise.errors import ModelError

__all__ = [
    "CAUSAL",
    "causal_heads",
    "class_of",
    "labels",
    "linear",
    "shared",
    "table",
    "unembedding",
]


def table(
    name: str,
    component: Component,
    rows: int,
    d: int,
    *,
    tied: bool = False,
    learned: bool = True,
) -> Matrix:
    """A table whose rows are picked: no arithmetic."""
    return Matrix(
        name=name,
        component=component,
        d_in=rows,
        d_out=d,
        rows=Rows.NONE,
        tied=tied,
        learned=learned,
    )


def linear(
    name: str,
    d_in: int,
    d_out: int,
    *,
    bias: bool,
    rows: Rows = Rows.TOKENS,
    component: Component = Component.HEAD,
) -> Matrix:
    """A linear map outside of the blocks."""
    return Matrix(
        name=name,
        component=component,
        d_in=d_in,
        d_out=d_out,
        bias=d_out * bias,
        rows=rows,
    )


def unembedding(d: int, vocab: int, *, tied: bool, bias: bool = False) -> list[Matrix]:
    """From the last hidden vectors to logits; tied, the numbers are those of the embedding."""
    product = Matrix(
        name="unembedding",
        component=Component.UNEMBEDDING,
        d_in=d,
        d_out=vocab,
        bias=0 if tied else vocab * bias,
        rows=Rows.LOGITS,
        tied=tied,
    )
    if tied and bias:
        own = Matrix(
            name="unembedding bias",
            component=Component.UNEMBEDDING,
            d_in=1,
            d_out=vocab,
            rows=Rows.NONE,
        )
        return [product, own]
    return [product]


def class_of(settings: Settings, default: str, known: Mapping[str, str]) -> tuple[str, str]:
    """The class that the configuration names, and which head that is.

    ``known``: end of the name of a class → word for its head; ``default``: the class that is
    counted where the configuration names none.
    """
    name = (settings.sequence("architectures") or [default])[0]
    if not isinstance(name, str):
        raise ModelError(
            f"architectures has {brief(name)} in {settings.where}", allowed="names of classes"
        )
    for end, head in known.items():
        if name.endswith(end):
            return name, head
    raise ModelError(
        f"the class {name[:60]} in {settings.where}",
        allowed="classes that end in " + ", ".join(known),
        to_do="name one of them under architectures",
    )


CAUSAL = {
    "ForCausalLM": "logits",
    "LMHeadModel": "logits",
    "ForConditionalGeneration": "logits",
    "ForSequenceClassification": "classes",
    "ForTokenClassification": "tags",
    "ForQuestionAnswering": "span",
    "Model": "",
}


def causal_heads(
    settings: Settings, head: str, d: int, vocab: int, tied: bool, *, bias: bool = False
) -> list[Matrix]:
    """What stands after the last norm of a decoder."""
    if head == "logits":
        return unembedding(d, vocab, tied=tied, bias=bias)
    if head == "classes":
        return [linear("classes", d, labels(settings), bias=False)]
    if head == "tags":
        return [linear("classes", d, labels(settings), bias=True)]
    return [linear("span", d, 2, bias=True)] if head == "span" else []


def labels(settings: Settings) -> int:
    """How many classes there are: the entries of ``id2label``, two unless said otherwise."""
    named = settings.values.get("id2label")
    if isinstance(named, Mapping) and named:
        return len(named)
    return settings.size("num_labels", default=2)


def shared(settings: Settings, default: bool) -> bool:
    """Whether the unembedding is the embedding."""
    return settings.flag("tie_word_embeddings", default)
