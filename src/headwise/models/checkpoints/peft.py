"""LoRA adapters as the ``peft`` library saves them: adapter_config.json, adapter_model.safetensors.

Strict: every tensor of the adapter is used, every projection that its configuration targets has
both of its factors, and what would change the mathematics (DoRA and the like) is refused.
Format: huggingface.co/docs/peft, "PEFT checkpoint format".
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from headwise.errors import ModelError
from headwise.models.checkpoints.checks import listed, read_json
from headwise.models.checkpoints.files import TensorFiles
from headwise.models.low_rank import LowRankLinear, attach, projections

__all__ = ["Place", "adapted_names", "load_peft"]

# Where a Hugging Face projection is in another model: a path, or several, each with its rows.
Place = str | Sequence[tuple[str, slice | Tensor]]

_ROOT: Final = "base_model.model."  # before the name of every projection
_READ: Final = frozenset(
    (
        "peft_type",
        "r",
        "lora_alpha",
        "use_rslora",
        "rank_pattern",
        "alpha_pattern",
        "target_modules",
        "exclude_modules",
        "layers_to_transform",
        "layers_pattern",
        "bias",
        "lora_dropout",
        "init_lora_weights",
    )
)
# Names, training, and fan_in_fan_out, which the module itself says: nothing that is computed.
_NO_MATTER: Final = frozenset(
    (
        "task_type",
        "auto_mapping",
        "base_model_name_or_path",
        "revision",
        "inference_mode",
        "peft_version",
        "fan_in_fan_out",
        "megatron_core",
        "runtime_config",
        "qalora_group_size",
        "eva_config",
        "loftq_config",
        "corda_config",
        "lora_ga_config",
        "ensure_weight_tying",
    )
)
_REFUSED: Final = {
    "use_dora": "DoRA, which also changes the length of every row of the weight",
    "modules_to_save": "modules trained as a whole, which are no change of low rank",
    "lora_bias": "biases on the factors",
    "trainable_token_indices": "token embeddings of its own",
    "target_parameters": "changes of parameters that are no projections",
}
_STARTS: Final = (True, False, None, "gaussian", "eva", "orthogonal")


@dataclass(frozen=True)
class _Config:
    """What the configuration says about one projection or another."""

    path: Path
    raw: Mapping[str, Any]

    def targets(self, name: str) -> bool:
        """Whether the projection of this name is to have an adapter."""
        chosen, left_out = self.raw.get("target_modules") or [], self.raw.get("exclude_modules")
        if left_out and _matches(left_out, name):
            return False
        if isinstance(chosen, str) or not _matches(chosen, name) or name in chosen:
            return _matches(chosen, name)
        layers = self.raw.get("layers_to_transform")
        if layers is None or layers == []:
            return True
        numbers = [layers] if isinstance(layers, int) else layers
        return self._layer(name) in numbers

    def _layer(self, name: str) -> int | None:
        patterns = self.raw.get("layers_pattern") or r"[^.]*"
        for pattern in [patterns] if isinstance(patterns, str) else patterns:
            found = re.match(rf"(?:.*?\.)?{pattern}\.(\d+)\.", name)
            if found:
                return int(found[1])
        return None

    def rank(self, name: str) -> int:
        """r of a projection."""
        return int(self._patterned("rank_pattern", name, self.raw["r"]))

    def alpha(self, name: str) -> float:
        """alpha of a projection."""
        return float(self._patterned("alpha_pattern", name, self.raw["lora_alpha"]))

    def _patterned(self, key: str, name: str, otherwise: float) -> float:
        for pattern, value in (self.raw.get(key) or {}).items():
            if re.match(rf"(.*\.)?({pattern})$", name):
                return float(value)
        return otherwise


def load_peft(
    model: nn.Module, folder: str | Path, *, names: Mapping[str, Place] | None = None
) -> tuple[str, ...]:
    """Attach a PEFT LoRA adapter to a model, unmerged; the paths that have an adapter now.

    Args:
        model: changed in place, once everything has been checked; only A and B stay trainable.
        folder: with adapter_config.json and adapter_model.safetensors.
        names: where each projection of the Hugging Face model is in this one. A fused projection
            is given as its parts, (path, rows of the fused output). None: the same names.

    Raises:
        ModelError: a factor is missing, left over or of another shape, or the adapter is of a kind
            that W + s·B·A does not describe.
    """
    here = Path(folder).expanduser()
    config = _read_config(here)
    there = projections(model)
    places = {path: path for path in there} if names is None else names
    factors = _factors(here, config, places)
    adapters: dict[str, LowRankLinear] = {}
    for name, (a, b) in factors.items():
        place = places[name]
        for path in [place] if isinstance(place, str) else [path for path, _ in place]:
            if path not in there:
                raise ModelError(
                    f"the model has no projection {path} without an adapter",
                    to_do="remove_low_rank(model) first, if it has one",
                )
        for path, part in _parts(place, b, f"lora_B of {name}"):
            adapters[path] = _adapter(there[path], config, name, a, part)
    return attach(model, adapters)


def adapted_names(folder: str | Path) -> tuple[str, ...]:
    """The projections that an adapter has factors for, by their names in the adapted model.

    None of them where there is no file to read: ``load_peft`` says what is wrong with the folder.
    """
    file = Path(folder).expanduser() / "adapter_model.safetensors"
    if not file.is_file():
        return ()
    found = (
        re.fullmatch(rf"{re.escape(_ROOT)}(.+)\.lora_[AB]\.weight", name)
        for name in TensorFiles.open(file)
    )
    return tuple(dict.fromkeys(match[1] for match in found if match))


def _read_config(folder: Path) -> _Config:
    path = folder / "adapter_config.json"
    if not path.is_file():
        raise ModelError(f"{folder} has no adapter_config.json, so it is not a PEFT adapter folder")
    raw = read_json(path)
    if raw.get("peft_type") != "LORA":
        raise ModelError(f"{path} is an adapter of the type {raw.get('peft_type')}", allowed="LORA")
    reason = [why for key, why in _REFUSED.items() if raw.get(key)]
    if raw.get("bias", "none") != "none":
        reason.append("trained biases of the model")
    if raw.get("init_lora_weights", True) not in _STARTS:
        reason.append(f"{raw['init_lora_weights']}, which changes the weights of the model first")
    other = set(raw) - _READ - _NO_MATTER - set(_REFUSED)
    reason += [f"{key}, which is not known here" for key in sorted(other) if raw[key]]
    if reason:
        raise ModelError(
            f"the adapter {folder} has {reason[0]}",
            allowed="W + s·B·A on projections",
            to_do="merge it with the peft library and load the merged model",
        )
    wrong = [key for key, fits in _kinds(raw).items() if not fits]
    if wrong:
        found = f"{wrong[0]} = {raw[wrong[0]]!r}" if wrong[0] in raw else f"no {wrong[0]}"
        raise ModelError(
            f"{path} has {found}, which cannot be used", to_do="save the adapter again"
        )
    return _Config(path, raw)


def _kinds(raw: Mapping[str, Any]) -> dict[str, bool]:
    """Whether each value that is read is of the kind that it has to be."""
    layers, pattern = raw.get("layers_to_transform"), raw.get("layers_pattern")
    numbers = layers if isinstance(layers, list) else [layers]
    return {
        "r": type(raw.get("r")) is int and raw["r"] > 0,
        "lora_alpha": type(raw.get("lora_alpha")) in (int, float),
        "lora_dropout": type(raw.get("lora_dropout", 0.0)) in (int, float),
        "target_modules": _names_something(raw.get("target_modules"), whole=True),
        "exclude_modules": not raw.get("exclude_modules")
        or _names_something(raw["exclude_modules"], whole=True),
        "layers_pattern": not pattern or _names_something(pattern),
        "layers_to_transform": layers is None or all(type(n) is int for n in numbers),
        **{key: _patterns(raw.get(key)) for key in ("rank_pattern", "alpha_pattern")},
    }


def _names_something(value: Any, *, whole: bool = False) -> bool:
    """A regular expression, or a list of names (``whole``) or of expressions."""
    if isinstance(value, str):
        return _compiles(value)
    names = isinstance(value, list) and all(isinstance(each, str) for each in value)
    return names and (whole or all(_compiles(each) for each in value))


def _patterns(value: Any) -> bool:
    if value is None:
        return True
    numbers = isinstance(value, dict) and all(type(x) in (int, float) for x in value.values())
    return numbers and all(_compiles(key) for key in value)


def _compiles(pattern: str) -> bool:
    try:
        re.compile(pattern)
    except re.error:
        return False
    return True


def _factors(
    folder: Path, config: _Config, names: Iterable[str]
) -> dict[str, tuple[Tensor, Tensor]]:
    """A and B of every projection, after making sure that none is missing or left over."""
    file = folder / "adapter_model.safetensors"
    if not file.is_file():
        pickled = (folder / "adapter_model.bin").is_file()
        raise ModelError(
            f"{folder} has no adapter_model.safetensors",
            to_do="its .bin can run code when it is opened; save the adapter again with"
            " safe_serialization=True"
            if pickled
            else None,
        )
    tensors = TensorFiles.open(file)
    expected = {
        f"{_ROOT}{name}.lora_{side}.weight": name
        for name in names
        if config.targets(name)
        for side in "AB"
    }
    unexpected = [name for name in tensors if name not in expected]
    if unexpected:
        raise ModelError(
            f"the adapter {folder} has {listed(unexpected)}, which the model has no place for",
            to_do="it belongs to another model, or is of another kind",
        )
    missing = [name for name in expected if name not in tensors]
    if missing or not expected:
        raise ModelError(f"the adapter {folder} lacks {listed(missing) or 'every tensor'}")
    found = dict.fromkeys(expected.values())
    return {
        name: (
            tensors.read(f"{_ROOT}{name}.lora_A.weight"),
            tensors.read(f"{_ROOT}{name}.lora_B.weight"),
        )
        for name in found
    }


def _matches(targets: str | Sequence[str], name: str) -> bool:
    """As the library does: a whole path by one expression, or the end of a path by its parts."""
    if isinstance(targets, str):
        return re.fullmatch(targets, name) is not None
    return any(name == target or name.endswith(f".{target}") for target in targets)


def _parts(place: Place, b: Tensor, what: str) -> list[tuple[str, Tensor]]:
    """B cut by the rows of the parts, which are to be all of its rows, each of them once."""
    if isinstance(place, str):
        return [(place, b)]
    wanted = sum(
        rows.stop - rows.start if isinstance(rows, slice) else len(rows) for _, rows in place
    )
    if b.dim() != 2 or len(b) != wanted:
        raise ModelError(
            f"{what} has the shape {tuple(b.shape)} where the model has {wanted} rows",
            to_do="the adapter belongs to a model of another size",
        )
    return [(path, b[rows]) for path, rows in place]


def _adapter(base: nn.Module, config: _Config, name: str, a: Tensor, b: Tensor) -> LowRankLinear:
    made = LowRankLinear(
        base,
        rank=config.rank(name),
        alpha=config.alpha(name),
        rslora=bool(config.raw.get("use_rslora")),
        dropout=float(config.raw.get("lora_dropout") or 0.0),
    )
    for letter, mine, given in (("A", made.A, a), ("B", made.B, b)):
        if given.shape != mine.shape:
            raise ModelError(
                f"lora_{letter} of {name} has the shape {tuple(given.shape)} where the model and"
                f" {config.path} give {tuple(mine.shape)}",
                to_do="the adapter belongs to a model of another size",
            )
        with torch.no_grad():
            mine.copy_(given)
    return made
