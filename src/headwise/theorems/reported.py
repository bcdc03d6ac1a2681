"""Which statements hold on a measured model: their outcomes as facts of the scan."""

from __future__ import annotations

import json
from typing import Final

import xarray as xr

from headwise.observation.loaded import LoadedModel
from headwise.observation.run import Progress
from headwise.results.validate import about
from headwise.theorems.checked import check_model, to_json
from headwise.theorems.registry import subjects
from headwise.theorems.trained import Trained

__all__ = ["add_theorems"]

TOKENS: Final = 128  # that the checks read
# A second each on a model of a hundred million parameters, or said elsewhere in a report;
# `headwise theorems MODEL` has them.
LEFT_OUT: Final[tuple[str, ...]] = (
    "causal-mask-orders",
    "complexity-table",
    "concat-is-sum",
    "crossover-lengths",
    "fine-tuning-update-rank",
    "gauge-freedom",
    "heads-exchangeable",
    "induction-needs-two-layers",
    "permutation-equivariance",
    "trained-ranks",
)


def add_theorems(
    scan: xr.Dataset,
    loaded: LoadedModel,
    *,
    text: str | None = None,
    tokens: int | None = None,
    progress: Progress | None = None,
) -> xr.Dataset:
    """The data set of a scan with what the checks of statements found on its model.

    The facts of the run get ``theorems``: ``checked``, a list of what ``to_json`` gives, and
    ``left_out``, the names of statements whose checks would take too long beside a scan.

    Args:
        text: what was scanned; None: the text inside the package. ``tokens``: of it, 128 at most.

    Example:
        >>> import headwise as hw
        >>> from headwise.observation.run import opened
        >>> loaded = opened(None, None, None, False)
        >>> found = add_theorems(hw.scan(loaded, tokens=40).dataset, loaded, tokens=40)
        >>> about(found)["theorems"]["checked"][0]["theorem"]
        'convex-combination'
    """
    able = [(subject, each) for subject, each in subjects() if each.model is not None]
    chosen = [(subject, each) for subject, each in able if each.name not in LEFT_OUT]
    left_out = [each.name for _, each in able if each.name in LEFT_OUT]
    model = Trained(loaded, text, tokens=min(TOKENS, tokens or TOKENS))
    found = [to_json(each) for each in check_model(chosen, model, progress=progress)]
    facts = {**about(scan), "theorems": {"checked": found, "left_out": left_out}}
    noted = scan.copy()
    noted.attrs = {**scan.attrs, "about": json.dumps(facts, sort_keys=True)}
    return noted
