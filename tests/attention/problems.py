"""Attention problems for the tests: masks by strategy, inputs from seeds, sizes that are prime."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from headwise.attention.bias import as_function
from headwise.attention.masks import (
    Band,
    Causal,
    Chunked,
    Dense,
    Documents,
    Everything,
    KeyPadding,
    Mask,
    Predicate,
    Prefix,
    Window,
)


def rand(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Normal numbers, the same in every run."""
    g = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype)


@dataclass(frozen=True)
class Problem:
    """Inputs of attention as a user passes them, and the bias also as a whole tensor."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Mask | None = None
    scale: float | None = None
    softcap: float | None = None
    bias: Tensor | None = None
    sinks: Tensor | None = None
    offset: int | None = None

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments, the bias as a tensor."""
        names = ("mask", "scale", "softcap", "bias", "sinks", "offset")
        return {name: getattr(self, name) for name in names}

    @property
    def tiled_options(self) -> dict[str, Any]:
        """Keyword arguments, the bias as a function of tiles."""
        if self.bias is None:
            return self.options
        (b, h, m, _), n = self.q.shape, self.k.shape[2]
        return {**self.options, "bias": as_function(self.bias, b, h, m, n)}

    def double(self) -> Problem:
        """The same numbers in float64."""
        return replace(
            self,
            q=self.q.double(),
            k=self.k.double(),
            v=self.v.double(),
            bias=None if self.bias is None else self.bias.double(),
            sinks=None if self.sinks is None else self.sinks.double(),
        )


def masks(batch: int, keys: int, queries: int = 0, offset: int = 0) -> st.SearchStrategy[Mask]:
    """Any mask this package knows, and combinations of them."""
    size = st.integers(1, keys + 2)
    ids = st.lists(
        st.lists(st.integers(0, 3), min_size=keys, max_size=keys), min_size=batch, max_size=batch
    ).map(torch.tensor)
    simple = st.one_of(
        st.just(Everything()),
        st.integers(-3, 3).map(Causal),
        size.map(Window),
        st.builds(Band, st.integers(0, keys), st.integers(0, keys)),
        st.builds(Chunked, size, st.integers(-3, 5)),
        st.integers(0, keys + 1).map(Prefix),
        ids.map(lambda x: KeyPadding(x > 0)),
        ids.map(lambda x: Documents(x.sort(-1).values)),
        ids.map(Documents),
        st.integers(2, 5).map(lambda p: Predicate(lambda b, i, j: (i * 3 + j + b) % p != 0)),
    )
    if queries:
        dense = ids.map(
            lambda x: Dense((x[:, None, :] + torch.arange(queries)[None, :, None]) % 3 > 0, offset)
        )
        simple = st.one_of(simple, dense)
    return st.recursive(
        simple,
        lambda inner: st.one_of(
            st.builds(lambda a, b: a & b, inner, inner), st.builds(lambda a, b: a | b, inner, inner)
        ),
        max_leaves=3,
    )


@st.composite
def problems(draw: st.DrawFn, dtype: torch.dtype = torch.float32) -> Problem:
    """Shapes with primes, grouped heads, masks, biases, softcap, sinks, saturation, empty rows."""
    batch = draw(st.sampled_from([1, 2]))
    kv_heads, group = draw(st.sampled_from([(1, 1), (1, 3), (2, 1), (2, 2), (3, 1)]))
    queries = draw(st.sampled_from([1, 2, 7, 13, 31]))
    keys = draw(st.sampled_from([1, 3, 7, 17, 37]))
    d, dv = draw(st.sampled_from([(3, 5), (5, 3), (7, 2)]))
    seed = draw(st.integers(0, 999))
    spread = draw(st.sampled_from([0.0, 1.0, 1.0, 5.0, 30.0]))
    offset = draw(st.sampled_from([None, None, 0, 5, keys - queries + 2]))
    at = keys - queries if offset is None else offset
    mask = draw(st.one_of(st.none(), masks(batch, keys, queries, at)))
    heads = kv_heads * group
    shape = draw(
        st.sampled_from(
            [
                None,
                None,
                (batch, heads, queries, keys),
                (1, heads, queries, keys),
                (heads, 1, keys),
                (batch, 1, queries, 1),
                (queries, keys),
            ]
        )
    )
    bias = None if shape is None else 2 * rand(*shape, seed=seed + 3, dtype=dtype)
    if bias is not None and draw(st.booleans()):
        bias[rand(*shape, seed=seed + 4) < -1] = -torch.inf
    return Problem(
        q=spread * rand(batch, heads, queries, d, seed=seed, dtype=dtype),
        k=rand(batch, kv_heads, keys, d, seed=seed + 1, dtype=dtype),
        v=rand(batch, kv_heads, keys, dv, seed=seed + 2, dtype=dtype),
        mask=mask,
        scale=draw(st.sampled_from([None, None, 1.0, 0.3])),
        softcap=draw(st.sampled_from([None, None, 2.0, 20.0])),
        bias=bias,
        sinks=draw(st.sampled_from([None, None, 2 * rand(heads, seed=seed + 5, dtype=dtype)])),
        offset=offset,
    )
