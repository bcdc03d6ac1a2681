"""LoRA: a learned change of low rank beside a frozen projection.

    W' = W + s·B·A,   A ``rank in``, B ``out rank``,   s = alpha/rank, or alpha/√rank (rsLoRA)

Hu et al. 2021 (arXiv:2106.09685), section 4.1; the rsLoRA scale: Kalajdzievski 2023
(arXiv:2312.03732). B starts at zero, so a new adapter changes nothing.

Merging never writes to the stored weight: it hangs another parameter in its place, and unmerging
hangs the first one back. So the round trip is exact in every dtype, and weights that are tied stay
tied.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from headwise.errors import ModelError, NonFiniteError, OptionError, ShapeError

__all__ = [
    "LowRankLinear",
    "add_low_rank",
    "attach",
    "low_rank_state",
    "merge",
    "projections",
    "remove_low_rank",
    "unmerge",
]


class LowRankLinear(nn.Module):
    """A projection with its adapter: base(x) + s·B·A·dropout(x).

    A and B are kept in float32 (float64 beside a float64 weight), whatever the type of the weight.
    The base is an ``nn.Linear``, or a ``Conv1D`` as in GPT-2, which stores W ``in out``.

    Example:
        >>> layer = LowRankLinear(nn.Linear(3, 2), rank=1, alpha=2.0)
        >>> _ = nn.init.ones_(layer.A), nn.init.ones_(layer.B)
        >>> x = torch.tensor([1.0, 2.0, 3.0])
        >>> (layer(x) - layer.base(x)).tolist()
        [12.0, 12.0]
    """

    def __init__(
        self,
        base: nn.Module,
        *,
        rank: int,
        alpha: float,
        rslora: bool = False,
        dropout: float = 0.0,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        _check_options(rank, alpha, dropout)
        shape = _shape(base)
        if shape is None:
            raise ModelError(
                f"{type(base).__name__} cannot have a low-rank change",
                allowed="linear projections (nn.Linear, or Conv1D as in GPT-2)",
            )
        self.out_features, self.in_features = shape
        self.transposed = not isinstance(base, nn.Linear)
        self.rank, self.alpha, self.rslora, self.dropout = rank, alpha, rslora, dropout
        self.base = base
        self.training = base.training  # an adapter hung into a model that answers drops nothing
        self._stored: tuple[nn.Parameter, ...] = ()  # the weight of the base while merged
        kind = torch.promote_types(self._weight.dtype, torch.float32)
        device = self._weight.device
        start = torch.empty(rank, self.in_features, dtype=kind)
        bound = 1 / math.sqrt(self.in_features)
        start.uniform_(-bound, bound, generator=generator)
        self.A = nn.Parameter(start.to(device))
        self.B = nn.Parameter(torch.zeros(self.out_features, rank, dtype=kind, device=device))

    @property
    def scale(self) -> float:
        """s: alpha/rank, or alpha/√rank."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    @property
    def merged(self) -> bool:
        """Whether the weight of the base holds the sum."""
        return bool(self._stored)

    @property
    def weight(self) -> Tensor:
        """What multiplies x: W + s·B·A, as the base stores it."""
        return self._weight if self.merged else self._sum()

    @property
    def bias(self) -> Tensor | None:
        """The bias of the base."""
        return self.base.bias  # type: ignore[return-value]

    @property
    def _weight(self) -> nn.Parameter:
        return self.base.weight  # type: ignore[return-value]

    def forward(self, x: Tensor) -> Tensor:
        """``… in`` -> ``… out``, in the type of the base's own result."""
        y: Tensor = self.base(x)
        if self.merged:
            return y
        inner = functional.dropout(x.to(self.A.dtype), self.dropout, self.training)
        change = functional.linear(functional.linear(inner, self.A), self.B)
        return (y + change * self.scale).to(y.dtype)

    def extra_repr(self) -> str:
        """The sizes."""
        state = ", merged" if self.merged else ""
        return f"rank={self.rank}, alpha={self.alpha}, scale={self.scale:.4g}{state}"

    def merge(self) -> None:
        """Put the sum, rounded once, in the place of the weight; the weight itself is kept."""
        if self.merged:
            return
        stored = self._weight
        with torch.no_grad():
            total = self._sum()
        if bool((torch.isfinite(stored) & ~torch.isfinite(total)).any()):
            raise NonFiniteError(
                f"merging the adapter overflows {stored.dtype}",
                to_do="keep it unmerged, or convert the model to a wider type",
            )
        self._hang(nn.Parameter(total, requires_grad=False))
        self._stored = (stored,)

    def unmerge(self) -> None:
        """Hang the stored weight, which nothing has written to, back in its place."""
        for stored in self._stored:
            self._hang(stored)
        self._stored = ()

    def _hang(self, weight: nn.Parameter) -> None:
        self.base.weight = weight

    def _sum(self) -> Tensor:
        """W + s·B·A in float32 or better, rounded once to the type of W."""
        kind = torch.promote_types(self._weight.dtype, torch.float32)
        change = self.scale * (self.B.to(kind) @ self.A.to(kind))
        change = change.T if self.transposed else change
        return (self._weight.to(kind) + change).to(self._weight.dtype)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> LowRankLinear:
        # .to(), .cuda() and the like must also reach the weight that is set aside.
        super()._apply(fn, recurse)
        for stored in self._stored:
            stored.data = fn(stored.data)
        return self


