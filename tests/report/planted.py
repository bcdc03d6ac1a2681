"""Scans with known contents: toy heads whose attention is computed densely, as real records.

Every layer mixes five kinds of heads (sink, previous token, local, broad, content); a test that
needs something out of the ordinary changes the record with ``dataclasses.replace``.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from headwise.results.records import (
    PROFILED,
    QUANTILES,
    BlockRecord,
    GradientRecord,
    LayerRecord,
    ScanRecord,
    TokenStream,
)

WORDS = (
    "Who 's there ? Nay , answer me : stand , and unfold yourself . Long live the king ! "
    "You come most carefully upon your hour . 'Tis now struck twelve ; get thee to bed , "
    "Francisco . For this relief much thanks : 'tis bitter cold , And I am sick at heart . "
    "Have you had quiet guard ? Not a mouse stirring . Well , good night ."
).split()


def tokens(count: int, name: str = "text", documents: int = 1) -> TokenStream:
    """Words with their leading spaces, a first special token, a newline now and then."""
    texts = ["<s>"]
    while len(texts) < count:
        texts += [" " + word for word in WORDS] + ["\n"]
    length = math.ceil(count / documents)
    index = torch.arange(count)
    return TokenStream(
        name=name,
        texts=tuple(texts[:count]),
        ids=index * 7 % 997,
        document=index // length,
        position=index % length,
    )


def _logits(kind: int, n: int, strength: float, noise: torch.Generator) -> Tensor:
    i, j = torch.arange(n)[:, None], torch.arange(n)[None]
    base = torch.randn(n, n, generator=noise) * 0.7
    if kind == 0:
        return base + (j == 0) * (5.0 + 2.0 * strength)
    if kind == 1:
        return base + (j == i - 1) * (5.0 + 2.0 * strength)
    if kind == 2:
        return base - (i - j).abs() / (3.0 + 9.0 * strength)
    if kind == 3:
        return base * 0.3
    content = torch.randn(n, generator=noise) * (0.8 + strength)
    return base + content[None] + (j == 0) * 3.0


def _bands(weights: Tensor) -> Tensor:
    n = weights.shape[-1]
    distance = (torch.arange(n)[:, None] - torch.arange(n)[None]).abs()
    edges = [0, *(2**b for b in range(math.ceil(math.log2(n))))]
    ends = [*edges[1:], n + 1]
    masses = [
        (weights * ((distance >= a) & (distance < b))).sum(-1).mean(-1)
        for a, b in zip(edges, ends, strict=True)
    ]
    return torch.stack(masses, -1)


def _pool(weights: Tensor, width: int) -> Tensor:
    heads, n, _ = weights.shape
    blocks = math.ceil(n / width)
    padded = torch.nn.functional.pad(weights, (0, blocks * width - n, 0, blocks * width - n))
    sums = padded.reshape(heads, blocks, width, blocks, width).sum((2, 4))
    rows = torch.full((blocks,), float(width))
    rows[-1] = n - width * (blocks - 1)
    return sums / rows[None, :, None]


def layer(
    number: int,
    heads: int = 5,
    kv_heads: int = 5,
    n: int = 131,
    role: str = "decoder",
    stream: str = "text",
    queries: str = "text",
) -> LayerRecord:
    """One attention module measured densely over ``n`` tokens."""
    noise = torch.Generator().manual_seed(1000 * number + len(role))
    causal = role == "decoder"
    visible = torch.ones(n, n, dtype=torch.bool)
    if causal:
        visible = visible.tril()
    kinds = [int(k) for k in torch.randint(0, 5, (heads,), generator=noise)]
    strengths = torch.rand(heads, generator=noise)
    logits = torch.stack(
        [_logits(k, n, float(s), noise) for k, s in zip(kinds, strengths, strict=True)]
    ).masked_fill(~visible, -math.inf)
    weights = logits.softmax(-1)
    rows = _rows(logits, weights, visible, role)
    width, bin_width = max(1, math.ceil(n / 64)), max(1, math.ceil(n / 32))
    return LayerRecord(
        module=f"model.{role}.layers.{number}.attention",
        role=role,
        number=number,
        heads=heads,
        kv_heads=kv_heads,
        mask="causal" if causal else "everything visible",
        query_stream=queries,
        key_stream=stream,
        scale=0.125,
        window=None,
        rows=n,
        rows_empty=0,
        rows_total=n,
        values=_values(rows, logits, visible),
        quantiles={k: _quantiles(rows[k]) for k in PROFILED},
        profiles={k: _profile(rows[k], bin_width) for k in PROFILED},
        profile_rows=torch.tensor([len(c) for c in torch.arange(n).split(bin_width)]),
        bin_width=bin_width,
        bands=_bands(weights) if role != "cross" else torch.full((heads, 1), math.nan),
        received=weights.sum(1),
        received_visible=visible.sum(0),
        pooled=_pool(weights, width),
        pool_rows=torch.tensor([len(c) for c in torch.arange(n).split(width)]),
        pool_width=width,
    )


def _rows(logits: Tensor, weights: Tensor, visible: Tensor, role: str) -> dict[str, Tensor]:
    n = weights.shape[-1]
    index = torch.arange(n)
    count = visible.sum(-1)
    finite = torch.where(visible, logits, 0.0)
    mean = finite.sum(-1) / count
    variance = (torch.where(visible, (logits - mean[..., None]) ** 2, 0.0)).sum(-1) / count
    sink = weights[..., 0]
    rest = weights[..., 1:] / (1 - sink)[..., None].clamp(min=1e-9)
    none = torch.full_like(sink, math.nan)
    cross = role == "cross"
    entropy = torch.special.entr(weights).sum(-1)
    previous = torch.diagonal(weights, -1, -2, -1)
    return {
        "entropy": entropy,
        "entropy_fraction": torch.where(count > 1, entropy / count.log(), math.nan),
        "entropy_without_sink": torch.special.entr(rest).sum(-1),
        "entropy_without_sink_fraction": torch.where(
            count > 2, torch.special.entr(rest).sum(-1) / (count - 1).log(), math.nan
        ),
        "effective_keys": 1 / (weights**2).sum(-1),
        "jacobian_trace": 1 - (weights**2).sum(-1),
        "top_weight": weights.amax(-1),
        "distance": none if cross else (weights * (index[:, None] - index[None]).abs()).sum(-1),
        "sink_mass": sink,
        "self_mass": none if cross else torch.diagonal(weights, 0, -2, -1),
        "previous_mass": none if cross else torch.nn.functional.pad(previous, (1, 0)),
        "max_logit": torch.where(visible, logits, -math.inf).amax(-1),
        "min_logit": torch.where(visible, logits, math.inf).amin(-1),
        "mean_logit": mean,
        "logit_std": variance.sqrt(),
        "log_sum_exp": logits.logsumexp(-1),
        "dead": (1 - weights.amax(-1) < 1e-3).float(),
        "dead_not_sink": ((1 - weights.amax(-1) < 1e-3) & (weights.argmax(-1) != 0)).float(),
    }


def _values(rows: dict[str, Tensor], logits: Tensor, visible: Tensor) -> dict[str, Tensor]:
    keys = [k for k in rows if k not in ("dead", "dead_not_sink", "max_logit", "min_logit")]
    flat = torch.where(visible, logits, -math.inf).flatten(1).argmax(-1)
    n = logits.shape[-1]
    return {
        **{key: rows[key].double().nanmean(-1) for key in keys},
        "dead_rows": rows["dead"][:, 1:].double().mean(-1),
        "dead_rows_not_sink": rows["dead_not_sink"][:, 1:].double().mean(-1),
        "null_mass": torch.full((len(flat),), math.nan, dtype=torch.float64),
        "max_logit": rows["max_logit"].double().amax(-1),
        "min_logit": rows["min_logit"].double().amin(-1),
        "max_abs_logit": torch.where(visible, logits.abs(), 0).double().amax((-1, -2)),
        "max_logit_query": (flat // n).double(),
        "max_logit_key": (flat % n).double(),
    }


def _quantiles(rows: Tensor) -> Tensor:
    levels = torch.tensor(QUANTILES, dtype=torch.float32)
    return torch.nanquantile(rows.float(), levels, dim=-1).T


def _profile(rows: Tensor, width: int) -> Tensor:
    return torch.stack([part.nanmean(-1) for part in rows.split(width, -1)], -1)


def block(number: int, stack: str = "decoder", first: float = 1.5) -> BlockRecord:
    """A block whose stream grows by a fifth."""
    grown = 1.2**number
    return BlockRecord(
        module=f"model.{stack}.layers.{number}",
        stack=stack,
        number=number,
        stream_in_rms=grown,
        stream_out_rms=1.2 * grown,
        stream_in_rms_first=first * grown,
        stream_out_rms_first=first * 1.2 * grown,
        stream_max_abs=9.0 * grown,
        attention_write_rms=0.3 * grown,
        mlp_write_rms=0.4 * grown,
        attention_write_rms_first=0.2 * grown,
        mlp_write_rms_first=0.5 * grown,
        writes_verified=True,
    )


def gradients(blocks: int) -> tuple[GradientRecord, ...]:
    """Gradient norms that fall gently with depth."""
    return tuple(
        GradientRecord(
            parameter=f"model.layers.{b}.{kind}_proj.weight",
            block=b,
            projection=kind,
            norm=scale / (1 + 0.2 * b),
            size=4096,
        )
        for b in range(blocks)
        for kind, scale in (("q", 0.1), ("k", 0.08), ("v", 0.4), ("o", 0.5), ("mlp", 0.9))
    )


def about(n: int, **more: Any) -> dict[str, Any]:
    """Facts of a run over ``n`` tokens."""
    return {
        "model": "toy-model",
        "architecture": "ToyForCausalLM",
        "tokens": n,
        "documents": 1,
        "dtype": "float32",
        "computed_dtype": "float32",
        "exactness": "exact over all rows",
        "rows_measured": n,
        "rows_total": n,
        "sink_keys": 1,
        "seconds": 12.4,
        "cpu_seconds": 21.9,
        "peak_memory_bytes": 731 * 2**20,
        "versions": {"headwise": "0.1.0", "torch": "2.13.0", "transformers": "5.24.0"},
        "created_at": "2026-11-29T23:12:00+00:00",
        "command": "headwise report toy-model --tokens 131",
        "device": "cpu",
        "context": 8192,
        "interrupted": False,
        "notes": [],
        **more,
    }


def scan(
    layers: int = 3, heads: int = 5, kv_heads: int = 5, n: int = 131, **facts: Any
) -> ScanRecord:
    """A healthy decoder."""
    return ScanRecord(
        layers=tuple(layer(number, heads, kv_heads, n) for number in range(layers)),
        blocks=tuple(block(number) for number in range(layers)),
        tokens=(tokens(n),),
        gradients=gradients(layers),
        about=about(n, **facts),
    )


def encoder_decoder(n: int = 67) -> ScanRecord:
    """Two encoder layers; two decoder layers, each with self- and cross-attention."""
    encoder = [layer(k, 3, 3, n, "encoder", "source", "source") for k in range(2)]
    decoder = [
        layer(k, 3, 3, n, role, stream, "target")
        for k in range(2)
        for role, stream in (("decoder", "target"), ("cross", "source"))
    ]
    return ScanRecord(
        layers=(*encoder, *decoder),
        blocks=tuple(block(k, stack) for stack in ("encoder", "decoder") for k in range(2)),
        tokens=(tokens(n, "source"), tokens(n, "target")),
        about=about(2 * n, model="toy-seq2seq"),
    )
