"""From the logits of the next token to the token: rules that change logits, and the choice.

    rules    repetition penalty -> temperature -> top-k -> top-p, in the order they are listed
    choice   greedy (the largest logit), or a draw from the softmax

A rule maps logits ``batch vocab`` and ``seen`` (boolean ``batch vocab``: the tokens that prompt and
answer already hold) to logits; what it forbids becomes -inf. ``Choice`` is rules and a pick.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from headwise.errors import OptionError

__all__ = [
    "Choice",
    "Draw",
    "Forbid",
    "Pick",
    "RepetitionPenalty",
    "Rule",
    "Temperature",
    "TopK",
    "TopP",
    "choice",
    "greedy",
]

Rule = Callable[[Tensor, Tensor], Tensor]
Pick = Callable[[Tensor], Tensor]

_LEAST_TEMPERATURE = 1e-6  # below it float32 overflows; 0 is a choice of its own, greedy


@dataclass(frozen=True)
class RepetitionPenalty:
    """z / θ where z > 0 and z · θ elsewhere, for the tokens that were seen; θ > 1 avoids them.

    Keskar et al. 2019, CTRL (arXiv:1909.05858), section 4.1, which divides whatever the sign; that
    would make negative logits more likely, so implementations multiply them.

    Example:
        >>> seen = torch.tensor([[True, True, False]])
        >>> RepetitionPenalty(2.0)(torch.tensor([[1.0, -1.0, 1.0]]), seen).tolist()
        [[0.5, -2.0, 1.0]]
    """

    theta: float

    def __post_init__(self) -> None:
        if not (self.theta > 0 and math.isfinite(self.theta)):
            raise OptionError(
                f"a repetition penalty of {self.theta:g}",
                allowed="above 0",
                to_do="1 changes nothing, 1.2 is usual",
            )

    def __call__(self, logits: Tensor, seen: Tensor) -> Tensor:
        penalised = torch.where(logits > 0, logits / self.theta, logits * self.theta)
        return torch.where(seen, penalised, logits)


@dataclass(frozen=True)
class Temperature:
    """z / T: below 1 sharper, above 1 flatter; T -> 0 tends to the greedy choice.

    Ackley, Hinton and Sejnowski 1985 (Cognitive Science 9), equation 5.

    Example:
        >>> Temperature(0.5)(torch.tensor([[1.0, 2.0]]), torch.zeros(1, 2)).tolist()
        [[2.0, 4.0]]
    """

    value: float

    def __post_init__(self) -> None:
        if not (self.value >= _LEAST_TEMPERATURE and math.isfinite(self.value)):
            raise OptionError(
                f"a temperature of {self.value:g}",
                allowed=f"0 (the most likely token), or {_LEAST_TEMPERATURE:g} and more",
            )

    def __call__(self, logits: Tensor, seen: Tensor) -> Tensor:
        return logits / self.value


@dataclass(frozen=True)
class TopK:
    """Keep the k largest logits, and what equals the smallest of them.

    Fan et al. 2018 (arXiv:1805.04833), section 5.4.

    Example:
        >>> TopK(1)(torch.tensor([[1.0, 3.0, 3.0]]), torch.zeros(1, 3)).tolist()
        [[-inf, 3.0, 3.0]]
    """

    k: int

    def __post_init__(self) -> None:
        if self.k < 1:
            raise OptionError(f"a top-k of {self.k}", allowed="1 or more")

    def __call__(self, logits: Tensor, seen: Tensor) -> Tensor:
        smallest = logits.topk(min(self.k, logits.shape[-1])).values[:, -1:]
        return logits.masked_fill(logits < smallest, -torch.inf)


@dataclass(frozen=True)
class TopP:
    """Keep the fewest tokens whose probabilities, from the largest on, sum to p or more.

    A token stays iff the tokens before it have less than p together, so the first one always does,
    and the one that crosses p too. Holtzman et al. 2020 (arXiv:1904.09751), equations 2 and 3.

    Example:
        >>> z = torch.tensor([[0.5, 0.3, 0.2]]).log()
        >>> TopP(0.7)(z, torch.zeros(1, 3)).softmax(-1).tolist()
        [[0.625, 0.375, 0.0]]
    """

    p: float

    def __post_init__(self) -> None:
        if not 0 < self.p <= 1:
            raise OptionError(f"a top-p of {self.p:g}", allowed="above 0, up to 1")

    def __call__(self, logits: Tensor, seen: Tensor) -> Tensor:
        # From the smallest on: a token goes iff it and all below it have 1 - p or less together.
        # Small numbers are added first, so that the many unlikely tokens are not rounded away.
        rising, order = logits.sort(-1)
        goes = rising.softmax(-1).cumsum(-1) <= 1 - self.p
        goes[:, -1] = False
        return logits.masked_fill(goes.scatter(-1, order, goes), -torch.inf)


@dataclass(frozen=True)
class Forbid:
    """-inf for these ids, which are then never chosen.

    Example:
        >>> Forbid((0, 2))(torch.tensor([[1.0, 2.0, 3.0]]), torch.zeros(1, 3)).tolist()
        [[-inf, 2.0, -inf]]
    """

    ids: tuple[int, ...]

    def __call__(self, logits: Tensor, seen: Tensor) -> Tensor:
        return logits.index_fill(-1, torch.tensor(self.ids, device=logits.device), -torch.inf)


def greedy(logits: Tensor) -> Tensor:
    """The most likely token: argmax z, ``batch vocab -> batch``; of equals, the first.

    Example:
        >>> greedy(torch.tensor([[1.0, 3.0, 2.0]])).tolist()
        [1]
    """
    return logits.argmax(-1)


@dataclass(frozen=True, eq=False)
class Draw:
    """A token drawn with probability softmax(z), ``batch vocab -> batch``.

    The generator, on the device of the logits, carries the state: a seed fixes all draws.

    Example:
        >>> z = torch.tensor([[-torch.inf, 0.0, -torch.inf]])
        >>> Draw(torch.Generator().manual_seed(0))(z).tolist()
        [1]
    """

    generator: torch.Generator

    def __call__(self, logits: Tensor) -> Tensor:
        return torch.multinomial(logits.softmax(-1), 1, generator=self.generator)[:, 0]


@dataclass(frozen=True)
class Choice:
    """Rules one after the other, then a pick: ``choose(logits, seen) -> ids``, ``batch``.

    Example:
        >>> choose = Choice((TopK(2), TopP(0.9)))
        >>> choose(torch.tensor([[1.0, 3.0, 2.0]]), torch.zeros(1, 3, dtype=torch.bool)).tolist()
        [1]
    """

    rules: tuple[Rule, ...] = ()
    pick: Pick = greedy

    def __call__(self, logits: Tensor, seen: Tensor) -> Tensor:
        for rule in self.rules:
            logits = rule(logits, seen)
        return self.pick(logits)


def choice(
    *,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    repetition_penalty: float | None = None,
    seed: int = 0,
    device: torch.device | str | None = None,
) -> Choice:
    """The choice in words. Greedy, unless a temperature, top-k or top-p asks for a draw.

    Args:
        temperature: T of z / T; 0 is greedy; None: 1 where top-k or top-p is given, else greedy.
        top_k: draw from the k most likely tokens.
        top_p: draw from the fewest tokens that have the probability p together.
        repetition_penalty: θ for tokens that prompt and answer already hold.
        seed: of the draws.
        device: where the logits are; None: on the CPU.

    Raises:
        OptionError: a value that is not allowed.

    Example:
        >>> choice().rules, choice().pick is greedy
        ((), True)
        >>> choice(temperature=0.8, top_p=0.9, repetition_penalty=1.2).rules
        (RepetitionPenalty(theta=1.2), Temperature(value=0.8), TopP(p=0.9))
    """
    rules: list[Rule] = []
    if repetition_penalty is not None:
        rules.append(RepetitionPenalty(repetition_penalty))
    if temperature:
        rules.append(Temperature(temperature))
    if top_k is not None:
        rules.append(TopK(top_k))
    if top_p is not None:
        rules.append(TopP(top_p))
    drawn = temperature is not None or top_k is not None or top_p is not None
    if temperature == 0 or not drawn:
        return Choice(tuple(rules))
    if not -(1 << 63) <= seed < 1 << 64:
        raise OptionError(f"a seed of {seed}", allowed="a whole number of 64 bits")
    return Choice(tuple(rules), Draw(torch.Generator(device or "cpu").manual_seed(seed)))
