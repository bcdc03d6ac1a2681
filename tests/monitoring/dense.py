"""The figures of a monitor from whole matrices in float64, and small models to train.

What a module attends with is taken at transformers' attention interface, by a function of its own
that adds the model's eager mask; of Headwise's own models, at their watcher, with the dense mask.
Nothing of what is tested is used.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, masking_utils

from headwise.models.fused import WATCHER, Attending, output
from headwise.monitoring.monitor import Monitor
from headwise.monitoring.record import LayerRecord, StepRecord
from tests.observation.own_models import shaken
from tests.parity.families import build as build_family

__all__ = [
    "NOISE",
    "SINGLE",
    "Heard",
    "assert_figures",
    "expected",
    "heard",
    "one_record",
    "one_step",
    "trained",
]

# Float64 rounding (2^-53), magnified by a few layers; a row too many changes means by 1/1000.
NOISE = 2.0**-33
# Eager attention takes its softmax in float32 in models of any dtype: 2 layers of sums of 64
# products, logits of order 10: some 1000 roundings of 2^-24.
SINGLE = 1000 * 2.0**-24


def trained(name: str, **changes: Any) -> nn.Module:
    """A model of transformers in float64, in training mode, without dropout, its heads unlike."""
    model = build_family(name, **changes).double()
    if model._can_set_experts_implementation():
        model.set_experts_implementation("eager")
    for part in model.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
        for rate in ("dropout", "attention_dropout", "dropout_rate", "dropout_prob"):
            if isinstance(getattr(part, rate, None), float):
                setattr(part, rate, 0.0)
    return shaken(model).train()


def one_step(model: nn.Module, *batches: dict[str, Any], optimizer: Any = None) -> None:
    """Forward and backward of every micro-batch, and a step."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=1e-3)
    for batch in batches:
        made = model(**batch)
        tensor = made if isinstance(made, Tensor) else made[0]
        tensor.square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def one_record(model: nn.Module, *batches: dict[str, Any], **options: Any) -> StepRecord:
    """What a monitor says of one step."""
    with Monitor(model, every=1, **{"spectra": 0, **options}) as monitor:
        one_step(model, *batches)
    [record] = monitor.records
    return record


@dataclass
class Heard:
    """One call: q, k ``batch head position d``, logits with −∞ where hidden."""

    module: nn.Module
    q: Tensor
    k: Tensor
    logits: Tensor
    null: Tensor | None


_CALLS: list[Heard] = []


