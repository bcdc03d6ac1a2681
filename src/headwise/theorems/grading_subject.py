"""The function that is graded: called with care, and what it returns looked at."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from headwise.theorems.grading_cases import Inputs

__all__ = ["Failed", "Raised", "Subject", "Unjudged"]


class Failed(Exception):
    """A requirement does not hold; the text says what is wrong."""


class Raised(Failed):
    """The function raised (its error is the context), or returned no tensor of the right shape."""


class Unjudged(Exception):
    """A requirement cannot be judged alone; the text says why."""


class Subject:
    """A function for multi-head attention; every call gets copies of its inputs."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    @property
    def name(self) -> str:
        """What it is called."""
        return str(getattr(self.function, "__name__", type(self.function).__name__))

    def takes(self, option: str) -> bool:
        """Whether it has a parameter of this name, or takes any."""
        try:
            parameters = inspect.signature(self.function).parameters
        except (TypeError, ValueError):  # some callables of C say nothing of their parameters
            return True
        kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        return any(
            (name == option and each.kind in kinds) or each.kind is inspect.Parameter.VAR_KEYWORD
            for name, each in parameters.items()
        )

    def __call__(self, inputs: Inputs) -> Tensor:
        """The output on copies of the inputs, of the right shape.

        Raises:
            Raised: it raised, or returned something else than a tensor of the shape of x.
        """
        tensors = {name: tensor.clone() for name, tensor in inputs.tensors.items()}
        return self.called(inputs.with_(**tensors))

    def called(self, inputs: Inputs) -> Tensor:
        """The same on the inputs themselves."""
        positional, named = inputs.call()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found = self.function(*positional, **named)
        except (Exception, SystemExit) as error:
            raise Raised(f"it raised {_shown(error)}") from None
        if not isinstance(found, Tensor):
            raise Raised(f"it returned {_a(type(found).__name__)}, not a torch.Tensor")
        wanted = (*inputs.x.shape[:2], inputs.w_o.shape[1])
        if tuple(found.shape) != wanted:
            raise Raised(f"it returned the shape {tuple(found.shape)}, not {wanted}")
        return found

    def finite(self, inputs: Inputs) -> Tensor:
        """The output where it is finite.

        Raises:
            Failed: it is not, and there is a mask. ``Unjudged``: there is none; "finite" says it.
        """
        found = self(inputs)
        if not bool(torch.isfinite(found).all()):
            if inputs.mask is not None:
                raise Failed("NaN or infinity under a mask that leaves every query a key")
            raise Unjudged("its outputs are not finite")
        return found


def _shown(error: BaseException) -> str:
    lines = " ".join(str(error).split())
    text = lines if len(lines) <= 160 else lines[:157] + "…"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _a(name: str) -> str:
    return f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}"
