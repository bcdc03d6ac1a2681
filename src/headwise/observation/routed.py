"""Which modules of a model route their attention through transformers' attention interface.

A class routes when one of its methods looks up ``ALL_ATTENTION_FUNCTIONS``. Models whose attention
is their own code are refused by name: given a foreign mask they compute wrong outputs (bloom, mpt),
or they ignore the interface, and a run that measured nothing would look like a result.
"""

from __future__ import annotations

import inspect
import re
from functools import cache, partial
from types import CodeType
from typing import Any, Final

import transformers
from torch import nn
from transformers import PreTrainedModel

from headwise.errors import ModelError
from headwise.observation.interface import route
from headwise.observation.sites import AttentionModule
from headwise.observation.survey import Survey, nearest, numbered
from headwise.observation.writes import find_blocks

__all__ = ["routes", "survey_routed"]

_REGISTRY: Final = "ALL_ATTENTION_FUNCTIONS"
_CROSS: Final = re.compile(r"cross|encoder_attn|encdec", re.IGNORECASE)


def survey_routed(model: nn.Module) -> Survey:
    """Find every attention module that routes; refuse models that cannot be measured."""
    name = type(model).__name__
    if not isinstance(model, PreTrainedModel):
        hint = "pass the model inside it" if isinstance(model, nn.Module) else None
        raise ModelError(
            f"{name} is neither a transformers model nor one of Headwise's own",
            allowed="a PreTrainedModel, or a model of headwise.models",
            to_do=hint,
        )
    if not type(model)._can_set_attn_implementation():
        raise ModelError(
            f"{name} ({model.config.model_type}) computes attention in its own code and does not "
            "route through transformers' attention interface; a measurement would see nothing, or "
            "corrupt the outputs",
            to_do="measure a model that routes: llama, qwen, gemma, mistral, gpt2, bert, t5, …",
        )
    models = {p: m for p, m in model.named_modules() if isinstance(m, PreTrainedModel)}
    deaf = {p: m for p, m in models.items() if not type(m)._can_set_attn_implementation()}
    notes = [
        f"{path} ({type(m).__name__}) computes attention in its own code and was not measured"
        for path, m in deaf.items()
        if not any(path != p and path.startswith(f"{p}.") for p in deaf)
    ]
    found = {
        path: m
        for path, m in model.named_modules()
        if _routes(m) and not any(path == p or path.startswith(f"{p}.") for p in deaf)
    }
    if not found:
        raise ModelError(
            f"{name} ({model.config.model_type}) has no attention module that routes through "
            "transformers' attention interface",
            allowed="a model with softmax attention",
        )
    owner = {path: nearest(path, models) for path in found}
    configs = _configs(model, deaf)
    numbers = numbered(list(found))
    modules = {
        id(m): AttentionModule(path, owner[path], numbers[path], _cross(path, m))
        for path, m in found.items()
    }
    return Survey(
        modules=modules,
        stacks={path: models[path] for path in dict.fromkeys(owner.values())},
        models={**models},
        blocks=find_blocks(dict(model.named_modules()), modules.values()),
        heads=max((_heads(config) for config in configs), default=0),
        attach=partial(route, configs),
        about=_about(model),
        notes=tuple(notes),
    )


def _about(model: PreTrainedModel) -> dict[str, Any]:
    config: Any = model.config
    return {
        "model": getattr(config, "_name_or_path", "") or type(model).__name__,
        "architecture": config.model_type,
        "context": getattr(config.get_text_config(), "max_position_embeddings", None),
        "versions": {"transformers": transformers.__version__},
    }


def _heads(config: Any) -> int:
    for name in ("num_attention_heads", "num_heads", "encoder_attention_heads"):
        value = getattr(config, name, None)
        if isinstance(value, int):
            return value
    return 0


def _routes(module: nn.Module) -> bool:
    kind: Any = type(module)
    return routes(kind)


@cache
def routes(kind: Any) -> bool:
    """Whether a class looks up the attention interface in a method of its own or inherited.

    Example:
        >>> from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP
        >>> routes(LlamaAttention), routes(LlamaMLP)
        (True, False)
    """
    if issubclass(kind, PreTrainedModel):  # their common base checks the registry's names
        return False
    members = {name: x for base in reversed(kind.__mro__) for name, x in vars(base).items()}
    for member in members.values():
        function = inspect.unwrap(member) if inspect.isfunction(member) else member
        code = getattr(function, "__code__", None)
        if code is not None and _mentions(code):
            return True
    return False


def _mentions(code: CodeType) -> bool:
    inner = (c for c in code.co_consts if isinstance(c, CodeType))
    return _REGISTRY in code.co_names or any(_mentions(c) for c in inner)


def _cross(path: str, module: nn.Module) -> bool:
    if getattr(module, "is_cross_attention", False):
        return True
    return bool(_CROSS.search(type(module).__name__) or _CROSS.search(path.rpartition(".")[2]))


def _configs(model: PreTrainedModel, deaf: dict[str, PreTrainedModel]) -> list[Any]:
    """Every config in the model, sub-configs included, save those of parts that do not route."""
    kept = {id(m.config) for m in deaf.values()}
    if id(model.config) in kept:
        raise ModelError(
            f"{type(model).__name__} shares its config with a part that computes attention in its "
            "own code",
            allowed="a model that routes through transformers' attention interface",
        )
    found: dict[int, Any] = {}
    queue: list[Any] = [m.config for m in model.modules() if hasattr(m, "config")]
    while queue:
        config = queue.pop()
        if id(config) in found or id(config) in kept or not hasattr(config, "sub_configs"):
            continue
        found[id(config)] = config
        queue += [getattr(config, name) for name in config.sub_configs if hasattr(config, name)]
    return list(found.values())
