"""Projections as matrices: ``in out`` as in x W, however stored; what is none is refused.

torch's ``Linear`` stores ``out in``, GPT-2's ``Conv1D`` ``in out``: the module says which it is,
since a square matrix does not.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from headwise.errors import ModelError, NonFiniteError

__all__ = ["bias", "check_finite", "matrix"]

_PLAIN = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def matrix(name: str, module: nn.Module | None) -> Tensor:
    """W of x W, ``in out``: a view of what the module holds.

    Raises:
        ModelError: no such module, quantised weights, weights that are not in memory, or an
            adapter of peft beside them.
    """
    if module is None:
        raise ModelError(
            f"the model has no module {name}", to_do="load it with the code that it was saved with"
        )
    if getattr(module, "lora_A", None) and not getattr(module, "merged", False):
        raise ModelError(f"{name} has a peft adapter beside it", to_do="model.merge_and_unload()")
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or weight.dim() != 2 or weight.dtype not in _PLAIN:
        kind = type(module).__name__
        held = "no weight" if weight is None else f"{_words(weight)}"
        raise ModelError(
            f"{name} ({kind}) holds {held}, not a matrix of numbers (a quantised model?)",
            allowed="weights in float32, float64, bfloat16 or float16",
            to_do="load the model without quantisation",
        )
    if weight.is_meta:
        raise ModelError(f"the weights of {name} are not in memory", to_do="load the whole model")
    weight = weight.detach()
    stored_in_out = type(module).__name__ == "Conv1D" or getattr(module, "transposed", False)
    return weight if stored_in_out else weight.T


def bias(module: nn.Module | None) -> Tensor | None:
    """The bias of a projection, if it has one."""
    found = getattr(module, "bias", None)
    return found.detach() if isinstance(found, Tensor) else None


def check_finite(name: str, x: Tensor | None) -> None:
    """Refuse a NaN or an infinity, by name and place."""
    if x is None or bool(torch.isfinite(x).all()):
        return
    wrong = (~torch.isfinite(x)).nonzero()
    place = tuple(wrong[0].tolist())
    more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
    raise NonFiniteError(
        f"{name} holds {float(x[place])} at {list(place)}{more}",
        to_do="circuits need finite weights; check the checkpoint",
    )


def _words(weight: object) -> str:
    if not isinstance(weight, Tensor):
        return type(weight).__name__
    return f"{tuple(weight.shape)} of type {weight.dtype}".replace("torch.", "")
