"""How numbers are written: three significant digits, the same in the page and the terminal."""

from __future__ import annotations

import math

__all__ = ["counted", "duration", "memory", "percent", "three"]


def three(value: float | None) -> str:
    """A number with three significant digits; thousands get commas, extremes get powers of ten.

    Example:
        >>> three(19.4512), three(0.012345), three(12345.6), three(3.2e-9), three(float("nan"))
        ('19.5', '0.0123', '12,300', '3.20e-9', 'not measured')
        >>> three(0.0), three(100.0), three(-2.5), three(0.99999)
        ('0', '100', '-2.50', '1.00')
    """
    if value is None or math.isnan(value):
        return "not measured"
    if math.isinf(value):
        return "infinite" if value > 0 else "minus infinite"
    if value == 0:
        return "0"
    rounded = float(f"{value:.2e}")
    if abs(rounded) >= 1e7 or abs(rounded) < 1e-4:
        mantissa, exponent = f"{value:.2e}".split("e")
        return f"{mantissa}e{int(exponent)}"
    if abs(rounded) >= 100 or value == int(value):
        return f"{rounded:,.0f}"
    digits = 2 - math.floor(math.log10(abs(rounded)))
    return f"{rounded:.{digits}f}"


def percent(share: float) -> str:
    """A share in percent, never rounded to 0% or 100% unless it is.

    Example:
        >>> percent(0.5259), percent(0.0), percent(0.0004), percent(0.9999), percent(1.0)
        ('53%', '0%', 'under 1%', 'over 99%', '100%')
    """
    if 0 < share < 0.005:
        return "under 1%"
    if 0.995 <= share < 1:
        return "over 99%"
    return f"{share:.0%}"


def counted(number: int, word: str) -> str:
    """A number and its noun.

    Example:
        >>> counted(1, "head"), counted(2048, "token")
        ('1 head', '2,048 tokens')
    """
    return f"{number:,} {word}" if number == 1 else f"{number:,} {word}s"


def duration(seconds: float) -> str:
    """A time span in the unit that suits it.

    Example:
        >>> duration(0.25), duration(75.0), duration(7500.0)
        ('0.250 s', '75 s', '2 h 5 min')
    """
    if seconds < 100:
        return f"{three(seconds)} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min"


def memory(size: float) -> str:
    """Bytes in binary units.

    Example:
        >>> memory(1536), memory(3 * 2**30), memory(2**50)
        ('1.50 KiB', '3 GiB', '1 PiB')
    """
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            return f"{three(size)} {unit}"
        size /= 1024
    return f"{three(size)} PiB"
