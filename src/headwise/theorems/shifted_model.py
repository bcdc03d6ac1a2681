"""A whole model read at positions of one's choice: logits (or states) of the first tokens."""

from __future__ import annotations

import inspect
from typing import Any, Final

import torch
from torch import Tensor

from headwise.models.architecture import Stack
from headwise.observation.driver import is_own
from headwise.positions import DynamicNTK, LongRope
from headwise.theorems.position_tables import has_position_table
from headwise.theorems.statement import NotApplicable
from headwise.theorems.trained import Trained

__all__ = ["check_turns", "outputs_at"]

_TOKENS: Final = 64
_BY_LENGTH: Final = ("dynamic", "longrope")


def check_turns(model: Trained) -> None:
    """Refuse a model whose outputs may depend on where its positions begin.

    Raises:
        NotApplicable: with the reason.
    """
    if model.dtype not in (torch.float32, torch.float64):
        raise NotApplicable(f"its weights are {model.dtype}, whose rounding hides that of angles")
    if has_position_table(model.model):
        raise NotApplicable("it adds vectors for absolute positions")
    if all(layer.rotary is None for layer in model.weights.layers):
        raise NotApplicable("no layer of it has rotary positions")
    if model.loaded.kind == "encoder-decoder":
        raise NotApplicable("it reads two sequences, whose positions are numbered apart")
    if _depends_on_length(model.model):
        raise NotApplicable("its rotary frequencies depend on the length of the text")


def _depends_on_length(model: Any) -> bool:
    if is_own(model):
        stack: Stack = model.architecture.stack
        return stack.rotary is not None and isinstance(stack.rotary.scaling, DynamicNTK | LongRope)
    found = getattr(model.config.get_text_config(), "rope_parameters", None) or {}
    parts = [found, *(part for part in found.values() if isinstance(part, dict))]
    return any(part.get("rope_type") in _BY_LENGTH for part in parts)


@torch.no_grad()
def outputs_at(model: Trained, first: int, stride: int = 1) -> Tensor:
    """Logits of the first tokens, numbered first, first + stride, …: ``position vocab``.

    States in place of logits where the model has no head.
    """
    ids = model.document(_TOKENS).ids[None]
    at = first + stride * torch.arange(ids.shape[1], device=ids.device)[None]
    module = model.model
    if is_own(module):
        return module(ids, position_ids=at)[0].double()
    if "position_ids" not in inspect.signature(module.forward).parameters:
        raise NotApplicable("it does not take position ids")
    more = {} if model.loaded.kind == "encoder" else {"use_cache": False}
    output = module(input_ids=ids, position_ids=at, **more)
    found: Tensor | None = getattr(output, "logits", None)
    return (output.last_hidden_state if found is None else found)[0].double()
