"""From what the user names to parts: a configuration, a folder, an id on the hub, a GGUF file."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from headwise.cost.parts import Parts
from headwise.cost.settings import Settings
from headwise.errors import ModelError

__all__ = ["known_families", "parts_of", "read_config"]

_MODULES: Final = ("llama", "gpt2")


def known_families() -> dict[str, Any]:
    """Every model type that can be counted, with the function that reads its configuration."""
    found: dict[str, Any] = {}
    for name in _MODULES:
        found |= importlib.import_module(f"headwise.cost.families.{name}").FAMILIES
    return found


def parts_of(config: Mapping[str, Any], where: str = "the configuration") -> Parts:
    """The parts of the model that a configuration describes.

    Raises:
        ModelError: an unknown family, a key that is missing, or sizes that do not fit together.

    Example:
        >>> parts_of({"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4,
        ...           "vocab_size": 257, "n_positions": 32}).model_class
        'GPT2LMHeadModel'
    """
    settings = Settings(config, where)
    readers = known_families()
    if settings.family not in readers:
        named = f"the model type {settings.family!r}" if settings.family else "no model_type"
        raise ModelError(
            f"{where} has {named}",
            allowed=", ".join(sorted(readers)),
            to_do="or give the sizes as options: --d-model, --layers, --heads, …",
        )
    parts: Parts = readers[settings.family](settings)
    return parts


def read_config(path: Path) -> dict[str, Any]:
    """The JSON object in a file."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, ValueError, RecursionError) as error:
        raise ModelError(f"cannot read {path}: {error}") from error
    if not isinstance(found, dict):
        raise ModelError(f"{path} holds no JSON object", to_do="name a config.json")
    return found
