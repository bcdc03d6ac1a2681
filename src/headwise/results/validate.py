"""Checks a data set against the schema; the order of dimensions never matters."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import xarray as xr

from headwise.errors import InputError
from headwise.results.schema import (
    CIRCUIT_COORDINATES,
    COORDINATES,
    DIMENSIONS,
    SCHEMA_VERSION,
    VARIABLES,
    Variable,
)

__all__ = ["about", "check", "holds_circuits"]


def check(dataset: xr.Dataset) -> None:
    """Raise an ``InputError`` that names the first thing that breaks the schema.

    Checked: the schema version, the ``about`` facts, that every required coordinate and variable
    is there, that nothing unknown is, and the dimensions and dtype of each.
    """
    version = dataset.attrs.get("schema_version")
    if version is None:
        raise InputError("the data set has no schema_version, so it is not a Headwise scan")
    if version != SCHEMA_VERSION:
        raise InputError(
            f"the scan has schema version {version}",
            allowed=f"version {SCHEMA_VERSION}",
            to_do="open it with the version of Headwise that wrote it",
        )
    about(dataset)
    for what, table, present in (
        ("coordinate", COORDINATES, dataset.coords),
        ("variable", VARIABLES, dataset.data_vars),
    ):
        needed = [name for name, v in table.items() if v.required]
        if holds_circuits(dataset):
            needed = [name for name in CIRCUIT_COORDINATES if name in table]
        missing = [name for name in needed if name not in present]
        if missing:
            raise InputError(f"the scan lacks the {what} {missing[0]!r}")
        for name, array in present.items():
            if name not in table:
                raise InputError(f"the {what} {str(name)!r} is not in the schema")
            _check_array(f"the {what} {str(name)!r}", table[str(name)], array)


def holds_circuits(dataset: xr.Dataset) -> bool:
    """Whether the set is one of circuits alone, without a scan."""
    return bool(dataset.attrs.get("holds") == "circuits")


def about(dataset: xr.Dataset) -> dict[str, Any]:
    """The facts of the run: model, tokens, dtype, exactness, seconds, versions, …

    Source: the ``about`` attribute, JSON text.
    """
    try:
        facts = json.loads(dataset.attrs["about"])
    except (KeyError, TypeError, ValueError):
        facts = None
    if not isinstance(facts, dict):
        raise InputError("the attribute 'about' of the scan is not the JSON text of an object")
    return facts


def _check_array(what: str, variable: Variable, array: xr.DataArray) -> None:
    if set(array.dims) != set(variable.dims):
        raise InputError(
            f"{what} has dimensions ({', '.join(map(str, array.dims))})",
            allowed=f"({', '.join(variable.dims)}) in any order",
        )
    if any(dim not in DIMENSIONS for dim in array.dims):
        raise AssertionError(f"{what}: the schema uses an undeclared dimension")
    if not _fits(array.to_numpy(), variable.kind):
        raise InputError(f"{what} has dtype {array.dtype}", allowed=variable.kind)


def _fits(values: np.ndarray, kind: str) -> bool:
    if kind != "str":
        return bool(values.dtype == np.dtype(kind))
    if values.dtype.kind == "O":
        return all(isinstance(value, str) for value in values.flat)
    return values.dtype.kind in "UT"
