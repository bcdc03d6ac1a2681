"""Scan records of small made-up models, computed densely by the book: inputs for tests.

Every number is a true statistic of explicit attention matrices in float64, so a synthetic record
obeys the identities that a real one does. Heads have known characters, in a fixed order, so tests
know what there is to find.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor

from headwise.results.records import (
    PROFILED,
    QUANTILES,
    VALUES,
    BlockRecord,
    GradientRecord,
    LayerRecord,
    ScanRecord,
    TokenStream,
)

CHARACTERS = ("sink", "previous", "local", "broad", "mixed")
WORDS = (
    " the",
    " whale",
    ",",
    " sea",
    "\n",
    " of",
    " and",
    "é",
    " Ahab",
    "<0x0A>",
    " 海",
    ".",
    " a",
)
SCRIPT = "</script><script>document.title='owned'</script>"
NAN = float("nan")


@dataclass(frozen=True)
class _Call:
    """What one layer reads and how it may look."""

    module: str
    role: str
    number: int
    query: TokenStream
    key: TokenStream


def make_record(
    layers: int = 5,
    heads: int = 3,
    tokens: int = 37,
    *,
    kv_heads: int | None = None,
    kind: Literal["decoder", "encoder", "encoder-decoder"] = "decoder",
    source_tokens: int = 23,
    documents: int = 1,
    unhealthy: bool = True,
    nan_layer: int | None = None,
    sampled: int | None = None,
    texts: bool = True,
    script: bool = False,
    gradients: bool = False,
    keep_rows: bool = False,
    null_sink: bool = False,
    bin_width: int = 4,
    blocks: bool = True,
    interrupted: bool = False,
) -> ScanRecord:
    """A scan of a made-up model.

    ``layers``, ``heads``: of each stack. Head h of layer l has the character
    ``CHARACTERS[(l + h) % 5]``; with ``unhealthy`` the last head of the last layer is saturated
    with logits above 100 and the first token's stream is massive from the middle block on.
    ``kind="encoder-decoder"`` gives encoder layers on ``source``, then decoder and cross layers.
    ``sampled`` measures only so many rows. ``nan_layer`` is the index of a layer full of NaN.
    ``script`` puts a ``<script>`` among the tokens.
    """
    streams, calls = _calls(kind, layers, _Texts(texts, script), tokens, source_tokens, documents)
    options = _Options(
        heads, kv_heads or heads, sampled, bin_width, keep_rows, null_sink, unhealthy, len(calls)
    )
    measured = tuple(
        _broken(_layer(i, call, options)) if i == nan_layer else _layer(i, call, options)
        for i, call in enumerate(calls)
    )
    return ScanRecord(
        layers=measured,
        blocks=_blocks(kind, layers, unhealthy, gradients) if blocks else (),
        tokens=streams,
        gradients=_gradients(layers) if gradients else (),
        about=_about(kind, measured, streams, documents, sampled, gradients, interrupted),
    )


@dataclass(frozen=True)
class _Options:
    heads: int
    kv_heads: int
    sampled: int | None
    bin_width: int
    keep_rows: bool
    null_sink: bool
    unhealthy: bool
    calls: int


@dataclass(frozen=True)
class _Texts:
    known: bool
    script: bool

    def stream(self, name: str, tokens: int, documents: int) -> TokenStream:
        index = torch.arange(tokens)
        document = index * documents // tokens
        start = torch.tensor([int((document < d).sum()) for d in range(documents)])
        words = [WORDS[i % len(WORDS)] for i in range(tokens)]
        if self.script:
            words[min(2, tokens - 1)] = SCRIPT
        return TokenStream(
            name=name,
            texts=tuple(words) if self.known else ("",) * tokens,
            ids=index * 7 % 101,
            document=document,
            position=index - start[document],
        )


def _calls(
    kind: str, layers: int, texts: _Texts, tokens: int, source_tokens: int, documents: int
) -> tuple[tuple[TokenStream, ...], list[_Call]]:
    if kind != "encoder-decoder":
        text = texts.stream("text", tokens, documents)
        path = "model.layers.{}.self_attn" if kind == "decoder" else "encoder.layer.{}.attention"
        return (text,), [_Call(path.format(i), kind, i, text, text) for i in range(layers)]
    source = texts.stream("source", source_tokens, documents)
    target = texts.stream("target", tokens, documents)
    encoder = [
        _Call(f"encoder.block.{i}.self", "encoder", i, source, source) for i in range(layers)
    ]
    decoder = [
        call
        for i in range(layers)
        for call in (
            _Call(f"decoder.block.{i}.self", "decoder", i, target, target),
            _Call(f"decoder.block.{i}.cross", "cross", i, target, source),
        )
    ]
    return (source, target), encoder + decoder


def _logits(layer: int, call: _Call, options: _Options) -> tuple[Tensor, Tensor]:
    """Made-up logits ``head query key`` (hidden keys are -inf) and visibility ``query key``."""
    generator = torch.Generator().manual_seed(1009 * layer + 31)
    m, n = len(call.query.ids), len(call.key.ids)
    noise = torch.randn(options.heads, m, n, generator=generator, dtype=torch.float64)
    row, column = torch.arange(m)[:, None], torch.arange(n)[None, :]
    visible = call.query.document[:, None] == call.key.document[None, :]
    if call.role == "decoder":
        visible = visible & (column <= row)
    first = (call.key.position == 0).double()[None, :]
    shapes = {
        "sink": 7.0 * first,
        "previous": 9.0 * (column == row - 1).double(),
        "local": -0.7 * (row - column).abs().double() + 3.0,
        "broad": torch.zeros(m, n, dtype=torch.float64),
        "mixed": 2.5 * first + 2.0 * (column == row).double(),
    }
    spread = {"sink": 0.8, "previous": 0.8, "local": 0.5, "broad": 0.1, "mixed": 1.7}
    names = [CHARACTERS[(layer + h) % len(CHARACTERS)] for h in range(options.heads)]
    logits = torch.stack([shapes[name] + spread[name] * noise[h] for h, name in enumerate(names)])
    if options.unhealthy and layer == options.calls - 1:
        logits[-1] = 53.0 * noise[-1]
        logits[-1, m // 2, 0] = 151.0
    return logits.masked_fill(~visible, -torch.inf), visible


def _layer(index: int, call: _Call, options: _Options) -> LayerRecord:
    logits, visible = _logits(index, call, options)
    m = logits.shape[1]
    count = m if options.sampled is None else min(options.sampled, m)
    chosen = (torch.arange(count) * m + m // 2) // count
    rows, null = _rows(call, logits, visible, options)
    weights = null[0]
    measured = {name: values[:, chosen] for name, values in rows.items()}
    positions = call.query.position[chosen]
    bins = int(call.query.position.max()) // options.bin_width + 1
    profiles, profile_rows, counts = _profiles(measured, positions, options.bin_width, bins)
    sampled = weights[:, chosen]
    pooled, pool_rows = _pooled(sampled, positions, call.key.position, options.bin_width * 2)
    levels = torch.tensor(QUANTILES, dtype=torch.float64)
    return LayerRecord(
        module=call.module,
        role=call.role,
        number=call.number,
        heads=options.heads,
        kv_heads=options.kv_heads,
        mask="causal" if call.role == "decoder" else "full",
        query_stream=call.query.name,
        key_stream=call.key.name,
        scale=0.125,
        window=None,
        rows=count,
        rows_empty=0,
        rows_total=m,
        values=_values(measured, logits[:, chosen], chosen, call),
        quantiles={k: torch.nanquantile(measured[k], levels, dim=1).T for k in PROFILED},
        profiles=profiles,
        profile_rows=profile_rows,
        profile_counts=counts,
        bin_width=options.bin_width,
        bands=_bands(sampled, chosen, call),
        received=sampled.sum(1) * (m / count),
        received_visible=visible[chosen].sum(0),
        pooled=pooled,
        pool_rows=pool_rows,
        pool_width=options.bin_width * 2,
        row_values=_kept(rows, chosen, m) if options.keep_rows else {},
    )


def _rows(
    call: _Call, logits: Tensor, visible: Tensor, options: _Options
) -> tuple[dict[str, Tensor], tuple[Tensor, Tensor]]:
    """Every row statistic ``head query`` and the weights ``head query key``."""
    learned = torch.full((*logits.shape[:2], 1), 0.3 if options.null_sink else -torch.inf)
    every = torch.softmax(torch.cat([logits, learned.double()], -1), -1)
    weights, null = every[..., :-1], every[..., -1]
    seen = visible.sum(-1).double()
    entropy = torch.special.entr(every).sum(-1)
    squares = every.square().sum(-1)
    first = (call.key.position == 0)[None, None, :]
    sink = (weights * first).sum(-1)
    outside = weights.masked_fill(first, 0.0)
    outside = outside / outside.sum(-1, keepdim=True).clamp_min(1e-300)
    without = torch.special.entr(outside).sum(-1)
    outside_seen = (visible & ~first[0]).sum(-1).double()
    finite = torch.where(visible, logits, NAN)
    mean = finite.nanmean(-1)
    top, top_key = weights.max(-1)
    rows = {
        "entropy": entropy,
        "entropy_fraction": torch.where(seen > 1, entropy / seen.log(), NAN),
        "entropy_without_sink": torch.where(outside_seen > 0, without, NAN),
        "entropy_without_sink_fraction": torch.where(
            outside_seen > 1, without / outside_seen.log(), NAN
        ),
        "effective_keys": 1 / squares,
        "jacobian_trace": 1 - squares,
        "top_weight": top,
        "dead_rows": torch.where(seen > 1, (1 - top < 1e-3).double(), NAN),
        "dead_rows_not_sink": torch.where(
            seen > 1, ((1 - top < 1e-3) & (call.key.position[top_key] != 0)).double(), NAN
        ),
        "sink_mass": sink,
        "null_mass": null if options.null_sink else torch.full_like(null, NAN),
        "max_logit": logits.amax(-1),
        "min_logit": torch.where(visible, logits, torch.inf).amin(-1),
        "max_abs_logit": torch.where(visible, logits.abs(), 0.0).amax(-1),
        "mean_logit": mean,
        "logit_std": (finite - mean[..., None]).square().nanmean(-1).sqrt(),
        "log_sum_exp": torch.logsumexp(torch.cat([logits, learned.double()], -1), -1),
    }
    rows |= _relative(weights, call)
    return rows, (weights, null)


def _relative(weights: Tensor, call: _Call) -> dict[str, Tensor]:
    """Distance, own and previous token: of self-attention only."""
    if call.role == "cross":
        absent = torch.full(weights.shape[:2], NAN, dtype=torch.float64)
        return {"distance": absent, "self_mass": absent, "previous_mass": absent}
    gap = _gap(torch.arange(weights.shape[1]), weights.shape[2])
    return {
        "distance": (weights * gap.abs()).sum(-1),
        "self_mass": (weights * (gap == 0)).sum(-1),
        "previous_mass": (weights * (gap == 1)).sum(-1),
    }


def _gap(rows: Tensor, keys: int) -> Tensor:
    return rows[:, None] - torch.arange(keys)[None, :]


def _values(
    measured: dict[str, Tensor], logits: Tensor, chosen: Tensor, call: _Call
) -> dict[str, Tensor]:
    """The reductions over rows."""
    values = {name: rows.nanmean(1) for name, rows in measured.items()}
    flat = logits.flatten(1)
    values["max_logit"], where = flat.max(1)
    values["min_logit"] = measured["min_logit"].amin(1)
    values["max_abs_logit"] = measured["max_abs_logit"].amax(1)
    values["max_logit_query"] = chosen[where // logits.shape[2]].double()
    values["max_logit_key"] = (where % logits.shape[2]).double()
    return {name: values[name] for name in VALUES}


def _profiles(
    measured: dict[str, Tensor], positions: Tensor, width: int, bins: int
) -> tuple[dict[str, Tensor], Tensor, dict[str, Tensor]]:
    member = (positions[:, None] // width == torch.arange(bins)[None, :]).double()
    profiles, counts = {}, {}
    for name in PROFILED:
        rows = measured[name]
        there = (~rows.isnan()).double()
        profiles[name] = (rows.nan_to_num() @ member) / (there @ member)
        counts[name] = (there[0] @ member).long()
    rows = member.sum(0).long()
    return profiles, rows, {k: c for k, c in counts.items() if not torch.equal(c, rows)}


def _bands(weights: Tensor, chosen: Tensor, call: _Call) -> Tensor:
    if call.role == "cross":
        return torch.empty(weights.shape[0], 0, dtype=torch.float64)
    gap = _gap(chosen, weights.shape[2]).abs()
    edges = [0, 1]
    while edges[-1] <= int(gap.max()):
        edges.append(edges[-1] * 2)
    masses = [(weights * ((gap >= lo) & (gap < hi))).sum(-1).mean(1) for lo, hi in pairwise(edges)]
    return torch.stack(masses, 1)


def _pooled(weights: Tensor, positions: Tensor, keys: Tensor, width: int) -> tuple[Tensor, Tensor]:
    rows = torch.nn.functional.one_hot(positions // width).double()
    columns = torch.nn.functional.one_hot(keys // width).double()
    total = torch.einsum("hqk,qa,kb->hab", weights, rows, columns)
    return total / rows.sum(0)[None, :, None], rows.sum(0).long()


def _kept(rows: dict[str, Tensor], chosen: Tensor, m: int) -> dict[str, Tensor]:
    there = torch.zeros(m, dtype=torch.bool)
    there[chosen] = True
    keep = ("entropy", "entropy_fraction", "top_weight", "sink_mass", "max_logit", "log_sum_exp")
    return {name: torch.where(there, rows[name], NAN) for name in keep}


def _broken(layer: LayerRecord) -> LayerRecord:
    """The same layer with nothing finite in it."""

    def lost(table: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: torch.full_like(values, NAN) for name, values in table.items()}

    return replace(
        layer,
        values=lost(dict(layer.values)),
        quantiles=lost(dict(layer.quantiles)),
        profiles=lost(dict(layer.profiles)),
        row_values=lost(dict(layer.row_values)),
        bands=torch.full_like(layer.bands, NAN),
        received=torch.full_like(layer.received, NAN),
        pooled=torch.full_like(layer.pooled, NAN),
        non_finite=f"NaN in the queries of {layer.module}",
    )


def _blocks(kind: str, layers: int, unhealthy: bool, gradients: bool) -> tuple[BlockRecord, ...]:
    stacks = ("encoder", "decoder") if kind == "encoder-decoder" else (kind,)
    path = {"encoder": "encoder.layer.{}", "decoder": "model.layers.{}"}
    out = []
    for stack in stacks:
        for i in range(layers):
            first = 900.0 if unhealthy and i >= layers // 2 else 1.3 + 0.2 * i
            before = 900.0 if unhealthy and i - 1 >= layers // 2 else 1.1 + 0.2 * i
            out.append(
                BlockRecord(
                    module=path[stack].format(i),
                    stack=stack,
                    number=i,
                    stream_in_rms=1.0 + 0.3 * i,
                    stream_out_rms=1.3 + 0.3 * i,
                    stream_in_rms_first=before,
                    stream_out_rms_first=first,
                    stream_max_abs=4.7 * first,
                    attention_write_rms=0.41 + 0.01 * i,
                    mlp_write_rms=0.53 + 0.02 * i,
                    attention_write_rms_first=0.37,
                    mlp_write_rms_first=abs(first - before) + 0.11,
                    writes_verified=kind == "decoder",
                    stream_gradient_rms=3e-4 / (i + 1) if gradients else None,
                )
            )
    return tuple(out)


def _gradients(layers: int) -> tuple[GradientRecord, ...]:
    out = [GradientRecord(parameter="embed", block=None, projection="embedding", norm=0.7, size=77)]
    for i in range(layers):
        for j, projection in enumerate(("q", "k", "v", "o", "mlp", "norm")):
            out.append(
                GradientRecord(
                    parameter=f"model.layers.{i}.{projection}.weight",
                    block=i,
                    projection=projection,
                    norm=0.11 * (j + 1) / (i + 1),
                    size=169,
                )
            )
    return tuple(out)


def _about(
    kind: str,
    layers: tuple[LayerRecord, ...],
    streams: tuple[TokenStream, ...],
    documents: int,
    sampled: int | None,
    gradients: bool,
    interrupted: bool,
) -> dict[str, object]:
    rows, total = sum(x.rows for x in layers), sum(x.rows_total for x in layers)
    about: dict[str, object] = {
        "model": f"synthetic-{kind}",
        "architecture": "Synthetic",
        "tokens": sum(len(s.ids) for s in streams),
        "documents": documents,
        "dtype": "float32",
        "computed_dtype": "float64",
        "exactness": "exact over all rows"
        if sampled is None
        else f"exact on {layers[0].rows} of {layers[0].rows_total} rows",
        "rows_measured": rows,
        "rows_total": total,
        "sink_keys": 1,
        "seconds": 1.25,
        "cpu_seconds": 2.5,
        "peak_memory_bytes": 123_456_789,
        "versions": {"headwise": "0.1.0", "torch": "2.13.0", "transformers": "5.24.0"},
        "created_at": "2026-11-05T12:34:56+00:00",
        "command": "headwise report synthetic",
        "device": "cpu",
        "context": 2048,
        "interrupted": interrupted,
        "notes": ["The run was stopped after 1 of 2 documents."] if interrupted else [],
    }
    return about | ({"loss": 3.25} if gradients else {})