def projections(model: nn.Module) -> dict[str, nn.Module]:
    """Every projection by its path, also where one module hangs in two places.

    Example:
        >>> list(projections(nn.Sequential(nn.Linear(2, 2), nn.ReLU())))
        ['0']
    """
    found = {
        path: module
        for path, module in model.named_modules(remove_duplicate=False)
        if _shape(module) is not None
    }
    inside = {f"{path}.base" if path else "base" for path, _ in _adapters(model)}
    return {path: module for path, module in found.items() if path not in inside}


def add_low_rank(
    model: nn.Module,
    targets: str | Sequence[str],
    *,
    rank: int,
    alpha: float,
    rslora: bool = False,
    dropout: float = 0.0,
    seed: int = 0,
) -> tuple[str, ...]:
    """Give the chosen projections an adapter; only the A and B of the model stay trainable.

    Args:
        model: changed in place.
        targets: the last parts of module paths, such as ["query", "value"]; or one regular
            expression that matches whole paths.
        rank: rows of A.
        alpha: numerator of the scale.
        rslora: scale alpha/√rank in place of alpha/rank.
        dropout: on the input of A, in training only.
        seed: of A, which is uniform in ±1/√in; B starts at zero.

    Returns:
        The paths that have an adapter now.

    Example:
        >>> model = nn.ModuleDict({"query": nn.Linear(5, 5), "key": nn.Linear(5, 5)})
        >>> add_low_rank(model, ["query"], rank=2, alpha=4.0)
        ('query',)
        >>> [name for name, p in model.named_parameters() if p.requires_grad]
        ['query.A', 'query.B']
    """
    _check_options(rank, alpha, dropout)
    chosen = _chosen(model, targets)
    generator = torch.Generator().manual_seed(seed)
    made: dict[int, LowRankLinear] = {}
    for base in chosen.values():
        if id(base) not in made:
            made[id(base)] = LowRankLinear(
                base, rank=rank, alpha=alpha, rslora=rslora, dropout=dropout, generator=generator
            )
    return attach(model, {path: made[id(base)] for path, base in chosen.items()})


def attach(model: nn.Module, adapters: Mapping[str, LowRankLinear]) -> tuple[str, ...]:
    """Hang adapters at their paths; only the A and B of the model stay trainable."""
    for path, adapter in adapters.items():
        _put(model, path, adapter)
    model.requires_grad_(False)
    for _, adapter in _adapters(model):
        adapter.A.requires_grad_(True)
        adapter.B.requires_grad_(True)
    return tuple(adapters)


