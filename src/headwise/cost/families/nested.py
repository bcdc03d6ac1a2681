"""Models of text and pictures: the decoder that writes the text, counted by itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Final

from headwise.cost.families.llama import FAMILIES as DECODERS
from headwise.cost.parts import Parts
from headwise.cost.settings import Settings
from headwise.errors import ModelError

__all__ = ["FAMILIES"]


def _text(settings: Settings, family: str) -> Parts:
    text = settings.below("text_config")
    if text is None:
        raise ModelError(
            f"{settings.where} has no text_config",
            to_do="add the key, or give the sizes as options",
        )
    outer = {k: settings.values[k] for k in ("tie_word_embeddings",) if k in settings.values}
    given = Settings({"model_type": family, **text.values, **outer}, text.where)
    if given.family != family:
        raise ModelError(f"model_type is {given.family!r} in {given.where}", allowed=family)
    parts = DECODERS[family](given)
    note = f"text_config alone is counted, as {parts.model_class}: no pictures, no vision_config"
    return replace(parts, notes=(note, *parts.notes))


def _reader(family: str) -> Callable[[Settings], Parts]:
    return lambda settings: _text(settings, family)


FAMILIES: Final[dict[str, Callable[[Settings], Parts]]] = {"gemma3": _reader("gemma3_text")}
