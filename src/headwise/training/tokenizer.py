"""Tokenizers of text as bytes: every UTF-8 text has an encoding, and decoding gives it back.

Both are objects of the ``tokenizers`` library, saved as ``tokenizer.json``. A byte stands in the
vocabulary as one printable character, by the table of GPT-2 (Radford et al. 2019, section 2.2).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from headwise.errors import OptionError, TextError

__all__ = ["END_OF_TEXT", "byte_tokenizer", "bytes_as_characters", "pieces", "train_bpe"]

END_OF_TEXT = "<|endoftext|>"
_PIECE = 1 << 16  # characters


def bytes_as_characters() -> list[str]:
    """The character that stands for each byte: itself if it is printable, else one from U+0100 on.

    Example:
        >>> table = bytes_as_characters()
        >>> len(set(table)), table[ord("a")], table[ord(" ")]
        (256, 'a', 'Ġ')
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def byte_tokenizer() -> Tokenizer:
    """The tokenizer without merges: 256 tokens, each its own byte, then the end of text.

    Example:
        >>> tokenizer = byte_tokenizer()
        >>> tokenizer.encode("Aé").ids, tokenizer.token_to_id(END_OF_TEXT)
        ([65, 195, 169], 256)
        >>> tokenizer.decode([65, 195, 169])
        'Aé'
    """
    vocabulary = {character: byte for byte, character in enumerate(bytes_as_characters())}
    tokenizer = _bytewise(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.add_special_tokens([END_OF_TEXT])
    return tokenizer


def train_bpe(texts: Iterable[str], vocab: int) -> Tokenizer:
    """Byte-pair encoding with ``vocab`` tokens: the end of text, 256 bytes, then merges by count.

    The same texts give the same tokenizer. Source: Sennrich et al. 2016 (arXiv:1508.07909),
    section 3.2, on bytes as in GPT-2.

    Raises:
        OptionError: fewer than 257 tokens.
        TextError: the texts are too short to make that many.

    Example:
        >>> tokenizer = train_bpe(["low lower lowest " * 9], 260)
        >>> tokenizer.encode("lowest low").tokens
        ['low', 'e', 's', 't', 'Ġlow']
    """
    least = 257
    if vocab < least:
        raise OptionError(
            f"a vocabulary of {vocab:,} tokens",
            allowed=f"{least} or more: 256 bytes and the end of text",
            to_do='for bytes alone ask for the tokenizer "bytes"',
        )
    tokenizer = _bytewise(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        min_frequency=2,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(bytes_as_characters()),
        show_progress=False,
    )
    tokenizer.train_from_iterator((piece for text in texts for piece in pieces(text)), trainer)
    made = tokenizer.get_vocab_size()
    if made != vocab:
        raise TextError(
            f"the text is too short for a vocabulary of {vocab:,} tokens: it gives {made:,}",
            to_do=f"lower the vocabulary to {made:,} or fewer, or use more text",
        )
    return tokenizer


def pieces(text: str, size: int = _PIECE) -> Iterator[str]:
    """The text cut into pieces of about ``size`` characters, each cut where words are cut anyway.

    A line end before a character that is no blank always ends a word of the byte-level pattern, so
    the tokens of the pieces are the tokens of the whole.

    Example:
        >>> list(pieces("ab\\ncd\\n ef\\ngh", size=3))
        ['ab\\n', 'cd\\n ef\\n', 'gh']
    """
    cut = re.compile(r"\n(?=\S)")
    start = 0
    while start < len(text):
        found = cut.search(text, start + size - 1)
        end = found.end() if found else len(text)
        yield text[start:end]
        start = end


def _bytewise(model: models.BPE) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer
