"""CLIP: a tower for texts, a tower for pictures, and projections into one space."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final

from headwise.cost.blocks import blocks
from headwise.cost.families.biased import Keys, biased_block, norms, of_sequence, vector
from headwise.cost.families.outside import class_of, labels, table
from headwise.cost.families.vit import patches
from headwise.cost.parts import Component, Matrix, Parts, Rows, Stack
from headwise.cost.settings import Settings

__all__ = ["FAMILIES"]

_CLASSES: Final = {
    "TextModelWithProjection": "text projection",
    "VisionModelWithProjection": "vision projection",
    "TextModel": "text",
    "VisionModel": "vision",
    "ForImageClassification": "classes",
    "Model": "both",
}
_TEXT: Final = {key: head for key, head in _CLASSES.items() if head.startswith("text")}
_VISION: Final = {key: head for key, head in _CLASSES.items() if head.startswith("vision")}
# A configuration may say of a tower only what differs from these.
_DEFAULTS: Final[dict[str, dict[str, Any]]] = {
    "text_config": {
        "vocab_size": 49408, "hidden_size": 512, "intermediate_size": 2048,
        "num_hidden_layers": 12, "num_attention_heads": 8, "max_position_embeddings": 77,
        "projection_dim": 512,
    },
    "vision_config": {
        "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12,
        "num_attention_heads": 12, "image_size": 224, "patch_size": 32, "num_channels": 3,
        "projection_dim": 512,
    },
}  # fmt: skip


def _below(settings: Settings, name: str, notes: list[str]) -> Settings:
    """The configuration of a tower; ``notes`` gets the sizes that it leaves out."""
    given = settings.below(name) or Settings({}, f"{settings.where} ({name})")
    notes += given.taken(_DEFAULTS[name])
    return given.over(_DEFAULTS[name])


def _text(settings: Settings) -> Stack:
    keys = Keys()
    d, vocab = settings.size(keys.width), settings.size("vocab_size")
    context = settings.size("max_position_embeddings")
    return Stack(
        name="text",
        d_model=d,
        layers=blocks([biased_block(settings, keys, causal=True)] * settings.layers(keys.layers)),
        matrices=(
            table("tokens", Component.EMBEDDING, vocab, d),
            table("positions", Component.POSITIONS, context, d),
        ),
        vectors=tuple(norms(d, "final norm")),
        context=context,
        decodes=False,
    )


def _vision(settings: Settings) -> Stack:
    keys = Keys()
    d = settings.size(keys.width)
    cut = patches(settings, d, bias=False)
    tokens = (cut.positions or 0) + 1
    return Stack(
        name="vision",
        d_model=d,
        layers=blocks([biased_block(settings, keys)] * settings.layers(keys.layers)),
        matrices=(cut, table("positions", Component.POSITIONS, tokens, d)),
        vectors=(
            vector("token of the whole", Component.EMBEDDING, d),
            *norms(d, "first norm", "final norm"),
        ),
        context=tokens,
        tokens=tokens,
        decodes=False,
    )


def _with(stack: Stack, *matrices: Matrix) -> Stack:
    return replace(stack, matrices=(*stack.matrices, *matrices))


def _tower(settings: Settings, stack: Stack, head: str) -> Stack:
    """A tower by itself, with its projection if the class has one."""
    if not head.endswith("projection"):
        return stack
    width = settings.size("projection_dim")
    return _with(stack, of_sequence("projection", stack.d_model, width, bias=False))


def _both(settings: Settings, notes: list[str]) -> tuple[Stack, ...]:
    text = _text(_below(settings, "text_config", notes))
    vision = _vision(_below(settings, "vision_config", notes))
    width = settings.size("projection_dim")
    similarity = Matrix(
        name="similarities",
        component=Component.HEAD,
        d_in=width,
        d_out=1,
        rows=Rows.BATCH,
        tied=True,  # between texts and pictures: nothing is stored
    )
    text = _with(text, of_sequence("projection", text.d_model, width, bias=False), similarity)
    vision = _with(vision, of_sequence("projection", vision.d_model, width, bias=False))
    scale = vector("scale of the similarities", Component.HEAD, 1)
    return replace(text, vectors=(*text.vectors, scale)), vision


def _clip(settings: Settings) -> Parts:
    name, head = class_of(settings, "CLIPModel", _CLASSES)
    notes: list[str] = []
    if head == "both":
        stacks = _both(settings, notes)
    elif head.startswith("text"):
        below = _below(settings, "text_config", notes)
        stacks = (_tower(below, _text(below), head),)
    else:
        below = _below(settings, "vision_config", notes)
        tower = _tower(below, _vision(below), head)
        if head == "classes":
            tower = _with(tower, of_sequence("classes", tower.d_model, labels(settings)))
        stacks = (tower,)
    return _parts(settings, name, stacks, notes)


def _clip_text(settings: Settings) -> Parts:
    name, head = class_of(settings, "CLIPTextModel", _TEXT)
    return _parts(settings, name, (_tower(settings, _text(settings), head),))


def _clip_vision(settings: Settings) -> Parts:
    name, head = class_of(settings, "CLIPVisionModel", _VISION)
    return _parts(settings, name, (_tower(settings, _vision(settings), head),))


def _parts(
    settings: Settings, name: str, stacks: tuple[Stack, ...], notes: Sequence[str] = ()
) -> Parts:
    tables = (
        matrix.d_in
        for stack in stacks
        for matrix in stack.matrices
        if matrix.component is Component.EMBEDDING
    )
    return Parts(
        family=settings.family,
        model_class=name,
        vocab=next(tables, 0),
        stacks=stacks,
        notes=tuple(notes),
    )


FAMILIES: Final[dict[str, Callable[[Settings], Parts]]] = {
    "clip": _clip,
    "clip_text_model": _clip_text,
    "clip_vision_model": _clip_vision,
}
