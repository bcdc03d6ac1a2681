"""The inputs on which a function for multi-head attention is graded, smallest first."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any, Final, Literal

import torch
from torch import Tensor

from headwise.attention.definition import output, scores, weights
from headwise.attention.heads import merge_heads, share_kv_heads, split_heads

__all__ = ["PROBES", "Case", "Inputs", "MaskKind", "cases", "defined", "relative", "rounding"]

MaskKind = Literal["none", "causal", "padding", "empty row"]

_UNIT: Final = torch.finfo(torch.float64).eps / 2
_NAMES: Final = ("x", "w_q", "w_k", "w_v", "w_o")


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """What the function is called with; ``mask`` and ``kv_heads`` only where they are not None."""

    x: Tensor
    w_q: Tensor
    w_k: Tensor
    w_v: Tensor
    w_o: Tensor
    heads: int
    mask: Tensor | None = None
    kv_heads: int | None = None

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Everything that the function could change or take a gradient of."""
        found = {name: getattr(self, name) for name in _NAMES}
        return found if self.mask is None else found | {"mask": self.mask}

    def call(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Positional and keyword arguments."""
        options = {"mask": self.mask, "kv_heads": self.kv_heads}
        given = {name: value for name, value in options.items() if value is not None}
        return (*(getattr(self, name) for name in _NAMES), self.heads), given

    def with_(self, **changes: Any) -> Inputs:
        """The same with some of it replaced."""
        return Inputs(**(self.by_name() | changes))

    def by_name(self) -> dict[str, Any]:
        """Every field by its name."""
        return {name: getattr(self, name) for name in (*_NAMES, "heads", "mask", "kv_heads")}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One input by its sizes; the same sizes and seed give the same numbers everywhere.

    Example:
        >>> case = Case(batch=1, n=2, heads=1, d_head=2)
        >>> case.said, case.inputs().x.shape
        ('x of shape (1, 2, 2), 1 head', torch.Size([1, 2, 2]))
    """

    batch: int
    n: int
    heads: int
    d_head: int
    mask: MaskKind = "none"
    kv_heads: int | None = None
    large: float = 0.0  # makes the hidden last token large: the size of its largest logit, scaled
    seed: int = 0

    @property
    def d(self) -> int:
        """Width of the model."""
        return self.heads * self.d_head

    @property
    def said(self) -> str:
        """The sizes in words."""
        heads = f"{self.heads} head" + "s" * (self.heads != 1)
        kv = "" if self.kv_heads is None else f" over {self.kv_heads} key-value heads"
        words = {
            "none": "",
            "causal": ", causal mask",
            "padding": ", last key hidden as padding",
            "empty row": ", a causal mask whose first row hides every key",
        }
        large = f", whose logits are as large as {self.large:g}" if self.large else ""
        shape = f"({self.batch}, {self.n}, {self.d})"
        return f"x of shape {shape}, {heads}{kv}{words[self.mask]}{large}"

    def generator(self) -> torch.Generator:
        """Random numbers of this case."""
        return torch.Generator().manual_seed(1_000_003 * self.seed + 97 * self.n + self.d)

    def inputs(self, dtype: torch.dtype = torch.float64) -> Inputs:
        """Normal x, and weights that give logits of a size of about 1."""
        generator = self.generator()

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64)

        kv = self.d_head * (self.heads if self.kv_heads is None else self.kv_heads)
        widths = {"w_q": self.d, "w_k": kv, "w_v": kv, "w_o": self.d}
        made = {name: normal(self.d, width) / math.sqrt(self.d) for name, width in widths.items()}
        x = normal(self.batch, self.n, self.d)
        if self.large:
            q, k = (split_heads(x[-1:] @ made[name], self.heads) for name in ("w_q", "w_k"))
            logits = (q[:, :, :-1] @ k[:, :, -1:].mT).abs() / math.sqrt(self.d_head)
            x[-1, -1] *= self.large / float(logits.max())
        made = {name: tensor.to(dtype) for name, tensor in made.items()}
        return Inputs(
            x=x.to(dtype), heads=self.heads, mask=self.keep(), kv_heads=self.kv_heads, **made
        )

    def keep(self) -> Tensor | None:
        """True = may attend: ``query key``, or ``batch 1 query key`` for padding."""
        if self.mask == "none":
            return None
        keep = torch.ones(self.n, self.n, dtype=torch.bool)
        if self.mask == "causal":
            return keep.tril()
        if self.mask == "empty row":
            keep = keep.tril()
            keep[0] = False
            return keep
        keep = keep.repeat(self.batch, 1, 1, 1)
        keep[-1, :, :, -1] = False  # the last sequence is one token shorter
        return keep


