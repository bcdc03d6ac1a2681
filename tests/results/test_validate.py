"""A data set that breaks the schema is refused, with what broke it."""

from __future__ import annotations

import runpy
from pathlib import Path

import numpy as np
import pytest

from headwise.axes import AXES
from headwise.errors import InputError
from headwise.results.label import to_dataset
from headwise.results.records import VALUES
from headwise.results.schema import COORDINATES, DIMENSIONS, VARIABLES
from headwise.results.validate import check
from tests.results.synthetic import make_record

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def good():
    return to_dataset(make_record(gradients=True))


def test_good_data_in_any_order_of_dimensions_passes(dataset):
    check(dataset)
    check(dataset.transpose(*reversed(list(dataset.sizes))))


BROKEN = {
    "not a scan": (lambda d: d.drop_attrs(), "no schema_version, so it is not a Headwise scan"),
    "version in words": (
        lambda d: d.assign_attrs(schema_version="one"),
        "the scan has schema version one;",
    ),
    "version": (lambda d: d.assign_attrs(schema_version=99), "the scan has schema version 99;"),
    "about": (lambda d: d.assign_attrs(about="[1]"), "'about' of the scan is not the JSON text"),
    "missing": (lambda d: d.drop_vars("entropy"), "the scan lacks the variable 'entropy'"),
    "coordinate": (lambda d: d.drop_vars("token"), "the scan lacks the coordinate 'token'"),
    "unknown": (lambda d: d.assign(mood=d["entropy"]), "the variable 'mood' is not in the schema"),
    "dims": (
        lambda d: d.assign(entropy=d["rows"].astype(float)),
        r"the variable 'entropy' has dimensions \(layer\); allowed: \(layer, head\) in any order",
    ),
    "dtype": (
        lambda d: d.assign(entropy=d["entropy"].astype("float32")),
        "the variable 'entropy' has dtype float32; allowed: float64",
    ),
    "text": (
        lambda d: d.assign_coords(token=("key", np.arange(d.sizes["key"]))),
        "the coordinate 'token' has dtype int64; allowed: str",
    ),
    "not all text": (
        lambda d: d.assign_coords(module=("layer", np.array([1, "a", "b", "c", "d"], object))),
        "the coordinate 'module' has dtype object; allowed: str",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_data_set_is_refused(good, name):
    breaks, message = BROKEN[name]
    with pytest.raises(InputError, match=message):
        check(breaks(good))


def test_the_table_is_whole():
    for variable in (*VARIABLES.values(), *COORDINATES.values()):
        assert set(variable.dims) <= set(DIMENSIONS)
        assert variable.long_name
    for variable in VARIABLES.values():
        assert variable.units
        assert variable.definition
    assert set(VALUES) <= set(VARIABLES)
    assert set(DIMENSIONS) - {"parameter"} <= set(AXES)
    assert not set(VARIABLES) & set(COORDINATES)


def test_the_page_of_the_schema_is_up_to_date():
    written = (ROOT / "docs" / "schema.md").read_text(encoding="utf-8")
    script = runpy.run_path(str(ROOT / "scripts" / "write_schema_docs.py"))
    assert written == script["page"](), "run: python scripts/write_schema_docs.py"
