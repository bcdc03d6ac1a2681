"""Which weights of a model a cut to rank r changes, and the change itself: see ``surgery``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn

from headwise.circuits.head_weights import head_weights
from headwise.circuits.layer_weights import LayerWeights
from headwise.errors import ModelError, OptionError

__all__ = ["Circuit", "Cut", "find_cuts"]

Circuit = Literal["qk", "ov"]

_OV_ALONE: Final = 'W_OV alone (circuits=["ov"], --matrix ov)'


class Cut:
    """One factor of some heads of one layer, and the directions it can be cut to.

    ``weight`` is a view of the parameter: ``head d_model width``, cut as U_r U_rᵀ W; with
    ``right``, ``head width d_model``, cut as W V_r V_rᵀ. ``directions``: ``head d_model width``,
    the strongest first. ``moved``: the value bias ``head width`` and the output projection, which
    takes what a cut of W_O would take away from b_V W_O. ``values``: the singular values of the
    products, ``head width``, largest first.
    """

    layer: int
    circuit: Circuit

    def __init__(
        self,
        weight: Tensor,
        heads: Sequence[int],
        directions: Tensor,
        values: Tensor,
        *,
        most: int,
        right: bool = False,
        moved: tuple[Tensor, nn.Module] | None = None,
    ) -> None:
        self.weight, self.heads, self.directions = weight, list(heads), directions
        self.values, self.most, self.right, self.moved = values, most, right, moved
        self._before: Tensor | None = None
        self._bias: nn.Parameter | None = None

    def make(self, rank: int) -> None:
        """Write the cut factor over the weight, in float64 and rounded once."""
        if self.moved is not None:
            held = self.moved[1].bias
            assert held is None or isinstance(held, nn.Parameter)
            self._bias = held
        self._before = self.weight[self.heads]  # indexing with a list copies
        wide = self._before.double()
        u = self.directions[..., :rank]
        cut = (wide @ u) @ u.mT if self.right else u @ (u.mT @ wide)
        if self.moved is not None:
            bias, module = self.moved
            lost = torch.einsum("hv,hvd->d", bias.double(), wide - cut)
            total = lost if self._bias is None else lost + self._bias.double()
            kind = self.weight.dtype if self._bias is None else self._bias.dtype
            module.bias = nn.Parameter(total.to(kind), requires_grad=False)
        self.weight[self.heads] = cut.to(self.weight.dtype)

    def undo(self) -> None:
        """Put back what ``make`` has written over."""
        if self._before is None:
            return
        self.weight[self.heads] = self._before
        if self.moved is not None:
            self.moved[1].bias = self._bias  # type: ignore[assignment]
        self._before = self._bias = None

    def alone(self, place: int) -> Cut:
        """The same cut of one of its heads only."""
        at = slice(place, place + 1)
        moved = None if self.moved is None else (self.moved[0][at], self.moved[1])
        one = Cut(
            self.weight,
            self.heads[at],
            self.directions[at],
            self.values[at],
            most=self.most,
            right=self.right,
            moved=moved,
        )
        one.layer, one.circuit = self.layer, self.circuit
        return one


def find_cuts(
    model: nn.Module,
    circuits: Iterable[Circuit],
    heads: Sequence[tuple[int, int]] | None,
    folded: bool = False,
) -> list[Cut]:
    """What has to be cut for these circuits of these heads; refused where it is not exact."""
    layers = head_weights(model).layers
    chosen = _chosen(layers, heads)
    modules = dict(model.named_modules())
    parameters = {p.untyped_storage().data_ptr(): p for p in model.parameters()}
    _check_apart(layers)
    cuts = []
    for index, numbers in chosen.items():
        layer, module = layers[index], modules[layers[index].module]
        for circuit in circuits:
            if circuit == "qk":
                cut = _qk(layer, numbers, module, folded)
            else:
                cut = _ov(layer, numbers, module, model, folded)
            if cut.weight.untyped_storage().data_ptr() not in parameters:
                raise ModelError(
                    f"the weights of {layer.module} are computed from others, so they cannot be"
                    " written",
                    to_do="merge the adapters or parametrisations of the model first",
                )
            cut.layer, cut.circuit = index, circuit
            cuts.append(cut)
    return cuts


def _chosen(
    layers: Sequence[LayerWeights], heads: Sequence[tuple[int, int]] | None
) -> dict[int, list[int]]:
    """Numbers of heads by layer."""
    if heads is None:
        return {i: list(range(layer.heads)) for i, layer in enumerate(layers)}
    if not heads:
        raise OptionError("no head is named", allowed="(layer, head) pairs, or None for all")
    found: dict[int, list[int]] = {}
    for layer, head in dict.fromkeys((int(a), int(b)) for a, b in heads):
        if not 0 <= layer < len(layers):
            raise OptionError(f"the model has no layer {layer}", allowed=f"0 to {len(layers) - 1}")
        if not 0 <= head < layers[layer].heads:
            raise OptionError(
                f"layer {layer} has no head {head}", allowed=f"0 to {layers[layer].heads - 1}"
            )
        found.setdefault(layer, []).append(head)
    return found


def _qk(layer: LayerWeights, heads: list[int], module: Any, folded: bool) -> Cut:
    if folded:
        raise OptionError(
            "W_QK has a norm's gain on both sides, and one factor cannot take them in",
            allowed=f"{_OV_ALONE}, where the cut is folded",
        )
    if layer.rotary is not None:
        raise OptionError(
            f"W_QK of {layer.module} turns with the distance (rotary positions), so no cut to a"
            " rank is that of every distance",
            allowed=_OV_ALONE,
        )
    if not layer.fixed:
        raise OptionError(
            f"W_QK of {layer.module} is no fixed product: {layer.why_not}",
            allowed=_OV_ALONE,
        )
    if layer.key_bias is not None and (_sinks(module) or _softcap(module)):
        between = "a learned sink" if _sinks(module) else "a softcap"
        raise OptionError(
            f"{layer.module} has a key bias and {between}, so cutting W_Q would also change x W_Q"
            " b_K, which is not in W_QK",
            allowed=_OV_ALONE,
        )
    parts = layer.qk()[heads].svd()
    return Cut(layer.query, heads, parts.left, parts.values, most=layer.query.shape[-1])


def _ov(layer: LayerWeights, heads: list[int], module: Any, model: nn.Module, folded: bool) -> Cut:
    if layer.clip is not None:
        raise OptionError(f"W_OV of {layer.module} is no fixed product: {layer.why_not}")
    # W_O is cut where it stands: before the norm, if any, that what is written passes.
    parts = replace(layer, output_norm=None).ov(folded=folded)[heads].svd()
    most = layer.value.shape[-1]
    if layer.heads == layer.kv_heads and layer.latent is None and not folded:
        return Cut(layer.value, heads, parts.left, parts.values, most=most)
    right = parts.right.mT
    constant = layer.folded().value_bias if folded else layer.value_bias
    if constant is None:
        return Cut(layer.output, heads, right, parts.values, most=most, right=True)
    if _sinks(module):
        raise OptionError(
            f"W_OV of {layer.module} can be cut in W_O only; its values have a bias and it has a"
            " learned sink, so no bias of the output makes up for what is cut",
            allowed="heads with values of their own, no sink, or no bias",
        )
    bias = layer.shared(constant)[heads]
    moved = (bias, _owner(model, layer))
    return Cut(layer.output, heads, right, parts.values, most=most, right=True, moved=moved)


def _owner(model: nn.Module, layer: LayerWeights) -> nn.Module:
    """The output projection: the module whose parameter the view is of."""
    pointer = layer.output.untyped_storage().data_ptr()
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if isinstance(weight, Tensor) and weight.untyped_storage().data_ptr() == pointer:
            return module
    raise ModelError(f"the output projection of {layer.module} was not found in the model")


def _check_apart(layers: Sequence[LayerWeights]) -> None:
    """Layers that share their weights cannot be cut one by one."""
    places = Counter(layer.output.data_ptr() for layer in layers)
    shared = [layer.module for layer in layers if places[layer.output.data_ptr()] > 1]
    if shared:
        raise ModelError(
            f"{shared[0]} and {shared[1]} are one set of weights, so a cut would change both",
            allowed="layers with weights of their own",
        )


def _sinks(module: Any) -> bool:
    return isinstance(getattr(module, "sinks", None), Tensor)


def _softcap(module: Any) -> bool:
    names = ("softcap", "attn_logit_softcapping")
    return any(getattr(module, name, None) is not None for name in names)
