"""T5 and its kin: no biases, RMSNorms, heads of width d_kv, and a table of biases by distance."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from headwise.cost.blocks import Block, FeedForward, blocks, norm
from headwise.cost.families.biased import of_sequence
from headwise.cost.families.outside import class_of, labels, linear, shared, table, unembedding
from headwise.cost.parts import Component, Matrix, Parts, Stack
from headwise.cost.settings import Settings, brief
from headwise.errors import ModelError

__all__ = ["FAMILIES"]

_NAMES: Final = {"t5": "T5", "mt5": "MT5", "umt5": "UMT5"}
_CLASSES: Final = {
    "ForConditionalGeneration": "logits",
    "ForSequenceClassification": "classes",
    "ForTokenClassification": "tags",
    "ForQuestionAnswering": "span",
    "EncoderModel": "encoder",
    "Model": "",
}
_ALONE: Final = ("tags", "encoder")  # classes that are the encoder and nothing else
_UNTIED: Final = (
    "tie_word_embeddings is false: the unembedding is counted as stored; transformers builds it "
    "tied and unties it when the weights that it reads differ"
)


def _gated(settings: Settings) -> bool:
    default = "relu" if settings.family == "t5" else "gated-gelu"
    kind = settings.word("feed_forward_proj", default)
    first, *rest = kind.split("-")
    if len(rest) > 1 or (rest and first != "gated"):
        raise ModelError(
            f"feed_forward_proj is {brief(kind)} in {settings.where}",
            allowed="an activation, or gated-ACTIVATION",
        )
    return bool(rest)


def _stack(settings: Settings, name: str, layers: int, tables: list[Matrix]) -> Stack:
    d, heads, width = (settings.size(key) for key in ("d_model", "num_heads", "d_kv"))
    decoder = name == "decoder"
    block = Block(
        d_model=d,
        heads=heads,
        kv_heads=heads,
        d_qk=width,
        d_value=width,
        feed_forward=FeedForward(d_ff=settings.size("d_ff"), gated=_gated(settings)),
        causal=decoder,
        source=d if decoder else None,
        norms=3 if decoder else 2,
    )
    buckets = settings.size("relative_attention_num_buckets")
    distances = table("distances", Component.POSITIONS, buckets, heads)
    # The first layer makes the biases for the whole stack; in umT5 every layer makes its own.
    times = layers if settings.family == "umt5" else 1
    return Stack(
        name=name,
        d_model=d,
        layers=blocks([block] * layers),
        matrices=(*tables, *(distances,) * times),
        vectors=(norm("final norm", d, bias=False),),
        decodes=decoder,
    )


def _after(settings: Settings, head: str, d: int, vocab: int) -> list[Matrix]:
    """What stands after the last stack."""
    if head == "logits":
        return unembedding(d, vocab, tied=shared(settings, True))
    if head == "classes":
        return [
            of_sequence("layer before the classes", d, d),
            of_sequence("classes", d, labels(settings)),
        ]
    return [linear(head, d, labels(settings), bias=True)] if head in ("tags", "span") else []


def _t5(settings: Settings) -> Parts:
    d, vocab, layers = (
        settings.size("d_model"),
        settings.size("vocab_size"),
        settings.layers("num_layers"),
    )
    title = _NAMES[settings.family]
    name, head = class_of(settings, f"{title}ForConditionalGeneration", _CLASSES)
    after = _after(settings, head, d, vocab)
    tokens = [table("tokens", Component.EMBEDDING, vocab, d)]
    if head in _ALONE:
        stacks: tuple[Stack, ...] = (_stack(settings, "encoder", layers, tokens + after),)
    else:
        again = [table("tokens", Component.EMBEDDING, vocab, d, tied=True)]
        deeper = settings.layers("num_decoder_layers", default=layers)
        stacks = (
            _stack(settings, "encoder", layers, tokens),
            _stack(settings, "decoder", deeper, again + after),
        )
    untied = head == "logits" and not shared(settings, True)
    notes = (_UNTIED,) if untied else ()
    return Parts(family=settings.family, model_class=name, vocab=vocab, stacks=stacks, notes=notes)


FAMILIES: Final[dict[str, Callable[[Settings], Parts]]] = dict.fromkeys(_NAMES, _t5)
