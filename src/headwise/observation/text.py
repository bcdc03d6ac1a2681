"""Text on its way to the model: cut into tokens, arranged as documents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor

from headwise.errors import ModelError, OptionError, TextError
from headwise.observation.driver import Document
from headwise.observation.loaded import LoadedModel
from headwise.observation.quiet import quiet

__all__ = ["DEFAULT_TOKENS", "Document", "Text", "tokenize"]

# Read when --tokens is left out: long enough for every statistic to settle, a few seconds on a CPU.
DEFAULT_TOKENS: Final = 2048

# A text far longer than what is asked for is not cut into tokens as a whole: 64 characters per
# token and a margin are taken first, which is more than any language needs.
_CHARACTERS_PER_TOKEN: Final = 64
_MARGIN: Final = 1_000_000

Text = str | Tensor | Sequence[int] | Sequence[str] | tuple[str, str] | tuple[Tensor, Tensor]


def tokenize(
    loaded: LoadedModel,
    text: Text,
    *,
    tokens: int | None = None,
    window: int | None = None,
    batch: int = 1,
    allow_long: bool = False,
) -> tuple[Document, ...]:
    """Cut a text into the documents that the model will read.

    A decoder reads the first ``tokens`` tokens in one piece, or in pieces of ``window`` tokens;
    with ``batch`` alone, in ``batch`` equally long pieces. An encoder reads pieces of ``window``
    tokens, its context by default, each with its special tokens around it (``tokens`` leaves these
    out). An encoder-decoder reads the first half of each piece as its source and is fed the second
    half as its target (teacher forcing); a pair ``(source, target)`` gives both directly.

    Args:
        loaded: the model.
        text: a text; several texts (several documents each, ``tokens`` bounds each text); or token
            ids, taken as they are.
        tokens: how many tokens to read; None for all, but at most ``DEFAULT_TOKENS`` and at most
            what the model was trained on.
        window: longest piece.
        batch: pieces computed side by side.
        allow_long: go on beyond the length the model was trained on.

    Raises:
        TextError: fewer than two tokens.
        OptionError: more tokens than the text has, or than the model was trained on.
    """
    _check_sizes(tokens, window, batch)
    if _is_pair(loaded, text):
        documents: tuple[Document, ...] = (_pair(loaded, text, tokens),)
    else:
        documents = ()
        texts = _several(text)
        for each in texts:
            ids = _ids(loaded, each, tokens)
            count = _count(loaded, ids, tokens, allow_long)
            piece = _piece(loaded, count, window, batch if len(texts) == 1 else 1)
            documents += _pieces(loaded, ids[:count], piece, given=not isinstance(each, str))
    for document in documents:
        _check_document(loaded, document, allow_long)
    return documents


def _check_sizes(tokens: int | None, window: int | None, batch: int) -> None:
    for name, value, least in (("tokens", tokens, 2), ("window", window, 2), ("batch", batch, 1)):
        if value is not None and value < least:
            raise OptionError(f"--{name} is {value}", allowed=f"{least} or more")


def _is_pair(loaded: LoadedModel, text: Text) -> bool:
    return loaded.kind == "encoder-decoder" and isinstance(text, tuple) and len(text) == 2


def _several(text: Text) -> list[Any]:
    """The separate texts (or sequences of ids) in what was given."""
    if isinstance(text, str):
        return [text]
    if isinstance(text, Tensor):
        return list(text) if text.dim() == 2 else [text]
    parts: list[Any] = list(text)
    if not parts:
        raise TextError("no text was given: the list is empty")
    return [torch.tensor(parts)] if all(isinstance(part, int) for part in parts) else parts


def _ids(loaded: LoadedModel, text: Any, wanted: int | None) -> Tensor:
    """The text's token ids; a decoder's with its tokenizer's special tokens, others' without."""
    if not isinstance(text, str):
        ids = torch.as_tensor(text).reshape(-1)
        if ids.is_floating_point() or ids.dtype == torch.bool:
            raise TextError(f"token ids of dtype {ids.dtype}; allowed: whole numbers")
        return ids.long().cpu()
    if not text.strip():
        raise TextError("the text is empty" if not text else "the text holds only white space")
    if loaded.tokenizer is None:
        why = next((f": {note}" for note in loaded.notes if note.startswith("the tokenizer")), "")
        raise ModelError(
            f"{loaded.name} has no tokenizer, so it cannot read text{why}",
            to_do="give token ids, or a model folder with its tokenizer",
        )
    enough = _CHARACTERS_PER_TOKEN * (wanted or DEFAULT_TOKENS) + _MARGIN
    special = loaded.kind == "decoder"
    encoded = _encode(loaded, text[:enough], special)
    if len(text) > enough and len(encoded) < (wanted or DEFAULT_TOKENS):
        encoded = _encode(loaded, text, special)
    return torch.tensor(encoded, dtype=torch.long)


def _encode(loaded: LoadedModel, text: str, special: bool) -> list[int]:
    assert loaded.tokenizer is not None
    with quiet():
        ids: list[int] = loaded.tokenizer(text, add_special_tokens=special)["input_ids"]
    return ids


def _count(loaded: LoadedModel, ids: Tensor, tokens: int | None, allow_long: bool) -> int:
    """How many of the tokens are read."""
    if len(ids) < 2:
        raise TextError(
            f"the text has {len(ids)} token{'' if len(ids) == 1 else 's'}; at least 2 are needed"
        )
    if tokens is not None:
        if tokens > len(ids):
            raise OptionError(
                f"--tokens is {tokens}, but the text has {len(ids)} tokens",
                to_do=f"give a longer text, or --tokens {len(ids)} at most",
            )
        return tokens
    count = min(len(ids), DEFAULT_TOKENS)
    if loaded.context is None or loaded.kind == "encoder":
        return count
    halves = 2 if loaded.kind == "encoder-decoder" else 1
    return max(2, min(count, halves * (loaded.context - _around(loaded) * (halves - 1))))


def _piece(loaded: LoadedModel, count: int, window: int | None, batch: int) -> int:
    """The length of a piece, special tokens left out."""
    if loaded.kind == "encoder":
        room = window or loaded.context or DEFAULT_TOKENS
        if room <= _around(loaded):
            raise OptionError(
                f"--window is {room}, which the special tokens fill",
                allowed=f"{_around(loaded) + 1} or more",
            )
        return room - _around(loaded)
    return window or -(-count // batch)


def _pieces(loaded: LoadedModel, ids: Tensor, size: int, *, given: bool) -> tuple[Document, ...]:
    pieces = [piece for piece in ids.split(size) if len(piece)]
    if loaded.kind == "decoder" or (loaded.kind == "encoder" and given):
        return tuple(Document(piece) for piece in pieces)
    before, after = _special(loaded)
    if loaded.kind == "encoder":
        return tuple(Document(torch.cat([before, piece, after])) for piece in pieces)
    if len(pieces) > 1 and len(pieces[-1]) < 2:
        # One token cannot be both a source and a target: the last piece is one longer instead.
        pieces[-2:] = [torch.cat(pieces[-2:])]
    return tuple(
        Document(
            torch.cat([before, piece[: len(piece) // 2], after]),
            torch.cat([_start(loaded), piece[len(piece) // 2 :]]),
        )
        for piece in pieces
    )


def _pair(loaded: LoadedModel, pair: Any, tokens: int | None) -> Document:
    """A source and a target given separately; ``tokens`` bounds each of the two."""
    source, target = (_ids(loaded, part, tokens)[:tokens] for part in pair)
    for name, ids in (("source", source), ("target", target)):
        if not len(ids):
            raise TextError(f"the {name} has no tokens")
    document = Document(source, target)
    if isinstance(pair[0], str):
        before, after = _special(loaded)
        document = replace(document, ids=torch.cat([before, source, after]))
    if isinstance(pair[1], str):
        document = replace(document, target=torch.cat([_start(loaded), target]))
    return document


def _special(loaded: LoadedModel) -> tuple[Tensor, Tensor]:
    """The special tokens that the tokenizer puts before and after a text."""
    nothing = torch.zeros(0, dtype=torch.long)
    if loaded.tokenizer is None:
        return nothing, nothing
    bare, dressed = (_encode(loaded, "a", special) for special in (False, True))
    for at in range(len(dressed) - len(bare) + 1):
        if dressed[at : at + len(bare)] == bare:
            return (
                torch.tensor(dressed[:at], dtype=torch.long),
                torch.tensor(dressed[at + len(bare) :], dtype=torch.long),
            )
    return nothing, nothing


def _around(loaded: LoadedModel) -> int:
    """How many special tokens surround a text."""
    before, after = _special(loaded)
    return len(before) + len(after)


def _start(loaded: LoadedModel) -> Tensor:
    """The token that an encoder-decoder's decoder is started with, shape (1,)."""
    token = loaded.driver.start_token
    if token is not None:
        return torch.tensor([token])
    raise ModelError(
        f"{loaded.name} names no token that its decoder starts with (decoder_start_token_id)",
        to_do="give token ids as a pair (source, target)",
    )


def _check_document(loaded: LoadedModel, document: Document, allow_long: bool) -> None:
    longest = max(len(document.ids), 0 if document.target is None else len(document.target))
    limit = loaded.position_limit
    if limit is not None and longest > limit:
        raise OptionError(
            f"a piece of {longest} tokens, but {loaded.name} has positions for {limit} only",
            to_do=f"take --window {limit} at most"
            + ("" if loaded.kind == "encoder" else f", or --tokens {limit}"),
        )
    if loaded.context is not None and longest > loaded.context and not allow_long:
        raise OptionError(
            f"a piece of {longest} tokens, but {loaded.name} was trained on at most"
            f" {loaded.context}",
            to_do=f"add --allow-long to go on, or take --tokens {loaded.context} or less",
        )
    entries = loaded.driver.vocabulary
    for ids in (document.ids, document.target):
        if ids is not None and (int(ids.max()) >= entries or int(ids.min()) < 0):
            wrong = int(ids.max()) if int(ids.max()) >= entries else int(ids.min())
            raise TextError(
                f"token id {wrong}, but the vocabulary of {loaded.name} has {entries} entries",
                to_do="the tokenizer or the ids belong to another model",
            )
