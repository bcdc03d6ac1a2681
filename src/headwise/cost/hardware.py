"""Machines: how many operations and bytes they do in a second, each number with its source.

The table is ``hardware.toml`` beside this file; a file of one's own, or one that calibration wrote,
has the same keys. Peaks are dense: no sparsity.
"""

from __future__ import annotations

import datetime
import math
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

from headwise.errors import FileError, OptionError
from headwise.files import whole

__all__ = [
    "BITS",
    "Figure",
    "Hardware",
    "Rate",
    "Shape",
    "hardware",
    "hardware_from",
    "machines",
    "save_hardware",
]

BITS: Final = {
    "float64": 64,
    "float32": 32,
    "tfloat32": 32,  # stored as float32, multiplied with 10 bits of it
    "float16": 16,
    "bfloat16": 16,
    "float8": 8,
    "int8": 8,
    "float4": 4,
}
_KINDS: Final = ("GPU", "TPU", "CPU")
_NEEDED: Final = ("title", "kind", "memory_bytes", "bytes_per_second", "peak", "source", "date")
_RATE: Final = ("dtype", "batch", "m", "k", "n", "flops_per_second", "low", "high")
_TABLE: Final = Path(__file__).with_name("hardware.toml")


@dataclass(frozen=True, slots=True)
class Figure:
    """A number, where it is from, and the day on which it was read or measured."""

    value: int
    source: str
    date: str


@dataclass(frozen=True, slots=True)
class Shape:
    """``batch`` products of an m × k and a k × n matrix.

    Example:
        >>> Shape(2, 3, 5, 7).flops
        420
    """

    batch: int
    m: int
    k: int
    n: int

    @property
    def flops(self) -> int:
        """2 · batch · m · k · n."""
        return 2 * self.batch * self.m * self.k * self.n

    def distance(self, other: Shape) -> float:
        """√ Σ ln² of the ratios of batch, m, k and n: how far apart two shapes are.

        Example:
            >>> Shape(1, 64, 64, 64).distance(Shape(1, 64, 64, 64))
            0.0
        """
        ours = (self.batch, self.m, self.k, self.n)
        theirs = (other.batch, other.m, other.k, other.n)
        return math.hypot(*(math.log(a) - math.log(b) for a, b in zip(ours, theirs, strict=True)))


@dataclass(frozen=True, slots=True)
class Rate:
    """FLOP/s measured for one shape: the median, and the lowest and highest of the repeats."""

    dtype: str
    shape: Shape
    flops_per_second: int
    low: int
    high: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """One machine.

    Attributes:
        memory: bytes.
        bandwidth: bytes per second.
        peaks: FLOP/s of each dtype; of a measured machine, the highest of its rates.
        rates: what was measured for single shapes; empty for a published machine.

    Example:
        >>> machine = hardware("h100-sxm")
        >>> machine.peak("bfloat16"), round(machine.ridge("bfloat16"))
        (989400000000000, 295)
    """

    name: str
    title: str
    kind: str
    memory: Figure
    bandwidth: Figure
    peaks: tuple[tuple[str, Figure], ...]
    rates: tuple[Rate, ...] = ()

    @property
    def dtypes(self) -> tuple[str, ...]:
        """The dtypes whose rate is known."""
        return tuple(dtype for dtype, _ in self.peaks)

    def peak(self, dtype: str) -> int:
        """Dense FLOP/s.

        Raises:
            OptionError: no rate of that dtype is known.
        """
        for name, figure in self.peaks:
            if name == dtype:
                return figure.value
        raise OptionError(
            f"no rate of {dtype} is known for {self.title}", allowed=", ".join(self.dtypes)
        )

    def ridge(self, dtype: str) -> float:
        """FLOPs per byte from which arithmetic, not bandwidth, sets the time: peak / bandwidth."""
        return self.peak(dtype) / self.bandwidth.value

    def rate(self, dtype: str, shape: Shape) -> int:
        """FLOP/s of a product: the measured rate of the nearest shape, or else the peak.

        Nearest is the smallest ``Shape.distance``; between equals, the one that was measured first.
        """
        measured = [rate for rate in self.rates if rate.dtype == dtype]
        if not measured:
            return self.peak(dtype)
        return min(measured, key=lambda rate: rate.shape.distance(shape)).flops_per_second


def machines() -> tuple[str, ...]:
    """The names that ``hardware`` knows.

    Example:
        >>> "tpu-v4" in machines()
        True
    """
    return tuple(_table())


def hardware(name: str) -> Hardware:
    """The machine of that name from the table.

    Raises:
        OptionError: there is none.

    Example:
        >>> hardware("A100-SXM4-80GB").memory.value
        80000000000
    """
    found = _table().get(name.lower())
    if found is None:
        raise OptionError(
            f"no machine is called {name!r}",
            allowed=", ".join(_table()),
            to_do="or name a file of your own, or calibrate this machine",
        )
    return found


def hardware_from(path: str | Path, name: str | None = None) -> Hardware:
    """The machine of a file with the keys of the table; ``name`` where the file has several.

    Raises:
        FileError: the file cannot be read, or a key is missing, unknown or wrong.
        OptionError: the file has several machines, or none of that name.

    Example:
        >>> hardware_from(Path(__file__).with_name("hardware.toml"), "t4").title
        'NVIDIA T4'
    """
    found = _read(Path(path).expanduser())
    if name is None and len(found) == 1:
        return next(iter(found.values()))
    if name is None or name not in found:
        asked = "names no machine" if name is None else f"is asked for {name!r}"
        raise OptionError(f"{path} {asked}", allowed=", ".join(found))
    return found[name]


