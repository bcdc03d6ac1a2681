"""What people do about exploding logits, as functions, each seen before and after on a batch.

    qk_clip           scale the weights of heads whose logits are too large, in place
    insert_qk_norm    norm queries and keys, so that gains bound the logits
    set_softcap       c·tanh(s / c), so that no logit is above c

The first leaves every function of the model but the clipped heads as it was. The other two change
what all heads compute; train on.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn

from headwise.errors import ModelError, OptionError
from headwise.models import Architecture, Decoder, Encoder, EncoderDecoder, Model, build
from headwise.models.attention import MultiHeadAttention
from headwise.models.norms import OffsetRMSNorm
from headwise.monitoring.before_after import Batch, BeforeAfter, look
from headwise.monitoring.qk_clip import Clipped, ClippedHead, qk_clip
from headwise.observation.survey import survey
from headwise.positions import frequencies

__all__ = [
    "Capped",
    "Clipped",
    "ClippedHead",
    "Normed",
    "insert_qk_norm",
    "qk_clip",
    "set_softcap",
]

_OWN: Final = (Decoder, Encoder, EncoderDecoder)
_STACKS: Final = ("encoder", "decoder")
_CAP: Final = "attn_logit_softcapping"
# Families that hand the cap to their attention; Gemma 3 has the setting and does not.
_CAPPED: Final = ("gemma2", "vaultgemma")
_CAPPING: Final = ("eager", "flex_attention", "flash_attention_2", "flash_attention_3")


@dataclass(frozen=True, eq=False, slots=True)
class Normed:
    """A model with norms of queries and keys.

    Attributes:
        model: the new one; the old one is as it was.
        gains: module → gain of its queries and of its keys.
        bounds: module → what no logit of it can exceed while the gains stay (before a learned
            bias).
        check: the old model and the new one on the batch; None without one.
    """

    model: Model
    gains: dict[str, tuple[float, float]]
    bounds: dict[str, float]
    check: BeforeAfter | None = None


@dataclass(frozen=True, slots=True)
class Capped:
    """A softcap that was set (None: taken away), and in which modules."""

    cap: float | None
    modules: tuple[str, ...]
    check: BeforeAfter | None = None


@torch.no_grad()
def insert_qk_norm(model: nn.Module, *, batch: Batch | None = None, tau: float = 100.0) -> Normed:
    """Build the same model with norms of queries and keys (``qk_norm="head"``), its weights kept.

        q ← g_q q / rms(q),  k ← g_k k / rms(k)      |s| ≤ scale · d_head · g_q g_k

    With a batch, g_q and g_k of a layer are the rms of its queries and keys there, so that logits
    begin at the size that they had on average; both are then lowered by one factor where the bound
    would be above τ. Without one they are 1, as in a new model: |s| ≤ √d_head with the usual scale.
    The loss changes, because tokens of unlike |q| and |k| become alike: ``check`` tells how much.
    An optimizer has to be made anew, for the new model.

    Henry et al. 2020 (arXiv:2010.04245); Dehghani et al. 2023 (arXiv:2302.05442), section 2.2.

    Args:
        model: of ``headwise.models``, without such norms.
        batch: see ``before_after.look``.
        tau: the largest bound.

    Raises:
        OptionError: a τ that is not above 0.
        ModelError: a model of another library, or one that has norms of queries and keys, or
            adapters.

    Example:
        >>> from headwise.models import preset
        >>> found = insert_qk_norm(build(preset("tiny")), batch=torch.arange(12)[None])
        >>> found.model.architecture.decoder.qk_norm, found.check.after.max_logit < 100
        ('head', True)
    """
    if not (math.isfinite(tau) and tau > 0):
        raise OptionError(f"tau is {tau}", allowed="a number above 0")
    if not isinstance(model, _OWN):
        raise ModelError(
            f"{type(model).__name__} is not made from an architecture of Headwise",
            allowed="models of headwise.models", to_do="use qk_clip, which scales the weights",
        )  # fmt: skip
    made = _with_norms(model)
    before = None if batch is None else look(model, batch)
    gains, bounds = {}, {}
    for path, module in made.named_modules():
        if isinstance(module, MultiHeadAttention):
            rms = (1.0, 1.0)
            if before is not None and path in before.query_rms:
                rms = before.query_rms[path], before.key_rms[path]
            gains[path], bounds[path] = _set_gains(module, rms, tau)
    after = None if batch is None else look(made, batch)
    check = None if before is None or after is None else BeforeAfter(before, after)
    return Normed(made, gains, bounds, check)


@torch.no_grad()
def set_softcap(model: nn.Module, cap: float | None, *, batch: Batch | None = None) -> Capped:
    """Cap the attention logits of every layer, in place: s ← c·tanh(s / c); None takes it away.

    Logits well below c stay nearly as they are. Gemma 2 (arXiv:2408.00118), section 2: c = 50.

    Args:
        model: of ``headwise.models``, or of a family of transformers that knows a softcap, with an
            attention that computes it.
        cap: c, above 0.
        batch: see ``before_after.look``.

    Raises:
        OptionError: a cap that is not above 0.
        ModelError: a family that has no softcap, or an attention that leaves it out.

    Example:
        >>> from headwise.models import preset
        >>> model = build(preset("tiny"))
        >>> found = set_softcap(model, 0.5, batch=torch.arange(12)[None])
        >>> found.check.after.max_logit < 0.5, model.architecture.decoder.softcap
        (True, 0.5)
    """
    if cap is not None and not (math.isfinite(cap) and cap > 0):
        raise OptionError(f"the cap is {cap}", allowed="a number above 0, or None")
    own = isinstance(model, _OWN)
    modules = _own_attention(model) if own else _routed_attention(model)
    before = None if batch is None else look(model, batch)
    for module in modules.values():
        if own:
            module.softcap = cap
        else:
            setattr(module, _CAP, cap)
            setattr(module.config, _CAP, cap)
    if isinstance(model, _OWN):
        model.architecture = _changed(model.architecture, softcap=cap)
    after = None if batch is None else look(model, batch)
    check = None if before is None or after is None else BeforeAfter(before, after)
    return Capped(cap, tuple(modules), check)


def _with_norms(model: Model) -> Model:
    """The model built anew with norms, in the type and place of the old one's weights."""
    stacks = [getattr(model.architecture, name) for name in _STACKS]
    if any(stack is not None and stack.qk_norm is not None for stack in stacks):
        raise ModelError(
            "the model norms its queries and keys already", to_do="lower the gains of these norms"
        )
    first = next(model.parameters())
    made = build(
        _changed(model.architecture, qk_norm="head"), dtype=first.dtype, device=first.device
    )
    fits = made.load_state_dict(model.state_dict(), strict=False)
    new = [name for name in fits.missing_keys if "query_norm." in name or "key_norm." in name]
    if fits.unexpected_keys or len(new) < len(fits.missing_keys):
        odd = next(iter(fits.unexpected_keys or set(fits.missing_keys) - set(new)))
        raise ModelError(
            f"{odd} is not where the architecture has its weights",
            to_do="merge the adapters of the model first",
        )
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    for name, parameter in made.named_parameters():
        parameter.requires_grad_(name not in frozen)
    made.allow_long = model.allow_long
    return made.train(model.training)


