"""Look at every attention call of a model that goes on as if nobody looked.

``observe`` takes the place of the model's attention, so that a number may differ in its last digit.
A tap does not: the model's own function is called with its own arguments, and its output is what
the model goes on with, bit for bit; the call is read beside it, without gradients. For training
loops.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor, nn

from headwise.models.attention import MultiHeadAttention
from headwise.models.fused import WATCHER, Attending, output
from headwise.observation.call import Call
from headwise.observation.own import read_attending
from headwise.observation.pieces import Piece, cross_pieces, self_pieces
from headwise.observation.survey import Survey
from headwise.observation.tokens import Extent, Reader, Stream

__all__ = ["Tell", "pieces_of", "tapped"]

# What is told of a call: (path of its module, the call, whether it is cross-attention).
Tell = Callable[[str, Call, bool], None]

_REGISTRY: Final = "ALL_ATTENTION_FUNCTIONS"
_CROSS: Final = ("key_value_states", "encoder_hidden_states", "cross_attention_states")


@contextmanager
def tapped(model: nn.Module, found: Survey, tell: Tell) -> Iterator[None]:
    """Inside, ``tell`` is called after every attention call of the surveyed modules.

    Example:
        >>> from transformers import LlamaConfig, LlamaModel
        >>> from headwise.observation.survey import survey
        >>> config = LlamaConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=1,
        ...                      num_attention_heads=2, vocab_size=11)
        >>> model, seen = LlamaModel(config), []
        >>> with tapped(model, survey(model), lambda path, call, cross: seen.append(path)):
        ...     _ = model(torch.tensor([[1, 2, 3]]))
        >>> seen
        ['layers.0.self_attn']
    """
    with ExitStack() as restore:
        if any(isinstance(part, MultiHeadAttention) for part in model.modules()):
            _tap_own(found, tell, restore)
        else:
            _tap_routed(model, found, tell, restore)
        yield


def _tap_own(found: Survey, tell: Tell, restore: ExitStack) -> None:
    outer = WATCHER.get()

    def watch(attending: Attending) -> Tensor:
        result = output(attending) if outer is None else outer(attending)
        info = found.modules.get(id(attending.module))
        if info is not None:
            with torch.no_grad():
                call = read_attending(replace(attending, dropout=0.0))
                tell(info.path, _detached(call), attending.cross)
        return result

    restore.callback(WATCHER.reset, WATCHER.set(watch))


class _Watched:
    """transformers' registry of attention functions; what it gives out also tells."""

    def __init__(self, registry: Any, told: Callable[..., None]) -> None:
        self._registry = registry
        self._told = told

    def __getattr__(self, name: str) -> Any:
        return getattr(self._registry, name)

    def __getitem__(self, name: str) -> Any:
        return self._telling(self._registry[name])

    def get_interface(self, name: Any, default: Any) -> Any:
        return self._telling(self._registry.get_interface(name, default))

    def _telling(self, function: Any) -> Any:
        def attention(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            result = function(module, *args, **kwargs)
            self._told(module, *args, **kwargs)
            return result

        return attention


def _tap_routed(model: nn.Module, found: Survey, tell: Tell, restore: ExitStack) -> None:
    from headwise.observation.interface import read_call

    crossing: dict[int, bool] = {}

    def told(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any
    ) -> None:
        info = found.modules.get(id(module))
        if info is None:
            return
        cross = crossing.get(id(module), info.named_cross)
        with torch.no_grad():
            call = read_call(
                module, query, key, value, mask, cross=cross, **{**kwargs, "dropout": 0.0}
            )
            tell(info.path, _detached(call), cross)

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = any(kwargs.get(name) is not None for name in _CROSS)
        crossing[id(module)] = given or found.modules[id(module)].named_cross

    parts = [m for m in model.modules() if id(m) in found.modules]
    for part in parts:
        handle = part.register_forward_pre_hook(before, with_kwargs=True)
        restore.callback(handle.remove)
    for namespace in _namespaces(parts):
        registry = getattr(namespace, _REGISTRY)
        setattr(namespace, _REGISTRY, _Watched(registry, told))
        restore.callback(setattr, namespace, _REGISTRY, registry)


def _namespaces(parts: Iterable[nn.Module]) -> list[Any]:
    """The files of transformers in which the modules look their attention function up."""
    names = {kind.__module__: None for part in parts for kind in type(part).__mro__}
    files = [sys.modules[name] for name in names if name in sys.modules]
    return [file for file in files if hasattr(file, _REGISTRY)]


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


def pieces_of(call: Call, cross: bool) -> list[Piece]:
    """The sequences of one call apart: padding cut away, packed documents each alone.

    Calls that share a mask share their pieces.
    """
    memory = call.spec.memory
    key = ("tap", cross)
    if key not in memory:
        memory[key] = _pieces(call, cross)
    found: list[Piece] = memory[key]
    return found


def _pieces(call: Call, cross: bool) -> list[Piece]:
    spec = call.spec
    extents = [spec.extents(b) for b in range(spec.batch)]
    if not cross:
        layout = Reader(Stream("token")).read(extents, spec.queries, spec.q_offset, None)
        return self_pieces(spec, layout)
    source = Reader(Stream("state")).read(extents, spec.keys, 0, None)
    queries = [[Extent(0, spec.queries)] for _ in range(spec.batch)]
    layout = Reader(Stream("token")).read(queries, spec.queries, 0, None)
    return cross_pieces(spec, layout, source, extents)
