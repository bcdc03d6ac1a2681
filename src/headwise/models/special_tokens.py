"""The ids that a checkpoint's files give a meaning in generation: what ends an answer, what is
never in one.

a Hugging Face folder   generation_config.json, and for what it leaves out config.json
a GGUF file             the ends of text and of a turn in its header
a Headwise folder       <|endoftext|> of the tokenizer, if it has one
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tokenizers import Tokenizer

from headwise.errors import ModelError
from headwise.gguf_header import read_gguf_header
from headwise.models.checkpoints.checks import read_json

__all__ = ["END_OF_TEXT", "SpecialTokens", "special_tokens"]

END_OF_TEXT: Final = "<|endoftext|>"
_GGUF_ENDS: Final = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")


@dataclass(frozen=True)
class SpecialTokens:
    """``stop`` ends an answer, ``forbidden`` is never chosen."""

    stop: frozenset[int] = frozenset()
    forbidden: tuple[int, ...] = ()


def special_tokens(path: Path | None, tokenizer: Tokenizer) -> SpecialTokens:
    """What the files at ``path`` say; without files, what the tokenizer says.

    Raises:
        ModelError: the files forbid sequences of tokens, which is not supported.

    Example:
        >>> from tokenizers.models import WordLevel
        >>> special_tokens(None, Tokenizer(WordLevel({"<|endoftext|>": 7}))).stop
        frozenset({7})
    """
    if path is not None and path.is_file():
        metadata = read_gguf_header(path).metadata
        return SpecialTokens(stop=_ids([metadata.get(name) for name in _GGUF_ENDS]))
    found: dict[str, Any] = {}
    if path is not None and not (path / "architecture.json").is_file():
        for name in ("config.json", "generation_config.json"):
            if (path / name).is_file():
                said = read_json(path / name)
                found |= {key: value for key, value in said.items() if value is not None}
        return SpecialTokens(
            stop=_ids(found.get("eos_token_id")),
            forbidden=_forbidden(found, path),
        )
    return SpecialTokens(stop=_ids(tokenizer.token_to_id(END_OF_TEXT)))


def _ids(value: Any) -> frozenset[int]:
    """One id, several or none."""
    several = value if isinstance(value, list) else [value]
    return frozenset(id for id in several if isinstance(id, int))


def _forbidden(found: dict[str, Any], path: Path) -> tuple[int, ...]:
    words = found.get("bad_words_ids") or []
    longer = [word for word in words if len(word) != 1]
    if longer:
        raise ModelError(
            f"generation_config.json in {path} forbids the sequence of tokens {longer[0]}",
            allowed="bad_words_ids of one token each",
            to_do="remove the others from the file",
        )
    return tuple(sorted({*(word[0] for word in words), *(found.get("suppress_tokens") or [])}))
