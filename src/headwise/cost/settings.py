"""The keys of a configuration, each checked as it is read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from headwise.errors import ModelError

__all__ = ["Settings"]

_MOST: Final = 10**9  # no width, number of layers or vocabulary comes near
_MISSING: Final = object()


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

    def size(self, *names: str, default: Any = _MISSING, least: int = 1) -> int:
        """A whole number from ``least`` on, under the first of the names that is there."""
        name, value = self._of(names, default)
        if type(value) is float and value.is_integer():
            value = int(value)
        if type(value) is not int or not least <= value <= _MOST:
            raise ModelError(
                f"{name} is {value!r} in {self.where}",
                allowed=f"a whole number, {least} to {_MOST:,}",
            )
        return value

    def maybe(self, *names: str, least: int = 1) -> int | None:
        """Likewise; None where there is none."""
        return self.size(*names, least=least) if any(name in self for name in names) else None

    def flag(self, name: str, default: bool) -> bool:
        """True or False."""
        _, value = self._of((name,), default)
        if type(value) is not bool:
            raise ModelError(f"{name} is {value!r} in {self.where}", allowed="true or false")
        return value

    def word(self, name: str, default: Any = _MISSING) -> str:
        """A text."""
        _, value = self._of((name,), default)
        if not isinstance(value, str):
            raise ModelError(f"{name} is {value!r} in {self.where}", allowed="a text")
        return value

    def sequence(self, name: str, length: int | None = None) -> list[Any] | None:
        """A list of ``length`` entries; None where there is none."""
        value = self.values.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or (length is not None and len(value) != length):
            found = f"{len(value)} entries" if isinstance(value, list) else repr(value)
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
            raise ModelError(f"{name} is {value!r} in {self.where}", allowed="a configuration")
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
