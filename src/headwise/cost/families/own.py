"""Headwise's own models: the fields of ``headwise.models.architecture.Architecture``, as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from headwise.cost.blocks import Block, FeedForward, blocks, norm
from headwise.cost.families.outside import linear, table, unembedding
from headwise.cost.parts import Component, Matrix, Parts, Rows, Stack, Vector
from headwise.cost.settings import Settings, brief
from headwise.errors import ModelError

__all__ = ["is_own", "own_parts"]

_NORMS: Final = {"layer": True, "rms": False, "rms+1": False}  # whether a norm has a bias
_PLACES: Final = {"pre": 1, "post": 1, "sandwich": 2, "branch": 1, "parallel": 1}  # per sublayer


def is_own(config: Mapping[str, Any]) -> bool:
    """Whether a configuration is an architecture of this library."""
    stacks = any(isinstance(config.get(name), Mapping) for name in ("encoder", "decoder"))
    return "model_type" not in config and stacks and "d_model" in config


def own_parts(settings: Settings) -> Parts:
    """The parts of an encoder, a decoder, or both.

    Raises:
        ModelError: a field is missing, or is not one that an architecture has.
    """
    encoder, decoder = settings.below("encoder"), settings.below("decoder")
    stacks = []
    if encoder is not None:
        stacks.append(_stack(settings, encoder, "encoder", first=True, last=decoder is None))
    if decoder is not None:
        stacks.append(_stack(settings, decoder, "decoder", first=encoder is None, last=True))
    kind = "EncoderDecoder" if len(stacks) == 2 else "Decoder" if encoder is None else "Encoder"
    return Parts(
        family=settings.word("family", "headwise"),
        model_class=kind,
        vocab=settings.size("vocab"),
        stacks=tuple(stacks),
    )


def _stack(settings: Settings, stack: Settings, name: str, *, first: bool, last: bool) -> Stack:
    d, layers = settings.size("d_model"), stack.layers("layers")
    matrices, vectors = _tables(settings, stack, d, tied=not first)
    if stack.flag("final_norm", True):
        vectors.append(norm("final norm", d, _norm_bias(stack)))
    more, others = _ends(settings, stack, d) if last else ([], [])
    relative = stack.below("relative")
    if relative is not None:
        rows, heads = relative.size("buckets", default=32), stack.size("heads")
        more.append(table("relative positions", Component.POSITIONS, rows, heads))
    return Stack(
        name=name,
        d_model=d,
        layers=blocks([_block(stack, d, layer, layers) for layer in range(layers)]),
        matrices=(*matrices, *more),
        vectors=(*vectors, *others),
        context=settings.size("context"),
        decodes=name == "decoder",
    )


def _tables(
    settings: Settings, stack: Settings, d: int, *, tied: bool
) -> tuple[list[Matrix], list[Vector]]:
    """The embedding; both stacks of an encoder–decoder have the same one, which counts once."""
    embedding = settings.below("embedding") or Settings({}, settings.where)
    found = [table("tokens", Component.EMBEDDING, settings.size("vocab"), d, tied=tied)]
    if _choice(embedding, "positions", ("learned", "sinusoidal"), None) == "learned":
        rows = settings.size("context")
        found.append(table("positions", Component.POSITIONS, rows, d, tied=tied))
    segments = embedding.size("segments", default=0, least=0)
    if segments:
        found.append(table("segments", Component.EMBEDDING, segments, d, tied=tied))
    has_norm = embedding.flag("norm", False) and not tied
    return found, [norm("norm of the embedding", d, _norm_bias(stack))] if has_norm else []


def _ends(settings: Settings, stack: Settings, d: int) -> tuple[list[Matrix], list[Vector]]:
    matrices: list[Matrix] = []
    vectors: list[Vector] = []
    absent = "unembedding" in settings.values and settings.values["unembedding"] is None
    if not absent:
        end = settings.below("unembedding") or Settings({}, settings.where)
        if end.flag("transform", False):
            name = "layer before the unembedding"
            matrices.append(linear(name, d, d, bias=True, rows=Rows.LOGITS))
            vectors.append(norm("norm before the unembedding", d, _norm_bias(stack)))
        tied, bias = end.flag("tied", True), end.flag("bias", False)
        matrices += unembedding(d, settings.size("vocab"), tied=tied, bias=bias)
    if settings.flag("pooler", False):
        matrices.append(linear("pooler", d, d, bias=True, rows=Rows.SEQUENCE))
    classes = settings.size("classes", default=0, least=0)
    if classes:
        matrices.append(linear("classes", d, classes, bias=True, rows=Rows.SEQUENCE))
    return matrices, vectors


def _block(stack: Settings, d: int, layer: int, layers: int) -> Block:
    heads, kv_heads, width = stack.size("heads"), stack.size("kv_heads"), stack.size("d_head")
    if heads % kv_heads:
        raise ModelError(
            f"{heads} query heads cannot share {kv_heads} key-value heads in {stack.where}",
            allowed="a number of key-value heads that divides the query heads",
        )
    cross, bias = stack.flag("cross", False), stack.flag("qkv_bias", False)
    of_place = _PLACES[_choice(stack, "placement", tuple(_PLACES), "pre") or "pre"]
    qk_norm = _choice(stack, "qk_norm", ("head", "all"), None)
    return Block(
        d_model=d,
        heads=heads,
        kv_heads=kv_heads,
        d_qk=width,
        d_value=width,
        feed_forward=FeedForward(
            d_ff=stack.size("d_ff"),
            gated=stack.flag("gated", True),
            bias=stack.flag("feed_forward_bias", False),
        ),
        causal=stack.flag("causal", True),
        window=_window(stack, layer, layers),
        source=d if cross else None,
        query_bias=bias,
        key_bias=bias,
        value_bias=bias,
        output_bias=stack.flag("output_bias", False),
        norms=(3 if cross else 2) * of_place,
        norm_bias=_norm_bias(stack),
        qk_norm=qk_norm,
        qk_norm_bias=_norm_bias(stack),
        sinks=stack.flag("sinks", False),
    )


def _window(stack: Settings, layer: int, layers: int) -> int | None:
    named = stack.sequence("windows") or [None]
    if len(named) not in (1, layers):
        raise ModelError(
            f"windows has {len(named)} entries for {layers} layers in {stack.where}",
            allowed="one for all, or one for each",
        )
    return Settings({"windows": named[layer % len(named)]}, stack.where).maybe("windows")


def _norm_bias(stack: Settings) -> bool:
    return _NORMS[_choice(stack, "norm", tuple(_NORMS), "rms") or "rms"]


def _choice(
    settings: Settings, name: str, allowed: tuple[str, ...], default: str | None
) -> str | None:
    value = settings.values.get(name, default)
    if value is not None and value not in allowed:
        raise ModelError(
            f"{name} is {brief(value)} in {settings.where}", allowed=", ".join(allowed)
        )
    return None if value is None else str(value)
