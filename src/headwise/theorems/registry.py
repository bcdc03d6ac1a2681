"""All statements, in the order of the theory, and the reproductions."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Final

from headwise.errors import OptionError
from headwise.theorems.statement import Theorem

__all__ = ["named", "reproductions", "theorems"]

# One module for each subject, in the order in which they are shown.
_SUBJECTS: Final = (
    "attention_definition",
    "scaling",
    "jacobian",
    "saturation",
    "permutation",
    "head_sizes",
    "low_rank_sum",
    "circuits_and_lora",
    "sinusoids",
    "rotary",
    "residual",
    "norm_placement",
    "kernel_smoother",
    "linear_attention",
    "complexity",
    "flash",
    "rank_collapse",
    "entropy_bound",
    "induction",
)
_REPRODUCTIONS: Final = ("initialisation", "collapse", "circuits", "positions", "memory", "trained")


def theorems() -> tuple[Theorem, ...]:
    """Every statement, each with a check that runs.

    Example:
        >>> import headwise as hw
        >>> hw.theorems()[0].name
        'convex-combination'
    """
    return _all("", _SUBJECTS)


def reproductions() -> tuple[Theorem, ...]:
    """Results of papers that are repeated here, by the name of ``--reproduce``."""
    return _all("reproductions.", _REPRODUCTIONS)


def named(name: str, among: Sequence[Theorem]) -> Theorem:
    """The statement of that name.

    Raises:
        OptionError: there is none; the known names are listed.
    """
    for each in among:
        if each.name == name:
            return each
    raise OptionError(
        f"no statement is called {name!r}", allowed=", ".join(each.name for each in among)
    )


def _all(prefix: str, modules: Sequence[str]) -> tuple[Theorem, ...]:
    found: list[Theorem] = []
    for module in modules:
        found += importlib.import_module(f"headwise.theorems.{prefix}{module}").THEOREMS
    return tuple(found)