def _dense(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None,
    scaling: float | None = None, softcap: float | None = None, s_aux: Tensor | None = None,
    position_bias: Tensor | None = None, **_: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    group = query.shape[1] // key.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (key, value))
    s = query @ k.mT * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    s = s if not softcap else softcap * torch.tanh(s / softcap)
    s = s if position_bias is None else s + position_bias
    if mask is not None:
        s = s.masked_fill(mask[..., : s.shape[-1]] < 0, -math.inf)
    null = s_aux if s_aux is not None else getattr(module, "sinks", None)
    _CALLS.append(Heard(module, query, k, s, None if null is None else null.clone()))
    a = _weights(s, null)
    return (a @ v).transpose(1, 2).contiguous(), None


AttentionInterface.register("dense_reference", _dense)
AttentionMaskInterface.register("dense_reference", masking_utils.eager_mask)


def _weights(s: Tensor, null: Tensor | None) -> Tensor:
    """Softmax with a learned sink in the denominator; 0 in rows that see no key."""
    column = torch.full_like(s[..., :1], -math.inf)
    column = column if null is None else null.view(-1, 1, 1).to(s).expand_as(column)
    return torch.cat((s, column), -1).softmax(-1).nan_to_num(0.0)[..., :-1]


@torch.no_grad()
def heard(model: nn.Module, *batches: dict[str, Any]) -> list[list[Heard]]:
    """The calls of every batch, in order."""
    found = []
    for batch in batches:
        _CALLS.clear()
        if hasattr(model, "set_attn_implementation"):
            before = model.config._attn_implementation
            model.set_attn_implementation("dense_reference")
            model(**batch)
            model.set_attn_implementation(before)
        else:
            token = WATCHER.set(_watch)
            model(**batch)
            WATCHER.reset(token)
        found.append(list(_CALLS))
    return found


def _watch(call: Attending) -> Tensor:
    k = call.k.repeat_interleave(call.q.shape[1] // call.k.shape[1], 1)
    s = call.q @ k.mT * call.scale
    s = s if call.softcap is None else call.softcap * torch.tanh(s / call.softcap)
    if call.bias is not None:
        every = torch.arange(s.shape[2])
        bias = call.bias
        if callable(bias):
            bias = bias(0, slice(0, s.shape[1]), every, range(s.shape[3]))[None]
        s = s + bias
    keep = torch.stack(
        [call.mask.dense(b, s.shape[2], s.shape[3], call.offset) for b in range(s.shape[0])]
    )
    s = s.masked_fill(~keep[:, None], -math.inf)
    null = None if call.sinks is None else call.sinks.clone()  # a step changes it
    _CALLS.append(Heard(call.module, call.q, k, s, null))
    return output(call)


def expected(
    calls: Iterable[Heard], queries: Iterable[list[list[int]]], keys: Iterable[list[list[int]]]
) -> dict[str, Tensor]:
    """The figures of one module over some calls.

    ``queries`` and ``keys``: of every call, of every row of its batch, the positions of the
    documents in it; documents of queries and keys belong together.
    """
    rows: dict[str, list[Tensor]] = {}
    for call, q_docs, k_docs in zip(calls, queries, keys, strict=True):
        for b, (q_here, k_here) in enumerate(zip(q_docs, k_docs, strict=True)):
            for q_at, k_at in zip(q_here, k_here, strict=True):
                _of_document(call, b, q_at, k_at, rows)
    found = {}
    for name, parts in rows.items():
        values = torch.cat(parts, -1)  # head row
        if name.startswith("max"):
            found[name] = values.nan_to_num(nan=-math.inf).amax(-1)
        else:
            found[name] = values.nanmean(-1)
    return found


def _of_document(
    call: Heard, b: int, q_at: list[int], k_at: list[int], rows: dict[str, list[Tensor]]
) -> None:
    s = call.logits[b][:, q_at][:, :, k_at].double()
    q, k = call.q[b][:, q_at].double(), call.k[b][:, k_at].double()
    seen = s > -math.inf
    nan = torch.tensor(math.nan, dtype=torch.float64)
    count = seen.sum(-1).double()
    a = _weights(s, call.null)
    rest = _weights(s[..., 1:], None)
    others = seen[..., 1:].sum(-1).double()
    without = torch.where(others > 0, torch.special.entr(rest).sum(-1), nan)
    mean = torch.where(seen, s, 0.0).sum(-1) / count
    spread = (torch.where(seen, s - mean[..., None], 0.0).square().sum(-1) / count).sqrt()
    square, dead = a.square().sum(-1), 1 - a.amax(-1) < 1e-3
    unit = (q / q.norm(dim=-1, keepdim=True)) @ (k / k.norm(dim=-1, keepdim=True)).mT
    found = {
        "max_logit": s.amax(-1),
        "max_abs_logit": torch.where(seen, s.abs(), -math.inf).amax(-1),
        "entropy": torch.special.entr(a).sum(-1),
        "entropy_without_sink": without,
        "entropy_without_sink_fraction": torch.where(others > 1, without / others.log(), nan),
        "effective_keys": 1 / square,
        "jacobian_trace": 1 - square,
        "dead_rows": torch.where(count > 1, dead.double(), nan),
        "dead_rows_not_sink": torch.where(count > 1, (dead & (a.argmax(-1) > 0)).double(), nan),
        "sink_mass": a[..., 0],
        "logit_std": spread,
        "query_norm": q.norm(dim=-1),
        "cosine": torch.where(seen, unit, 0.0).sum(-1) / count,
    }
    for name, values in found.items():
        rows.setdefault(name, []).append(torch.where(count > 0, values, nan))
    rows.setdefault("key_norm", []).append(k.norm(dim=-1))


def assert_figures(
    layer: LayerRecord, want: dict[str, Tensor], noise: float = NOISE, but: tuple[str, ...] = ()
) -> None:
    """Every figure of every head, relative to its size (1 at least)."""
    assert layer.figures.keys() == want.keys()
    for name in want.keys() - set(but):
        got = torch.tensor(layer.figures[name], dtype=torch.float64)
        error = (got - want[name]).abs() / (1 + want[name].abs())
        assert bool((error <= noise).all()), f"{layer.module} {name}: {got} is not {want[name]}"
