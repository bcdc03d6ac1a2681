"""The folder of a run: a checkpoint that other commands open, and what a resumed run needs.

    architecture.json  model.safetensors  tokenizer.json     the model as it is now
    training.safetensors                                     weights, moments of AdamW, step, config

Everything that a resumed run reads stands in one file, so that no crash can leave weights of one
step with moments of another. Each file is written beside the old one, flushed to the disk, and then
renamed: a full disk or a killed process leaves the checkpoint before intact.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.optim import Optimizer

from headwise.errors import FileError
from headwise.files import whole
from headwise.models.architecture import Architecture

__all__ = ["STATE", "State", "read_state", "restore", "save", "write_model"]

STATE = "training.safetensors"
_MOMENTS = ("exp_avg", "exp_avg_sq")


class State(NamedTuple):
    """What a run continues from: what is said about it, and its tensors by name."""

    about: dict[str, Any]
    tensors: dict[str, Tensor]


def write_model(folder: Path, architecture: Architecture, tensors: dict[str, Tensor]) -> None:
    """``architecture.json`` and ``model.safetensors``, each whole or not at all."""
    with whole(folder / "architecture.json") as temporary:
        temporary.write_text(architecture.model_dump_json(indent=2) + "\n", encoding="utf-8")
        _flush(temporary)
    _write(folder / "model.safetensors", tensors, {"format": "headwise"})


def save(
    folder: Path, architecture: Architecture, model: nn.Module, optimizer: Optimizer, **about: Any
) -> None:
    """Write the state of a run, then the model; ``about`` holds the step and the config.

    Raises:
        FileError: it cannot be written, such as on a full disk; the old files stand.
    """
    weights = {name: _plain(p) for name, p in model.named_parameters()}
    tensors = {f"model.{name}": weight for name, weight in weights.items()}
    for name, parameter in model.named_parameters():
        kept = optimizer.state[parameter]
        tensors |= {f"{moment}.{name}": _plain(kept[moment]) for moment in _MOMENTS}
    _write(folder / STATE, tensors, {"about": json.dumps(about)})
    write_model(folder, architecture, weights)


def read_state(folder: Path) -> State:
    """The state that a run in this folder continues from.

    Raises:
        FileError: there is none, or the file is cut off or is something else.
    """
    path = folder / STATE
    try:
        with safe_open(path, framework="pt") as file:
            about = json.loads(file.metadata()["about"])
            return State(about, {name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
    except FileNotFoundError:
        raise FileError(
            f"{folder} holds no run to resume: there is no {STATE}",
            to_do="leave out --resume to start one",
        ) from None
    except (SafetensorError, OSError, TypeError, KeyError, ValueError) as error:
        raise FileError(f"{path} is cut off or is not the state of a run: {error}") from None


def restore(state: State, model: nn.Module, optimizer: Optimizer) -> None:
    """Put the weights and moments of ``state`` into the model and the optimizer."""
    parameters = dict(model.named_parameters())
    wanted = {f"{kind}.{name}" for name in parameters for kind in ("model", *_MOMENTS)}
    if wanted != set(state.tensors):
        odd = sorted(wanted ^ set(state.tensors))
        raise FileError(
            f"the state of the run does not fit the model: {odd[0]} and {len(odd)} more"
        )
    for name, parameter in parameters.items():
        found = state.tensors[f"model.{name}"].shape
        if found != parameter.shape:
            raise FileError(
                f"the state of the run does not fit the model: {name} has the shape"
                f" {tuple(found)} there and {tuple(parameter.shape)} here"
            )
    step = float(state.about["step"])
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(state.tensors[f"model.{name}"])
            optimizer.state[parameter] = {
                "step": torch.tensor(step, dtype=torch.float32, device=parameter.device),
                **{m: state.tensors[f"{m}.{name}"].to(parameter.device) for m in _MOMENTS},
            }


def _plain(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous()


def _write(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    with whole(path) as temporary:
        try:
            save_file(tensors, temporary, metadata=metadata)
        except SafetensorError as error:
            raise FileError(f"cannot write {path}: {error}; what was there stands") from None
        _flush(temporary)


def _flush(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
