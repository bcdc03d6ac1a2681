"""Published figures, and figures that other counters gave for published models."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from fractions import Fraction
from math import gcd, log10
from pathlib import Path
from typing import Any

import pytest

from headwise.cost.config import parts_of
from headwise.cost.counting import Counts, count
from headwise.cost.crossovers import crossovers
from headwise.cost.explicit import explicit
from headwise.cost.kv_cache import kv_cache
from headwise.cost.parts import Component, Parts
from headwise.cost.utilisation import mfu, model_flops
from headwise.cost.workload import Workload

HERE = Path(__file__).parent
GIVEN = json.loads((HERE / "reference.json").read_text(encoding="utf-8"))
RECORDS: list[dict[str, Any]] = GIVEN["records"]
PRODUCTS = (Component.SCORES, Component.MIX)
LINEAR = (Component.QUERY, Component.KEY, Component.VALUE, Component.OUTPUT)


def parts(record: Mapping[str, Any]) -> Parts:
    config = GIVEN["models"][record["model"]]
    return parts_of(config) if "model_type" in config else explicit(**config)


def plain(record: Mapping[str, Any]) -> Workload:
    return Workload(length=record["length"], attention="materialised")


def counts(record: Mapping[str, Any]) -> Counts:
    return count(parts(record), plain(record))


def of(found: Counts, *components: Component, name: str = "macs") -> int:
    each = found.by_component(name)
    return sum(each[component] for component in components)


def parameters(record):
    return count(parts(record), Workload(length=1)).parameters


def matrix_parameters(record):
    found = count(parts(record), Workload(length=1))
    return found.parameters - of(found, Component.NORMS, name="parameters")


def six_n_d(record):
    n = record["parameters"] if record["model"] is None else parameters(record)
    return record["factor"] * n * record["tokens"]


def training_per_token(record):
    return model_flops(parts(record), plain(record))


def utilisation(record):
    share = mfu(
        training_per_token(record),
        record["tokens_per_second"],
        record["peak"],
        record["devices"],
    )
    return 100 * share


def cache_of_a_token(record):
    return kv_cache(parts(record), tokens=1, dtype="bfloat16").per_token


def numbers_of_a_token(record):
    return Fraction(cache_of_a_token(record), 2)


def kept_cache(record):
    return kv_cache(parts(record), tokens=record["length"], dtype="float32").transformers


def groups_of_the_same_cache(record):
    """How many key-value heads of the same width would keep as many numbers as the latent."""
    attention = next(attention for *_, attention in parts(record).attentions())
    return Fraction(attention.cached, 2 * attention.d_value)


def forward(record):
    found = counts(record)
    assert 2 * of(found, *PRODUCTS) == record["attention"]
    return found.flops


def forward_and_backward(record):
    found = counts(record)
    unused = [line.backward for line in found.lines if line.name == record["without"]]
    assert len(unused) == bool(record["without"])
    return found.training_flops - 2 * sum(unused)


def crossing(record):
    sizes = record["model"]
    d, a, kv = sizes["d"], sizes["h_times_dh"], sizes["kv_dim"]
    width = gcd(a, kv)
    found = crossovers(
        explicit(
            d_model=d, layers=1, heads=a // width, kv_heads=kv // width, d_head=width, vocab=1,
            d_ff=sizes["d_ff"], gated=sizes["mlp_matrices"] == 3,
        )
    )  # fmt: skip
    by = {(each.other, each.pairs): each.value for each in found}
    return {
        "full_vs_mlp": by["MLP", "all"],
        "full_vs_all_linears": by["all linear layers", "all"],
        "full_vs_attn_projections": by["projections", "all"],
        "causal_vs_mlp": by["MLP", "causal"],
        "causal_vs_all_linears": by["all linear layers", "causal"],
    }


def ratios(record):
    n, found = record["length"], counts(record)
    half = count(parts(record), Workload(length=n, pairs="visible"))
    products, causal = of(found, *PRODUCTS), of(half, *PRODUCTS)
    one, mlp = of(found, Component.QUERY), of(found, Component.MLP)
    qkv, qkvo = of(found, *LINEAR[:3]), of(found, *LINEAR)
    return {
        "n/d": Fraction(of(found, Component.SCORES), one),
        "2n2d/nd2": Fraction(products, one),
        "2n2d/3nd2 (QKV)": Fraction(products, qkv),
        "2n2d/4nd2 (QKVO)": Fraction(products, qkvo),
        "2n2d/8nd2 (MLP)": Fraction(products, mlp),
        "2n2d/12nd2 (all linears)": Fraction(products, qkvo + mlp),
        "(4nd2+2n2d)/8nd2": Fraction(qkvo + products, mlp),
        "causal n(n+1)d/8nd2": Fraction(causal, mlp),
        "causal/12nd2": Fraction(causal, qkvo + mlp),
    }


def fused_and_not(record):
    sizes = {"length": record["length"], "batch": record["batch"]}
    dense = count(parts(record), Workload(**sizes, attention="materialised"))
    fused = count(parts(record), Workload(**sizes, attention="fused"))
    return {
        "fwd": 2 * of(dense, *PRODUCTS),
        "standard_fwd_bwd": 2 * (of(dense, *PRODUCTS) + of(dense, *PRODUCTS, name="backward")),
        "flash_fwd_bwd": 2 * (of(fused, *PRODUCTS) + of(fused, *PRODUCTS, name="backward")),
    }


FIGURES: dict[str, Callable[[Mapping[str, Any]], Any]] = {
    "parameters": parameters,
    "matrix parameters": matrix_parameters,
    "6ND": six_n_d,
    "training per token": training_per_token,
    "mfu": utilisation,
    "cache of a token": cache_of_a_token,
    "numbers of a token": numbers_of_a_token,
    "kept cache": kept_cache,
    "groups of the same cache": groups_of_the_same_cache,
    "forward": forward,
    "forward and backward": forward_and_backward,
    "crossovers": crossing,
    "ratios": ratios,
    "fused and not": fused_and_not,
}


def matches(found: Any, value: Any, how: str) -> bool:
    """Equal (binary fractions as they are written), to so many digits, or within a share."""
    if isinstance(value, dict):
        return found.keys() == value.keys() and all(
            matches(found[key], value[key], how) for key in value
        )
    if how == "equal":
        return bool(found == value if isinstance(value, int) else float(found) == value)
    if how.endswith("digits"):
        return rounded(found, int(how.split()[0])) == rounded(value, int(how.split()[0]))
    share = Fraction(how.removeprefix("within ").removesuffix(" %")) / 100
    return bool(abs(Fraction(found) - Fraction(value)) <= share * Fraction(value))


def rounded(value: Any, digits: int) -> Fraction:
    unit = Fraction(10) ** (int(log10(value)) + 1 - digits)
    return round(Fraction(value) / unit) * unit


@pytest.mark.parametrize("record", RECORDS, ids=[record["id"] for record in RECORDS])
def test_figure(record):
    assert matches(FIGURES[record["figure"]](record), record["value"], record["match"])


def printed(text: str) -> tuple[Fraction, int]:
    """A size as it is printed, and its digits: zeros at the end of a whole number only fill it.

    GPT-3's table has three digits or more; PaLM's has two decimals.
    """
    number = text[:-1]
    scale = {"M": 10**6, "B": 10**9}[text[-1]]
    digits = number.replace(".", "")
    kept = len(digits) if "." in number else max(3, len(digits.rstrip("0")))
    return Fraction(number) * scale, kept


@pytest.mark.parametrize(
    "record", [r for r in RECORDS if "printed" in r], ids=lambda record: record["id"]
)
def test_sizes_round_to_what_is_printed(record):
    value, digits = printed(record["printed"])
    assert rounded(FIGURES[record["figure"]](record), digits) == value


@pytest.mark.parametrize(
    "record", [r for r in RECORDS if "active" in r], ids=lambda record: record["id"]
)
def test_parameters_that_work_on_a_token(record):
    assert count(parts(record), Workload(length=1)).active == record["active"]


def test_every_record_is_tested_or_left_out_by_name():
    names = [each["id"] for key in ("records", "elsewhere", "left_out") for each in GIVEN[key]]
    assert sorted(names) == sorted(GIVEN["ids"])
    assert len(GIVEN["ids"]) == len(set(GIVEN["ids"])) == 137
    assert all(each["reason"] for each in GIVEN["left_out"])
    assert all((HERE / each["file"]).is_file() for each in GIVEN["elsewhere"])


def test_every_record_says_where_it_comes_from():
    assert all(record["source"] and record["unit"] for record in RECORDS)


@pytest.mark.parametrize("record", RECORDS, ids=[record["id"] for record in RECORDS])
def test_another_value_would_not_pass(record):
    value = record["value"]
    wrong = (
        {key: other * 1.02 for key, other in value.items()}
        if isinstance(value, dict)
        else value * 1.02
        if record["match"] != "equal"
        else value + 1
    )
    assert not matches(FIGURES[record["figure"]](record), wrong, record["match"])
