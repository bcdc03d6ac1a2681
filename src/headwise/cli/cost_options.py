"""The text of the options of ``headwise cost`` as values: lengths, memory, explicit sizes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from headwise.errors import OptionError

__all__ = ["lengths", "memory_bytes", "packed", "sizes"]

_UNITS: Final = {
    "": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
}  # fmt: skip
_NEEDED: Final = ("d_model", "layers", "heads", "vocab")


def lengths(text: str | None) -> list[int | None]:
    """``"2048,8k,1_000"`` as numbers of tokens; None: one length, the usual one.

    Example:
        >>> lengths("2048, 8k,128k"), lengths(None)
        ([2048, 8192, 131072], [None])
    """
    return [None] if text is None else [*_numbers("--length", text)]


def packed(text: str | None) -> tuple[int, ...]:
    """The lengths of the documents of a sequence; none if there are none.

    Example:
        >>> packed("100,28"), packed(None)
        ((100, 28), ())
    """
    return () if text is None else _numbers("--documents", text)


def _numbers(option: str, text: str) -> tuple[int, ...]:
    found = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d[\d_]{0,15})\s*([kK]?)\s*", part, re.ASCII)
        number = int(match[1].replace("_", "")) * (1024 if match[2] else 1) if match else 0
        if number < 1:
            raise OptionError(
                f"{option} {text!r}", allowed="numbers from 1 on, such as 2048,8k (8k is 8,192)"
            )
        found.append(number)
    return tuple(found)


def memory_bytes(text: str | None) -> int | None:
    """``"80GB"`` and ``"24GiB"`` as bytes; None stays None.

    Example:
        >>> memory_bytes("80GB"), memory_bytes("1.5 GiB"), memory_bytes(None)
        (80000000000, 1610612736, None)
    """
    if text is None:
        return None
    match = re.fullmatch(r"\s*(\d{1,15})(?:\.(\d{1,6}))?\s*([a-zA-Z]*)\s*", text)
    unit = _UNITS.get(match[3].lower()) if match else None
    if match is None or unit is None:
        raise OptionError(f"--memory {text!r}", allowed="bytes, or a number with GB, GiB, MB, …")
    digits = match[2] or ""
    found = int(match[1] + digits) * unit // 10 ** len(digits)
    if found < 1:
        raise OptionError(f"--memory {text!r}", allowed="more than nothing")
    return found


def sizes(given: Mapping[str, Any]) -> dict[str, Any] | None:
    """The explicit sizes among the options, by the names of ``explicit``; None if none is given.

    Example:
        >>> sizes({"d_model": 64, "layers": 2, "heads": 4, "vocab": None, "bias": None})
        Traceback (most recent call last):
        ...
        headwise.errors.OptionError: explicit sizes without --vocab; allowed: --d-model, --layers, --heads and --vocab at least
    """  # noqa: E501
    chosen = {name: value for name, value in given.items() if value is not None}
    if not chosen:
        return None
    missing = [f"--{name.replace('_', '-')}" for name in _NEEDED if name not in chosen]
    if missing:
        raise OptionError(
            f"explicit sizes without {missing[0]}",
            allowed="--d-model, --layers, --heads and --vocab at least",
        )
    for name, needed in (("experts_used", "experts"), ("shared_experts", "experts")):
        if name in chosen and needed not in chosen:
            raise OptionError(f"--{name.replace('_', '-')} without --{needed}")
    if "window" in chosen and chosen.get("causal") is False:
        raise OptionError("--window with --encoder", allowed="a window of a model with the mask")
    return chosen
