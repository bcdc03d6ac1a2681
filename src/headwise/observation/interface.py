"""transformers' attention interface: Headwise registered in it, and one call of it understood.

One name is registered in both of transformers' registries, for attention and for masks. Model code
passes queries, keys, values, a mask in one of five forms, and keyword arguments of which some
change the mathematics. ``read_call`` turns them into a ``Call``; what is not known is refused
before anything is computed.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, masking_utils

from headwise.errors import MeasurementError
from headwise.observation.assemble import plain
from headwise.observation.call import Call, refuse_dropout
from headwise.observation.inference import ordinary_tensors
from headwise.observation.lazy_mask import LazyMask, lazy_mask, materialised
from headwise.observation.recorder import ACTIVE, Recorder
from headwise.observation.rule import MaskSpec
from headwise.observation.structure import read

__all__ = ["NAME", "read_call", "route"]

# transformers reads meaning into names that contain flash, sdpa, flex_attention, paged or a slash.
NAME: Final = "headwise"

# Keyword arguments that do not change what is computed here. The variable-length ones describe the
# packing that the mask also describes; the window is in the mask already.
_HARMLESS: Final = {
    "cache_position", "cu_seq_lens_k", "cu_seq_lens_q", "deterministic", "layer_idx",
    "logits_to_keep", "max_length_k", "max_length_q", "num_items_in_batch", "output_attentions",
    "output_hidden_states", "output_router_logits", "position_ids", "return_dict", "seq_idx",
    "sliding_window", "use_cache",
}  # fmt: skip


def route(configs: Iterable[Any], recorder: Recorder, restore: ExitStack) -> None:
    """Give the configs our name; ``restore`` takes it back."""
    before = materialised()

    def say() -> None:
        built = materialised() - before
        if built:
            recorder.note(f"the model's own code built {built} attention masks as arrays")

    restore.callback(say)
    for config in configs:
        restore.callback(
            setattr, config, "_attn_implementation_internal", config._attn_implementation_internal
        )
        config._attn_implementation_internal = NAME


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The function registered with transformers; returns ``batch query head d_value``."""
    recorder = ACTIVE.get()
    cross = recorder is not None and recorder.is_cross(module)
    if recorder is None:
        cross = bool(getattr(module, "is_cross_attention", False))
    call = read_call(module, query, key, value, attention_mask, cross=cross, **kwargs)
    if recorder is None:
        return plain(call), None
    with ordinary_tensors():
        return recorder.attention(call), None


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, lazy_mask)


def read_call(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    cross: bool,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    sinks: Tensor | None = None,
    position_bias: Tensor | None = None,
    indices: Tensor | None = None,
    **others: Any,
) -> Call:
    """Resolve the conventions of one call; refuse what would change the mathematics unnoticed."""
    name = type(module).__name__
    unknown = sorted(k for k, v in others.items() if v is not None and k not in _HARMLESS)
    if unknown:
        raise MeasurementError(
            f"{name} passes {', '.join(unknown)} to its attention, which is not known here and may "
            "change what is computed",
            to_do="this model cannot be measured",
        )
    refuse_dropout(name, dropout)
    if query.shape[0] != key.shape[0]:
        raise MeasurementError(
            f"{name} passes {query.shape[0]} query and {key.shape[0]} key sequences",
            allowed="one batch size",
        )
    bias = position_bias
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if attention_mask is None and causal and key.shape[2] > query.shape[2] > 1:
        # transformers' own convention: what lies beyond the queries is room of a static cache.
        key, value = key[:, :, : query.shape[2]], value[:, :, : query.shape[2]]
        bias = None if bias is None else bias[..., : query.shape[2]]
    spec, added = _rule(attention_mask, query, key, causal=bool(causal), cross=cross)
    if added is not None:
        bias = added if bias is None else bias + added
    return Call(
        module=module, q=query, k=key, v=value, spec=spec,
        scale=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        softcap=softcap or None, sinks=s_aux if sinks is None else sinks, bias=bias,
        indices=indices, bias_hides=added is not None,
    )  # fmt: skip


def _rule(
    mask: Tensor | None, q: Tensor, k: Tensor, *, causal: bool, cross: bool
) -> tuple[MaskSpec, Tensor | None]:
    """The mask as a rule, and what has to be added to the logits."""
    batch, queries, keys = q.shape[0], q.shape[2], k.shape[2]
    if isinstance(mask, LazyMask):
        return _checked(mask.spec, batch, queries, keys), None
    everything = masking_utils.bidirectional_mask_function
    function, padding, added, q_offset = everything, None, None, 0
    if mask is None:
        if causal and queries > 1:
            function = masking_utils.causal_mask_function
        elif not cross:
            q_offset = max(keys - queries, 0)
    else:
        if mask.dim() != 4 or mask.shape[2] not in (1, queries) or mask.shape[3] < keys:
            raise MeasurementError(
                f"an attention mask of shape {tuple(mask.shape)} for {queries} queries and "
                f"{keys} keys",
                allowed="(batch, 1 or head, query or 1, key)",
            )
        q_offset = 0 if cross else max(keys - queries, 0)
        mask = mask[..., :keys]
        keep, added = _split(mask)
        if keep is not None and keep.shape[2] == 1 and queries > 1:
            padding = keep[:, 0, 0].expand(batch, -1)
        elif keep is not None:
            function = _lookup(keep, q_offset)
    spec = MaskSpec(
        batch=batch, queries=queries, keys=keys, q_offset=q_offset, kv_offset=0,
        function=function, padding=padding, read=read, vmap=False, device=q.device,
    )  # fmt: skip
    return spec, added


def _split(mask: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """A mask of a user: what it hides (bool), and what it adds."""
    if mask.dtype == torch.bool:
        if mask.shape[1] == 1:
            return mask, None
        return None, torch.where(mask, 0.0, -torch.inf)
    hidden = mask <= torch.finfo(mask.dtype).min / 2
    if mask.shape[1] == 1 and bool((hidden | (mask == 0)).all()):
        return ~hidden, None
    return None, torch.where(hidden, -torch.inf, mask.float())


def _lookup(keep: Tensor, q_offset: int) -> Any:
    """A boolean ``batch 1 query key`` array as a mask function."""

    def function(batch: Any, _: Any, query: Tensor, key: Tensor) -> Tensor:
        rows = keep[batch if keep.shape[0] > 1 else 0, 0]
        return rows[query - q_offset if keep.shape[2] > 1 else torch.zeros_like(query), key]

    return function


def _checked(spec: MaskSpec, batch: int, queries: int, keys: int) -> MaskSpec:
    """The rule of a LazyMask, for the tensors it arrived with."""
    if spec.batch != batch or spec.queries != queries or spec.keys < keys:
        raise MeasurementError(
            f"a mask for {spec.batch} sequences, {spec.queries} queries and {spec.keys} keys came "
            f"with {batch} sequences, {queries} queries and {keys} keys",
            to_do="this model cannot be measured",
        )
    return spec if spec.keys == keys else spec.cut(3, 0, keys)
