"""Transformer blocks, and which modules inside may write to the residual stream.

In transformers' models the writes are found by the names of modules, which is a guess; what counts
is checked while the model runs (``stream``).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from torch import nn

from headwise.observation.sites import AttentionModule

__all__ = ["Block", "find_blocks"]

_MLP: Final = re.compile(
    r"mlp|ffn|feed_?forward|moe|mixture|experts?_?layer|dense_?relu|fc2|^output$|^ff$|expert",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Block:
    """One transformer block: its place, and the modules inside that may write to the stream."""

    path: str
    stack: str
    number: int
    attention: tuple[tuple[str, ...], ...]  # for each attention module: itself, then what holds it
    mlp: tuple[str, ...]
    norms: tuple[str, ...]
    factor: float = 1.0  # by which writes are multiplied

    @property
    def kind(self) -> tuple[str, frozenset[str]]:
        """The same for blocks of one list that are built alike."""
        inside = (*itertools.chain(*self.attention), *self.mlp, *self.norms)
        return self.path.rpartition(".")[0], frozenset(p.removeprefix(self.path) for p in inside)


def find_blocks(
    modules: dict[str, nn.Module], attention: Collection[AttentionModule]
) -> tuple[Block, ...]:
    """The blocks: elements of the outermost module lists of each stack that hold attention."""
    lists: dict[str, str] = {}
    for info in attention:
        prefix = f"{info.stack}." if info.stack else ""
        parts = info.path.removeprefix(prefix).split(".")
        for end in range(1, len(parts)):
            above = prefix + ".".join(parts[:end])
            if isinstance(modules[above], nn.ModuleList):
                lists.setdefault(above, info.stack)
                break
    blocks = []
    for place, stack in lists.items():
        for index in range(len(modules[place])):  # type: ignore[arg-type]
            blocks.append(_block(modules, f"{place}.{index}", stack, index, attention))
    return tuple(blocks)


def _block(
    modules: dict[str, nn.Module],
    path: str,
    stack: str,
    number: int,
    found: Collection[AttentionModule],
) -> Block:
    inside = {p: m for p, m in modules.items() if p.startswith(f"{path}.")}
    attention = []
    for info in found:
        if info.path.startswith(f"{path}."):
            parts = info.path.removeprefix(f"{path}.").split(".")
            holders = [f"{path}." + ".".join(parts[:end]) for end in range(len(parts) - 1, 0, -1)]
            attention.append((info.path, *holders))
    mine = {p for chain in attention for p in chain}
    mlp: list[str] = []
    for p, m in inside.items():
        depth = p.removeprefix(f"{path}.").count(".")
        name = p.rpartition(".")[2]
        in_attention = any(p.startswith(f"{a[0]}.") for a in attention)
        if p in mine or depth > 2 or in_attention or any(p.startswith(f"{q}.") for q in mlp[-1:]):
            continue
        if _MLP.search(name) or _MLP.search(type(m).__name__):
            mlp.append(p)
    norms = [
        p
        for p, m in inside.items()
        if "norm" in type(m).__name__.lower() and "." not in p.removeprefix(f"{path}.")
    ]
    factor = getattr(modules[path], "residual_multiplier", 1.0)
    return Block(path, stack, number, tuple(attention), tuple(mlp), tuple(norms), float(factor))
