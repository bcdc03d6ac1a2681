"""From what the user names to parts: a configuration, a folder, an id on the hub, a GGUF file."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from headwise.cost.families.own import is_own, own_parts
from headwise.cost.gguf import Stored, read_stored
from headwise.cost.hub import fetch_config, is_hub_id
from headwise.cost.parts import Parts
from headwise.cost.settings import Settings, brief
from headwise.errors import ModelError

__all__ = ["Source", "known_families", "load_parts", "parts_of", "read_config", "read_source"]

_MODULES: Final = (
    "llama", "nested", "gpt2", "opt", "deepseek", "bert", "t5", "bart", "whisper", "vit", "clip",
)  # fmt: skip
_FILES: Final = ("config.json", "architecture.json")  # what a folder is known by, in this order
_SIZES: Final = "give the sizes as options: --d-model, --layers, --heads, …"
_MOST_BYTES: Final = 64 * 2**20  # a configuration is a thousandth of that


@dataclass(frozen=True, slots=True)
class Source:
    """A model that was named: its parts, and where they come from.

    ``stored``: what its tensors take, where the source is a file that holds them; ``config``: the
    configuration that was read, where it is one of transformers. Else None.
    """

    parts: Parts
    where: str
    stored: Stored | None = None
    config: Mapping[str, Any] | None = None


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
    if is_own(config):
        return own_parts(settings)
    readers = known_families()
    if settings.family not in readers:
        raise _unknown(settings, sorted(readers))
    parts: Parts = readers[settings.family](settings)
    return parts


def _unknown(settings: Settings, known: list[str]) -> ModelError:
    values, to_do = settings.values, f"or {_SIZES}"
    if settings.family:
        named = f"the model type {brief(settings.family)}"
        text = values.get("text_config")
        inner = text.get("model_type") if isinstance(text, Mapping) else None
        if inner in known:
            to_do = f"or give its text_config alone, of the type {inner}, as a file of its own"
    elif "_class_name" in values:
        named = f"no model_type: it is of diffusers ({brief(values['_class_name'])})"
    else:
        first = ", ".join(str(key)[:40] for key in list(values)[:4])
        named = f"no model_type, but {first}" if values else "no keys"
    return ModelError(f"{settings.where} has {named}", allowed=", ".join(known), to_do=to_do)


def load_parts(source: object) -> Parts:
    """The parts of a model, from whatever names it: see ``read_source``."""
    return read_source(source).parts


def read_source(source: object) -> Source:
    """A model from what names it; weights are never read, and nothing that can run is.

    Args:
        source: a config.json or architecture.json under any name, a folder that has one, a .gguf
            file, an id on the Hugging Face hub (looked up in its cache first; one small file is
            fetched), a configuration as a mapping or as an object of transformers, an
            ``Architecture``, or parts.

    Raises:
        ModelError: what was named cannot be found, read or counted.

    Example:
        >>> read_source({"model_type": "opt", "hidden_size": 64, "num_attention_heads": 4,
        ...     "num_hidden_layers": 2, "ffn_dim": 96, "vocab_size": 257,
        ...     "max_position_embeddings": 32}).parts.model_class
        'OPTForCausalLM'
    """
    if isinstance(source, Source):
        return source
    if isinstance(source, Parts):
        return Source(source, source.family)
    if isinstance(source, Mapping):
        return _read(source, "the configuration")
    if isinstance(source, (str, Path)):
        return _named(str(source))
    name = type(source).__name__
    for method, options in (("to_dict", {}), ("model_dump", {"mode": "json"})):
        if callable(getattr(source, method, None)) and not isinstance(source, type):
            found = getattr(source, method)(**options)
            if isinstance(found, Mapping):
                return _read(found, name)
    raise ModelError(
        f"a model as {name}",
        allowed="a path, an id on the hub, a mapping, a configuration of transformers, or parts",
    )


def _named(name: str) -> Source:
    path = Path(name).expanduser()
    try:
        is_folder, is_file = bool(name) and path.is_dir(), path.is_file()
    except (OSError, ValueError) as error:  # a name too long, or with a null character
        reason = getattr(error, "strerror", None) or error
        raise ModelError(f"cannot look for {brief(name)}: {reason}") from None
    if is_folder:
        return _configured(_in_folder(path))
    if is_file:
        return _from_file(path)
    if is_hub_id(name):
        return _configured(fetch_config(name), name)
    raise ModelError(
        f"there is no file or folder {name or repr(name)}",
        allowed="a config.json, a folder that has one, a .gguf file, or an id on the hub",
        to_do=f"or {_SIZES}",
    )


def _in_folder(folder: Path) -> Path:
    for name in _FILES:
        if (folder / name).is_file():
            return folder / name
    stored = sorted(folder.glob("*.gguf"))
    raise ModelError(
        f"{folder} has no {' and no '.join(_FILES)}",
        to_do=f"name a file, such as {stored[0]}" if stored else _SIZES,
    )


def _from_file(path: Path) -> Source:
    try:
        with path.open("rb") as file:
            start = file.read(4)
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror or error}") from None
    if start != b"GGUF":
        return _configured(path)
    parts, stored = read_stored(path, parts_of)
    return Source(parts, str(path), stored)


def _configured(path: Path, where: str | None = None) -> Source:
    return _read(read_config(path), str(path) if where is None else where)


def _read(config: Mapping[str, Any], where: str) -> Source:
    return Source(parts_of(config, where), where, config=None if is_own(config) else config)


def read_config(path: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        ModelError: the file cannot be read, or holds something else.
    """
    try:
        size = path.stat().st_size
        if size > _MOST_BYTES:
            raise ModelError(
                f"{path} has {size:,} bytes", allowed="a configuration", to_do="name a config.json"
            )
        found = json.loads(path.read_text(encoding="utf-8-sig"))
    except RecursionError:
        raise ModelError(f"cannot read {path}: it is nested too deep") from None
    except ValueError as error:
        if isinstance(error, ModelError):
            raise
        reason = "it is not text in UTF-8" if isinstance(error, UnicodeDecodeError) else str(error)
        to_do = "name a config.json, its folder, or a .gguf file"
        raise ModelError(f"{path} holds no JSON: {reason}", to_do=to_do) from None
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror or error}") from None
    if not isinstance(found, dict):
        raise ModelError(f"{path} holds no JSON object", to_do="name a config.json")
    return found
