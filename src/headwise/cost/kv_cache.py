"""What a decoder remembers of earlier tokens: bytes per token and in total, as three figures.

    ideal          min(n, W) tokens in a layer with a window of W keys, n in the others
    transformers   min(n, W − 1): the next query brings its own key (all n if W is 1)
    paged          ⌈n / page⌉ pages in every layer: sliding layers as long as the others

A token of a layer takes (kv_heads · d_head) numbers for keys and as many for values; with latent
attention (MLA) rank + rotary numbers for both. Cross-attention keeps the tokens of the source.

``transformers`` is what ``past_key_values`` of transformers 5.24 holds after a pass
(``DynamicCache``). The tensors of a sliding layer are views: right after a prompt that is longer
than its window, the storage behind them still has the whole prompt, until the next token
(``after_prompt``). ``paged`` is vLLM without its hybrid manager (vllm/v1/kv_cache_interface.py: a
sliding layer counts as full); ``paged_hybrid`` is with it: a sliding layer holds ⌈W / page⌉ + 1
pages, for a window need not begin where a page does. MLA: DeepSeek-AI 2024 (arXiv:2405.04434),
table 1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from headwise.cost.formats import format_of
from headwise.cost.parts import Attention, Parts
from headwise.errors import OptionError

__all__ = ["KeyValueCache", "LayerCache", "kv_cache"]

_MOST = 10**12


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCache:
    """One attention of one layer, for one sequence.

    Attributes:
        kind: "MHA", "GQA", "MQA" or "MLA"; with "sliding" or "cross" before it.
        per_token: bytes of one token.
        ideal, transformers, paged, paged_hybrid, after_prompt: tokens for which there is memory.
    """

    layer: int
    kind: str
    per_token: int
    ideal: int
    transformers: int
    paged: int
    paged_hybrid: int
    after_prompt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyValueCache:
    """The cache of ``batch`` sequences of ``tokens`` tokens, in bytes.

    Example:
        >>> from headwise.cost.explicit import explicit
        >>> parts = explicit(d_model=64, layers=2, heads=4, kv_heads=2, vocab=257, window=10)
        >>> found = kv_cache(parts, tokens=40)
        >>> found.per_token, found.ideal, found.transformers, found.paged
        (256, 2560, 2304, 12288)
    """

    layers: tuple[LayerCache, ...]
    tokens: int
    batch: int
    source: int
    dtype: str
    page: int

    @property
    def per_token(self) -> int:
        """Bytes of one more token of one sequence, as long as no window is full."""
        return sum(each.per_token for each in self.layers if not each.kind.startswith("cross"))

    @property
    def per_token_later(self) -> int:
        """Bytes of one more token of one sequence once every window is full."""
        grows = (each for each in self.layers if not each.kind.startswith(("cross", "sliding")))
        return sum(each.per_token for each in grows)

    @property
    def ideal(self) -> int:
        """Bytes of what later queries can see."""
        return self._sum(lambda each: each.ideal)

    @property
    def transformers(self) -> int:
        """Bytes of the keys and values in the cache of transformers."""
        return self._sum(lambda each: each.transformers)

    @property
    def after_prompt(self) -> int:
        """Bytes of the storages behind them, right after a prompt of ``tokens`` in one pass."""
        return self._sum(lambda each: each.after_prompt)

    @property
    def paged(self) -> int:
        """Bytes of the pages of an engine that treats all layers alike."""
        return self._sum(lambda each: each.paged)

    @property
    def paged_hybrid(self) -> int:
        """Bytes of the pages of an engine that frees those before a window."""
        return self._sum(lambda each: each.paged_hybrid)

    def by_kind(self) -> dict[str, tuple[int, int, int, int]]:
        """Kind → number of layers, and bytes: ideal, transformers, paged."""
        out: dict[str, tuple[int, int, int, int]] = {}
        for each in self.layers:
            number, *sums = out.get(each.kind, (0, 0, 0, 0))
            tokens = (each.ideal, each.transformers, each.paged)
            new = [s + self.batch * each.per_token * n for s, n in zip(sums, tokens, strict=True)]
            out[each.kind] = (number + 1, new[0], new[1], new[2])
        return out

    def _sum(self, tokens: Callable[[LayerCache], int]) -> int:
        return self.batch * sum(each.per_token * tokens(each) for each in self.layers)


def kv_cache(
    parts: Parts,
    *,
    tokens: int,
    batch: int = 1,
    source: int | None = None,
    dtype: str = "bfloat16",
    page: int = 16,
) -> KeyValueCache:
    """The cache after ``tokens`` tokens of each of ``batch`` sequences; empty for an encoder.

    Args:
        source: tokens that the encoder of an encoder–decoder has read; None: as many.
        dtype: of keys and values, stored number by number.
        page: tokens of a page of a paged engine.

    Raises:
        OptionError: numbers out of range, or a type with blocks.

    Example:
        >>> from headwise.cost.explicit import explicit
        >>> llama_3_8b = explicit(d_model=4096, layers=32, heads=32, kv_heads=8, vocab=128_256)
        >>> kv_cache(llama_3_8b, tokens=8192).per_token
        131072
    """
    for name, value in (("tokens", tokens), ("batch", batch), ("page", page)):
        if not 1 <= value <= _MOST:
            raise OptionError(f"{name} is {value}", allowed=f"1 to {_MOST:,}")
    form = format_of(dtype)
    if not form.plain:
        raise OptionError(
            f"a cache in {dtype}", allowed="float64, float32, bfloat16, float16 or float8"
        )
    encoder = parts.stack("encoder")
    known = tokens if source is None else source
    if encoder is not None and encoder.tokens is not None:
        known = encoder.tokens
    if not 1 <= known <= _MOST:
        raise OptionError(f"source is {known}", allowed=f"1 to {_MOST:,}")
    layers = tuple(
        _layer(number, attention, known if attention.role == "cross" else tokens, form.size, page)
        for stack, number, attention in parts.attentions()
        if stack.decodes
    )
    return KeyValueCache(
        layers=layers, tokens=tokens, batch=batch, source=known, dtype=dtype, page=page
    )


def _layer(number: int, of: Attention, tokens: int, size: int, page: int) -> LayerCache:
    whole = -(-tokens // page) * page
    window = of.window
    ideal = kept = tokens
    hybrid = whole
    if window is not None:
        ideal = min(tokens, window)
        # transformers slices [-W + 1:], which is everything where W is 1.
        kept = tokens if window == 1 else min(tokens, window - 1)
        hybrid = min(whole, (-(-window // page) + 1) * page)
    return LayerCache(
        layer=number,
        kind=_kind(of),
        per_token=of.cached * size,
        ideal=ideal,
        transformers=kept,
        paged=whole,
        paged_hybrid=hybrid,
        after_prompt=tokens,
    )


def _kind(of: Attention) -> str:
    if of.latent is not None:
        name = "MLA"
    elif of.kv_heads == of.heads:
        name = "MHA"
    else:
        name = "MQA" if of.kv_heads == 1 else "GQA"
    if of.role == "cross":
        return f"cross {name}"
    return f"sliding {name}" if of.window is not None else name
