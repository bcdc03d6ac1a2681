"""The table of machines: every number with source and date, and files of one's own."""

from __future__ import annotations

import datetime
import tomllib
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwise.cost import hardware as table_module
from headwise.cost.hardware import (
    BITS,
    Figure,
    Rate,
    Shape,
    hardware,
    hardware_from,
    machines,
    save_hardware,
)
from headwise.errors import FileError, OptionError

TABLE = Path(table_module.__file__).with_name("hardware.toml")
FILE = """
[machines.mine]
title = "Mine"
kind = "CPU"
memory_bytes = 17_000_000_000
bytes_per_second = 23e9
source = "measured by hand"
date = 2026-11-29
[machines.mine.peak]
float32 = 101_000_000_000
bfloat16 = 53_000_000_000
[machines.mine.sources]
bfloat16 = "measured by foot"
[[machines.mine.rates]]
dtype = "float32"
batch = 1
m = 3
k = 5
n = 7
flops_per_second = 101_000_000_000
low = 97_000_000_000
high = 103_000_000_000
"""


@pytest.fixture
def file(tmp_path):
    def write(text: str) -> Path:
        path = tmp_path / "mine.toml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


@pytest.mark.parametrize("name", machines())
def test_every_number_has_a_source_and_a_date(name):
    machine = hardware(name)
    for figure in (machine.memory, machine.bandwidth, *(each for _, each in machine.peaks)):
        assert len(figure.source) > 20
        assert datetime.date.fromisoformat(figure.date) >= datetime.date(2026, 11, 30)
    assert machine.title
    assert machine.rates == ()


