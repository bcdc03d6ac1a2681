"""Every kind of attention that the module knows, small, in float64, with its rule in numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from headwise.attention.masks import Causal, Documents, Everything, KeyPadding, Mask, Window
from headwise.models import AcrossHeads, Context, MultiHeadAttention, RMSNorm, Rotary
from headwise.positions import Layout
from tests.attention.problems import rand
from tests.models.oracle import Keep, Rule, context_of, spread

BATCH, LENGTH, WIDTH, SOURCE = 2, 11, 13, 7


def causal(b: int, i: int, j: int) -> bool:
    return j <= i


def padded(b: int, i: int, j: int) -> bool:
    return j <= i and j >= (3, 0)[b]


def packed(b: int, i: int, j: int) -> bool:
    return j <= i and (i < 5) == (j < 5)


@dataclass(frozen=True)
class Variant:
    """How to build one attention, and how the reference is to compute it."""

    heads: int = 3
    kv_heads: int = 3
    d_head: int = 5
    d_value: int = 5
    bias: bool = False
    module: dict[str, Any] = field(default_factory=dict)
    rule: dict[str, Any] = field(default_factory=dict)
    norm: str | None = None
    visible: Mask | None = None
    offsets: tuple[int, ...] | None = None  # first position of each row
    logits: str | None = None  # "alibi", "learned"
    source_keep: Tensor | None = None
    cross: bool = False

    def build(self, seed: int = 0, dtype: torch.dtype = torch.float64) -> MultiHeadAttention:
        q, k = self.heads * self.d_head, self.kv_heads * self.d_head
        v = self.kv_heads * self.d_value
        norms: dict[str, Any] = {}
        if self.norm == "head":
            norms = {"query_norm": RMSNorm(self.d_head), "key_norm": RMSNorm(self.d_head)}
        elif self.norm == "all":
            norms = {"query_norm": AcrossHeads(RMSNorm(q)), "key_norm": AcrossHeads(RMSNorm(k))}
        module = MultiHeadAttention(
            nn.Linear(WIDTH, q, bias=self.bias), nn.Linear(WIDTH, k, bias=self.bias),
            nn.Linear(WIDTH, v, bias=self.bias),
            nn.Linear(self.heads * self.d_value, WIDTH, bias=self.bias),
            heads=self.heads, kv_heads=self.kv_heads, cross=self.cross, **norms, **self.module,
        ).to(dtype)  # fmt: skip
        spread(module, seed)
        with torch.no_grad():
            module.query.weight.mul_(2)  # type: ignore[operator,union-attr]
        return module.eval()

    def inputs(self, seed: int = 7, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Context]:
        x = rand(BATCH, LENGTH, WIDTH, seed=seed, dtype=dtype)
        source = rand(BATCH, SOURCE, WIDTH, seed=seed + 1, dtype=dtype) if self.cross else None
        logits = self.logits_bias()
        return x, context_of(
            x,
            positions=self.positions(),
            visible=self.visible,
            bias=None if logits is None else logits[None].to(dtype),
            source=source,
            source_visible=None if self.source_keep is None else KeyPadding(self.source_keep),
        )

    def positions(self) -> Tensor | None:
        if self.offsets is None:
            return None
        return torch.arange(LENGTH)[None] + torch.tensor(self.offsets)[:, None]

    def logits_bias(self) -> Tensor | None:
        if self.logits is None:
            return None
        i, j = torch.arange(LENGTH)[:, None], torch.arange(LENGTH)[None]
        if self.logits == "learned":
            return rand(self.heads, 2 * LENGTH, seed=5, dtype=torch.float64)[:, j - i + LENGTH]
        slope = torch.tensor([2.0**-4, 2.0**-8, 2.0**-2], dtype=torch.float64)
        return -slope[:, None, None] * (i - j).abs()

    def law(self, **changes: Any) -> Rule:
        keep: Keep = (lambda b, i, j: True) if self.cross else causal
        if self.source_keep is not None:
            table = self.source_keep
            keep = lambda b, i, j: bool(table[b, j])  # noqa: E731
        settings: dict[str, Any] = {
            "heads": self.heads, "kv_heads": self.kv_heads, "scale": 1 / math.sqrt(self.d_head),
            "keep": keep, "norm": self.norm, "positions": self.positions(),
            "bias": self.logits_bias(), **self.rule, **changes,
        }  # fmt: skip
        return Rule(**settings)


_SEEN = torch.ones(BATCH, LENGTH, dtype=torch.bool)
_SEEN[0, :3] = False
_READ = torch.ones(BATCH, SOURCE, dtype=torch.bool)
_READ[1, 4:] = False
_FIRST = torch.arange(LENGTH)[None].expand(BATCH, -1) < 5
_WIDE = Rotary(width=4, base=100.0)
_PAIRS = Rotary(width=4, base=100.0, layout=Layout.INTERLEAVED)

VARIANTS: dict[str, Variant] = {
    "one head": Variant(heads=1, kv_heads=1),
    "plain": Variant(),
    "grouped": Variant(heads=6, kv_heads=2, d_head=3, d_value=3),
    "multi-query": Variant(heads=5, kv_heads=1, d_head=3, d_value=3),
    "values of another width": Variant(heads=4, kv_heads=2, d_head=3, d_value=7),
    "biases": Variant(heads=4, kv_heads=2, bias=True),
    "norm of each head": Variant(heads=4, kv_heads=2, norm="head"),
    "norm over all heads": Variant(heads=4, kv_heads=2, norm="all"),
    "softcap": Variant(module={"softcap": 1.5}, rule={"cap": 1.5}),
    "sinks": Variant(heads=4, kv_heads=2, module={"sinks": True}),
    "scale": Variant(module={"scale": 0.3}, rule={"scale": 0.3}),
    "window": Variant(
        module={"mask": Window(3)}, rule={"keep": lambda b, i, j: i - 3 < j <= i}
    ),
    "both ways": Variant(module={"mask": Everything()}, rule={"keep": lambda b, i, j: True}),
    "rotary": Variant(module={"rotary": _WIDE}, rule={"turning": 4, "base": 100.0}),
    "rotary in pairs": Variant(
        heads=4, kv_heads=2,
        module={"rotary": _PAIRS}, rule={"turning": 4, "base": 100.0, "interleaved": True},
    ),
    "rotary, normed, other positions": Variant(
        norm="head", module={"rotary": _WIDE}, rule={"turning": 4, "base": 100.0},
        offsets=(17, 3),
    ),
    "ALiBi": Variant(logits="alibi"),
    "learned bias": Variant(logits="learned"),
    "left padding": Variant(visible=KeyPadding(_SEEN), rule={"keep": padded}),
    "left padding and sinks": Variant(
        visible=KeyPadding(_SEEN), rule={"keep": padded}, module={"sinks": True}
    ),
    "left padding and learned bias": Variant(
        visible=KeyPadding(_SEEN), rule={"keep": padded}, logits="learned"
    ),
    "documents": Variant(visible=Documents(_FIRST.long()), rule={"keep": packed}),
    "everything at once": Variant(
        heads=6, kv_heads=2, d_head=5, d_value=2, bias=True, norm="all",
        module={"rotary": _WIDE, "softcap": 2.0, "sinks": True, "scale": 0.7, "mask": Causal()},
        rule={"turning": 4, "base": 100.0, "cap": 2.0, "scale": 0.7, "keep": padded},
        visible=KeyPadding(_SEEN), offsets=(-3, 0),
    ),
    "cross": Variant(heads=4, kv_heads=2, bias=True, cross=True),
    "cross, padded source": Variant(cross=True, source_keep=_READ, norm="head"),
}  # fmt: skip
