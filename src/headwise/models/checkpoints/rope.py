"""Rotary positions of a Hugging Face configuration, in its old and its new spelling.

    old   rope_theta, rope_scaling {"type" or "rope_type", "factor", …}, partial_rotary_factor
    new   rope_parameters {"rope_type", "rope_theta", "partial_rotary_factor", "factor", …}

Where both stand, ``rope_scaling`` is read first and a key inside before the same key outside, as
transformers 5 does (modeling_rope_utils). The mathematics is in ``positions.scalings``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from headwise.errors import ModelError
from headwise.models.architecture import Rotary
from headwise.models.checkpoints.settings import Settings
from headwise.positions import DynamicNTK, Linear, Llama3, LongRope, Scaling, YaRN, frequencies

__all__ = ["rotary"]


def rotary(
    settings: Settings,
    d_head: int,
    *,
    context: int,
    base: float = 10000.0,
    base_key: str = "rope_theta",
    partial_key: str | None = None,
    partial: float = 1.0,
) -> Rotary:
    """The rotary positions that a configuration describes.

    Args:
        settings: the configuration.
        d_head: width of a head.
        context: the value of max_position_embeddings.
        base, partial: the family's defaults.
        base_key, partial_key: the family's old names outside the inner table; None: the family
            always turns whole heads, and any other share is refused.

    Raises:
        ModelError: a kind of scaling, or a key, that is not known.

    Example:
        >>> old = Settings({"rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 2.0}})
        >>> rotary(old, 8, context=64)
        Rotary(width=8, base=500.0, layout=<Layout.HALF: 'half'>, scaling=Linear(factor=2.0))
    """
    name, inner = _inner(settings)
    outer_base = settings.number(base_key, base)
    outer_share = settings.number(partial_key or "partial_rotary_factor", partial)
    length = settings.whole_or_none("original_max_position_embeddings")
    table = Settings(inner, f"{name} of {settings.source}")
    table.silent("type", "rope_type", "finetuned")
    share = table.number("partial_rotary_factor", outer_share)
    if partial_key is None and share != 1:
        raise ModelError(
            f"{settings.source} turns {share:g} of each head",
            allowed="1 in this family",
            to_do="this variant of the model cannot be loaded",
        )
    theta = table.number("rope_theta", outer_base)
    kind = inner.get("rope_type") or inner.get("type") or "default"
    if not isinstance(kind, str) or kind not in _KINDS:
        raise ModelError(f"{name} is of the type {kind!r}", allowed=", ".join(_KINDS))
    scaling = _KINDS[kind](table, context, length)
    table.finish()
    found = Rotary.checked(width=int(d_head * share), base=theta, scaling=scaling)
    frequencies(found.width, base=theta, scaling=scaling)  # refuses what cannot be computed
    return found


def _inner(settings: Settings) -> tuple[str, Mapping[str, Any]]:
    """The table inside, and the name it has."""
    for name in ("rope_scaling", "rope_parameters"):
        found = settings.get(name)
        if found:
            if not isinstance(found, dict):
                raise settings.refusal(name, "a table of rope parameters")
            settings.silent("rope_parameters")
            return name, found
    return "rope_parameters", {}


def _trained(table: Settings, context: int, outside: int | None) -> int:
    """The trained length: outside the table, inside it, or the context."""
    inside = table.whole_or_none("original_max_position_embeddings")
    return outside or inside or context


def _plain(table: Settings, context: int, outside: int | None) -> Scaling | None:
    table.silent("original_max_position_embeddings")
    table.only("factor", 1, 1.0)
    return None


def _linear(table: Settings, context: int, outside: int | None) -> Scaling | None:
    table.silent("original_max_position_embeddings")
    return Linear(factor=_factor(table))


def _dynamic(table: Settings, context: int, outside: int | None) -> Scaling | None:
    table.silent("original_max_position_embeddings")  # transformers takes the context
    return DynamicNTK(factor=_factor(table), trained=context)


def _yarn(table: Settings, context: int, outside: int | None) -> Scaling | None:
    trained = _trained(table, context, outside)
    return YaRN(
        factor=table.number("factor", context / trained),
        trained=trained,
        beta_fast=table.number("beta_fast", 32.0) or 32.0,
        beta_slow=table.number("beta_slow", 1.0) or 1.0,
        attention_factor=table.number_or_none("attention_factor"),
        mscale=table.number_or_none("mscale"),
        mscale_all_dim=table.number_or_none("mscale_all_dim"),
        truncate=table.flag("truncate", True),
    )


def _llama3(table: Settings, context: int, outside: int | None) -> Scaling | None:
    return Llama3(
        factor=_factor(table),
        trained=_trained(table, context, outside),
        low_turns=_needed(table, "low_freq_factor"),
        high_turns=_needed(table, "high_freq_factor"),
    )


def _longrope(table: Settings, context: int, outside: int | None) -> Scaling | None:
    trained = _trained(table, context, outside)
    return LongRope(
        short=_numbers(table, "short_factor"),
        long=_numbers(table, "long_factor"),
        factor=table.number("factor", context / trained),
        trained=trained,
        attention_factor=table.number_or_none("attention_factor"),
    )


_KINDS: Final[dict[str, Callable[[Settings, int, int | None], Scaling | None]]] = {
    "default": _plain,
    "linear": _linear,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "llama3": _llama3,
    "longrope": _longrope,
}


def _factor(table: Settings) -> float:
    return _needed(table, "factor")


def _needed(table: Settings, key: str) -> float:
    value = table.number_or_none(key)
    if value is None:
        raise ModelError(f"{table.source} lacks {key}", to_do="fetch the file again")
    return value


def _numbers(table: Settings, key: str) -> tuple[float, ...]:
    value = table.get(key)
    numbers = isinstance(value, list) and all(isinstance(each, int | float) for each in value)
    if not numbers:
        raise table.refusal(key, "a list of numbers")
    return tuple(float(each) for each in value)
