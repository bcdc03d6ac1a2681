"""A family of checkpoints: from a configuration and tensor names to a model of the library.

    Source     which stored tensors give one parameter, and how
    Family     configuration -> Architecture, Architecture -> the source of every parameter
    assemble   a family, its configuration and its tensors -> the model, or one error

Strict: every stored tensor is used, or is known to follow from the sizes (a causal mask, rotary
frequencies), or is bit for bit another one that is used; anything else is refused by name. All of
that is checked from the headers, before a weight is read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn

from headwise.errors import ModelError
from headwise.models.architecture import Architecture
from headwise.models.build import Model, skeleton
from headwise.models.checkpoints.checks import listed
from headwise.models.checkpoints.filling import fill
from headwise.models.checkpoints.settings import Settings

__all__ = [
    "ACTIVATION_WORDS",
    "Family",
    "Names",
    "Source",
    "Stored",
    "assemble",
    "base_prefix",
    "linear",
]

# Words of configurations -> words of ``Stack.activation``. The three names of the tanh form differ
# in how it is computed only.
ACTIVATION_WORDS = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}


class Stored(Protocol):
    """The tensors of a checkpoint: names, shapes and types from headers, and one at a time."""

    def __iter__(self) -> Iterator[str]: ...
    def __len__(self) -> int: ...
    def shape(self, name: str) -> tuple[int, ...]: ...
    def dtype(self, name: str) -> torch.dtype: ...
    def read(self, name: str) -> Tensor: ...


def _itself(tensor: Tensor) -> Tensor:
    return tensor


@dataclass(frozen=True)
class Source:
    """The stored tensors that one parameter is made from: itself, transposed, a slice, several.

    Example:
        >>> Source("c_fc.weight", torch.t).made(lambda name: torch.zeros(2, 3)).shape
        torch.Size([3, 2])
    """

    names: str | tuple[str, ...]
    make: Callable[..., Tensor] = _itself

    @property
    def stored(self) -> tuple[str, ...]:
        """The names as a tuple."""
        return (self.names,) if isinstance(self.names, str) else self.names

    def made(self, read: Callable[[str], Tensor]) -> Tensor:
        """The parameter."""
        return self.make(*(read(name) for name in self.stored))


Names = Collection[str]


@dataclass(frozen=True, kw_only=True)
class Family:
    """How the checkpoints of some model types are read.

    Args:
        model_types: the values of ``model_type`` that it reads.
        architecture: from the configuration and the stored names. It asks for every key that it
            understands and refuses values that mean something else; other keys are refused after.
        sources: the stored tensors of every parameter of the model.
        derived: patterns of stored names that follow from the sizes and are not read.
        copies: from the configuration and the stored names, tensors that may be stored twice:
            copy -> original. An equal copy is left out; another one is a tensor of its own.
        computed: stored tensors that the model computes instead, with what it computes: they may
            be missing, and are refused where they differ by more than their own rounding.
        prefix: of the names of the base model inside a model with a head on top.
        table: the name of the token table inside the base model.
    """

    model_types: tuple[str, ...]
    architecture: Callable[[Settings, Names], Architecture]
    sources: Callable[[Architecture, Names], dict[str, Source]]
    derived: tuple[str, ...] = ()
    copies: Callable[[Settings, Names], Mapping[str, str]] = lambda settings, names: {}
    computed: Callable[[Architecture, Names], Mapping[str, Tensor]] = lambda a, names: {}
    prefix: str = ""
    table: str


def base_prefix(names: Names, prefix: str, landmark: str) -> str:
    """The prefix of a base model's tensors: there with a head on top, absent in a bare base model.

    Example:
        >>> base_prefix(["wte.weight", "wpe.weight"], "transformer.", "wte.weight")
        ''
    """
    for each in (prefix, ""):
        if each + landmark in names:
            return each
    raise ModelError(
        f"the checkpoint lacks {prefix}{landmark}",
        to_do="fetch the files again: it belongs to every model of this family",
    )


def linear(ours: str, stored: str, *, bias: bool) -> dict[str, Source]:
    """The sources of a linear layer, or of a norm, that is stored as it is used.

    Example:
        >>> [source.names for source in linear("norm", "ln_f", bias=True).values()]
        ['ln_f.weight', 'ln_f.bias']
    """
    parts = ("weight", "bias") if bias else ("weight",)
    return {f"{ours}.{part}": Source(f"{stored}.{part}") for part in parts}


def assemble(
    family: Family,
    settings: Settings,
    stored: Stored,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    source: str = "the checkpoint",
) -> Model:
    """The model of a checkpoint in evaluation mode, every parameter from its stored tensors.

    ``dtype`` None: as stored; where types are mixed, the widest of them.

    Raises:
        ModelError: a setting that is not understood, or a tensor that is missing, left over or of
            another shape than the configuration says.
    """
    names = set(stored) - _equal_copies(family.copies(settings, set(stored)), stored)
    architecture = family.architecture(settings, names)
    settings.finish()
    model = skeleton(architecture)
    sources = family.sources(architecture, names)
    computed = family.computed(architecture, names)
    _check_names(sources, names - set(computed), family.derived, source)
    _check_computed(computed, stored, source)
    _check_shapes(model, sources, stored, source)
    used = {name for each in sources.values() for name in each.stored}
    fill(
        model,
        {ours: partial(each.made, stored.read) for ours, each in sources.items()},
        dtype=_widest(stored.dtype(name) for name in used) if dtype is None else dtype,
        device="cpu" if device is None else device,
        source=source,
    )
    return model.eval()


def _equal_copies(copies: Mapping[str, str], stored: Stored) -> set[str]:
    there = set(stored)
    return {
        copy
        for copy, original in copies.items()
        if copy in there
        and original in there
        and stored.shape(copy) == stored.shape(original)
        and torch.equal(stored.read(copy), stored.read(original))
    }


def _check_names(
    sources: Mapping[str, Source], names: Names, derived: tuple[str, ...], source: str
) -> None:
    used = {name for each in sources.values() for name in each.stored}
    missing = sorted(used - set(names))
    extra = sorted(
        name
        for name in set(names) - used
        if not any(re.search(pattern, name) for pattern in derived)
    )
    parts = [f"lacks {listed(missing)}"] if missing else []
    if extra:
        parts.append(f"has {listed(extra)}, which its configuration has no place for")
    if parts:
        raise ModelError(
            f"{source} {', and '.join(parts)}",
            to_do="fetch the files again, with the configuration that belongs to them",
        )


def _check_computed(computed: Mapping[str, Tensor], stored: Stored, source: str) -> None:
    there = set(stored)
    for name, wanted in computed.items():
        if name not in there:
            continue
        dtype = stored.dtype(name)
        rounding = torch.finfo(dtype).eps if dtype.is_floating_point else 0.0
        if stored.shape(name) == wanted.shape:
            difference = (stored.read(name).double() - wanted.double()).abs()
            if bool((difference <= rounding * wanted.double().abs().clamp_min(1)).all()):
                continue
        raise ModelError(
            f"{source} has a {name} that is not what the model computes in its place",
            to_do="this variant of the model cannot be loaded",
        )


def _check_shapes(
    model: nn.Module, sources: Mapping[str, Source], stored: Stored, source: str
) -> None:
    """Make every parameter without numbers, from the shapes in the headers alone."""

    def empty(name: str) -> Tensor:
        return torch.empty(stored.shape(name), device="meta")

    wanted = {name: parameter.shape for name, parameter in model.named_parameters()}
    for ours, each in sources.items():
        try:
            made = each.made(empty).shape
        except (RuntimeError, IndexError, ValueError):
            made = None
        if ours in wanted and made != wanted[ours]:
            shapes = listed(f"{name} {stored.shape(name)}" for name in each.stored)
            raise ModelError(
                f"{source} has {shapes}, which does not give {ours} {tuple(wanted[ours])}",
                to_do="the configuration does not belong to these tensors",
            )


def _widest(dtypes: Iterator[torch.dtype]) -> torch.dtype | None:
    widest: torch.dtype | None = None
    for each in dtypes:
        if each.is_floating_point:
            widest = each if widest is None else torch.promote_types(widest, each)
    return widest
