"""Headwise's own models under observation: what they are made of, and each call as a ``Call``.

Every attention of ``headwise.models`` asks one context variable, ``WATCHER``, whether somebody
wants to see its call. Masks arrive as rules and stay rules.
"""

from __future__ import annotations

import hashlib
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from headwise.attention.masks import (
    Band,
    Causal,
    Chunked,
    Documents,
    Everything,
    KeyPadding,
    Mask,
)
from headwise.attention.masks.base import Both
from headwise.models import Architecture
from headwise.models.attention import MultiHeadAttention
from headwise.models.block import Block, ParallelBlock
from headwise.models.context import Context
from headwise.models.embedding import TokenEmbedding
from headwise.models.fused import WATCHER, Attending, output
from headwise.models.stack import BlockStack
from headwise.observation import writes
from headwise.observation.call import Call, refuse_dropout
from headwise.observation.inference import ordinary_tensors
from headwise.observation.recorder import Recorder
from headwise.observation.rule import MaskFunction, MaskSpec, Pattern
from headwise.observation.sites import AttentionModule
from headwise.observation.survey import Survey, nearest, numbered

__all__ = ["Rules", "read_attending", "survey_own"]


def survey_own(model: nn.Module) -> Survey:
    """Every ``MultiHeadAttention`` of a model that is made of Headwise's parts."""
    parts = dict(model.named_modules())
    found = {p: m for p, m in parts.items() if isinstance(m, MultiHeadAttention)}
    runs = {p: m for p, m in parts.items() if isinstance(m, BlockStack)}
    owner = {path: nearest(path, runs) for path in found}
    numbers = numbered(list(found))
    modules = {
        id(m): AttentionModule(path, owner[path], numbers[path], m.cross)
        for path, m in found.items()
    }
    stacks = {path: parts[path] for path in dict.fromkeys(owner.values())}
    return Survey(
        modules=modules,
        stacks=stacks,
        models={"": model, **stacks},
        blocks=tuple(
            _block(path, m, nearest(path, runs))
            for path, m in parts.items()
            if isinstance(m, Block | ParallelBlock)
        ),
        heads=max(m.heads for m in found.values()),
        attach=partial(_attach, model),
        about=_about(model),
    )


def _about(model: nn.Module) -> dict[str, Any]:
    name = type(model).__name__
    made = getattr(model, "architecture", None)
    facts: dict[str, Any] = {"model": name, "architecture": name, "context": None, "versions": {}}
    if isinstance(made, Architecture):
        # Many models of one family: the digest says whether two are made alike.
        digest = hashlib.sha256(made.model_dump_json().encode()).hexdigest()[:12]
        facts |= {
            "architecture": made.family,
            "architecture_digest": digest,
            "context": made.context,
        }
    return facts


def _block(path: str, block: nn.Module, stack: str) -> writes.Block:
    """What is added to the stream leaves each placement through its dropout."""

    def write(name: str) -> str:
        part = getattr(block, name)
        return f"{path}.{name}.dropout" if hasattr(part, "dropout") else f"{path}.{name}"

    attention = [name for name in ("attention", "cross") if getattr(block, name, None) is not None]
    number = path.rpartition(".")[2]
    return writes.Block(
        path=path,
        stack=stack,
        number=int(number) if number.isdigit() else 0,
        attention=tuple((write(name),) for name in attention),
        mlp=(write("feed_forward"),),
        norms=(),
    )


