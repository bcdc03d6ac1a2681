"""What can be measured in a model: its attention modules, stacks and blocks, and the way in.

Two kinds of model are known. Those of transformers send their attention through its interface
(``routed``); Headwise's own call a watcher (``own``). Each is surveyed by its own file; everything
that reads a ``Survey`` is the same for both.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from torch import nn

from headwise.errors import ModelError
from headwise.models.attention import MultiHeadAttention
from headwise.observation.recorder import Recorder
from headwise.observation.sites import AttentionModule
from headwise.observation.writes import Block

__all__ = ["Survey", "nearest", "numbered", "survey"]


@dataclass(frozen=True)
class Survey:
    """What can be measured in a model, and how its calls are brought to a recorder."""

    modules: dict[int, AttentionModule]  # id of the module -> what it is
    stacks: dict[str, nn.Module]  # what runs the modules, by path
    models: dict[str, nn.Module]  # the stacks, and the models around them
    blocks: tuple[Block, ...]
    heads: int  # the most that a module has; 0 where that is not known
    attach: Callable[[Recorder, ExitStack], None]
    about: dict[str, Any]  # model, architecture, context, versions
    notes: tuple[str, ...] = ()


def survey(model: nn.Module) -> Survey:
    """Find every attention module that can be measured; refuse models that cannot be."""
    name = type(model).__name__
    if hasattr(model, "_orig_mod"):
        raise ModelError(
            f"{name} is a compiled model", allowed="the model before torch.compile",
            to_do="pass model._orig_mod",
        )  # fmt: skip
    if getattr(model, "_compiled_call_impl", None) is not None:
        raise ModelError(f"{name} is compiled", allowed="the model before model.compile()")
    if isinstance(model, nn.Module) and any(
        isinstance(part, MultiHeadAttention) for part in model.modules()
    ):
        from headwise.observation.own import survey_own

        return survey_own(model)
    from headwise.observation.routed import survey_routed

    return survey_routed(model)


def nearest(path: str, above: Iterable[str]) -> str:
    """The nearest of some paths at or above a path; "" when there is none.

    Example:
        >>> nearest("decoder.blocks.0.attention", ["", "decoder"])
        'decoder'
    """
    known = set(above)
    parts = path.split(".")
    for end in range(len(parts), 0, -1):
        if ".".join(parts[:end]) in known:
            return ".".join(parts[:end])
    return ""


def numbered(paths: list[str]) -> dict[str, int]:
    """Number each module within its stack: by the first index in its path, if that is unique among
    modules of the same kind of place; else in order."""
    groups: dict[str, list[str]] = defaultdict(list)
    for path in paths:
        groups[re.sub(r"\.\d+(?=\.|$)", "", path)].append(path)
    numbers = {}
    for group in groups.values():
        first = [re.search(r"\.(\d+)(?=\.|$)", f".{path}") for path in group]
        index = [int(m.group(1)) if m else None for m in first]
        distinct = None not in index and len(set(index)) == len(index)
        for order, (path, number) in enumerate(zip(group, index, strict=True)):
            numbers[path] = number if distinct and number is not None else order
    return numbers