@pytest.mark.parametrize("name", machines())
def test_values_are_of_a_plausible_size(name):
    machine = hardware(name)
    assert 10**10 <= machine.memory.value <= 10**12
    assert 10**11 <= machine.bandwidth.value <= 10**13
    for dtype, figure in machine.peaks:
        assert 10**12 <= figure.value <= 10**16
        assert dtype in BITS
    rates = {dtype: figure.value for dtype, figure in machine.peaks}
    for wide, narrow in [
        ("float32", "bfloat16"), ("float32", "float16"), ("bfloat16", "float8"),
        ("float8", "float4"), ("float32", "tfloat32"),
    ]:  # fmt: skip
        if wide in rates and narrow in rates:
            assert rates[wide] <= rates[narrow]
    if "float16" in rates and "bfloat16" in rates:
        assert rates["bfloat16"] in (rates["float16"], rates["float16"] // 2)


def test_no_machine_has_the_rates_with_sparsity():
    # Twice the dense rate is what vendors print in the largest letters.
    dense = {"a100-sxm4-80gb": 312, "h100-sxm": 989, "h200": 989, "mi300x": 1307, "l40s": 362}
    for name, teraflops in dense.items():
        assert hardware(name).peak("bfloat16") // 10**12 == teraflops


def test_later_generations_are_faster():
    for names in (
        ["v100-sxm2-32gb", "a100-sxm4-40gb", "a100-sxm4-80gb", "h100-sxm", "h200", "b200"],
        ["tpu-v3", "tpu-v4", "tpu-v5p"],
        ["tpu-v5e", "tpu-v6e"],
        ["rtx-3090", "rtx-4090"],
    ):
        chain = [hardware(name) for name in names]
        dtype = next(d for d in ("float16", "bfloat16") if d in chain[0].dtypes)
        for older, newer in pairwise(chain):
            assert older.peak(dtype) <= newer.peak(dtype)
            assert older.bandwidth.value <= newer.bandwidth.value


def test_the_table_is_in_the_package():
    assert set(tomllib.loads(TABLE.read_text(encoding="utf-8"))["machines"]) == set(machines())


def test_names_are_found_whatever_their_case_and_others_refused():
    assert hardware("H100-SXM") is hardware("h100-sxm")
    with pytest.raises(OptionError, match=r"no machine is called 'abacus'; allowed: v100-sxm2"):
        hardware("abacus")
    with pytest.raises(OptionError, match="no rate of bfloat16 is known for NVIDIA T4; allowed: f"):
        hardware("t4").peak("bfloat16")


def test_a_file_of_ones_own(file):
    machine = hardware_from(file(FILE))
    assert machine.memory == Figure(17 * 10**9, "measured by hand", "2026-11-29")
    assert machine.bandwidth.value == 23 * 10**9
    assert dict(machine.peaks)["bfloat16"].source == "measured by foot"
    assert machine.rates == (
        Rate("float32", Shape(1, 3, 5, 7), 101 * 10**9, 97 * 10**9, 103 * 10**9),
    )
    assert hardware_from(file(FILE), "mine") == machine


def test_a_file_of_several_machines_needs_a_name():
    assert hardware_from(TABLE, "t4") == hardware("t4")
    with pytest.raises(OptionError, match="names no machine; allowed: v100"):
        hardware_from(TABLE)
    with pytest.raises(OptionError, match="is asked for 'abacus'"):
        hardware_from(TABLE, "abacus")


@pytest.mark.parametrize("name", machines())
def test_what_is_saved_is_read(name, tmp_path):
    save_hardware(hardware(name), tmp_path / "saved.toml")
    assert hardware_from(tmp_path / "saved.toml") == hardware(name)


@given(title=st.text(st.characters(codec="utf-8"), min_size=1).filter(lambda each: each.strip()))
def test_any_title_is_read_again(title, tmp_path_factory):
    path = tmp_path_factory.mktemp("titles") / "saved.toml"
    rates = (Rate("float16", Shape(2, 3, 5, 7), 11, 10, 13),)
    save_hardware(replace(hardware("t4"), name='a "b" ü', title="x" + title, rates=rates), path)
    found = hardware_from(path)
    plain = "".join(each if each.isprintable() else " " for each in title)
    assert (found.name, found.title, found.rates) == ('a "b" ü', "x" + plain, rates)


WRONG = {
    "no title": ('title = "Mine"\n', "", "mine in .* has no title; add the key"),
    "no date": ("date = 2026-11-29\n", "", "has no date"),
    "no source": ('source = "measured by hand"\n', "", "has no source"),
    "date as text": ("2026-11-29", '"2026-11-29"', "date is '2026-11-29' .* a date such as"),
    "date with hours": ("2026-11-29", "2026-11-29T10:00:00", "allowed: a date such as"),
    "unknown key": ('title = "Mine"', 'title = "Mine"\ncolour = 3', "has the key colour; allowed"),
    "unknown dtype": ("bfloat16 = 53", "bfloat17 = 53", "has the key bfloat17; allowed: float64"),
    "unknown source": ('bfloat16 = "', 'float64 = "', "sources of mine .* has the key float64"),
    "half a byte": ("= 23e9", "= 2.5", "is 2.5 .* a whole number"),
    "no bandwidth": ("= 23e9", "= 0", "bytes_per_second is 0"),
    "infinite": ("= 23e9", "= inf", "bytes_per_second is inf"),
    "negative": ("= 17_000", "= -17_000", "memory_bytes is -17000000000"),
    "a truth": ("= 23e9", "= true", "bytes_per_second is True"),
    "text for a number": ("= 23e9", '= "fast"', "bytes_per_second is 'fast'"),
    "empty source": ('"measured by hand"', '" "', "source is ' ' .* a text"),
    "another kind": ('"CPU"', '"abacus"', "kind is 'abacus' .* GPU, TPU, CPU"),
    "rate of another dtype": ('dtype = "float32"', 'dtype = "float64"', "dtype is 'float64'"),
    "rate without shape": ("k = 5\n", "", "a rate of mine .* has no k"),
    "rates is no list": ("[[machines.mine.rates]]", "[machines.mine.rates]", "rates is {"),
    "not a table": ("[machines.mine]", "[machines]", "title in .* is 'Mine'"),
    "another top": ("[machines.mine]", "[engines.mine]", "has engines, machines at its top"),
    "not TOML": ("[machines.mine]", "[machines.mine", "is not a TOML file"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_file_is_refused_in_one_line(case, file):
    old, new, said = WRONG[case]
    assert old in FILE
    with pytest.raises(FileError, match=said) as caught:
        hardware_from(file(FILE.replace(old, new, 1)))
    assert "\n" not in str(caught.value)


def test_files_that_cannot_be_read(file, tmp_path):
    with pytest.raises(FileError, match=r"cannot read .*no such file"):
        hardware_from(tmp_path / "missing.toml")
    with pytest.raises(FileError, match="has nothing at its top"):
        hardware_from(file(""))
    with pytest.raises(FileError, match=r"peak of mine in .* is empty"):
        hardware_from(file(FILE.split("float32")[0]))
    path = tmp_path / "latin.toml"
    path.write_bytes(b'x = "\xff"')
    with pytest.raises(FileError, match="is not a TOML file"):
        hardware_from(path)


shapes = st.builds(Shape, *[st.integers(1, 10**6)] * 4)


@given(one=shapes, other=shapes)
def test_the_distance_of_shapes(one, other):
    assert one.distance(one) == 0
    assert one.distance(other) == other.distance(one) >= 0
    assert (one.distance(other) == 0) == (one == other)


def test_the_rate_of_the_nearest_shape():
    rates = (
        Rate("float16", Shape(1, 1, 64, 64), 3, 3, 3),
        Rate("float16", Shape(1, 64, 64, 64), 5, 5, 5),
        Rate("int8", Shape(1, 7, 64, 64), 7, 7, 7),
    )
    machine = replace(hardware("t4"), rates=rates)
    assert machine.rate("float16", Shape(1, 7, 64, 64)) == 3  # 7² < 64, in logarithms below half
    assert machine.rate("float16", Shape(1, 9, 64, 64)) == 5
    assert machine.rate("float16", Shape(1, 8, 64, 64)) == 3  # as near: the first
    assert machine.rate("float32", Shape(1, 8, 64, 64)) == machine.peak("float32")