def merge(model: nn.Module) -> None:
    """Add every adapter into its weight, in float32, rounded once; ``unmerge`` undoes it exactly.

    Raises:
        OptionError: the model has no adapter.
        NonFiniteError: a sum is too large for the type of the weight; nothing was merged.

    Example:
        >>> model = nn.Sequential(nn.Linear(5, 3))
        >>> before = model[0].weight
        >>> _ = add_low_rank(model, "0", rank=2, alpha=4.0)
        >>> merge(model)
        >>> unmerge(model)
        >>> model[0].base.weight is before
        True
    """
    done: list[LowRankLinear] = []
    for path, adapter in _some(model):
        if adapter.merged:
            continue
        try:
            adapter.merge()
        except NonFiniteError as error:
            for each in done:
                each.unmerge()
            raise NonFiniteError(f"{path}: {error}") from None
        done.append(adapter)


def unmerge(model: nn.Module) -> None:
    """Put every stored weight back: the same parameter, bit for bit."""
    for _, adapter in _some(model):
        adapter.unmerge()


def remove_low_rank(model: nn.Module, *, keep_merged: bool = False) -> None:
    """Take the adapters away; ``keep_merged`` leaves W + s·B·A in the place of W for good.

    Every parameter stays frozen: ``model.requires_grad_(True)`` trains them all again.
    """
    if keep_merged:
        merge(model)
    for path, adapter in _some(model):
        if not keep_merged:
            adapter.unmerge()
        _put(model, path, adapter.base)


def low_rank_state(model: nn.Module) -> dict[str, Tensor]:
    """The A and B of every adapter, by name: what ``load_state_dict(…, strict=False)`` takes."""
    return {
        f"{path}.{name}" if path else name: tensor.detach()
        for path, adapter in _some(model)
        for name, tensor in (("A", adapter.A), ("B", adapter.B))
    }


def _check_options(rank: int, alpha: float, dropout: float) -> None:
    if rank < 1:
        raise OptionError(f"rank is {rank}", allowed="1 or more")
    if not math.isfinite(alpha):
        raise OptionError(f"alpha is {alpha}", allowed="a finite number")
    if not 0 <= dropout < 1:
        raise OptionError(f"dropout is {dropout}", allowed="0 to below 1")


def _shape(module: nn.Module) -> tuple[int, int] | None:
    """(out, in) of a projection; None for everything else."""
    if isinstance(module, nn.Linear):
        return module.out_features, module.in_features
    weight = module._parameters.get("weight")
    width = getattr(module, "nf", None)  # GPT-2's Conv1D: y = x W + b with W (in, out)
    if weight is None or weight.dim() != 2 or width != weight.shape[1]:
        return None
    return weight.shape[1], weight.shape[0]


def _chosen(model: nn.Module, targets: str | Sequence[str]) -> dict[str, nn.Module]:
    there = projections(model)
    taken = [path for path, _ in _adapters(model)]
    chosen: dict[str, nn.Module] = {}
    for target in [targets] if isinstance(targets, str) else targets:
        pattern = _pattern(target if isinstance(targets, str) else rf"(.*\.)?{re.escape(target)}")
        if any(pattern.fullmatch(path) for path in taken):
            raise ModelError(
                f"{target!r} names projections that have an adapter already",
                to_do="remove_low_rank(model) first",
            )
        found = {path: module for path, module in there.items() if pattern.fullmatch(path)}
        if not found:
            last = dict.fromkeys(path.rpartition(".")[2] for path in there)
            raise OptionError(
                f"no projection of the model matches {target!r}",
                allowed=", ".join(last) or "none: the model has no projection",
            )
        chosen |= found
    if not chosen:
        raise OptionError("no target is named", allowed="names such as query, or an expression")
    return {path: module for path, module in there.items() if path in chosen}


def _pattern(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise OptionError(f"{text!r} is no regular expression: {error}") from None


def _adapters(model: nn.Module) -> Iterator[tuple[str, LowRankLinear]]:
    for path, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, LowRankLinear):
            yield path, module


def _some(model: nn.Module) -> list[tuple[str, LowRankLinear]]:
    found = list(_adapters(model))
    if not found:
        raise OptionError("the model has no low-rank adapter", to_do="call add_low_rank first")
    return found


def _put(model: nn.Module, path: str, module: nn.Module) -> None:
    if not path:
        raise ShapeError(
            "the model is itself a projection, which has no place to hang another in",
            to_do="put it into a module, or use LowRankLinear itself",
        )
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, module)