def cases(
    *,
    mask: MaskKind = "none",
    grouped: bool = False,
    least_n: int = 1,
    least_batch: int = 1,
    least_heads: int = 1,
) -> Iterator[Case]:
    """Cases in the order of their number of entries, so that the first that fails is the smallest.

    Example:
        >>> first = next(cases(least_n=2, least_heads=2))
        >>> first.batch, first.n, first.heads, first.d_head
        (1, 2, 2, 1)
    """
    heads: list[tuple[int, int | None]] = (
        [(2, 1), (4, 2), (6, 2), (6, 3)] if grouped else [(h, None) for h in (1, 2, 3)]
    )
    small = product((1, 2), (1, 2, 3, 5), heads, (1, 2, 3))
    many: tuple[int, int | None] = (6, 2) if grouped else (5, None)
    two_more = [(2, 7, heads[-1], 5), (3, 11, many, 7)]
    sizes = [(b, n, h, g, d) for b, n, (h, g), d in [*small, *two_more]]
    sizes = [s for s in sizes if s[0] >= least_batch and s[1] >= least_n and s[2] >= least_heads]
    # −10000 hides a logit of 8000, and does not once it is divided by √2; it hides no 30000.
    larger = (0.0, 8e3, 3e4) if mask == "padding" else (0.0,)
    for b, n, h, g, d in sorted(sizes, key=lambda s: (s[0] * s[1] * s[2] * s[4], s[2], s[0], s[1])):
        for large in larger:
            yield Case(batch=b, n=n, heads=h, d_head=d, mask=mask, kv_heads=g, large=large)


# Where a known mistake has to give the same numbers before it is named: no size equals another.
PROBES: Final = {
    "none": (
        Case(batch=2, n=5, heads=3, d_head=7, seed=1),
        Case(batch=1, n=7, heads=5, d_head=3, seed=2),
    ),
    "causal": (Case(batch=2, n=5, heads=3, d_head=7, mask="causal", seed=1),),
    "padding": (
        Case(batch=2, n=5, heads=3, d_head=7, mask="padding", seed=1),
        Case(batch=2, n=5, heads=3, d_head=7, mask="padding", large=8e3, seed=1),
    ),
    "empty row": (Case(batch=2, n=5, heads=3, d_head=7, mask="empty row", seed=1),),
    "grouped": (Case(batch=2, n=5, heads=6, d_head=7, kv_heads=2, seed=1),),
}


def defined(inputs: Inputs) -> Tensor:
    """What has to come out: the definition of attention for each head, concatenated, times W_O."""
    kv_heads = inputs.heads if inputs.kv_heads is None else inputs.kv_heads
    q = split_heads(inputs.x @ inputs.w_q, inputs.heads)
    k, v = (split_heads(inputs.x @ w, kv_heads) for w in (inputs.w_k, inputs.w_v))
    a = weights(scores(q, k), inputs.mask)
    return merge_heads(output(a, v)) @ inputs.w_o


def rounding(inputs: Inputs) -> float:
    """How far an exact float64 output may be off: ``relative`` times Σ |x| |W_V| |W_O|."""
    kv_heads = inputs.heads if inputs.kv_heads is None else inputs.kv_heads
    v = share_kv_heads(split_heads(inputs.x.abs() @ inputs.w_v.abs(), kv_heads), inputs.heads)
    size = float(v.amax((0, 2)).sum()) * float(inputs.w_o.abs().max())
    return relative(inputs) * size


def relative(inputs: Inputs) -> float:
    """Relative error of a float64 implementation, of any order of its sums and without a scale too.

    Logits s wrong by u |s| make weights wrong by 2 u |s|; 32 is the safety of a fused softmax; sums
    of n or d terms add their number times u.
    """
    kv_heads = inputs.heads if inputs.kv_heads is None else inputs.kv_heads
    q = split_heads((inputs.x @ inputs.w_q).abs(), inputs.heads)
    k = share_kv_heads(split_heads((inputs.x @ inputs.w_k).abs(), kv_heads), inputs.heads)
    largest = float((q @ k.mT).max())
    return _UNIT * (32 * (1 + largest) + 2 * (inputs.x.shape[1] + 3 * inputs.x.shape[2]))
