"""Rotary frequencies, and the published ways to stretch them beyond the trained length.

Each scaling is a small frozen record that answers with the frequencies (float64) and with the
attention factor, by which the rotated queries and keys are multiplied.

Plain: Su et al. 2021 (arXiv:2104.09864), section 3.2.2. Each scaling names its own source.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from headwise.errors import OptionError, ShapeError
from headwise.positions.powers import powers

__all__ = [
    "DynamicNTK",
    "Frequencies",
    "Linear",
    "Llama3",
    "LongRope",
    "Proportional",
    "Scaling",
    "YaRN",
]


class Frequencies(NamedTuple):
    """Radians per position for each pair (float64, ``pair``), and the factor on rotated vectors."""

    inv_freq: Tensor
    attention_factor: float


class Scaling(Protocol):
    """What ``frequencies`` asks of a scaling; ``length`` is that of the sequence, None if short."""

    def frequencies(self, width: int, base: float, length: int | None) -> Frequencies: ...


def plain(width: int, base: float) -> Tensor:
    """θ_i = base^(−2i/width), i = 0 … width/2 − 1."""
    if width < 2 or width % 2:
        raise OptionError(
            f"a rotary width of {width}, which cannot be cut into pairs",
            allowed="an even number, 2 or more",
            to_do="rotate fewer entries of the head (partial rotary)",
        )
    return powers(width, base, of="a rotary base of", to_do="take the checkpoint's (rope_theta)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Linear:
    """Position interpolation: θ / factor. Chen et al. 2023 (arXiv:2306.15595), section 2.3.

    Example:
        >>> Linear(factor=2.0).frequencies(2, 10000.0, None).inv_freq.tolist()
        [0.5]
    """

    factor: float

    def __post_init__(self) -> None:
        _positive(self, "factor")

    def frequencies(self, width: int, base: float, length: int | None) -> Frequencies:
        return Frequencies(plain(width, base) / self.factor, 1.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class DynamicNTK:
    """The base grows with the sequence once it is longer than the trained length.

    base · (factor · L/trained − factor + 1)^(width/(width − 2)), L = max(length, trained).
    The frequencies depend on the length of the sequence, so relativity holds at one length only.

    Peng et al. 2023 (arXiv:2309.00071), section 3.3 and appendix A.

    Example:
        >>> scaling = DynamicNTK(factor=2.0, trained=8)
        >>> [round(x, 4) for x in scaling.frequencies(4, 100.0, 16).inv_freq.tolist()]
        [1.0, 0.0333]
    """

    factor: float
    trained: int

    def __post_init__(self) -> None:
        _positive(self, "factor", "trained")

    def frequencies(self, width: int, base: float, length: int | None) -> Frequencies:
        plain(width, base)
        if width == 2:
            raise OptionError(
                "dynamic scaling of a rotary width of 2, whose only pair has frequency 1",
                allowed="a width of 4 or more",
                to_do="leave the scaling out",
            )
        reach = max(self.trained, length or 0) / self.trained
        growth = (self.factor * reach - (self.factor - 1)) ** (width / (width - 2))
        return Frequencies(plain(width, base * growth), 1.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class YaRN:
    """Fast pairs stay, slow pairs are interpolated, a ramp between; logits become sharper.

    The pair that makes r turns in the trained length has the index
    width · ln(trained/(2πr)) / (2 ln base), rounded outwards if ``truncate``; the ramp runs from
    r = ``beta_fast`` to r = ``beta_slow``.
    The attention factor is 0.1 ln(factor) + 1 unless given, or, with both ``mscale`` numbers (the
    DeepSeek models), (0.1 mscale ln(factor) + 1) / (0.1 mscale_all_dim ln(factor) + 1).

    Peng et al. 2023 (arXiv:2309.00071), sections 3.2 and 3.4.

    Example:
        >>> round(YaRN(factor=8.0, trained=64).frequencies(8, 10000.0, None).attention_factor, 4)
        1.2079
    """

    factor: float
    trained: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        _positive(self, "factor", "trained", "beta_fast", "beta_slow")

    def frequencies(self, width: int, base: float, length: int | None) -> Frequencies:
        theta = plain(width, base)
        if base == 1.0:
            raise OptionError(
                "YaRN with a rotary base of 1, where all pairs turn alike",
                allowed="any other base",
                to_do="leave the scaling out",
            )
        low, high = (self._pair(r, width, base) for r in (self.beta_fast, self.beta_slow))
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, width - 1)
        high = high + 0.001 if high == low else high
        pair = torch.arange(len(theta), dtype=torch.float64)
        slow = ((pair - low) / (high - low)).clamp(0, 1)
        return Frequencies(theta * (slow / self.factor + 1 - slow), self._attention_factor())

    def _pair(self, turns: float, width: int, base: float) -> float:
        """The (fractional) index of the pair that makes so many turns in the trained length."""
        return width * math.log(self.trained / (turns * 2 * math.pi)) / (2 * math.log(base))

    def _attention_factor(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._sharper(self.mscale) / self._sharper(self.mscale_all_dim)
        return self._sharper(1.0)

    def _sharper(self, mscale: float) -> float:
        return 1.0 if self.factor <= 1 else 0.1 * mscale * math.log(self.factor) + 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Llama3:
    """Long wavelengths are interpolated, short ones stay, between them a weighted mean.

    A pair makes r = trained · θ / 2π turns in the trained length; it keeps the share
    s = (r − low_turns) / (high_turns − low_turns), cut to [0, 1]: θ' = (1 − s) θ/factor + s θ.

    Llama 3.1's published code; Grattafiori et al. 2024 (arXiv:2407.21783).

    Example:
        >>> scaling = Llama3(factor=8.0, trained=64)
        >>> [round(x, 4) for x in scaling.frequencies(6, 1000.0, None).inv_freq.tolist()]
        [1.0, 0.013, 0.0013]
    """

    factor: float
    trained: int
    low_turns: float = 1.0
    high_turns: float = 4.0

    def __post_init__(self) -> None:
        _positive(self, "factor", "trained", "low_turns", "high_turns")
        if self.high_turns <= self.low_turns:
            raise OptionError(
                f"high_turns is {self.high_turns} and low_turns {self.low_turns}",
                allowed="high_turns above low_turns",
                to_do="take the checkpoint's high_freq_factor and low_freq_factor",
            )

    def frequencies(self, width: int, base: float, length: int | None) -> Frequencies:
        theta = plain(width, base)
        turns = self.trained * theta / (2 * math.pi)
        kept = ((turns - self.low_turns) / (self.high_turns - self.low_turns)).clamp(0, 1)
        return Frequencies((1 - kept) * theta / self.factor + kept * theta, 1.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class LongRope:
    """Each pair is slowed down by a number of its own; other numbers beyond the trained length.

    θ_i / short_i, or θ_i / long_i when the sequence is longer than ``trained``. The attention
    factor is √(1 + ln(factor)/ln(trained)) unless given; ``factor`` = longest / trained length.

    Ding et al. 2024 (arXiv:2402.13753); Phi-3 (arXiv:2404.14219).

    Example:
        >>> scaling = LongRope(short=(1.0,), long=(4.0,), factor=4.0, trained=16)
        >>> [scaling.frequencies(2, 10000.0, n).inv_freq.item() for n in (16, 17)]
        [1.0, 0.25]
    """

    short: tuple[float, ...]
    long: tuple[float, ...]
    factor: float
    trained: int
    attention_factor: float | None = None

    def __post_init__(self) -> None:
        _positive(self, "factor", "trained")
        if self.attention_factor is None and self.factor > 1 and self.trained < 2:
            raise OptionError(
                f"a trained length of {self.trained}, from which no attention factor follows",
                allowed="2 or more",
                to_do="give attention_factor",
            )
        if min((*self.short, *self.long), default=1.0) <= 0:
            raise OptionError(
                "a factor for a rotary pair that is 0 or negative",
                allowed="positive numbers",
                to_do="take the checkpoint's short_factor and long_factor",
            )

    def frequencies(self, width: int, base: float, length: int | None) -> Frequencies:
        theta = plain(width, base)
        name = "long" if length is not None and length > self.trained else "short"
        factors = torch.tensor(self.long if name == "long" else self.short, dtype=torch.float64)
        if len(factors) != len(theta):
            raise ShapeError(
                f"{len(factors)} {name} factors for a rotary width of {width}",
                allowed=f"one for each pair: {len(theta)}",
                to_do="give the width that is rotated, not the head's, if rotary is partial",
            )
        return Frequencies(theta / factors, self._attention_factor())

    def _attention_factor(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        if self.factor <= 1:
            return 1.0
        return math.sqrt(1 + math.log(self.factor) / math.log(self.trained))


@dataclass(frozen=True, kw_only=True, slots=True)
class Proportional:
    """The fastest ``share`` of all pairs turns, the others stand still (frequency 0).

    Unlike partial rotary, pairs span the whole head and exponents are over its whole width.
    Barbero et al. 2024 (arXiv:2410.06205, p-RoPE); Gemma 4.

    Example:
        >>> Proportional(share=0.5).frequencies(4, 100.0, None).inv_freq.tolist()
        [1.0, 0.0]
    """

    share: float
    factor: float = 1.0

    def __post_init__(self) -> None:
        _positive(self, "factor")
        if not 0 <= self.share <= 1:
            raise OptionError(
                f"a share of {self.share} of the rotary pairs",
                allowed="0 to 1",
                to_do="take the checkpoint's partial_rotary_factor",
            )

    def frequencies(self, width: int, base: float, length: int | None) -> Frequencies:
        theta = plain(width, base)
        theta[int(self.share * width // 2) :] = 0.0
        return Frequencies(theta / self.factor, 1.0)


def _positive(scaling: object, *names: str) -> None:
    for name in names:
        value = getattr(scaling, name)
        if not (math.isfinite(value) and value > 0):
            raise OptionError(
                f"{name} of the rotary scaling {type(scaling).__name__} is {value}",
                allowed="a positive number",
                to_do="take the checkpoint's rope parameters",
            )
