"""Multi-head attention with known mistakes: whose numbers a wrong function gives, names its cause.

A ``Form`` is an implementation with every choice named; the right one is ``Form()``. A mistake is
one other choice. A function that gives the numbers of a form with one or two mistakes has made
those.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Final

import torch
from torch import Tensor

from headwise.theorems.grading_cases import Inputs

__all__ = ["MISTAKES", "Form", "Mistake", "attention_with", "recognise"]

# Masks by adding a number lose about 1e-7 of a logit in float64; other mistakes are far larger.
_SAME: Final = 1e-6


@dataclass(frozen=True, slots=True)
class Form:
    """Every choice of an implementation, by a word; the first written here is right."""

    scale: str = "1/√d_k"
    split: str = "heads, then width"
    merge: str = "heads, then width"
    normalised: str = "over keys"
    mask: str = "selects"
    polarity: str = "True attends"
    shared: str = "in place"
    projections: str = "x W"
    output: str = "W_O"
    logits: str = "q·k"


@dataclass(frozen=True, slots=True)
class Mistake:
    """One wrong choice, and what it is called."""

    field: str
    choice: str
    sentence: str


MISTAKES: Final = tuple(
    Mistake(*each)
    for each in (
        ("scale", "1", "the scale 1/√d_k is missing: the output equals unscaled attention"),
        ("scale", "1/d_k", "the logits are divided by d_k in place of √d_k"),
        ("scale", "1/√d", "the logits are divided by √d of the model in place of √d_k of a head"),
        ("scale", "1/d", "the logits are divided by the width d of the model in place of √d_k"),
        ("scale", "√d_k", "the logits are multiplied by √d_k in place of divided"),
        ("merge", "reshaped", "the heads are merged without the transpose back to batch, n, heads"),
        ("split", "reshaped", "the heads are split by a reshape without the transpose"),
        ("split", "interleaved", "the width is split as (d_k, heads) in place of (heads, d_k)"),
        ("merge", "interleaved", "the heads are merged as (d_k, heads) in place of (heads, d_k)"),
        ("split", "one head", "the number of heads is ignored: there is one head of width d"),
        ("normalised", "over queries", "the softmax runs over the queries, not over the keys"),
        ("normalised", "over heads", "the softmax runs over the heads, not over the keys"),
        ("normalised", "over batch", "the softmax runs over the batch, not over the keys"),
        ("normalised", "not", "the softmax is missing"),
        ("normalised", "sigmoid", "a sigmoid stands in place of the softmax"),
        ("polarity", "True hides", "the mask is read the other way round: True has to mean attend"),
        ("mask", "ignored", "the mask is ignored"),
        ("mask", "always causal", "a causal mask is applied that nobody asked for"),
        (
            "mask",
            "after",
            "the mask is applied after the softmax, and rows are not normalised anew",
        ),
        ("mask", "zero", "hidden logits are set to 0 in place of −∞: exp(0) is 1, not 0"),
        ("mask", "number", "the boolean mask is added to the logits as the numbers 0 and 1"),
        ("mask", "nan", "a row of nothing but −∞ goes through the softmax: 0/0 is NaN"),
        ("mask", "fill", "a finite number stands for −∞, so a row that sees nothing is uniform"),
        ("mask", "add", "a finite mask is added: a row that sees nothing attends as if unmasked"),
        ("mask", "add 1e4", "the mask adds −10000, which large logits outweigh"),
        ("mask", "add 1e4 before", "the mask is added before the scale, which makes it weaker"),
        ("shared", "tiled", "key-value heads are tiled (h mod g) in place of repeated in place"),
        ("shared", "ignored", "kv_heads is ignored"),
        ("projections", "x Wᵀ", "the weights are transposed: x Wᵀ in place of x W"),
        ("output", "none", "the output projection W_O is missing"),
        ("output", "W_Oᵀ", "W_O is transposed"),
        ("logits", "k·q", "queries and keys are exchanged: k qᵀ in place of q kᵀ"),
    )
)


def attention_with(form: Form, inputs: Inputs) -> Tensor:
    """Multi-head attention as this form computes it: ``batch n d``."""
    x, d = inputs.x, inputs.x.shape[-1]
    kv_heads = inputs.kv_heads or inputs.heads
    one = form.split == "one head"
    heads, kv_heads = (1, 1) if one else (inputs.heads, kv_heads)
    if form.shared == "ignored":
        kv_heads = heads
    ws = (inputs.w_q, inputs.w_k, inputs.w_v)
    q, k, v = (x @ (w.mT if form.projections == "x Wᵀ" else w) for w in ws)
    q = _split(q, heads, form.split)
    k, v = (_shared(_split(y, kv_heads, form.split), heads, form.shared) for y in (k, v))
    d_k = q.shape[-1]
    scale = {
        "1/√d_k": d_k**-0.5,
        "1": 1.0,
        "1/d_k": 1 / d_k,
        "1/√d": d**-0.5,
        "1/d": 1 / d,
        "√d_k": d_k**0.5,
    }[form.scale]
    s = q @ k.mT if form.logits == "q·k" else k @ q.mT
    merged = _merge(_weights(s, scale, inputs.mask, form) @ v, form.merge)
    if form.output == "none":
        return merged
    return merged @ (inputs.w_o.mT if form.output == "W_Oᵀ" else inputs.w_o)


def _split(y: Tensor, heads: int, how: str) -> Tensor:
    b, n, width = y.shape
    if how == "reshaped":
        return y.reshape(b, heads, n, width // heads)
    if how == "interleaved":
        return y.reshape(b, n, width // heads, heads).permute(0, 3, 1, 2)
    return y.reshape(b, n, heads, width // heads).transpose(1, 2)


def _shared(y: Tensor, heads: int, how: str) -> Tensor:
    group = heads // y.shape[1]
    return y.repeat(1, group, 1, 1) if how == "tiled" else y.repeat_interleave(group, 1)


def _merge(o: Tensor, how: str) -> Tensor:
    b, _, n, _ = o.shape
    if how == "reshaped":
        return o.reshape(b, n, -1)
    order = (0, 2, 3, 1) if how == "interleaved" else (0, 2, 1, 3)
    return o.permute(order).reshape(b, n, -1)


def _weights(s: Tensor, scale: float, mask: Tensor | None, form: Form) -> Tensor:
    n = s.shape[-1]
    if form.mask == "always causal":
        causal = torch.ones(n, n, dtype=torch.bool).tril()
        mask = causal if mask is None else mask & causal
    if mask is not None and form.polarity == "True hides":
        mask = ~mask
    raw, s = s, scale * s
    if mask is None or form.mask == "ignored":
        return _normalised(s, form.normalised)
    hidden = (~mask).to(s.dtype)
    if form.mask == "after":
        return _normalised(s, form.normalised) * (1 - hidden)
    s = {
        "zero": lambda: torch.where(mask, s, 0.0),
        "number": lambda: s + mask.to(s.dtype),
        "fill": lambda: torch.where(mask, s, -1e9),
        "add": lambda: s - 1e9 * hidden,
        "add 1e4": lambda: s - 1e4 * hidden,
        "add 1e4 before": lambda: scale * (raw - 1e4 * hidden),
    }.get(form.mask, lambda: torch.where(mask, s, -math.inf))()
    a = _normalised(s, form.normalised)
    return a if form.mask == "nan" else torch.where(mask.any(-1, keepdim=True), a, _kept(a, form))


def _kept(a: Tensor, form: Form) -> Tensor:
    """Weights of a row that sees nothing: 0 where it is selected away, else what came out."""
    return torch.zeros_like(a) if form.mask in ("selects", "always causal") else a


def _normalised(s: Tensor, how: str) -> Tensor:
    axis = {"over keys": -1, "over queries": -2, "over heads": 1, "over batch": 0}.get(how)
    if axis is not None:
        return torch.softmax(s, axis)
    return torch.sigmoid(s) if how == "sigmoid" else torch.where(s == -math.inf, 0.0, s)


def recognise(
    found: Sequence[tuple[Inputs, Tensor]], *, allowed: Iterable[Mistake] = MISTAKES
) -> tuple[Mistake, ...]:
    """The one or two mistakes that give these outputs on all these inputs; () where none do.

    Example:
        >>> from headwise.theorems.grading_cases import Case
        >>> inputs = Case(batch=2, n=5, heads=3, d_head=7).inputs()
        >>> unscaled = attention_with(Form(scale="1"), inputs)
        >>> [each.choice for each in recognise([(inputs, unscaled)])]
        ['1']
    """
    if all(_gives((), *each) for each in found):
        return ()
    return next(
        (some for some in _sets(tuple(allowed)) if all(_gives(some, *each) for each in found)), ()
    )


def _sets(mistakes: tuple[Mistake, ...]) -> Iterator[tuple[Mistake, ...]]:
    for count in (1, 2):
        for some in combinations(mistakes, count):
            if len({each.field for each in some}) == count:
                yield some


def _gives(some: tuple[Mistake, ...], inputs: Inputs, output: Tensor) -> bool:
    form = replace(Form(), **{each.field: each.choice for each in some})
    compute: Callable[[Form, Inputs], Tensor] = attention_with
    try:
        made = compute(form, inputs)
    except RuntimeError:  # shapes that this mistake cannot have
        return False
    if made.shape != output.shape:
        return False
    size = float(made.nan_to_num().abs().max()) + 1e-12
    return torch.allclose(made, output, rtol=_SAME, atol=_SAME * size, equal_nan=True)
