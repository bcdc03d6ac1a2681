"""Look at every attention call of a model that goes on as if nobody looked.

``observe`` takes the place of the model's attention, so that a number may differ in its last digit.
A tap does not: the model's own functions are called with its own arguments, and their output is
what the model goes on with, bit for bit; the call is read beside it, without gradients and without
autocast. For training loops.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor, nn

from headwise.models.attention import MultiHeadAttention
from headwise.models.fused import WATCHER, Attending, output
from headwise.observation.call import Call
from headwise.observation.own import Rules, read_attending
from headwise.observation.pieces import Piece, cross_pieces, self_pieces
from headwise.observation.rule import MaskSpec
from headwise.observation.survey import Survey
from headwise.observation.tokens import Extent, Layout, Reader, Stream

__all__ = ["Seen", "Tell", "tapped"]


@dataclass(frozen=True, eq=False)
class Seen:
    """One attention call.

    Attributes:
        path: of the module. ``cross``: whether it is cross-attention.
        call: q, k, v and the rule of the logits, detached.
        pieces: the sequences apart: padding cut away, packed documents each alone.
        real: ``batch query``, True where a query is a token.
        first: ``batch query``, True where it is the first token of a document.
    """

    path: str
    cross: bool
    call: Call
    pieces: list[Piece]
    real: Tensor
    first: Tensor


Tell = Callable[[Seen], None]

_ATTENTION: Final = "ALL_ATTENTION_FUNCTIONS"
_MASKS: Final = "ALL_MASK_ATTENTION_FUNCTIONS"
_CROSS: Final = ("key_value_states", "encoder_hidden_states", "cross_attention_states")
_LOCK: Final = threading.Lock()


@contextmanager
def tapped(model: nn.Module, found: Survey, tell: Tell) -> Iterator[None]:
    """Inside, ``tell`` is called after every attention call of the surveyed modules.

    Example:
        >>> from transformers import LlamaConfig, LlamaModel
        >>> from headwise.observation.survey import survey
        >>> config = LlamaConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=1,
        ...                      num_attention_heads=2, vocab_size=11)
        >>> model, seen = LlamaModel(config), []
        >>> with tapped(model, survey(model), lambda call: seen.append(call.path)):
        ...     _ = model(torch.tensor([[1, 2, 3]]))
        >>> seen
        ['layers.0.self_attn']
    """
    with ExitStack() as restore:
        reading = _Reading(found, tell)
        restore.callback(reading.stop)
        if any(isinstance(part, MultiHeadAttention) for part in model.modules()):
            _tap_own(reading, restore)
        else:
            _tap_routed(model, reading, restore)
        yield


class _Reading:
    """One pass: what its calls share, and who is told of them."""

    def __init__(self, found: Survey, tell: Tell) -> None:
        self.modules = found.modules
        self._tell: Tell | None = tell
        self._layouts: dict[str, Layout] = {}  # stack -> its queries, by its last self-attention

    def stop(self) -> None:
        """Nobody is told any more, not even where a context still knows this pass."""
        self._tell = None

    def tell(self, module: nn.Module, cross: bool, read: Callable[[], Call]) -> None:
        """Read the call of a module and say so; other modules are none of our business."""
        info = self.modules.get(id(module))
        if info is None or self._tell is None:
            return
        with torch.no_grad():
            call = _detached(read())
            with _without_autocast(call.q.device.type):
                layout, pieces = self._pieces(info.stack, call, cross)
                self._tell(Seen(info.path, cross, call, pieces, layout.real, layout.first))

    def _pieces(self, stack: str, call: Call, cross: bool) -> tuple[Layout, list[Piece]]:
        """Calls that share a mask share their pieces."""
        before = self._layouts.get(stack)
        shape = (call.spec.batch, call.spec.queries)
        if before is not None and (before.batch, before.queries) != shape:
            before = None
        memory, key = call.spec.memory, ("tap", cross, id(before) if cross else 0)
        if key not in memory:
            memory[key] = _cross_pieces(call, before) if cross else _self_pieces(call)
        found: tuple[Layout, list[Piece]] = memory[key]
        if not cross:
            self._layouts[stack] = found[0]
        return found


def _self_pieces(call: Call) -> tuple[Layout, list[Piece]]:
    spec = call.spec
    extents = [spec.extents(b) for b in range(spec.batch)]
    layout = Reader(Stream("token")).read(extents, spec.queries, spec.q_offset, None)
    return layout, self_pieces(spec, layout)


def _cross_pieces(call: Call, queries: Layout | None) -> tuple[Layout, list[Piece]]:
    """The mask knows the keys; which queries are tokens is known from their self-attention."""
    spec = call.spec
    extents = [spec.extents(b) for b in range(spec.batch)]
    source = Reader(Stream("state")).read(extents, spec.keys, 0, None)
    if queries is None:
        every = [[Extent(0, spec.queries)] for _ in range(spec.batch)]
        queries = Reader(Stream("token")).read(every, spec.queries, 0, None)
    return queries, cross_pieces(spec, queries, source, extents)


def _without_autocast(device: str) -> Any:
    """What is measured is computed as it is written, whatever the model is computed in."""
    available = torch.amp.autocast_mode.is_autocast_available(device)
    return torch.autocast(device, enabled=False) if available else ExitStack()


def _tap_own(reading: _Reading, restore: ExitStack) -> None:
    outer, rules = WATCHER.get(), Rules()

    def watch(attending: Attending) -> Tensor:
        result = output(attending) if outer is None else outer(attending)
        reading.tell(
            attending.module, attending.cross,
            lambda: read_attending(replace(attending, dropout=0.0), rules),
        )  # fmt: skip
        return result

    token = WATCHER.set(watch)

    def reset() -> None:
        if WATCHER.get() is watch:  # else it was set in the context of another thread
            WATCHER.reset(token)

    restore.callback(reset)


class _Watched:
    """A registry of transformers; listeners hear of every call of what it gives out."""

    def __init__(self, registry: Any) -> None:
        self.registry = registry
        self.listeners: list[Callable[..., None]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.registry, name)

    def __contains__(self, name: object) -> bool:
        return name in self.registry

    def __iter__(self) -> Iterator[str]:
        return iter(self.registry)

    def __len__(self) -> int:
        return len(self.registry)

    def __getitem__(self, name: str) -> Any:
        return self._telling(self.registry[name])

    def get_interface(self, name: Any, default: Any) -> Any:
        return self._telling(self.registry.get_interface(name, default))

    def _telling(self, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            for listener in tuple(self.listeners):
                listener(result, *args, **kwargs)
            return result

        return call


def _listen(space: Any, name: str, listener: Callable[..., None], restore: ExitStack) -> None:
    """Put a watched registry in the place of a namespace's own, or join the one that is there."""
    with _LOCK:
        watched = getattr(space, name)
        if not isinstance(watched, _Watched):
            watched = _Watched(watched)
            setattr(space, name, watched)
        watched.listeners.append(listener)

    def leave() -> None:
        with _LOCK:
            watched.listeners.remove(listener)
            if not watched.listeners and getattr(space, name) is watched:
                setattr(space, name, watched.registry)

    restore.callback(leave)


