"""QK-Clip: heads whose logits have grown past τ are scaled back to it, in their weights.

    γ = min(1, τ / S_max)      s ← γ s,  by  W_Q ← √γ W_Q and W_K ← √γ W_K  (and their biases)

Where query heads share keys, W_Q of the head alone takes γ, so that the others that read the same
keys stay as they are. In multi-head latent attention the head's own parts of queries and keys take
√γ each and its rotary queries γ, because their key is shared by all heads. Every logit of the head
is multiplied by γ, whatever the input: positions and rotation commute with it.

Kimi K2 2025 (arXiv:2507.20534), section 2.1 and algorithm 1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

from headwise.circuits.head_weights import LayerWeights, head_weights
from headwise.circuits.matrices import matrix
from headwise.errors import MeasurementError, ModelError, OptionError
from headwise.models.stack import BlockStack
from headwise.monitoring.before_after import Batch, BeforeAfter, Look, look
from headwise.monitoring.monitor import Monitor
from headwise.monitoring.record import StepRecord

__all__ = ["Clipped", "ClippedHead", "Seen", "qk_clip"]

Seen = Monitor | StepRecord | Sequence[StepRecord] | Mapping[str, Sequence[float]]

_INSTEAD: Final = "QK-Clip needs logits that are scale times a product of W_Q and W_K"


@dataclass(frozen=True, slots=True)
class ClippedHead:
    """One head that was scaled back: its largest logit before, and γ."""

    module: str
    head: int
    max_logit: float
    gamma: float


@dataclass(frozen=True, slots=True)
class Clipped:
    """What a clip has done; ``check`` is there where a batch was given."""

    tau: float
    heads: tuple[ClippedHead, ...]
    check: BeforeAfter | None = None


@torch.no_grad()
def qk_clip(
    model: nn.Module, seen: Seen | None = None, *, tau: float = 100.0, batch: Batch | None = None
) -> Clipped:
    """Scale W_Q and W_K of every head whose largest logit is above τ, in place, back to τ.

    In a training loop: after the optimizer's step, with the monitor. The weights are multiplied in
    float64 and rounded once. Optimizers that keep weights of their own in float32 have to be given
    them anew.

    Args:
        model: one whose weights ``head_weights`` finds.
        seen: the largest logits: of the last record of a monitor or of records, or by path of the
            module and head. None: those of the batch.
        tau: the largest logit that stays.
        batch: looked at before and after, see ``before_after.look``. The largest logit of a clipped
            head is τ where the layers before it have not changed.

    Raises:
        OptionError: a τ that is not above 0; neither logits nor a batch; logits that do not fit the
            model.
        ModelError: norms of queries and keys, which undo any scaling; a learned bias, a clip or a
            softcap between W_Q W_Kᵀ and the logits; weights that are shared or computed.

    Example:
        >>> from headwise.models import build, preset
        >>> model, ids = build(preset("tiny")), torch.arange(12)[None]
        >>> with torch.no_grad():
        ...     _ = model.decoder.blocks[1].attention.branch.query.weight[:8].mul_(1000)
        >>> found = qk_clip(model, batch=ids)
        >>> [(each.module, each.head) for each in found.heads]
        [('decoder.blocks.1.attention.branch', 0)]
        >>> round(found.check.after.max_logit, 3)
        100.0
    """
    if not (math.isfinite(tau) and tau > 0):
        raise OptionError(f"tau is {tau}", allowed="a number above 0")
    layers = {layer.module: layer for layer in head_weights(model, validate=False).layers}
    modules = dict(model.named_modules())
    for layer in layers.values():
        _refuse_norms(layer)
    before = None if batch is None else look(model, batch)
    largest = _largest(seen, before)
    wanted: list[ClippedHead] = []
    for path, values in largest.items():
        wanted += _above(layers.get(path), path, values, tau)
    for path in dict.fromkeys(each.module for each in wanted):
        _check_product(model, layers[path], modules[path], tau)
    _check_own(model, layers, {each.module for each in wanted})
    for each in wanted:
        _scale(layers[each.module], modules[each.module], each.head, each.gamma)
    after = None if batch is None else look(model, batch)
    check = None if before is None or after is None else BeforeAfter(before, after)
    return Clipped(tau, tuple(wanted), check)


def _largest(seen: Seen | None, before: Look | None) -> Mapping[str, Sequence[float]]:
    """Module → largest logit of each head."""
    if seen is None:
        if before is None:
            raise OptionError(
                "no logits and no batch", allowed="a monitor, records, logits by module, or a batch"
            )
        return before.logits
    if isinstance(seen, Mapping):
        return seen
    if isinstance(seen, StepRecord):
        record = seen
    else:
        records = seen.records if isinstance(seen, Monitor) else list(seen)
        if not records:
            raise OptionError("there is no record yet", to_do="take a step that is recorded first")
        record = records[-1]
    return {layer.module: layer.figures["max_logit"] for layer in record.layers}


def _above(
    layer: LayerWeights | None, path: str, values: Sequence[float], tau: float
) -> list[ClippedHead]:
    if layer is None:
        raise OptionError(f"the model has no attention module {path}")
    if len(values) != layer.heads:
        raise OptionError(f"{len(values)} logits for {path}", allowed=f"{layer.heads} of them")
    for head, value in enumerate(values):
        if math.isnan(value) or value == math.inf:
            raise MeasurementError(
                f"the largest logit of {path} head {head} is {value}, which no factor repairs",
                to_do="go back to weights from before it",
            )
    return [
        ClippedHead(path, head, float(value), tau / value)
        for head, value in enumerate(values)
        if value > tau
    ]


def _refuse_norms(layer: LayerWeights) -> None:
    if layer.query_norm is not None or layer.key_norm is not None:
        raise ModelError(
            f"{layer.module} norms its queries and keys, which undoes any scaling of W_Q and W_K:"
            " QK-Clip would have no effect",
            to_do="lower the gains of these norms instead; they bound the logits",
        )


def _check_product(model: nn.Module, layer: LayerWeights, module: Any, tau: float) -> None:
    """Refuse what stands between the product and the logits."""
    cap = next(
        (c for n in ("softcap", "attn_logit_softcapping") if (c := getattr(module, n, None))), None
    )
    if cap is not None:
        raise ModelError(
            f"{layer.module} has a softcap of {cap:g}, so scaling does not bring its logits to"
            f" {tau:g}",
            to_do="lower the softcap instead (set_softcap)",
        )
    if layer.clip is not None:
        raise ModelError(f"{layer.module} clips its queries and keys", allowed=_INSTEAD)
    if layer.role != "cross" and _has_bias(model, layer.module):
        raise ModelError(
            f"{layer.module} adds a bias by distance to its logits, which no weight of a head"
            " scales",
            allowed=_INSTEAD,
        )


def _has_bias(model: nn.Module, path: str) -> bool:
    """Whether its stack learns or fixes a bias by distance: one for all its layers."""
    for name, module in model.named_modules():
        inside = path.startswith(f"{name}.") or not name
        if inside and isinstance(module, BlockStack) and module.bias is not None:
            return True
        stack = name.partition(".block.")[0]
        if name.endswith("relative_attention_bias") and path.startswith(f"{stack}.block."):
            return True
    return False


def _check_own(model: nn.Module, layers: Mapping[str, LayerWeights], paths: set[str]) -> None:
    """Weights must be parameters, and of one layer only."""
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    for path in paths:
        layer = layers[path]
        held = layer.latent is not None or all(
            x.untyped_storage().data_ptr() in parameters for x in (layer.query, layer.key)
        )
        if not held:
            raise ModelError(
                f"the weights of {path} are computed from others, so they cannot be written",
                to_do="merge the adapters or parametrisations of the model first",
            )
        twins = [
            p for p, other in layers.items() if other.output.data_ptr() == layer.output.data_ptr()
        ]
        if len(twins) > 1:
            raise ModelError(
                f"{twins[0]} and {twins[1]} are one set of weights, so a clip would change both",
                allowed="layers with weights of their own",
            )


def _scale(layer: LayerWeights, module: nn.Module, head: int, gamma: float) -> None:
    root = math.sqrt(gamma)
    if layer.latent is not None:
        _scale_latent(layer, module, head, gamma)
    elif layer.heads == layer.kv_heads:
        for x in (layer.query, layer.key, layer.query_bias, layer.key_bias):
            _times(None if x is None else x[head], root)
    else:
        for x in (layer.query, layer.query_bias):
            _times(None if x is None else x[head], gamma)


def _scale_latent(layer: LayerWeights, module: Any, head: int, gamma: float) -> None:
    """The head's columns of what leads up from the narrow vectors."""
    plain = layer.query.shape[2]
    name = "q_proj" if module.q_lora_rank is None else "q_b_proj"
    queries = matrix(f"{layer.module}.{name}", getattr(module, name))
    keys = matrix(f"{layer.module}.kv_b_proj", module.kv_b_proj)
    query = queries.unflatten(-1, (layer.heads, -1))[:, head]
    _times(query[:, :plain], math.sqrt(gamma))
    _times(query[:, plain:], gamma)
    _times(keys.unflatten(-1, (layer.heads, -1))[:, head, :plain], math.sqrt(gamma))


def _times(x: Tensor | None, factor: float) -> None:
    """In place, rounded once."""
    if x is not None:
        x.copy_(x.double() * factor)
