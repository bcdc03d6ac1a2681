"""Heads of a trained decoder removed by their importance, at random, and from the other end."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor, nn

from headwise.observation.evaluating import evaluating
from headwise.observation.loss import cross_entropy
from headwise.observation.projections import projection
from headwise.theorems.measured import Measured, bootstrap, within
from headwise.theorems.reproductions.trained_text import embedded, sequences
from headwise.theorems.statement import Control, Curve, Effort, Evidence, NotApplicable, Plot
from headwise.theorems.trained import Trained

__all__ = ["pruning_of_a_model", "pruning_of_the_embedded"]

_SHARE: Final = 0.2  # of heads removed: the least that both papers could
_SHARES: Final = (0.1, 0.2, 0.4)
_MOST: Final = 0.3  # nats per token that this may cost
_DRAWS: Final = 8  # sets of heads chosen at random


class _Gated:
    """A decoder whose heads have gates ξ: what head m gives is multiplied by ξ_m, 1 as it is."""

    def __init__(self, model: Trained) -> None:
        self.model, self.driver = model.model, model.loaded.driver
        self.outputs = [_output(model.model, layer) for layer in model.weights.layers]
        sizes = [(layer.heads, layer.output.shape[1]) for layer in model.weights.layers]
        device = next(self.model.parameters()).device
        self.widths = [width for _, width in sizes]
        self.gates = [torch.ones(heads, device=device) for heads, _ in sizes]
        self.heads = sum(heads for heads, _ in sizes)

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Inside, the gates count and weights have no gradients; afterwards all is as before."""
        learned = [each for each in self.model.parameters() if each.requires_grad]
        handles = []
        try:
            for each in learned:
                each.requires_grad_(False)
            for layer, module in enumerate(self.outputs):
                handles.append(module.register_forward_pre_hook(self._gate(layer)))
            with evaluating(self.model):
                yield
        finally:
            for handle in handles:
                handle.remove()
            for each in learned:
                each.requires_grad_(True)

    def _gate(self, layer: int) -> Any:
        def before(module: nn.Module, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            gate = self.gates[layer].repeat_interleave(self.widths[layer])
            return (given[0] * gate.to(given[0].dtype), *given[1:])

        return before

    def loss(self, ids: Tensor) -> Tensor:
        """Mean loss of one sequence."""
        states, logits = self.driver.predict(ids, None)
        return cross_entropy(logits(states)[0, :-1], ids[1:]) / (len(ids) - 1)

    def importance(self, ids: Tensor) -> Tensor:
        """E |∂L/∂ξ| over sequences, divided by its l2 norm in each layer: one number a head."""
        total = [torch.zeros_like(gate) for gate in self.gates]
        self.gates = [torch.ones_like(gate).requires_grad_() for gate in self.gates]
        for row in ids:
            found = torch.autograd.grad(self.loss(row), self.gates)
            for sums, gradient in zip(total, found, strict=True):
                sums += gradient.abs()
        self.gates = [gate.detach() for gate in self.gates]
        tiny = torch.finfo(total[0].dtype).tiny
        return torch.cat([sums / sums.norm().clamp(min=tiny) for sums in total])

    def without(self, removed: Tensor, ids: Tensor) -> float:
        """Mean loss with some heads removed."""
        open_ = torch.ones(self.heads)
        open_[removed.cpu()] = 0.0
        parts = open_.to(self.gates[0].device).split([len(gate) for gate in self.gates])
        self.gates = list(parts)
        with torch.no_grad():
            return sum(float(self.loss(row)) for row in ids) / len(ids)


def _output(model: nn.Module, layer: Any) -> nn.Module:
    """The module that makes W_O of a layer."""
    inside = model.get_submodule(layer.module)
    found = [
        part
        for name, part in inside.named_modules()
        if name
        and isinstance(getattr(part, "weight", None), Tensor)
        and projection(model, f"{layer.module}.{name}.weight")[1] == "o"
    ]
    if len(found) != 1:
        raise NotApplicable(f"the output projection of {layer.module} cannot be told")
    return found[0]


def pruning_of_the_embedded(effort: Effort) -> Evidence:
    """On the model inside the package."""
    return _evidence(embedded(), 256, effort.pick(8, 16), effort.pick(16, 64), effort.seed)


def pruning_of_a_model(model: Trained) -> Evidence:
    """On a trained decoder: importance and loss on 4 sequences each of 128 tokens."""
    return _evidence(model, min(128, model.loaded.context or 128), 4, _DRAWS, model.seed)


def _evidence(model: Trained, tokens: int, count: int, draws: int, seed: int) -> Evidence:
    ids = sequences(model, tokens, 2 * count)
    gated = _Gated(model)
    generator = torch.Generator().manual_seed(seed)
    chosen, held_out = ids[:count], ids[count:]
    with gated.opened():
        order = gated.importance(chosen).argsort().cpu()
        whole = gated.without(order[:0], held_out)

        def cost(removed: Tensor) -> float:
            return gated.without(removed, held_out) - whole

        every = cost(order)
        if every <= _MOST:
            raise NotApplicable(
                f"without any head its loss rises by {every:.2g} nats only, so no order of heads"
                " can be told"
            )
        sizes = [max(1, round(share * gated.heads)) for share in _SHARES]
        least = [cost(order[:size]) for size in sizes]
        most = [cost(order[-size:]) for size in sizes]
        size = sizes[_SHARES.index(_SHARE)]
        by_chance = [
            cost(torch.randperm(gated.heads, generator=generator)[:size]) for _ in range(draws)
        ]
    at = _SHARES.index(_SHARE)
    kept = _kept(least[at])
    against = _against(least[at], by_chance)
    opposite = _against(most[at], by_chance)
    return Evidence(
        measured=(kept, against),
        controls=(
            Control(name="every head is removed", measured=(_kept(every),)),
            Control(name="the most important fifth is removed", measured=(opposite,)),
        ),
        inconclusive=(
            "" if opposite.failed else "the most important heads cost no more than random ones"
        ),
        finding=_finding(gated.heads, size, least[at], by_chance, most[at], kept, against),
        plots=(_plot(least, most),),
    )


def _kept(rise: float) -> Measured:
    name = "rise of the loss without the least important fifth"
    return within(name, rise, allowed=(-math.inf, _MOST), unit="nats")


def _against(rise: float, by_chance: Sequence[float]) -> Measured:
    """Less than a fifth chosen at random: the interval is over the random choices."""
    low, high = bootstrap(by_chance, lambda some: rise - sum(some) / len(some))
    return within(
        "its rise less that of a random fifth",
        rise - sum(by_chance) / len(by_chance),
        allowed=(-math.inf, 0.0),
        interval=(low, high),
        draws=len(by_chance),
        unit="nats",
    )


def _finding(
    heads: int,
    size: int,
    least: float,
    by_chance: Sequence[float],
    most: float,
    kept: Measured,
    against: Measured,
) -> str:
    text = (
        f"Without the least important {size} of {heads} heads the loss rises by {least:.3g} nats,"
        f" without as many at random by {sum(by_chance) / len(by_chance):.3g} on average, without"
        f" the most important by {most:.3g}"
    )
    if kept.holds and against.holds:
        return f"{text}."
    if kept.failed or against.failed:
        return f"{text}; the papers' claim does not reproduce on this model."
    return f"{text}; that the order matters cannot be told from chance on this model."


def _plot(least: Sequence[float], most: Sequence[float]) -> Plot:
    return Plot(
        title="Heads removed in the order of their importance",
        across="share of heads removed",
        up="rise of the loss, nats",
        places=_SHARES,
        curves=(
            Curve("least important first", tuple(least)),
            Curve("control: most important first", tuple(most)),
            Curve("allowed", (_MOST,) * len(_SHARES)),
        ),
    )
