"""How a token is shown: whitespace as symbols, bytes as hex, never as markup.

A leading space becomes ``␣`` here; the running text of the page turns it back into a space.
"""

from __future__ import annotations

import re
import unicodedata

__all__ = ["shown"]

_SYMBOLS = {" ": "␣", "\n": "⏎", "\t": "⇥", "\r": "␍", "\xa0": "⍽", "\u3000": "␣"}
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def shown(text: str, number: int) -> str:
    """The label of a token; its number in the vocabulary where there is no text.

    Example:
        >>> shown(" king", 7), shown("\\n\\n", 8), shown("<0x0A>", 9), shown("", 10)
        ('␣king', '⏎⏎', '0x0A', '#10')
        >>> shown("\\x07", 11), shown("\\ufffd", 12), shown("Ġking", 13), shown("▁the", 14)
        ('0x07', '�#12', '␣king', '␣the')
    """
    if not text:
        return f"#{number}"
    byte = _BYTE.fullmatch(text)
    if byte:
        return f"0x{byte[1].upper()}"
    if "\ufffd" in text:  # part of a character: the number tells such tokens apart
        return f"{text}#{number}"
    if text[0] in "Ġ▁":
        text = text.replace(text[0], " ")
    return "".join(_visible(character) for character in text)


def _visible(character: str) -> str:
    if character in _SYMBOLS:
        return _SYMBOLS[character]
    if unicodedata.category(character) in ("Cc", "Cf", "Zl", "Zp", "Cs", "Zs"):
        return f"0x{ord(character):02X}"
    return character
