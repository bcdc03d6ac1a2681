"""The text of a file or a folder as one array of tokens, made once and kept beside the run."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from headwise.errors import FileError, TextError
from headwise.files import whole
from headwise.observation.reading import read_text
from headwise.training.tokenizer import END_OF_TEXT, pieces

__all__ = ["SUFFIXES", "encode", "encoded", "fingerprint", "read_documents"]

SUFFIXES = (".txt", ".text", ".md")
_TOGETHER = 64  # pieces encoded side by side: what bounds the memory that encoding takes


def read_documents(source: str | Path) -> dict[str, str]:
    """The text of a file, or of every text file under a folder, by name in sorted order.

    In a folder, files ending in .txt, .text or .md are read; hidden ones are not.

    Raises:
        TextError: nothing there, a file that is empty or not UTF-8 (named), no text in a folder.

    Example:
        >>> read_documents("/no/such/text")
        Traceback (most recent call last):
            ...
        headwise.errors.TextError: there is no text file /no/such/text
    """
    path = Path(source).expanduser()
    if not path.is_dir():
        return {path.name: read_text(source)}
    files = [
        file
        for file in sorted(path.rglob("*"))
        if file.suffix.lower() in SUFFIXES
        and file.is_file()
        and not any(part.startswith(".") for part in file.relative_to(path).parts)
    ]
    if not files:
        raise TextError(
            f"the folder {source} holds no text", allowed=f"files ending in {', '.join(SUFFIXES)}"
        )
    return {file.relative_to(path).as_posix(): read_text(file) for file in files}


def encode(tokenizer: Tokenizer, documents: dict[str, str]) -> np.ndarray:
    """The tokens of all documents, int32, with the end of text after each.

    Example:
        >>> from headwise.training.tokenizer import byte_tokenizer
        >>> encode(byte_tokenizer(), {"a.txt": "ab", "b.txt": "c"}).tolist()
        [97, 98, 256, 99, 256]
    """
    end = tokenizer.token_to_id(END_OF_TEXT)
    out: list[np.ndarray] = []
    for text in documents.values():
        cut = list(pieces(text))
        for start in range(0, len(cut), _TOGETHER):
            batch = tokenizer.encode_batch_fast(
                cut[start : start + _TOGETHER], add_special_tokens=False
            )
            out.extend(np.array(piece.ids, dtype=np.int32) for piece in batch)
        if end is not None:
            out.append(np.array([end], dtype=np.int32))
    return np.concatenate(out)


def encoded(tokenizer: Tokenizer, documents: dict[str, str], folder: Path) -> np.ndarray:
    """The tokens of the documents, from the folder when they were made from the same before."""
    made_from = fingerprint(documents, tokenizer.to_str())
    about, array = folder / "tokens.json", folder / "tokens.npy"
    try:
        if json.loads(about.read_text(encoding="utf-8")).get("made_from") == made_from:
            return np.load(array, mmap_mode="r")
    except (OSError, ValueError):
        pass  # not made yet, or cut off: made again
    tokens = encode(tokenizer, documents)
    with whole(array) as temporary:
        np.save(temporary, tokens)
    with whole(about) as temporary:
        temporary.write_text(json.dumps({"made_from": made_from, "tokens": len(tokens)}) + "\n")
    try:
        return np.load(array, mmap_mode="r")
    except OSError as error:
        raise FileError(f"cannot read {array}: {str(error.strerror).lower()}") from error


def fingerprint(documents: dict[str, str], *more: str) -> str:
    """A SHA-256 over names and texts: equal exactly when the training data are.

    Example:
        >>> fingerprint({"a": "bc"}) == fingerprint({"ab": "c"})
        False
    """
    digest = hashlib.sha256()
    for part in (part for pair in documents.items() for part in pair):
        data = part.encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    for part in more:
        digest.update(part.encode())
    return digest.hexdigest()
