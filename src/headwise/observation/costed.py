"""What a measured model costs: its sizes as facts of the scan, held against a real count."""

from __future__ import annotations

import json
from typing import Any

import xarray as xr

from headwise.cost.config import is_own, parts_of
from headwise.cost.counting import count
from headwise.cost.workload import Workload
from headwise.errors import HeadwiseError
from headwise.observation.counted import verify
from headwise.observation.loaded import LoadedModel
from headwise.results.validate import about

__all__ = ["add_cost"]


def add_cost(scan: xr.Dataset, loaded: LoadedModel) -> xr.Dataset:
    """The data set of a scan with the sizes of its model, or with a note why they are not known.

    The facts of the run get ``cost``: ``config`` (what ``headwise.cost`` reads), ``length`` (the
    longest text measured), and ``checks``: [what, predicted, counted], parameters against those of
    the model in memory, FLOPs against the same model on the meta device.

    Example:
        >>> import headwise as hw
        >>> from headwise.observation.run import opened
        >>> loaded = opened(None, None, None, False)
        >>> found = add_cost(hw.scan(loaded, tokens=40).dataset, loaded)
        >>> about(found)["cost"]["length"], about(found)["cost"]["checks"][0][0]
        (40, 'parameters')
    """
    facts = about(scan)
    try:
        facts["cost"] = _facts(loaded, _longest(scan))
    except HeadwiseError as error:
        facts["notes"] = [*facts.get("notes", []), f"no cost: {error}"]
    noted = scan.copy()
    noted.attrs = {**scan.attrs, "about": json.dumps(facts, sort_keys=True)}
    return noted


def _longest(scan: xr.Dataset) -> int:
    return int(scan["position"].max()) + 1


def _facts(loaded: LoadedModel, length: int) -> dict[str, Any]:
    config = _config(loaded.model)
    parts = parts_of(config, loaded.name)
    stored = sum(p.numel() for p in loaded.model.parameters())
    predicted = count(parts, Workload(length=length)).parameters
    checks: list[list[Any]] = [["parameters", predicted, stored]]
    if not is_own(config):
        try:
            found = verify(config, length=length)
        except HeadwiseError as error:
            return {"config": config, "length": length, "checks": checks, "why": str(error)}
        checks += [
            ["FLOPs forward", found.forward, found.counted_forward],
            ["FLOPs forward and backward", found.training, found.counted_training],
        ]
    return {"config": config, "length": length, "checks": checks}


def _config(model: Any) -> dict[str, Any]:
    """The configuration as JSON has it, with the class that was really run."""
    if hasattr(model, "architecture"):
        own: dict[str, Any] = json.loads(model.architecture.model_dump_json())
        return own
    found: dict[str, Any] = json.loads(model.config.to_json_string(use_diff=False))
    return {**found, "architectures": [type(model).__name__]}
