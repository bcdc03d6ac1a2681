"""One call of transformers' attention interface, with every convention resolved.

Model code passes queries, keys, values, a mask in one of five forms, and keyword arguments of which
some change the mathematics. ``read_call`` turns them into a ``Call``, whose mask is always a rule;
what is not known is refused before anything is computed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import masking_utils

from headwise.attention.masks import Causal, Everything, Mask, Predicate
from headwise.attention.streaming import attend
from headwise.errors import MeasurementError, OptionError
from headwise.observation.lazy_mask import LazyMask, MaskSpec
from headwise.observation.pieces import Piece
from headwise.observation.tokens import Index, take

__all__ = ["Call", "read_call"]

_SAMPLED: Final = 16

# Keyword arguments that do not change what is computed here. The variable-length ones describe the
# packing that the mask also describes; the window is in the mask already.
_HARMLESS: Final = {
    "cache_position", "cu_seq_lens_k", "cu_seq_lens_q", "deterministic", "layer_idx",
    "logits_to_keep", "max_length_k", "max_length_q", "num_items_in_batch", "output_attentions",
    "output_hidden_states", "output_router_logits", "position_ids", "return_dict", "seq_idx",
    "use_cache",
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class Call:
    """q ``batch head query d_head``, k and v ``batch kv_head key dim``; the rule of the logits."""

    module: nn.Module
    q: Tensor
    k: Tensor
    v: Tensor
    spec: MaskSpec
    scale: float
    softcap: float | None
    sinks: Tensor | None
    bias: Tensor | None  # broadcasts to batch head query key
    indices: Tensor | None  # (batch, query, kept): the only keys a query may attend to
    window: int | None
    bias_hides: bool = False  # the bias may hold -inf: it is (part of) a mask

    def self_role(self) -> str:
        """ "decoder" for causal self-attention, else "encoder".

        Where the rule is not known in closed form, sampled rows say whether later keys are seen;
        a causal module whose mask opens some of them (a prefix, an image) is still a decoder.
        """
        spec = self.spec
        if not self.bias_hides and spec.pattern is not None:
            return "encoder" if spec.pattern.looks_ahead else "decoder"
        ahead = False
        for row in torch.linspace(0, spec.queries - 1, min(_SAMPLED, spec.queries)).long():
            query = row[None, None].to(spec.device) + spec.q_offset
            first = int(query) + 1 - spec.kv_offset
            key = torch.arange(max(first, 0), spec.keys, device=spec.device)[None]
            seen = spec.visible(0, query, key + spec.kv_offset)
            if self.bias is not None and self.bias_hides:
                row_bias = cut_bias(self.bias, (0, 1), row[None], slice(max(first, 0), spec.keys))
                seen = seen & (row_bias[0, :, 0] > -torch.inf)
            ahead = ahead or bool(seen.any())
        causal = not ahead or getattr(self.module, "is_causal", False)
        return "decoder" if causal else "encoder"

    @property
    def differentiable(self) -> bool:
        """Whether somebody may ask for gradients through this call."""
        tensors = (self.q, self.k, self.v, self.sinks, self.bias)
        return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)

    def part(self, piece: Piece) -> tuple[Tensor, Tensor, Tensor]:
        """The queries, keys and values of one piece."""
        first, last = piece.batch
        q, k, v = (x[first:last] for x in (self.q, self.k, self.v))
        return take(q, 2, piece.rows), take(k, 2, piece.keys), take(v, 2, piece.keys)

    def part_mask(self, piece: Piece) -> Mask:
        """The mask of one piece, sparse key choices included."""
        if self.indices is None:
            return piece.mask
        return piece.mask & _chosen(self.indices, piece)

    def part_bias(self, piece: Piece) -> Tensor | None:
        """The additive bias of one piece: a view where its rows and keys are runs."""
        if self.bias is None:
            return None
        return cut_bias(self.bias, piece.batch, piece.rows, piece.keys)

    def output(self, piece: Piece) -> Tensor:
        """Attention output of one piece without measuring: ``batch head query d_value``."""
        q, k, v = self.part(piece)
        mask, bias = self.part_mask(piece), self.part_bias(piece)
        plain = self.softcap is None and self.sinks is None and bias is None
        causal = mask == Causal() and piece.offset == 0 and q.shape[2] == k.shape[2]
        if plain and (causal or isinstance(mask, Everything)):
            return functional.scaled_dot_product_attention(
                q, k, v, is_causal=causal, scale=self.scale, enable_gqa=q.shape[1] != k.shape[1]
            )
        return attend(
            q, k, v, mask=mask, scale=self.scale, softcap=self.softcap, bias=bias,
            sinks=self.sinks, offset=piece.offset,
        )  # fmt: skip

    def output_of_rows(self, batch: int, rows: Tensor) -> Tensor:
        """Output of rows that are no tokens (padding), by the same mask: ``1 head row d_value``."""
        spec = self.spec
        index = rows.to(self.q.device)

        def rule(_: int, query: Tensor, key: Tensor) -> Tensor:
            query = rows.to(query.device)[query] + spec.q_offset
            return spec.visible(batch, query, key + spec.kv_offset)

        mask: Mask = Predicate(rule)
        whole = (batch, batch + 1)
        keys = slice(0, self.k.shape[2])
        if self.indices is not None:
            mask = mask & _allowed(self.indices[batch][rows.to(self.indices.device)], 0, keys)
        bias = None if self.bias is None else cut_bias(self.bias, whole, rows, keys)
        return attend(
            self.q[batch : batch + 1].index_select(2, index),
            self.k[batch : batch + 1], self.v[batch : batch + 1], mask=mask, scale=self.scale,
            softcap=self.softcap, bias=bias, sinks=self.sinks, offset=0,
        )  # fmt: skip


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
    sliding_window: int | None = None,
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
    if dropout:
        raise OptionError(
            f"{name} drops attention weights (dropout {dropout:g})",
            allowed="a model in evaluation mode, or attention dropout 0",
            to_do="call model.eval()",
        )
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
        indices=indices, window=sliding_window, bias_hides=added is not None,
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
        function=function, padding=padding, vmap=False, device=q.device,
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


def _chosen(indices: Tensor, piece: Piece) -> Mask:
    rows = take(indices[piece.batch[0]], 0, piece.rows)
    return _allowed(rows, piece.offset, piece.keys)


def _allowed(chosen: Tensor, offset: int, keys: Index) -> Mask:
    """Only the keys that are listed: ``chosen`` is ``query kept``, indices into the whole call."""
    columns = keys if isinstance(keys, Tensor) else torch.arange(keys.start, keys.stop)

    def rule(_: int, query: Tensor, key: Tensor) -> Tensor:
        query, key = torch.broadcast_tensors(query, key)
        listed = chosen.to(query.device)
        at = columns.to(key.device)[key]
        if query.dim() == 2 and bool((at[:1] == at).all()):
            width = int(max(int(at.max()), int(listed.max()))) + 1
            table = torch.zeros(query.shape[0], width + 1, dtype=torch.bool, device=query.device)
            mine = listed[query[:, 0] - offset].long()
            table.scatter_(1, torch.where(mine < 0, width, mine), True)
            return table.gather(1, at)
        return (listed[query - offset] == at[..., None]).any(-1)

    return Predicate(rule)


def cut_bias(bias: Tensor, batch: tuple[int, int], rows: Index, keys: Index) -> Tensor:
    """The part of an additive bias for some sequences, rows and keys; axes of size 1 stay."""
    bias = bias if bias.dim() == 4 else bias[(None,) * (4 - bias.dim())]
    if bias.shape[0] > 1:
        bias = bias[slice(*batch)]
    if bias.shape[2] > 1:
        bias = take(bias, 2, rows)
    return take(bias, 3, keys) if bias.shape[3] > 1 else bias
