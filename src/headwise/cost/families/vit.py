"""ViT: a picture cut into patches, each a token, behind one token that stands for the whole."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Final

from headwise.cost.blocks import blocks
from headwise.cost.families.biased import Keys, biased_block, norms, of_sequence, vector
from headwise.cost.families.outside import class_of, labels, linear, table
from headwise.cost.parts import Component, Matrix, Parts, Stack, Vector
from headwise.cost.settings import Settings, brief
from headwise.errors import ModelError

__all__ = ["FAMILIES", "patches"]

_CLASSES: Final = {
    "ForImageClassification": "classes",
    "ForMaskedImageModeling": "pixels",
    "Model": "",
}


def _sides(settings: Settings, name: str) -> tuple[int, int]:
    """Height and width: one number for both, or a list of two."""
    given = settings.values.get(name)
    if not isinstance(given, list):
        side = settings.size(name)
        return side, side
    if len(given) != 2:
        raise ModelError(
            f"{name} is {brief(given)} in {settings.where}", allowed="a number, or [height, width]"
        )
    height, width = (Settings({name: side}, settings.where).size(name) for side in given)
    return height, width


def patches(settings: Settings, d: int, *, bias: bool) -> Matrix:
    """The convolution that makes a token of every patch: one product for each."""
    height, width = _sides(settings, "image_size")
    high, wide = _sides(settings, "patch_size")
    if high > height or wide > width:
        raise ModelError(
            f"patches of {high} × {wide} in pictures of {height} × {width} in {settings.where}",
            allowed="a patch_size up to image_size",
        )
    pixels = settings.size("num_channels", default=3) * high * wide
    made = linear("patches", pixels, d, bias=bias, component=Component.PATCHES)
    count = (height // high) * (width // wide)
    return replace(made, positions=count, input_gradient=False)


def _after(settings: Settings, head: str, d: int, count: int) -> list[Matrix]:
    if head == "classes":
        return [of_sequence("classes", d, labels(settings))]
    if head == "pixels":
        stride = settings.size("encoder_stride", default=16)
        pixels = settings.size("num_channels", default=3) * stride * stride
        return [replace(linear("pixels", d, pixels, bias=True), positions=count)]
    return [of_sequence("pooler", d, settings.size("pooler_output_size", default=d))]


def _vit(settings: Settings) -> Parts:
    keys = Keys()
    d, layers = settings.size(keys.width), settings.layers(keys.layers)
    name, head = class_of(settings, "ViTModel", _CLASSES)
    cut = patches(settings, d, bias=True)
    tokens = (cut.positions or 0) + 1
    block = biased_block(settings, keys, qkv_bias=settings.flag("qkv_bias", True))
    own: list[Vector] = [vector("token of the whole", Component.EMBEDDING, d)]
    if head == "pixels":
        own.append(vector("token of a hidden patch", Component.EMBEDDING, d))
    stack = Stack(
        name="vision",
        d_model=d,
        layers=blocks([block] * layers),
        matrices=(
            cut,
            table("positions", Component.POSITIONS, tokens, d),
            *_after(settings, head, d, tokens - 1),
        ),
        vectors=(*own, *norms(d, "final norm")),
        context=tokens,
        tokens=tokens,
        decodes=False,
    )
    return Parts(family=settings.family, model_class=name, vocab=0, stacks=(stack,))


FAMILIES: Final[dict[str, Callable[[Settings], Parts]]] = {"vit": _vit}
