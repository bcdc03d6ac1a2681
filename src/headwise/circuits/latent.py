"""Multi-head latent attention: keys and values out of one narrow vector of each token.

    c = x W_DKV,  ĉ = norm(c)            keys k_h = [ĉ W_UK^h, R x W_KR],  values v_h = ĉ W_UV^h
    queries [q_h, R q_h'] = x W_Q^h, or norm(x W_DQ) W_UQ^h

A norm divides by a positive number of each token, so ĉ W_U reads x through W_DKV diag(γ) W_U, up to
that number. W_V and the keys' W_K of a head are those products, so W_OV and the W_QK of the entries
that do not turn are exact up to positive numbers of each token; with the rotary entries, whose key
has no norm and is one for all heads, logits are no such product.

DeepSeek-AI 2024 (arXiv:2405.04434), section 2.1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from headwise.circuits.matrices import bias, check_finite, matrix
from headwise.circuits.norms import NormFold
from headwise.errors import ModelError
from headwise.positions import half_order

if TYPE_CHECKING:
    from headwise.circuits.layer_weights import RotaryUse

__all__ = ["Latent", "LatentUse", "Turned", "not_fixed", "read_latent"]

Turned = Literal["kept", "sorted"]  # the order of rotary entries in queries and keys


@dataclass(frozen=True, eq=False)
class Latent:
    """x ↦ norm(x W_D) W_U: ``down`` d_model rank, ``up`` head rank width.

    Example:
        >>> norm = NormFold("rms", torch.tensor([2.0, 1.0]), None, eps=0.0)
        >>> latent = Latent(torch.eye(2), norm, torch.ones(1, 2, 1))
        >>> latent.product().tolist(), latent(torch.tensor([[3.0, 3.0]])).tolist()
        ([[[2.0], [1.0]]], [[[3.0]]])
    """

    down: Tensor
    norm: NormFold
    up: Tensor

    def product(self) -> Tensor:
        """W_D diag(γ) W_U, ``head d_model width``: summed in float64, kept in float32 or better."""
        wide = self.down.double() @ self.norm.fold(self.up.double())
        return wide.to(torch.promote_types(self.up.dtype, torch.float32))

    def __call__(self, x: Tensor) -> Tensor:
        """What the heads get, ``… position d_model -> … head position width``, in float64."""
        return self.norm(x.double() @ self.down.double())[..., None, :, :] @ self.up.double()


@dataclass(frozen=True, eq=False)
class LatentUse:
    """The narrow vectors of one module, and the part of its queries and keys that turns.

    Attributes:
        query: of queries, all entries (those that turn last); None: they have none.
        source: of keys (the entries that do not turn) and values, side by side.
        rotary_query: ``head d_model rotary``, None where ``query`` has it.
        rotary_key: ``d_model rotary``, shared by all heads.
        rotary: how these turn, in the order in which attention gets them.
    """

    query: Latent | None
    source: Latent
    rotary_query: Tensor | None
    rotary_key: Tensor
    rotary: RotaryUse


Parts = tuple[Tensor, Tensor, Tensor]


def read_latent(
    module: nn.Module, path: str, rotary: RotaryUse, turned: Turned
) -> tuple[Parts, LatentUse]:
    """W_Q and W_K of the entries that do not turn and W_V, ``head d_model …``, and the rest.

    ``turned``: rotary entries stay where they are ("kept"), or the model turns pairs side by side
    and gives all first members, then all second ones ("sorted").
    """
    held: Any = module
    plain, narrow = int(held.qk_nope_head_dim), int(held.kv_lora_rank)
    order = half_order(rotary.width) if turned == "sorted" else torch.arange(rotary.width)
    both = _matrix(path, module, "kv_a_proj_with_mqa")
    up = _by_heads(_matrix(path, module, "kv_b_proj"), plain + int(held.v_head_dim))
    source = Latent(both[:, :narrow], _norm(path, module, "kv_a_layernorm"), up)
    made = source.product()
    rotary_key = both[:, narrow:][:, order]
    width = plain + rotary.width
    if held.q_lora_rank is None:
        query = _by_heads(_matrix(path, module, "q_proj"), width)
        use = LatentUse(None, source, query[..., plain:][..., order], rotary_key, rotary)
        return (query[..., :plain], made[..., :plain], made[..., plain:]), use
    up = _by_heads(_matrix(path, module, "q_b_proj"), width)
    up = torch.cat((up[..., :plain], up[..., plain:][..., order]), -1)
    down = _matrix(path, module, "q_a_proj")
    latent = Latent(down, _norm(path, module, "q_a_layernorm"), up)
    use = LatentUse(latent, source, None, rotary_key, rotary)
    query = Latent(down, latent.norm, up[..., :plain]).product()
    return (query, made[..., :plain], made[..., plain:]), use


def not_fixed(use: LatentUse, plain: int) -> str:
    """What of the logits is in W_QK, and up to what."""
    normed = "keys come" if use.query is None else "queries and keys come"
    number = "key" if use.query is None else "query and each key"
    return (
        f"{normed} out of norms of narrow latent vectors (multi-head latent attention): W_QK is of"
        f" the {plain} entries that do not turn, exact up to a positive number of each {number};"
        f" the {use.rotary.width} rotary entries, whose key all heads share, add a part to every"
        " logit that is not in it"
    )


def _matrix(path: str, module: nn.Module, name: str) -> Tensor:
    """A projection without a bias, which the norm of a latent vector would not let pass alone."""
    part = getattr(module, name, None)
    found = matrix(f"{path}.{name}", part)
    check_finite(f"{path}.{name}", found)
    if bias(part) is not None:
        raise ModelError(
            f"{path}.{name} has a bias, which reaches keys and values divided by what they are",
            allowed="latent attention without biases (attention_bias = False)",
        )
    return found


def _norm(path: str, module: nn.Module, name: str) -> NormFold:
    part: Any = getattr(module, name)
    gain = part.weight.detach()
    check_finite(f"{path}.{name} (gain)", gain)
    return NormFold("rms", gain, None, float(part.variance_epsilon))


def _by_heads(weight: Tensor, width: int) -> Tensor:
    """``head in width``, a view."""
    return weight.unflatten(-1, (-1, width)).movedim(-2, 0)
