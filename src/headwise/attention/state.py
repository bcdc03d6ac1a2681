"""The state of a softmax-weighted sum that is read piece by piece: a monoid.

For a set of keys C, one query's state is (M, Z, W) with

    M = max_{j∈C} s_j        Z = Σ_{j∈C} e^(s_j − M)        W = Σ_{j∈C} e^(s_j − M) v_j

``empty`` is the state of no keys, ``absorb`` adds a tile of keys, ``merge`` joins the states of two
disjoint sets (associative and commutative up to rounding, ``empty`` neutral), and ``finish`` gives
output W / Z and log-sum-exp M + ln Z. However the keys are cut and in whatever order they come, the
result is the same.

Milakov and Gimelshein 2018 (arXiv:1805.02867), section 3.1; Dao et al. 2022 (arXiv:2205.14135),
section 3.1.

With ``flush``, weights below 2^-100 of their row's maximum (float64: 2^-996) are taken as 0. They
are far below the rounding of Z and W; what they cost is time, because processors compute with
numbers near the smallest one many times slower, and a bias that grows with distance makes whole
tiles of such numbers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

__all__ = ["LN2", "LOG2E", "State", "negligible", "weights_"]

LOG2E: Final = math.log2(math.e)
LN2: Final = math.log(2.0)


@dataclass(frozen=True)
class State:
    """What a row of queries remembers about the keys it has seen.

    ``top`` M and ``total`` Z have shape ``query 1``, ``weighted`` W has ``query d_value``. Logits
    are kept in units of ln 2 (s · log2 e), because 2^x is computed several times faster than e^x.

    Example:
        >>> logits, v = torch.tensor([[0.0, 1.0, 2.0]]), torch.tensor([[1.0], [2.0], [3.0]])
        >>> one = State.empty(1, 1).absorb(logits[:, :1].clone(), v[:1])
        >>> two = State.empty(1, 1).absorb(logits[:, 1:].clone(), v[1:])
        >>> o, lse = one.merge(two).finish()
        >>> round(o.item(), 4), round(lse.item() * LOG2E, 4)  # (1 + 4 + 12) / 7, log2(7)
        (2.4286, 2.8074)
    """

    top: Tensor
    total: Tensor
    weighted: Tensor

    @classmethod
    def empty(
        cls,
        rows: int,
        d_value: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
    ) -> State:
        """No keys seen: M = -inf, Z = 0, W = 0, the neutral element of ``merge``."""
        return cls(
            torch.full((rows, 1), -math.inf, dtype=dtype, device=device),
            torch.zeros((rows, 1), dtype=dtype, device=device),
            torch.zeros((rows, d_value), dtype=dtype, device=device),
        )

    @classmethod
    def sink(cls, logits: Tensor, d_value: int) -> State:
        """A key without a value: a learned logit (``query 1``) that only enters the denominator."""
        return cls(logits, torch.ones_like(logits), logits.new_zeros(len(logits), d_value))

    def absorb(
        self, logits: Tensor, values: Tensor, finite: Tensor | None = None, flush: bool = False
    ) -> State:
        """The state after a tile of keys: logits ``query key``, values ``key d_value``.

        ``logits`` is overwritten by the unnormalised weights 2^(s − M). ``finite`` (boolean, like
        ``values``) is given when some values are not finite: these reach only the queries that put
        weight on them. ``flush`` takes negligible weights as 0.
        """
        here = logits.amax(-1, keepdim=True)
        top = torch.maximum(self.top, here)
        origin = _origin(top)
        if flush and negligible(here - origin):
            return self
        e = weights_(logits, origin, flush)
        shrink = torch.exp2(self.top - origin)
        total = torch.addcmul(e.sum(-1, keepdim=True), self.total, shrink)
        if finite is None:
            return State(top, total, (self.weighted * shrink).addmm_(e, values))
        clean = torch.where(finite, values, torch.zeros_like(values))
        weighted = (self.weighted * shrink).addmm_(e, clean)
        reached = (e != 0).to(e.dtype) @ (~finite).to(e.dtype) > 0
        return State(top, total, weighted.masked_fill_(reached, math.nan))

    def merge(self, other: State) -> State:
        """The state of both sets of keys together."""
        top = torch.maximum(self.top, other.top)
        origin = _origin(top)
        a, b = torch.exp2(self.top - origin), torch.exp2(other.top - origin)
        return State(top, self.total * a + other.total * b, self.weighted * a + other.weighted * b)

    def finish(self) -> tuple[Tensor, Tensor]:
        """Output ``query d_value`` and log-sum-exp ``query`` (nats); 0 and -inf without a key."""
        output = self.weighted / torch.where(self.total == 0, 1.0, self.total)
        return output, (self.top + self.total.log2()).mul_(LN2).squeeze(-1)


def _origin(top: Tensor) -> Tensor:
    """Where exponents are measured from: the maximum, or 0 while no key is visible.

    Without it, a row of hidden logits would compute -inf − (-inf) = NaN.
    """
    return top.masked_fill(top == -math.inf, 0.0)


def negligible(logits: Tensor) -> bool:
    """Whether every weight 2^logits is negligible; False when a logit is NaN."""
    return bool(logits.amax() <= _floor(logits.dtype))


def weights_(logits: Tensor, origin: Tensor, flush: bool) -> Tensor:
    """2^(logits − origin), in place; with ``flush``, negligible weights are 0."""
    logits.sub_(origin)
    if flush:
        torch.threshold_(logits, _floor(logits.dtype), -math.inf)
    return logits.exp2_()


def _floor(dtype: torch.dtype) -> float:
    """log2 of the smallest weight that counts: 2^-26 of it is still a normal number."""
    return math.log2(torch.finfo(dtype).tiny) + 26