def _tap_routed(model: nn.Module, reading: _Reading, restore: ExitStack) -> None:
    from transformers import masking_utils

    from headwise.observation.interface import read_call

    crossing: dict[int, bool] = {}
    masks = _Masks()

    def told(
        _: Any, module: nn.Module, query: Tensor, key: Tensor, value: Tensor,
        mask: Any, **kwargs: Any,
    ) -> None:  # fmt: skip
        info = reading.modules.get(id(module))
        if info is None:
            return
        cross = crossing.get(id(module), info.named_cross)
        given = {**kwargs, "dropout": 0.0}

        def read() -> Call:
            spec = masks.of(mask, query, key)
            array = mask if spec is None else None
            call = read_call(module, query, key, value, array, cross=cross, **given)
            return masks.known(call, mask, given) if spec is None else replace(call, spec=spec)

        reading.tell(module, cross, read)

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = any(kwargs.get(name) is not None for name in _CROSS)
        crossing[id(module)] = given or reading.modules[id(module)].named_cross

    parts = [m for m in model.modules() if id(m) in reading.modules]
    for part in parts:
        handle = part.register_forward_pre_hook(before, with_kwargs=True)
        restore.callback(handle.remove)
    for space in _namespaces(parts, _ATTENTION):
        _listen(space, _ATTENTION, told, restore)
    for space in {id(s): s for s in (masking_utils, *_namespaces(parts, _MASKS))}.values():
        _listen(space, _MASKS, masks.made, restore)


class _Masks:
    """The masks that transformers made in this pass, and the rules it made them from.

    An array says which keys are seen, not which rows are padding, and is slow to read; the rule
    says all. Kernels that need no array are given None, or the padding alone.
    """

    def __init__(self) -> None:
        self._made: dict[int, tuple[Any, MaskSpec]] = {}
        self._unmade: list[MaskSpec] = []
        self._plain: dict[Any, MaskSpec] = {}

    def made(self, mask: Any, *args: Any, **kwargs: Any) -> None:
        """transformers has made a mask by these arguments."""
        from headwise.observation.lazy_mask import lazy_mask

        spec = lazy_mask(*args, **kwargs).spec
        if mask is None:
            self._unmade.append(spec)
        else:
            self._made[id(mask)] = (mask, spec)

    def of(self, mask: Any, query: Tensor, key: Tensor) -> MaskSpec | None:
        """The rule of a mask that reached the attention function as it was made."""
        if id(mask) not in self._made:
            return None
        spec = self._made[id(mask)][1]
        fits = (spec.batch, spec.queries, spec.keys) == (
            query.shape[0], query.shape[2], key.shape[2]
        )  # fmt: skip
        return spec if fits else None

    def known(self, call: Call, mask: Any, given: dict[str, Any]) -> Call:
        """A call without a mask by the rule for which there was none; else with its own, once."""
        if mask is not None:
            return call
        spec = call.spec
        shape = (spec.batch, spec.queries, spec.keys)
        window = given.get("sliding_window")
        fitting = [
            s
            for s in self._unmade
            if (s.batch, s.queries, s.keys) == shape
            and s.pattern is not None
            and s.looks_ahead == spec.looks_ahead
            and s.pattern.before in ((None,) if window is None else (window - 1, window))
        ]
        if len(fitting) == 1:
            return replace(call, spec=fitting[0])
        key = (*shape, spec.q_offset, spec.function, spec.device)
        return replace(call, spec=self._plain.setdefault(key, spec))


def _namespaces(parts: Iterable[nn.Module], name: str) -> list[Any]:
    """The files of transformers in which the modules look a function up."""
    names = {kind.__module__: None for part in parts for kind in type(part).__mro__}
    files = [sys.modules[each] for each in names if each in sys.modules]
    return [file for file in files if hasattr(file, name)]


def _detached(call: Call) -> Call:
    bias, sinks = call.bias, call.sinks
    return replace(
        call,
        q=call.q.detach(),
        k=call.k.detach(),
        v=call.v.detach(),
        bias=bias.detach() if isinstance(bias, Tensor) else bias,
        sinks=None if sinks is None else sinks.detach(),
    )
