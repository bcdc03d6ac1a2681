"""A trained model run again: with other weights for a moment, other positions, another order."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final

import torch
from torch import Tensor, nn

from headwise.circuits.layer_weights import LayerWeights
from headwise.models import EncoderDecoder
from headwise.observation.driver import Document, is_own
from headwise.observation.survey import survey
from headwise.theorems.statement import NotApplicable
from headwise.theorems.trained import Trained

__all__ = [
    "block_outputs", "changed", "moved", "output_projection", "own_heads", "rounding",
    "takes_positions",
]  # fmt: skip

_COARSEST: Final = 2.0**-20  # unit roundoff from which a change of weights drowns in rounding


def rounding(model: Trained, tokens: int, layers: int) -> float:
    """How far rounding moves a stream vector, relative to its length: 50 √n u for each layer.

    A layer adds some ten roundings of sums, each typically √d u of what is summed, and its softmax
    sums n terms; 50 √n u is their worst, measured with a margin of ten.

    Raises:
        NotApplicable: the model's precision is too coarse to see anything smaller than a fault.
    """
    unit = torch.finfo(model.dtype).eps / 2
    if unit > _COARSEST:
        raise NotApplicable(
            f"in {str(model.dtype).removeprefix('torch.')} rounding hides what is looked for; load"
            " the model in float32"
        )
    return 50 * math.sqrt(tokens) * unit * layers


def moved(one: Tensor, other: Tensor) -> float:
    """The largest ‖x_i − y_i‖ / ‖x_i‖ over positions."""
    one, other = one.double(), other.double()
    return float(((one - other).norm(dim=-1) / one.norm(dim=-1).clamp_min(1e-300)).max())


@contextmanager
def changed(tensors: Iterable[Tensor | None]) -> Iterator[None]:
    """Inside, the tensors may be written to; afterwards they are as before, bit for bit."""
    kept = [(x, x.clone()) for x in tensors if x is not None]
    try:
        with torch.no_grad():
            yield
    finally:
        with torch.no_grad():
            for x, before in kept:
                x.copy_(before)


def own_heads(model: Trained) -> tuple[LayerWeights, ...]:
    """The self-attentions whose weights are the model's own memory.

    Raises:
        NotApplicable: they are products, so nothing can be written to them.
    """
    layers = tuple(layer for layer in model.weights.layers if layer.role != "cross")
    if not layers or any(layer.latent is not None for layer in layers):
        raise NotApplicable("keys and values come out of latent vectors, which heads share")
    return layers


def output_projection(model: Trained, layer: LayerWeights) -> nn.Module:
    """The module that holds W_O of a layer: the one whose weight starts at the same address."""
    for module in model.model.modules():
        weight = module._parameters.get("weight")
        if weight is not None and weight.data_ptr() == layer.output.data_ptr():
            found: nn.Module = module
            return found
    raise NotApplicable(f"the output projection of {layer.module} is not stored as it is used")


@torch.no_grad()
def block_outputs(
    model: Trained, ids: Tensor, *, at_zero: bool = False, target: Tensor | None = None
) -> list[Tensor]:
    """The stream after every block, ``position d_model`` each, in the order of the blocks.

    ``at_zero`` puts every token at position 0, so that positions tell nothing.
    """
    found: list[Tensor] = []

    def keep(module: Any, inputs: Any, output: Any) -> None:
        found.append((output[0] if isinstance(output, tuple) else output)[0].clone())

    modules = dict(model.model.named_modules())
    with ExitStack() as stack:
        for block in survey(model.model).blocks:
            stack.callback(modules[block.path].register_forward_hook(keep).remove)
        if not at_zero:
            model.loaded.driver.run([Document(ids, target)])
        elif is_own(model.model):
            assert not isinstance(model.model, EncoderDecoder)
            model.model.hidden(ids[None], position_ids=torch.zeros_like(ids))
        else:
            _body(model)(input_ids=ids[None], position_ids=torch.zeros_like(ids)[None])
    if not found:
        raise NotApplicable("its blocks cannot be found")
    return found


def takes_positions(model: Trained) -> bool:
    """Whether the model can be told at which position each token stands."""
    if model.loaded.kind == "encoder-decoder":
        return False
    call = model.model.hidden if is_own(model.model) else _body(model).forward
    return "position_ids" in inspect.signature(call).parameters


def _body(model: Trained) -> Any:
    prefix = getattr(model.model, "base_model_prefix", "")
    return getattr(model.model, prefix, None) or model.model