def _changed(architecture: Architecture, **changes: Any) -> Architecture:
    """The same architecture, with every stack changed; checked again."""
    facts = architecture.model_dump()
    for name in _STACKS:
        if facts[name] is not None:
            facts[name] |= changes
    return Architecture.checked(**facts)


def _set_gains(
    module: MultiHeadAttention, rms: tuple[float, float], tau: float
) -> tuple[tuple[float, float], float]:
    """Gains of queries and keys, and the bound of the logits with them."""
    factor = 1.0
    if module.rotary is not None:
        spec = module.rotary
        _, found = frequencies(spec.width, base=spec.base, scaling=spec.scaling)
        factor = max(1.0, found)  # rms is that of queries and keys times it
    rms = rms[0] / factor, rms[1] / factor
    bound = abs(module.scale) * factor**2 * module.d_head * rms[0] * rms[1]
    shrink = min(1.0, math.sqrt(tau / bound)) if bound > 0 else 1.0
    gains = rms[0] * shrink, rms[1] * shrink
    for norm, gain in zip((module.query_norm, module.key_norm), gains, strict=True):
        weight: Any = getattr(norm, "weight", None)
        weight.fill_(gain - 1 if isinstance(norm, OffsetRMSNorm) else gain)
    return gains, bound * shrink**2


def _own_attention(model: nn.Module) -> dict[str, Any]:
    return {p: m for p, m in model.named_modules() if isinstance(m, MultiHeadAttention)}


def _routed_attention(model: nn.Module) -> dict[str, Any]:
    """The attention modules of a transformers model that has a softcap; else refused by name."""
    sites = survey(model).modules
    found: dict[str, Any] = {sites[id(m)].path: m for m in model.modules() if id(m) in sites}
    for path, module in found.items():
        config: Any = getattr(module, "config", None)
        family = getattr(config, "model_type", type(module).__name__)
        if family not in _CAPPED or not hasattr(module, _CAP):
            raise ModelError(
                f"{path}: attention of {family} has no softcap",
                allowed=f"models of headwise.models, {', '.join(_CAPPED)}",
                to_do="use qk_clip, which scales the weights",
            )
        attention = config._attn_implementation
        if attention not in _CAPPING:
            raise ModelError(
                f"{path} computes attention with {attention}, which leaves a softcap out",
                allowed=", ".join(_CAPPING),
                to_do='model.set_attn_implementation("eager")',
            )
    return found
