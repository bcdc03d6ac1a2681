"""All statements, in the order of the theory, and the reproductions."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Final

from headwise.errors import OptionError
from headwise.theorems.statement import Theorem

__all__ = ["named", "reproductions", "subjects", "theorems"]

# One module for each subject, in the order in which they are shown.
_SUBJECTS: Final = {
    "attention_definition": "Scaled dot-product attention",
    "scaling": "Why 1/√d_k",
    "jacobian": "The Jacobian of the softmax",
    "saturation": "Saturation",
    "permutation": "Permutations",
    "head_sizes": "Sizes of heads",
    "low_rank_sum": "Heads as a sum of low-rank maps",
    "circuits_and_lora": "Circuits and LoRA",
    "sinusoids": "Sinusoidal positions",
    "rotary": "Rotary positions",
    "residual": "The residual stream",
    "norm_placement": "Where the norm stands",
    "kernel_smoother": "Attention as a kernel smoother",
    "linear_attention": "Linear attention",
    "complexity": "Complexity",
    "flash": "Exact attention in O(n) memory",
    "rank_collapse": "Rank collapse",
    "entropy_bound": "Entropy",
    "induction": "Induction heads",
}
_REPRODUCTIONS: Final = ("initialisation", "collapse", "circuits", "positions", "memory", "trained")


def theorems() -> tuple[Theorem, ...]:
    """Every statement, each with a check that runs.

    Example:
        >>> import headwise as hw
        >>> hw.theorems()[0].name
        'convex-combination'
    """
    return tuple(theorem for _, theorem in subjects())


def subjects() -> tuple[tuple[str, Theorem], ...]:
    """Every statement with the title of its subject.

    Example:
        >>> subjects()[0][0]
        'Scaled dot-product attention'
    """
    return tuple((title, each) for name, title in _SUBJECTS.items() for each in _of(name))


def reproductions() -> tuple[Theorem, ...]:
    """Results of papers that are repeated here, by the name of ``--reproduce``."""
    return tuple(each for name in _REPRODUCTIONS for each in _of(f"reproductions.{name}"))


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


def _of(module: str) -> tuple[Theorem, ...]:
    found: tuple[Theorem, ...] = importlib.import_module(f"headwise.theorems.{module}").THEOREMS
    return found
