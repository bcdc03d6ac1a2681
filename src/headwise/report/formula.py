"""Formulas from LaTeX to MathML, which browsers draw by themselves: nothing is loaded."""

from __future__ import annotations

import functools
import re
from typing import Final

from markupsafe import Markup

__all__ = ["formula"]


_SIZED: Final = {
    "|": "‖", "Vert": "‖", "lVert": "‖", "rVert": "‖", "lvert": "|", "rvert": "|", "vert": "|",
    "{": "{", "}": "}", "langle": "⟨", "rangle": "⟩",
    "lfloor": "⌊", "rfloor": "⌋", "lceil": "⌈", "rceil": "⌉",
}  # fmt: skip


@functools.cache
def formula(latex: str) -> tuple[Markup, ...]:
    r"""The formula as MathML, in parts where ``\qquad`` parts it: they can stand in several lines.

    Raises:
        ValueError: a command is not known.

    Example:
        >>> [str(part)[:5] for part in formula(r"a \ge 0, \qquad b = \frac{a}{2}")]
        ['<math', '<math']
    """
    from latex2mathml.converter import convert

    # The one operator of plain LaTeX that latex2mathml does not know.
    known = re.sub(r"\\arg(?![A-Za-z])", r"\\operatorname{arg}", latex)
    made = [_delimiters(convert(part, display="block")) for part in _parts(known)]
    for part in made:
        if "\\" in part:
            raise ValueError(f"no MathML for {latex!r}: {part!r}")
    return tuple(Markup(part) for part in made)


def _delimiters(mathml: str) -> str:
    r"""What latex2mathml leaves as it is after ``\big``, ``\Big`` and the like."""
    return re.sub(r">\\(\W|[A-Za-z]+)<", lambda m: f">{_SIZED.get(m[1], m[0][1:-1])}<", mathml)


def _parts(latex: str) -> list[str]:
    r"""What stands between ``\qquad`` outside of all braces and environments."""
    parts = [""]
    for piece in re.split(r"\\qquad", latex):
        whole = _closed(parts[-1])
        parts = [*parts, piece] if whole and parts[-1] else [*parts[:-1], _joined(parts[-1], piece)]
    return [part.strip() for part in parts if part.strip()]


def _joined(before: str, after: str) -> str:
    return rf"{before}\qquad{after}" if before else after


def _closed(latex: str) -> bool:
    bare = re.sub(r"\\[{}]", "", latex)
    pairs = (("{", "}"), ("\\begin", "\\end"), ("\\left", "\\right"))
    plain = re.sub(r"\\(left|right)[a-z]+", "", bare)  # \leftarrow is an arrow
    return all(plain.count(first) == plain.count(last) for first, last in pairs)
