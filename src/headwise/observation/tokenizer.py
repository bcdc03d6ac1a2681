"""A tokenizer of the ``tokenizers`` library, asked in the way transformers' tokenizers are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from tokenizers import Tokenizer

__all__ = ["OwnTokenizer", "decoding"]

_MASKS: Final = ("[MASK]", "<mask>", "<|mask|>")


class OwnTokenizer:
    """Text to ids and back, and the few ids that a scan asks for.

    Example:
        >>> from tokenizers.models import WordLevel
        >>> words = OwnTokenizer(Tokenizer(WordLevel({"to": 0, "be": 1}, "be")))
        >>> words("to")["input_ids"], words.decode([1])
        ([0], 'be')
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    def __call__(self, text: str, *, add_special_tokens: bool = True) -> dict[str, list[int]]:
        """The ids of a text, with or without what the tokenizer puts around it."""
        encoded = self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return {"input_ids": encoded.ids}

    def decode(self, ids: Sequence[int]) -> str:
        """The text of some ids, special tokens by their names."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=False))

    @property
    def all_special_ids(self) -> list[int]:
        added = self.tokenizer.get_added_tokens_decoder()
        return [number for number, token in added.items() if token.special]

    @property
    def mask_token_id(self) -> int | None:
        """The id of the token that hides another one; None when there is none."""
        found = (self.tokenizer.token_to_id(name) for name in _MASKS)
        return next((number for number in found if number is not None), None)


def decoding(tokenizer: Any) -> Any:
    """The tokenizer, in a form that has transformers' ``decode``; None stays None."""
    return OwnTokenizer(tokenizer) if isinstance(tokenizer, Tokenizer) else tokenizer
