"""The tokenizer inside a GGUF file: byte-level BPE, split into words as its model splits them.

The file names its way of splitting (``tokenizer.ggml.pre``); another one than the model was trained
with gives other tokens without an error, so an unknown name is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    normalizers,
    pre_tokenizers,
    processors,
)
from tokenizers.models import BPE

from headwise.errors import ModelError
from headwise.models.checkpoints.gguf import GgufFile

__all__ = ["tokenizer_from_gguf"]

# A word or a run of signs with the space before it, digits in groups, white space; by model.
_WORDS: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_KNOWN: Final = {
    "default": "gpt-2",
    "gpt-2": "gpt-2",
    "smollm": "smollm",
    "llama-bpe": "llama-bpe",
    "llama3": "llama-bpe",
    "llama-v3": "llama-bpe",
    "qwen2": "qwen2",
}
_CONTROL, _USER_DEFINED = 3, 4


def tokenizer_from_gguf(file: GgufFile) -> Tokenizer:
    """The tokenizer of a GGUF file, with its special tokens and what it puts before a text.

    Raises:
        ModelError: the file has no byte-level BPE vocabulary, or splits in a way not known here.
    """
    metadata = file.header.metadata
    kind, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre", "default")
    if kind != "gpt2":
        raise ModelError(
            f"{file.path} has a tokenizer of the kind {kind!r}",
            allowed="gpt2, which is byte-level BPE",
            to_do="use the tokenizer.json of the model",
        )
    if pre not in _KNOWN:
        raise ModelError(
            f"{file.path} splits text as {pre!r}",
            allowed=", ".join(_KNOWN),
            to_do="use the tokenizer.json of the model",
        )
    split = _KNOWN[pre]
    tokenizer = Tokenizer(_bpe(file, metadata, split))
    tokenizer.pre_tokenizer = _splitter(split)
    tokenizer.decoder = decoders.ByteLevel()
    if split == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokens = metadata["tokenizer.ggml.tokens"]
    for token, mark in zip(tokens, metadata.get("tokenizer.ggml.token_type", ()), strict=False):
        if mark == _CONTROL:
            tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False)])
        elif mark == _USER_DEFINED:
            tokenizer.add_tokens([AddedToken(token, special=False, normalized=False)])
    _put_around(tokenizer, metadata, split)
    return tokenizer


def _bpe(file: GgufFile, metadata: Mapping[str, Any], split: str) -> BPE:
    for key in ("tokens", "merges"):
        if not isinstance(metadata.get(f"tokenizer.ggml.{key}"), list):
            raise ModelError(f"{file.path} has no tokenizer.ggml.{key}")
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        twice = next(token for i, token in enumerate(tokens) if vocabulary[token] != i)
        raise ModelError(f"the vocabulary of {file.path} holds {twice!r} twice")
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    try:
        # Llama 3 takes a whole word that is in the vocabulary, whatever its merges.
        return BPE(vocabulary, merges, ignore_merges=split == "llama-bpe")
    except Exception as error:
        raise ModelError(f"the merges of {file.path} cannot be used ({error})") from None


def _splitter(split: str) -> pre_tokenizers.PreTokenizer:
    if split == "gpt-2":
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    if split == "smollm":
        return pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
            ]
        )
    words = Regex(_WORDS % ("{1,3}" if split == "llama-bpe" else ""))
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(words, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _put_around(tokenizer: Tokenizer, metadata: Mapping[str, Any], split: str) -> None:
    """The tokens of begin and end, where the file has them put around a text."""
    parts, special = ["$A"], []
    for key, first, otherwise in (("bos", True, split == "llama-bpe"), ("eos", False, False)):
        number = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if not metadata.get(f"tokenizer.ggml.add_{key}_token", otherwise) or number is None:
            continue
        token = tokenizer.id_to_token(number)
        if token is None:
            raise ModelError(f"the vocabulary has no token {number}, its {key} token")
        special.append((token, number))
        parts = [token, *parts] if first else [*parts, token]
    plain = processors.ByteLevel(trim_offsets=False)
    if not special:
        tokenizer.post_processor = plain
        return
    template = processors.TemplateProcessing(
        single=parts,
        pair=[*parts, *(f"{part}:1" if part != "$A" else "$B:1" for part in parts)],
        special_tokens=special,
    )
    tokenizer.post_processor = processors.Sequence([plain, template])
