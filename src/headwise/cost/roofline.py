"""The roofline: how long every component takes at the least, and what holds it back.

A product of F FLOPs that moves B bytes takes max(F / P, B / W) seconds on a machine of P FLOP/s and
W bytes per second. Below the ridge, F / B < P / W, bandwidth holds it back, above it arithmetic.

Source: Williams, Waterman and Patterson 2009, Roofline, Communications of the ACM 52 (4).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Final

from headwise.cost.hardware import BITS, Hardware, Shape
from headwise.cost.parts import Component, Parts
from headwise.cost.traffic import Product, Widths, pass_products
from headwise.cost.workload import Workload
from headwise.errors import OptionError

__all__ = ["ComponentTime", "PassTime", "Time", "roofline"]

_ORDER: Final = {component: place for place, component in enumerate(Component)}
_NOTE: Final = (
    "a lower bound: each product reads its operands and writes its result once, and starting"
    " kernels, norms, activation functions, communication and optimizer steps cost nothing"
)
_EXPERTS: Final = (
    "experts whose weights are read: the number expected when every token picks at random;"
    " real routers touch fewer"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ComponentTime:
    """One component of a pass, summed over its layers.

    Attributes:
        arithmetic_seconds, bandwidth_seconds: Σ F / P and Σ B / W over its products.
        seconds: Σ max(F / P, B / W).
    """

    component: Component
    flops: int
    moved_bytes: int
    arithmetic_seconds: float
    bandwidth_seconds: float
    seconds: float

    @property
    def intensity(self) -> float:
        """FLOPs per byte that is moved."""
        return self.flops / self.moved_bytes

    @property
    def bound(self) -> str:
        """What holds it back: "arithmetic" or "bandwidth"."""
        return "arithmetic" if self.arithmetic_seconds >= self.bandwidth_seconds else "bandwidth"


@dataclass(frozen=True, slots=True, kw_only=True)
class PassTime:
    """One pass: ``tokens`` are those of all sequences that it takes in."""

    tokens: int
    components: tuple[ComponentTime, ...]

    @property
    def flops(self) -> int:
        """2 · multiply-adds of the matrix products."""
        return sum(each.flops for each in self.components)

    @property
    def moved_bytes(self) -> int:
        """Bytes read and written."""
        return sum(each.moved_bytes for each in self.components)

    @property
    def seconds(self) -> float:
        """The components one after another."""
        return sum(each.seconds for each in self.components)

    @property
    def intensity(self) -> float:
        """FLOPs per byte that is moved."""
        return self.flops / self.moved_bytes

    @property
    def bound(self) -> str:
        """What holds the whole back: "arithmetic" or "bandwidth"."""
        arithmetic = sum(each.arithmetic_seconds for each in self.components)
        bandwidth = sum(each.bandwidth_seconds for each in self.components)
        return "arithmetic" if arithmetic >= bandwidth else "bandwidth"

    @property
    def tokens_per_second(self) -> float:
        """Tokens of all sequences per second, at the most."""
        return self.tokens / self.seconds

    def of(self, component: Component) -> ComponentTime | None:
        """The component of that name."""
        return next((each for each in self.components if each.component is component), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Time:
    """The passes of a model on one device of a machine.

    Attributes:
        ridge: FLOPs per byte from which arithmetic holds a product back.
        prefill: the forward pass of the workload.
        decode: one more token of every sequence after it; None where nothing is decoded.
        training: forward, backward and what is computed again; None after a cache.
    """

    hardware: Hardware
    dtype: str
    workload: Workload
    ridge: float
    prefill: PassTime
    decode: PassTime | None
    training: PassTime | None
    notes: tuple[str, ...]


def roofline(
    parts: Parts,
    workload: Workload,
    hardware: Hardware,
    *,
    dtype: str = "bfloat16",
    weight_bits: int | float | Fraction | None = None,
    cache_bits: int | float | Fraction | None = None,
    efficiency: float | None = None,
) -> Time:
    """How long a workload takes at the least on one device, component by component.

    seconds = Σ max(FLOPs / (efficiency · peak), bytes / bandwidth), products one after another.
    On a calibrated machine, the rate of a product is that of the nearest shape that was measured.

    Args:
        dtype: of the arithmetic, of activations and gradients.
        weight_bits: of a stored weight; None: as wide as ``dtype``. Quantised weights are taken to
            be multiplied in ``dtype``.
        cache_bits: of a key or value that attention reads; None: as wide as ``dtype``.
        efficiency: the share of the published peak that products reach; None: all of it, so that
            the result is a bound.

    Raises:
        OptionError: the machine has no rate of that dtype, or an option is out of its range.

    Example:
        >>> from headwise.cost.explicit import explicit
        >>> from headwise.cost.hardware import hardware
        >>> parts = explicit(d_model=4096, layers=32, heads=32, vocab=32_000, kv_heads=8)
        >>> time = roofline(parts, Workload(length=8192), hardware("h100-sxm"))
        >>> time.prefill.bound, time.decode.bound
        ('arithmetic', 'bandwidth')
    """
    peak = hardware.peak(dtype)
    share = _share(efficiency, hardware)
    own = Fraction(BITS[dtype])
    widths = Widths(
        weight=_bits("weight_bits", weight_bits, own),
        cache=_bits("cache_bits", cache_bits, own),
        activation=own,
    )
    clock = _Clock(hardware, dtype, share)

    def passing(of: Workload, training: bool = False) -> PassTime:
        products = pass_products(parts, of, widths, training=training)
        return PassTime(tokens=_tokens(parts, of), components=clock.components(products))

    later = replace(
        workload,
        length=1,
        cached=workload.cached + workload.length,
        source=workload.encoded,
        documents=(),
    )
    decodes = any(stack.decodes for stack in parts.stacks) and not workload.documents
    experts = any(matrix.copies > 1 for _, _, matrix in parts.matrices())
    return Time(
        hardware=hardware,
        dtype=dtype,
        workload=workload,
        ridge=float(share * peak) / hardware.bandwidth.value,
        prefill=passing(workload),
        decode=passing(later) if decodes else None,
        training=None if workload.cached else passing(workload, training=True),
        notes=(_NOTE, _EXPERTS) if experts else (_NOTE,),
    )


def _share(efficiency: float | None, hardware: Hardware) -> float:
    if efficiency is None:
        return 1.0
    if hardware.rates:
        raise OptionError(
            f"an efficiency for {hardware.title}, whose rates are measured",
            to_do="leave it out",
        )
    if not 0 < efficiency <= 1:
        raise OptionError(f"efficiency is {efficiency}", allowed="above 0, up to 1")
    return efficiency


def _bits(name: str, given: int | float | Fraction | None, own: Fraction) -> Fraction:
    if given is None:
        return own
    if not 0 < given <= 64:
        raise OptionError(f"{name} is {given}", allowed="above 0, up to 64")
    return Fraction(given)


def _tokens(parts: Parts, workload: Workload) -> int:
    """New tokens of the stack that decodes, or else of the last one that is run."""
    ordered = sorted(parts.stacks, key=lambda stack: stack.decodes)
    counts = [workload.batch * workload.queries(stack) for stack in ordered]
    found = next((count for count in reversed(counts) if count), None)
    if found is None:
        raise OptionError(
            f"a cache of {workload.cached} tokens for a model that does not decode",
            allowed="cached 0",
        )
    return found


@dataclass(slots=True)
class _Sums:
    flops: int = 0
    moved_bytes: int = 0
    arithmetic: float = 0.0
    bandwidth: float = 0.0
    seconds: float = 0.0


class _Clock:
    """Adds up products by component; the rate of a shape is looked up once."""

    def __init__(self, hardware: Hardware, dtype: str, share: float) -> None:
        self.hardware = hardware
        self.dtype = dtype
        self.share = share
        self.rates: dict[Shape, float] = {}

    def rate(self, shape: Shape) -> float:
        if shape not in self.rates:
            self.rates[shape] = self.share * self.hardware.rate(self.dtype, shape)
        return self.rates[shape]

    def components(self, products: Iterable[Product]) -> tuple[ComponentTime, ...]:
        found: dict[Component, _Sums] = {}
        for product in products:
            sums = found.setdefault(product.component, _Sums())
            arithmetic = product.flops / self.rate(product.shape) if product.shape else 0.0
            bandwidth = product.moved_bytes / self.hardware.bandwidth.value
            sums.flops += product.flops
            sums.moved_bytes += product.moved_bytes
            sums.arithmetic += arithmetic
            sums.bandwidth += bandwidth
            sums.seconds += max(arithmetic, bandwidth)
        return tuple(
            ComponentTime(
                component=component,
                flops=sums.flops,
                moved_bytes=sums.moved_bytes,
                arithmetic_seconds=sums.arithmetic,
                bandwidth_seconds=sums.bandwidth,
                seconds=sums.seconds,
            )
            for component, sums in sorted(found.items(), key=lambda item: _ORDER[item[0]])
        )
