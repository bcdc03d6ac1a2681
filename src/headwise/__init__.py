"""Headwise: an exact measuring instrument for transformers.

The public names, resolved on first use (PEP 562) so that ``import headwise`` costs nothing.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# Public name -> "module:attribute", or the module itself.
_WHERE = {
    "LightningMonitor": "headwise.monitoring.lightning:LightningMonitor",
    "Monitor": "headwise.monitoring.monitor:Monitor",
    "TensorBoardWriter": "headwise.monitoring.tensorboard:TensorBoardWriter",
    "TrainerMonitor": "headwise.monitoring.trainer:TrainerMonitor",
    "attention": "headwise.attention",
    "circuits": "headwise.circuits.dataset:circuits",
    "cost": "headwise.cost.planner:cost",
    "errors": "headwise.errors",
    "findings": "headwise.report.findings:findings",
    "generate": "headwise.models.text:generate",
    "load": "headwise.models.checkpoints.loading:load",
    "load_model": "headwise.observation.loading:load_model",
    "load_scan": "headwise.results.io:load",
    "masks": "headwise.attention.masks",
    "models": "headwise.models",
    "observe": "headwise.observation.attach:observe",
    "positions": "headwise.positions",
    "report": "headwise.report.page:write_report",
    "save": "headwise.models.checkpoints.own:save",
    "scan": "headwise.observation.run:scan",
    "stream": "headwise.models.text:stream",
    "theorems": "headwise.theorems.registry:theorems",
    "train": "headwise.training.loop:train",
    "truncate": "headwise.circuits.truncation:truncate",
}

__all__ = [
    "LightningMonitor",
    "Monitor",
    "TensorBoardWriter",
    "TrainerMonitor",
    "attention",
    "circuits",
    "cost",
    "errors",
    "findings",
    "generate",
    "load",
    "load_model",
    "load_scan",
    "masks",
    "models",
    "observe",
    "positions",
    "report",
    "save",
    "scan",
    "stream",
    "theorems",
    "train",
    "truncate",
]

if TYPE_CHECKING:
    from headwise import attention, errors, models, positions
    from headwise.attention import masks
    from headwise.circuits.dataset import circuits
    from headwise.circuits.truncation import truncate
    from headwise.cost.planner import cost
    from headwise.models.checkpoints.loading import load
    from headwise.models.checkpoints.own import save
    from headwise.models.text import generate, stream
    from headwise.monitoring.lightning import LightningMonitor
    from headwise.monitoring.monitor import Monitor
    from headwise.monitoring.tensorboard import TensorBoardWriter
    from headwise.monitoring.trainer import TrainerMonitor
    from headwise.observation.attach import observe
    from headwise.observation.loading import load_model
    from headwise.observation.run import scan
    from headwise.report.findings import findings
    from headwise.report.page import write_report as report
    from headwise.results.io import load as load_scan
    from headwise.theorems.registry import theorems
    from headwise.training.loop import train


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'headwise' has no attribute {name!r}")
    module, _, attribute = _WHERE[name].partition(":")
    found: Any = importlib.import_module(module)
    return getattr(found, attribute) if attribute else found


def __dir__() -> list[str]:
    return sorted({*globals(), *_WHERE})


class _Headwise(ModuleType):
    """The first import of a subpackage binds its name here; a public function keeps that name.

    So ``headwise.report`` is the function, and ``from headwise.report.page import …`` the package.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if not (isinstance(value, ModuleType) and ":" in _WHERE.get(name, "")):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Headwise
