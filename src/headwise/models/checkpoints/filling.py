"""A model without numbers (meta tensors) filled from a checkpoint: every tensor used exactly once.

Nothing is skipped, guessed or left at random values: what is missing, left over or of another shape
is an error that names it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from headwise.errors import ModelError
from headwise.models.checkpoints.checks import listed

__all__ = ["Slot", "fill", "slots"]


@dataclass(frozen=True)
class Slot:
    """One parameter or persistent buffer, at each place in the model where it hangs."""

    places: tuple[tuple[nn.Module, str], ...]
    names: tuple[str, ...]  # more than one where the model ties them
    tensor: Tensor

    def put(self, tensor: Tensor) -> None:
        """Hang the tensor in every place, a parameter where there was one."""
        if isinstance(self.tensor, nn.Parameter):
            tensor = nn.Parameter(tensor, requires_grad=self.tensor.requires_grad)
        for module, name in self.places:
            setattr(module, name, tensor)


def slots(model: nn.Module) -> tuple[Slot, ...]:
    """Every parameter and persistent buffer of a model, tied ones once.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
        >>> [slot.names[0] for slot in slots(model)][2:5]
        ['1.weight', '1.bias', '1.running_mean']
    """
    found: dict[int, Slot] = {}
    for path, module in model.named_modules():
        for name, tensor in _own(module):
            full = f"{path}.{name}" if path else name
            before = found.get(id(tensor), Slot((), (), tensor))
            found[id(tensor)] = Slot(
                (*before.places, (module, name)), (*before.names, full), tensor
            )
    return tuple(found.values())


def _own(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in module._parameters.items():
        if parameter is not None:
            yield name, parameter
    for name, buffer in module._buffers.items():
        if buffer is not None and name not in module._non_persistent_buffers_set:
            yield name, buffer


def fill(
    model: nn.Module,
    tensors: Mapping[str, Callable[[], Tensor]],
    *,
    dtype: torch.dtype | None = None,
    device: str | torch.device = "cpu",
    source: str = "the checkpoint",
) -> None:
    """Give every parameter and persistent buffer of ``model`` its tensor, in place.

    Args:
        model: usually on the meta device; a tied tensor may be given under any one of its names.
        tensors: for each name in the model, what reads the tensor; each is called once.
        dtype: of every floating-point tensor; None keeps each as it is stored.
        device: where the tensors go.
        source: what the errors call the checkpoint.

    Raises:
        ModelError: tensors are missing, left over, given twice, or of another shape or kind.

    Example:
        >>> with torch.device("meta"):
        ...     layer = nn.Linear(2, 1, bias=False)
        >>> fill(layer, {"weight": lambda: torch.tensor([[3.0, 5.0]])})
        >>> layer(torch.ones(2)).tolist()
        [8.0]
    """
    assigned = _assign(slots(model), tensors, source)
    wrong, storages = [], set[int]()
    for name, slot in assigned.items():
        tensor = tensors[name]().detach()
        if tensor.shape != slot.tensor.shape:
            wrong.append(f"{name} {tuple(tensor.shape)} for {tuple(slot.tensor.shape)}")
            continue
        if tensor.is_floating_point() != slot.tensor.is_floating_point():
            wrong.append(f"{name} ({tensor.dtype} for {slot.tensor.dtype})")
            continue
        slot.put(_placed(tensor, dtype, device, storages))
    if wrong:
        raise ModelError(
            f"{source} does not fit the model: {listed(wrong)}",
            to_do="the tensors do not belong to this architecture",
        )
    empty = [
        name for name, each in (*model.named_parameters(), *model.named_buffers()) if each.is_meta
    ]
    if empty:
        raise ModelError(f"nothing in {source} gives a value to {listed(empty)}")


def _assign(
    places: tuple[Slot, ...], tensors: Mapping[str, Callable[[], Tensor]], source: str
) -> dict[str, Slot]:
    """The slot of every given name, after making sure that each slot has exactly one."""
    by_name = {name: slot for slot in places for name in slot.names}
    parts = []
    missing = [s.names[0] for s in places if not any(name in tensors for name in s.names)]
    if missing:
        parts.append(f"lacks {listed(missing)}")
    unexpected = [name for name in tensors if name not in by_name]
    if unexpected:
        parts.append(f"has {listed(unexpected)}, which the model has no place for")
    given = [[name for name in slot.names if name in tensors] for slot in places]
    twice = [" and ".join(names) for names in given if len(names) > 1]
    if twice:
        parts.append(f"gives two tensors for one tied tensor: {listed(twice)}")
    if parts:
        raise ModelError(
            f"{source} {', and '.join(parts)}",
            to_do="the tensors do not belong to this architecture, or are incomplete",
        )
    return {name: by_name[name] for name in tensors}


def _placed(
    tensor: Tensor, dtype: torch.dtype | None, device: str | torch.device, storages: set[int]
) -> Tensor:
    """The tensor where and as it was asked for; a part or a second use of a tensor is copied."""
    wanted = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
    placed = tensor.to(device, wanted).contiguous()
    storage = placed.untyped_storage()
    if storage.nbytes() != placed.nbytes or storage.data_ptr() in storages:
        placed = placed.clone()
        storage = placed.untyped_storage()
    storages.add(storage.data_ptr())
    return placed
