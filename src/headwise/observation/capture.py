"""Every attention call of one pass, kept as it is: for checks of what a model is made of.

The way in is that of ``observe`` (the survey, the attention interface or the watcher), so what is
seen is what the model computes with; nothing is measured. Meant for a few tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Final

from torch import Tensor, nn

from headwise.observation.assemble import plain
from headwise.observation.attach import enter
from headwise.observation.call import Call
from headwise.observation.recorder import Options, Recorder
from headwise.observation.survey import Survey

__all__ = ["Captured", "captured"]

_STREAM: Final = ("hidden_states", "x", "hidden_state", "input")
_SOURCE: Final = ("key_value_states", "encoder_hidden_states", "cross_attention_states")


@dataclass(frozen=True, eq=False)
class Captured:
    """One call: what the module read (``batch position d_model``), and what its heads gave."""

    call: Call
    stream: Tensor
    source: Tensor  # the other sequence of cross-attention; else the stream
    output: Tensor  # batch query head d_value


@contextmanager
def captured(model: nn.Module, found: Survey) -> Iterator[dict[str, Captured]]:
    """Inside, the last call of every attention module is kept, by the module's path.

    Example:
        >>> import torch
        >>> from headwise.models import build, preset
        >>> from headwise.observation.survey import survey
        >>> model = build(preset("tiny"))
        >>> with captured(model, survey(model)) as calls:
        ...     _ = model(torch.tensor([[1, 2, 3]]))
        >>> [call.stream.shape for call in calls.values()]
        [torch.Size([1, 3, 32]), torch.Size([1, 3, 32])]
    """
    recorder = _Capturing(found)
    with ExitStack() as restore:
        enter(model, found, recorder, None, restore)
        yield recorder.kept


class _Capturing(Recorder):
    """A recorder that keeps calls."""

    def __init__(self, found: Survey) -> None:
        super().__init__(found.modules, Options())
        self.kept: dict[str, Captured] = {}
        self._inputs: dict[int, dict[str, Any]] = {}

    def begin_module(self, module: nn.Module, inputs: dict[str, Any]) -> None:
        super().begin_module(module, inputs)
        self._inputs[id(module)] = inputs

    def attention(self, call: Call) -> Tensor:
        output = plain(call)
        inputs = self._inputs[id(call.module)]
        stream = next(x for name in _STREAM if isinstance(x := inputs.get(name), Tensor))
        named = (inputs.get(name) for name in _SOURCE)
        source = next((x for x in named if isinstance(x, Tensor)), None)
        context = inputs.get("context")
        if source is None and getattr(call.module, "cross", False) and context is not None:
            source = context.source
        path = self.modules[id(call.module)].path
        self.kept[path] = Captured(call, stream, stream if source is None else source, output)
        return output
