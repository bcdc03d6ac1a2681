"""A decoder's step in one compiled call: for one row, in float32, on a CPU.

Covers what most decoders are: RMSNorm before each part, rotary positions, gated SiLU, no biases.
Everything else takes ``lean_step`` or the ordinary path; all three are tied by tests.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import _get_current_dispatch_mode

from headwise.attention.blas import sgemm_address
from headwise.attention.masks import Band
from headwise.models.cache import Cache
from headwise.models.context import Context
from headwise.models.decoder import Decoder
from headwise.models.feed_forward import GatedMLP
from headwise.models.joined import joined
from headwise.models.lean import covered
from headwise.models.norms import OffsetRMSNorm, RMSNorm
from headwise.positions import Layout

__all__ = ["CompiledStep", "compiled_step"]


def compiled_step(model: Decoder, cache: Cache) -> CompiledStep | None:
    """The compiled step of a decoder over its cache; None where it does not apply.

    Example:
        >>> from headwise.models import build, preset
        >>> model = build(preset("tiny")).eval()
        >>> cache = Cache.empty(model.architecture, batch=1, capacity=8)
        >>> ids = torch.tensor([[3, 1, 4]])
        >>> with torch.inference_mode():
        ...     want = model.hidden(ids)[:, -1]
        ...     _ = model.hidden(ids[:, :2], cache=cache)
        ...     step = compiled_step(model, cache)
        ...     got = want if step is None else step(ids[:, 2:])
        >>> bool(torch.allclose(got, want, atol=1e-6))
        True
    """
    table = model.embedding.tokens.weight
    first = cache.slots[0].keys
    alike = table.device.type == "cpu" and {p.dtype for p in model.parameters()} == {torch.float32}
    if not (alike and first.dtype == torch.float32 and len(first) == 1):
        return None
    if sgemm_address() is None or not covered(model):
        return None
    if _get_current_dispatch_mode() is not None:  # somebody counts or traces torch's operations
        return None
    stack = model.architecture.decoder
    rotary = None if stack is None else stack.rotary
    if rotary is None or rotary.layout is not Layout.HALF:
        return None
    held = [_parts(block) for block in model.decoder.blocks]
    if any(parts is None for parts in held):
        return None
    return CompiledStep(model, cache, [parts for parts in held if parts is not None])


class CompiledStep:
    """Ids ``1 1`` of the next position -> the stream after the last norm, ``1 d_model``."""

    def __init__(self, model: Decoder, cache: Cache, parts: list[list[Tensor]]) -> None:
        stack = model.architecture.stack
        self._model, self._cache = model, cache
        self._held = parts  # their addresses stand in ``_layers``, as do those of the cache
        self._stored = [(slot.keys, slot.values) for slot in cache.slots]
        self._layers = np.array(
            [
                [x.data_ptr() for x in (*weights, *stored)]
                for weights, stored in zip(parts, self._stored, strict=True)
            ],
            dtype=np.int64,
        )
        d = model.architecture.d_model
        self._sizes = (d, stack.heads, stack.kv_heads, stack.d_head, stack.d_ff, cache.capacity)
        rows = (stack.heads + 2 * stack.kv_heads) * stack.d_head
        widest = max(2 * stack.d_ff, stack.heads // stack.kv_heads * cache.capacity)
        self._work = np.empty(d + rows + stack.heads * stack.d_head + widest, np.float32)
        block: Any = model.decoder.blocks[0]
        self._attention = block.attention.branch
        floats = (block.attention.norm.eps, self._attention.scale)
        self._floats = (np.float32(floats[0]), np.float32(floats[1]))
        self._fortran = np.zeros(9, np.int32), np.array([1, 0, 0], np.float32)
        self._words = np.frombuffer(b"NT", np.uint8).copy()
        self._windows = [_window(block) for block in model.decoder.blocks]

    def __call__(self, ids: Tensor) -> Tensor:
        from headwise.models.step_kernel import step  # compiled code is loaded when it is needed

        filled, table = self._cache.next_place(), self._model.embedding.tokens.weight
        context = Context(1, 1, filled, ids.device, table.dtype)
        x = self._model.embedding(ids, context.positions())[:, 0].clone()
        turns = context.turns(self._attention.rotary)
        firsts = [0 if w is None else max(0, filled + 1 - w) for w in self._windows]
        step(
            sgemm_address(), self._layers, np.array(firsts), (*self._sizes, filled), self._floats,
            turns.cos.numpy()[0], turns.sin.numpy()[0], x.numpy()[0], self._work, *self._fortran,
            self._words,
        )  # fmt: skip
        for slot in self._cache.slots:
            slot.length = filled + 1
        norm = self._model.decoder.norm
        return x if norm is None else norm(x)


def _window(block: Any) -> int | None:
    mask = block.attention.branch.mask
    return mask.before + 1 if isinstance(mask, Band) else None


def _parts(block: Any) -> list[Tensor] | None:
    """Gain, (query key value), output, gain, (gate up), down; None where one is of another kind."""
    attention, network = block.attention.branch, block.feed_forward.branch
    norms = block.attention.norm, block.feed_forward.norm
    linear = [attention.query, attention.key, attention.value, attention.output]
    if not all(type(norm) in (RMSNorm, OffsetRMSNorm) for norm in norms):
        return None
    if not isinstance(network, GatedMLP) or network.activation is not functional.silu:
        return None
    linear += [network.gate, network.up, network.down]
    read = joined([each.weight for each in linear[:3]])
    widen = joined([each.weight for each in linear[4:6]])
    whole = all(each.bias is None and each.weight.is_contiguous() for each in linear)
    if read is None or widen is None or not whole or norms[0].eps != norms[1].eps:
        return None
    gains = [norm.weight + 1 if type(norm) is OffsetRMSNorm else norm.weight for norm in norms]
    return [gains[0], read, attention.output.weight, gains[1], widen, network.down.weight]
