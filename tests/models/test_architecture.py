"""The record of a model: what it says, what it refuses, and that it is the same after JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import pytest
from pydantic import ValidationError

from headwise.errors import ModelError
from headwise.models import Architecture, Embedding, Relative, Rotary, Stack, Unembedding
from headwise.models.architecture import head_width
from headwise.positions import Layout, scalings
from tests.models.architectures import SCALINGS


def stack(**more: Any) -> Stack:
    return Stack(**{"layers": 2, "heads": 4, "kv_heads": 2, "d_head": 6, "d_ff": 7, **more})


def model(**more: Any) -> Architecture:
    return Architecture(**{"vocab": 17, "d_model": 12, "context": 13, **more})


def both(encoder: dict[str, Any] | None = None, decoder: dict[str, Any] | None = None) -> Any:
    return model(
        encoder=stack(causal=False, **(encoder or {})), decoder=stack(cross=True, **(decoder or {}))
    )


def test_kinds_and_stacks() -> None:
    assert (model(decoder=stack()).kind, model(encoder=stack(causal=False)).kind) == (
        "decoder", "encoder",
    )  # fmt: skip
    assert both().kind == "encoder-decoder"
    assert both().stack is both().decoder or both().stack == both().decoder
    assert model(encoder=stack(causal=False)).stack.causal is False


def test_one_entry_is_for_all_layers() -> None:
    many = stack(windows=(3, None), scales=(None, 0.5))
    assert [many.window(i) for i in (0, 1)] == [3, None]
    assert [many.scale(i) for i in (0, 1)] == [None, 0.5]
    one = stack(windows=(5,), scales=(0.25,))
    assert [one.window(i) for i in (0, 1)] == [5, 5]
    assert [one.scale(i) for i in (0, 1)] == [0.25, 0.25]


def test_it_is_frozen() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        stack().heads = 3  # type: ignore[misc]


@pytest.mark.parametrize("word", SCALINGS)
def test_scalings_are_tagged_in_json(word: str) -> None:
    rotary = Rotary(width=4, base=100.0, layout=Layout.INTERLEAVED, scaling=SCALINGS[word])
    text = rotary.model_dump_json()
    assert json.loads(text)["scaling"]["kind"] == word
    assert Rotary.from_json(text) == rotary
    whole = model(decoder=stack(rotary=rotary))
    again = Architecture.from_json(whole.model_dump_json())
    assert again == whole
    assert type(again.stack.rotary.scaling) is type(SCALINGS[word])  # type: ignore[union-attr]
    assert hash(again) == hash(whole)


def test_json_keeps_every_field() -> None:
    made = both(
        {"relative": Relative(buckets=8, max_distance=9), "norm": "rms+1", "dropout": 0.25},
        {
            "alibi": True,
            "windows": (3, None),
            "scales": (1 / 3, None),
            "softcap": 0.1,
            "sinks": True,
        },
    ).model_copy(
        update={
            "embedding": Embedding(positions="learned", scale=math.sqrt(12), segments=2, norm=True),
            "unembedding": Unembedding(tied=False, bias=True, scale=0.1, softcap=30.0),
            "family": "t5",
        }
    )
    assert Architecture.from_json(made.model_dump_json()) == made
    assert Architecture.from_json(made.model_dump_json()) != both()


BAD: dict[str, tuple[Callable[[], object], str]] = {
    "heads that cannot share": (
        lambda: stack(heads=5),
        "5 query heads cannot share 2 key-value heads; allowed: a number of key-value heads that "
        "divides the query heads; change the sizes of the model",
    ),
    "no heads": (lambda: stack(heads=0), "heads is 0: Input should be greater than or equal to 1"),
    "odd rotary": (lambda: Rotary(width=3), "a rotary width of 3, which cannot be cut into pairs"),
    "wide rotary": (
        lambda: stack(rotary=Rotary(width=8)),
        "a rotary width of 8 in heads of width 6; allowed: even, and at most the width of a head",
    ),
    "rotary base": (lambda: Rotary(width=4, base=0.0), "base is 0.0: Input should be greater than"),
    "scaling of another type": (
        lambda: Rotary(width=4, scaling=3), "a rotary scaling of type int; allowed: a scaling",
    ),
    "unknown scaling": (
        lambda: Rotary(width=4, scaling={"kind": "magic"}),
        "a rotary scaling of kind 'magic'; allowed: linear, dynamic, yarn, llama3, longrope, prop",
    ),
    "scaling with another field": (
        lambda: Rotary(width=4, scaling={"kind": "linear", "facto": 2.0}),
        "the rotary scaling {'kind': 'linear', 'facto': 2.0}; allowed: factor",
    ),
    "scaling that the width does not fit": (
        lambda: Rotary(width=2, scaling=scalings.DynamicNTK(factor=2.0, trained=8)),
        "dynamic scaling of a rotary width of 2, whose only pair has frequency 1; allowed: a width",
    ),
    "too many windows": (
        lambda: stack(windows=(3, 3, 3)),
        "3 windows for 2 layers; allowed: one for all, or one for each",
    ),
    "scales": (
        lambda: stack(layers=3, scales=(1.0, 2.0)),
        "2 scales for 3 layers; allowed: one for all, or one for each",
    ),
    "empty window": (lambda: stack(windows=(0,)), "windows.0 is 0: Input should be greater than "),
    "window both ways": (
        lambda: stack(causal=False, windows=(3,)),
        "windows in a stack that is not causal; allowed: windows = (None,)",
    ),
    "two biases": (
        lambda: stack(alibi=True, relative=Relative()),
        "ALiBi and learned relative biases in one stack; allowed: one of them",
    ),
    "parallel cross": (
        lambda: stack(cross=True, placement="parallel"),
        "cross-attention in parallel blocks; allowed: another placement",
    ),
    "softcap": (lambda: stack(softcap=0.0), "softcap is 0.0: Input should be greater than 0"),
    "last softcap": (lambda: Unembedding(softcap=-1.0), "softcap is -1.0: Input should be greater"),
    "epsilon": (lambda: stack(norm_eps=math.nan), "norm_eps is nan: Input should be"),
    "infinite scale": (lambda: Embedding(scale=math.inf), "scale is inf: Input should be a finite"),
    "dropout": (lambda: stack(dropout=1.0), "dropout is 1.0: Input should be less than 1"),
    "unknown word": (lambda: stack(norm="batch"), "norm is 'batch': Input should be 'layer', 'rm"),
    "unknown field": (lambda: stack(colour=1), "colour is 1: Extra inputs are not permitted"),
    "no stack": (lambda: model(), "no stack of blocks; allowed: an encoder, a decoder, or both"),
    "cross alone": (lambda: model(decoder=stack(cross=True)), "cross-attention out of place; all"),
    "cross in the encoder": (lambda: both({"cross": True}), "cross-attention out of place; allow"),
    "no cross": (
        lambda: model(encoder=stack(causal=False), decoder=stack()), "cross-attention out of plac",
    ),
    "causal encoder": (
        lambda: model(encoder=stack()), "an encoder that is causal; allowed: causal = False",
    ),
    "decoder both ways": (
        lambda: model(decoder=stack(causal=False)), "a decoder that is not causal; allowed: causa",
    ),
    "pooler": (lambda: model(decoder=stack(), pooler=True), "a pooler on a decoder; allowed: a p"),
    "no unembedding": (
        lambda: model(decoder=stack(), unembedding=None),
        "a decoder without an unembedding; allowed: without one, an encoder",
    ),
    "classes": (
        lambda: model(encoder=stack(causal=False), classes=3),
        "classes without a pooler; allowed: a pooler, whose vector they read",
    ),
    "start": (lambda: model(decoder=stack(), start_token=17), "a start token of 17; allowed: 0 t"),
    "head width": (lambda: head_width(12, 5), "5 heads do not divide the width 12; allowed: a num"),
}  # fmt: skip


@pytest.mark.parametrize(("make", "words"), BAD.values(), ids=BAD.keys())
def test_what_does_not_fit_is_refused_in_one_line(make: Callable[[], object], words: str) -> None:
    with pytest.raises(ModelError) as caught:
        make()
    message = str(caught.value)
    assert message.startswith(words)
    assert "\n" not in message


def test_json_that_does_not_fit_is_refused_in_one_line() -> None:
    good = json.loads(model(decoder=stack()).model_dump_json())
    for change, words in (
        ({"decoder": {**good["decoder"], "heads": 5}}, "5 query heads cannot share 2 key-value"),
        ({"vocab": "many"}, "vocab is 'many': Input should be a valid integer"),
        ({"colour": 1}, "colour is 1: Extra inputs are not permitted"),
    ):
        with pytest.raises(ModelError) as caught:
            Architecture.from_json(json.dumps({**good, **change}))
        assert str(caught.value).startswith(words)
        assert str(caught.value).endswith("; write the file again")
        assert "change the sizes" not in str(caught.value)
    with pytest.raises(ModelError, match="Invalid JSON"):
        Architecture.from_json("{")