def _attach(model: nn.Module, recorder: Recorder, restore: ExitStack) -> None:
    """Watch the calls, and the embeddings, which are told the token ids."""
    rules = Rules()

    def watch(attending: Attending) -> Tensor:
        if not recorder.knows(attending.module):
            return output(attending)
        with ordinary_tensors():
            return recorder.attention(read_attending(attending, rules)).transpose(1, 2)

    def look_up(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if recorder.here():
            recorder.stacks.looked_up = args[0] if args else kwargs.get("ids")

    restore.callback(WATCHER.reset, WATCHER.set(watch))
    for part in model.modules():
        if isinstance(part, TokenEmbedding):
            handle = part.register_forward_pre_hook(look_up, with_kwargs=True)
            restore.callback(handle.remove)


class Rules:
    """The rules of the pass that is running, which its layers share."""

    def __init__(self) -> None:
        self._context: Context | None = None
        self._made: dict[tuple[Mask, int], MaskSpec] = {}

    def of(self, attending: Attending) -> MaskSpec:
        """The mask of a call as a rule, made once for all layers of a pass that share it."""
        if attending.context is not self._context:
            self._context, self._made = attending.context, {}
        mask, keys = attending.mask, attending.k.shape[2]
        if (mask, keys) not in self._made:
            self._made[mask, keys] = _rule(mask, attending)
        return self._made[mask, keys]


def read_attending(attending: Attending, rules: Rules | None = None) -> Call:
    """One call of an own model, as what is measured."""
    refuse_dropout(type(attending.module).__name__, attending.dropout)
    return Call(
        module=attending.module,
        q=attending.q,
        k=attending.k,
        v=attending.v,
        spec=(Rules() if rules is None else rules).of(attending),
        scale=attending.scale,
        softcap=attending.softcap,
        sinks=attending.sinks,
        bias=attending.bias,
    )


def _rule(mask: Mask, attending: Attending) -> MaskSpec:
    """Padding apart; what is left as a function of positions, and as a pattern where it is one.

    Cross-attention has no positions in common, so only its padding is taken apart.
    """
    batch, _, queries, _ = attending.q.shape
    keys, device = attending.k.shape[2], attending.q.device
    parts = _parts(mask)
    padding = None
    for part in parts:
        if isinstance(part, KeyPadding):
            keep = part.keep[:, :keys].to(device)
            padding = keep if padding is None else padding & keep
    rest = [part for part in parts if not isinstance(part, KeyPadding)]

    def function(b: Any, _: Any, query: Tensor, key: Tensor) -> Tensor:
        seen = torch.ones_like(query + key, dtype=torch.bool)
        for part in rest:
            seen = seen & part.visible(int(b), query, key)
        return seen

    def read(_: MaskFunction) -> Pattern | None:
        whole: Pattern | None = Pattern()
        for part in rest:
            apart = attending.cross and not isinstance(part, Everything)
            one = None if apart else _pattern(part, batch, keys, device)
            whole = None if whole is None or one is None else whole.joined(one)
        return whole

    return MaskSpec(
        batch=batch,
        queries=queries,
        keys=keys,
        q_offset=attending.offset,
        kv_offset=0,
        function=function,
        padding=None if padding is None or bool(padding.all()) else padding,
        read=read,
        vmap=False,
        device=device,
    )


def _parts(mask: Mask) -> list[Mask]:
    """The members of a conjunction."""
    if isinstance(mask, Both):
        return _parts(mask.left) + _parts(mask.right)
    return [mask]


def _pattern(mask: Mask, batch: int, keys: int, device: torch.device) -> Pattern | None:
    """A mask as a pattern; None for what has no closed form."""
    match mask:
        case Everything():
            return Pattern()
        case Causal(shift=shift):
            return Pattern(after=shift)
        case Band(before=before, after=after):
            return Pattern(before=before, after=after)
        case Chunked(size=size, start=start):
            return Pattern(chunk=(size, torch.full((batch,), start, device=device)))
        case Documents(ids=ids) if _in_one_piece(ids[:, :keys]):
            positions = torch.arange(keys, device=device).expand(batch, -1)
            return Pattern(documents=ids[:, :keys].to(device), positions=positions)
    return None


def _in_one_piece(ids: Tensor) -> bool:
    """Whether all tokens of a document are neighbours, in every row."""
    return all(
        torch.unique_consecutive(row).numel() == torch.unique(row).numel() for row in ids.cpu()
    )