def save_hardware(machine: Hardware, path: str | Path) -> None:
    """Write a machine as a file that ``hardware_from`` reads.

    Raises:
        FileError: the file cannot be written.

    Example:
        >>> import tempfile
        >>> file = Path(tempfile.mkdtemp()) / "mine.toml"
        >>> save_hardware(hardware("t4"), file)
        >>> hardware_from(file) == hardware("t4")
        True
    """
    figures = [("memory_bytes", machine.memory), ("bytes_per_second", machine.bandwidth)]
    source, date = machine.bandwidth.source, machine.bandwidth.date
    head = f"machines.{_text(machine.name)}"
    lines = [f"[{head}]", f"title = {_text(machine.title)}", f"kind = {_text(machine.kind)}"]
    lines += [f"{name} = {figure.value}" for name, figure in figures]
    lines += [f"source = {_text(source)}", f"date = {date}", "", f"[{head}.peak]"]
    lines += [f"{dtype} = {figure.value}" for dtype, figure in machine.peaks]
    others = [(name, each) for name, each in (*figures, *machine.peaks) if each.source != source]
    if others:
        lines += ["", f"[{head}.sources]"]
        lines += [f"{name} = {_text(each.source)}" for name, each in others]
    for rate in machine.rates:
        shape = rate.shape
        values = (
            shape.batch,
            shape.m,
            shape.k,
            shape.n,
            rate.flops_per_second,
            rate.low,
            rate.high,
        )
        lines += ["", f"[[{head}.rates]]", f"dtype = {_text(rate.dtype)}"]
        lines += [f"{name} = {value}" for name, value in zip(_RATE[1:], values, strict=True)]
    with whole(path) as temporary:
        temporary.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _text(value: str) -> str:
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + "".join(each if each.isprintable() else " " for each in escaped) + '"'


@cache
def _table() -> dict[str, Hardware]:
    return _read(_TABLE)


def _read(path: Path) -> dict[str, Hardware]:
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise FileError(f"cannot read {path}: {(error.strerror or str(error)).lower()}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise FileError(f"{path} is not a TOML file: {error}") from error
    found = values.get("machines")
    if not isinstance(found, dict) or not found or len(values) != 1:
        raise FileError(
            f"{path} has {', '.join(values) or 'nothing'} at its top",
            allowed="one table [machines.NAME] or more",
        )
    return {name: _machine(_Keys(each, f"{name} in {path}"), name) for name, each in found.items()}


class _Keys:
    """The keys of a table, each checked as it is read; ``where`` is said in messages."""

    def __init__(self, values: Any, where: str) -> None:
        self.where = where
        if not isinstance(values, dict):
            raise FileError(f"{where} is {values!r}", allowed="a table")
        self.values: dict[str, Any] = values

    def only(self, needed: tuple[str, ...], more: tuple[str, ...] = ()) -> None:
        for name in needed:
            if name not in self.values:
                raise FileError(f"{self.where} has no {name}", to_do="add the key")
        for name in self.values:
            if name not in needed + more:
                raise FileError(
                    f"{self.where} has the key {name}", allowed=", ".join(needed + more)
                )

    def number(self, name: str) -> int:
        value = self.values[name]
        if type(value) is float and value.is_integer():
            value = int(value)
        if type(value) is not int or value < 1:
            raise FileError(
                f"{name} is {value!r} for {self.where}", allowed="a whole number, 1 or more"
            )
        return value

    def text(self, name: str) -> str:
        value = self.values[name]
        if not isinstance(value, str) or not value.strip():
            raise FileError(f"{name} is {value!r} for {self.where}", allowed="a text")
        return value

    def date(self, name: str) -> str:
        value = self.values[name]
        if type(value) is not datetime.date:
            raise FileError(
                f"{name} is {value!r} for {self.where}", allowed="a date such as 2026-11-30"
            )
        return value.isoformat()


def _machine(keys: _Keys, name: str) -> Hardware:
    keys.only(_NEEDED, ("sources", "rates"))
    kind, source, date = keys.text("kind"), keys.text("source"), keys.date("date")
    if kind not in _KINDS:
        raise FileError(f"kind is {kind!r} for {keys.where}", allowed=", ".join(_KINDS))
    peak = _Keys(keys.values["peak"], f"peak of {keys.where}")
    peak.only((), tuple(BITS))
    if not peak.values:
        raise FileError(f"{peak.where} is empty", allowed=", ".join(BITS))
    other = _Keys(keys.values.get("sources", {}), f"sources of {keys.where}")
    other.only((), ("memory_bytes", "bytes_per_second", *peak.values))

    def figure(of: _Keys, key: str) -> Figure:
        return Figure(of.number(key), other.text(key) if key in other.values else source, date)

    rates = keys.values.get("rates", [])
    if not isinstance(rates, list):
        raise FileError(f"rates is {rates!r} for {keys.where}", allowed="tables [[….rates]]")
    return Hardware(
        name=name,
        title=keys.text("title"),
        kind=kind,
        memory=figure(keys, "memory_bytes"),
        bandwidth=figure(keys, "bytes_per_second"),
        peaks=tuple((dtype, figure(peak, dtype)) for dtype in peak.values),
        rates=tuple(_rate(_Keys(each, f"a rate of {keys.where}"), peak) for each in rates),
    )


def _rate(keys: _Keys, peak: _Keys) -> Rate:
    keys.only(_RATE)
    dtype = keys.text("dtype")
    if dtype not in peak.values:
        raise FileError(f"dtype is {dtype!r} for {keys.where}", allowed=", ".join(peak.values))
    batch, m, k, n, flops, low, high = (keys.number(name) for name in _RATE[1:])
    return Rate(dtype, Shape(batch, m, k, n), flops, low, high)
