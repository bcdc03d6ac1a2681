"""The keys of a configuration, each checked as it is read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from headwise.errors import ModelError

__all__ = ["Settings", "brief"]

_MOST: Final = 10**9  # no width or vocabulary comes near
_MOST_LAYERS: Final = 10_000
_SHOWN: Final = 60  # characters of a value in a message
_BITS: Final = 128  # a longer number is named by its length
_MISSING: Final = object()


def brief(value: object) -> str:
    """A value as a message shows it: no longer than part of a line.

    Example:
        >>> brief("d_ff"), len(brief("x" * 1000))
        ("'d_ff'", 60)
    """
    if type(value) is int and value.bit_length() > _BITS:
        return f"a number of {value.bit_length():,} bits"
    text = repr(value)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…"


class Settings:
    """A configuration: ``values`` by key, and ``where`` they come from for messages.

    Example:
        >>> given = Settings({"hidden_size": 64, "num_layers": None}, "config.json")
        >>> given.size("d_model", "hidden_size"), given.size("num_layers", default=2)
        (64, 2)
    """

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values = values
        self.where = where

    @property
    def family(self) -> str:
        """The model type."""
        return self.word("model_type", "")

    def over(self, defaults: Mapping[str, Any]) -> Settings:
        """These settings, laid over values for the keys that they leave out.

        A key that is null is not left out: it says that there is no such thing.

        Example:
            >>> given = Settings({"head_dim": None}, "config.json")
            >>> given.over({"head_dim": 128, "kv_heads": 8}).values
            {'head_dim': None, 'kv_heads': 8}
        """
        return Settings({**defaults, **self.values}, self.where)

    def taken(self, defaults: Mapping[str, Any]) -> list[str]:
        """A note that names the sizes among ``defaults`` that these settings leave out."""
        found = [
            f"{name} = {value:,}"
            for name, value in defaults.items()
            if type(value) is int and name not in self.values
        ]
        if not found:
            return []
        return [f"not in {self.where}, so as the family has it by default: {', '.join(found)}"]

    def __contains__(self, name: str) -> bool:
        return self.values.get(name) is not None

    def _of(self, names: tuple[str, ...], default: Any) -> tuple[str, Any]:
        for name in names:
            if self.values.get(name) is not None:
                return name, self.values[name]
        if default is _MISSING:
            missing = " or ".join(names)
            raise ModelError(
                f"{self.where} has no {missing}",
                to_do="add the key, or give the sizes as options",
            )
        return names[0], default

    def size(self, *names: str, default: Any = _MISSING, least: int = 1, most: int = _MOST) -> int:
        """A whole number from ``least`` on, under the first of the names that is there."""
        name, value = self._of(names, default)
        if type(value) is float and value.is_integer():
            value = int(value)
        if type(value) is not int or not least <= value <= most:
            raise ModelError(
                f"{name} is {brief(value)} in {self.where}",
                allowed=f"a whole number, {least} to {most:,}",
            )
        return value

    def layers(self, *names: str, default: Any = _MISSING) -> int:
        """How many blocks there are; each is listed, so there is a bound."""
        return self.size(*names, default=default, most=_MOST_LAYERS)

    def maybe(self, *names: str, least: int = 1) -> int | None:
        """Likewise; None where there is none."""
        return self.size(*names, least=least) if any(name in self for name in names) else None

    def flag(self, name: str, default: bool) -> bool:
        """True or False."""
        _, value = self._of((name,), default)
        if type(value) is not bool:
            raise ModelError(f"{name} is {brief(value)} in {self.where}", allowed="true or false")
        return value

    def word(self, name: str, default: Any = _MISSING) -> str:
        """A text."""
        _, value = self._of((name,), default)
        if not isinstance(value, str):
            raise ModelError(f"{name} is {brief(value)} in {self.where}", allowed="a text")
        return value

    def sequence(self, name: str, length: int | None = None) -> list[Any] | None:
        """A list of ``length`` entries; None where there is none."""
        value = self.values.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or (length is not None and len(value) != length):
            found = f"{len(value)} entries" if isinstance(value, list) else brief(value)
            raise ModelError(
                f"{name} has {found} in {self.where}",
                allowed="a list" if length is None else f"a list of {length}, one for each layer",
            )
        return value

    def below(self, name: str) -> Settings | None:
        """The configuration of a part, such as ``text_config``; None where there is none."""
        value = self.values.get(name)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise ModelError(f"{name} is {brief(value)} in {self.where}", allowed="a configuration")
        return Settings(value, f"{self.where} ({name})")

    def divided(self, whole: str, by: int, name: str) -> int:
        """``whole`` / ``by``, where a family has no key for the width of a head."""
        width = self.size(whole)
        if width % by:
            raise ModelError(
                f"{by} heads do not divide {whole} {width} in {self.where}",
                allowed=f"a number of heads that divides it, or {name}",
            )
        return width // by
