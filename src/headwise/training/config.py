"""Everything that decides a run: the same config, text and program give the same losses."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from headwise.errors import FileError, OptionError
from headwise.models.architecture import Architecture
from headwise.training.schedule import Shape
from headwise.training.sizes import Sizes, published

__all__ = ["MAY_CHANGE", "TrainConfig", "read_config"]

MAY_CHANGE = frozenset(
    {"steps", "eval_every", "eval_windows", "save_every", "log_every", "threads", "device"}
)  # what a resumed run may be given anew; everything else would make another run of it


class TrainConfig(BaseModel):
    """The settings of a run, each with its default; unknown names are refused.

    ``batch`` is the number of sequences of one step over all processes and micro-batches.
    ``weight_decay`` acts on matrices; ``decay_all`` extends it to norms, biases and embeddings.
    ``repeated`` is the share of sequences that are repeated random tokens. With ``preset``, the
    vocabulary is the tokenizer's, and the context is that of the preset unless it is given.

    Example:
        >>> config = TrainConfig(steps=100, model={"layers": 2})
        >>> config.model.layers, config.batch
        (2, 16)
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    model: Sizes = Sizes()
    preset: str | None = None  # a published decoder by name, in place of ``model``
    architecture: Architecture | None = None  # in full, in place of ``model``
    tokenizer: str = "bpe"  # or "bytes", or a tokenizer.json
    vocab: int = Field(default=4096, ge=257)
    context: int = Field(default=512, ge=2)
    batch: int = Field(default=16, ge=1)
    accumulate: int = Field(default=1, ge=1)
    steps: int = Field(default=2000, ge=1)
    lr: float = Field(default=1e-3, gt=0)
    final_lr: float = Field(default=0.0, ge=0)
    warmup: int = Field(default=100, ge=0)
    schedule: Shape = "cosine"
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=0.1, ge=0)
    decay_all: bool = False
    clip: float | None = Field(default=1.0, gt=0)
    precision: Literal["float32", "bfloat16"] = "float32"
    seed: int = Field(default=0, ge=0, lt=1 << 63)
    validation: float = Field(default=0.05, ge=0, lt=1)
    repeated: float = Field(default=0.0, ge=0, le=1)
    shortest_period: int = Field(default=8, ge=1)
    longest_period: int = Field(default=64, ge=1)
    copies: int = Field(default=4, ge=2)
    eval_every: int = Field(default=200, ge=1)
    eval_windows: int = Field(default=32, ge=1)
    save_every: int = Field(default=200, ge=1)
    log_every: int = Field(default=10, ge=1)
    threads: int | None = Field(default=None, ge=1)
    device: str = "auto"

    @model_validator(mode="before")
    @classmethod
    def _context_of_preset(cls, given: Any) -> Any:
        name = given.get("preset") if isinstance(given, Mapping) else None
        if not isinstance(name, str) or given.get("context") is not None:
            return given
        return {**given, "context": published(name).context}

    @model_validator(mode="after")
    def _one_model(self) -> TrainConfig:
        ways = [
            ("model" in self.model_fields_set, "sizes of the model"),
            (self.architecture is not None, "an architecture"),
        ]
        also = [words for is_given, words in ways if is_given]
        if self.preset is not None and also:
            raise ValueError(f"the preset {self.preset} and {also[0]}; allowed: one of the two")
        return self

    @model_validator(mode="after")
    def _fits(self) -> TrainConfig:
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas {self.betas}; allowed: two numbers from 0 to below 1")
        if self.batch % self.accumulate:
            raise ValueError(
                f"a batch of {self.batch} cannot be cut into {self.accumulate} equal micro-batches"
            )
        if self.final_lr > self.lr:
            raise ValueError(f"final_lr {self.final_lr} is above lr {self.lr}")
        if self.repeated and not self.shortest_period <= self.longest_period <= self.context:
            raise ValueError(
                f"repeated periods from {self.shortest_period} to {self.longest_period} with a"
                f" context of {self.context}; allowed: shortest <= longest <= context"
            )
        return self

    def changed(self, other: TrainConfig) -> list[str]:
        """The settings in which two configs differ, besides those a resumed run may change.

        Example:
            >>> TrainConfig(steps=5).changed(TrainConfig(steps=9, seed=1))
            ['seed']
        """
        return [
            name
            for name in type(self).model_fields
            if name not in MAY_CHANGE and getattr(self, name) != getattr(other, name)
        ]


def read_config(
    base: TrainConfig | Mapping[str, Any] | str | Path | None = None, /, **options: Any
) -> TrainConfig:
    """A config from a record, a mapping, a .toml or .json file, or the defaults; options win.

    Options that are None do not count. ``model`` may be given in part: the rest stays.

    Raises:
        FileError: the file is missing or is not TOML or JSON.
        OptionError: a name that is not known, or a value that is not allowed (each named).

    Example:
        >>> read_config({"lr": 0.01, "model": {"layers": 3}}, steps=7, model={"heads": 2}).model
        Sizes(d_model=256, layers=3, heads=2, ...)
        >>> read_config(lr=0)
        Traceback (most recent call last):
            ...
        headwise.errors.OptionError: lr is 0: input should be greater than 0
    """
    where = f"{base}: " if isinstance(base, str | Path) else ""
    values = _values(base)
    given = {name: value for name, value in options.items() if value is not None}
    if isinstance(given.get("model"), Mapping) and isinstance(values.get("model"), Mapping):
        given["model"] = {**values["model"], **given["model"]}
    try:
        config = TrainConfig.model_validate({**values, **given})
        config.model.architecture(vocab=config.vocab, context=config.context)
    except ValidationError as error:
        raise OptionError(where + _first(error)) from None
    return config


def _values(base: TrainConfig | Mapping[str, Any] | str | Path | None) -> dict[str, Any]:
    if base is None:
        return {}
    if isinstance(base, TrainConfig):
        return base.model_dump(exclude_unset=True)
    if isinstance(base, Mapping):
        return dict(base)
    path = Path(base).expanduser()
    try:
        text = path.read_text(encoding="utf-8")
        return json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except FileNotFoundError:
        raise FileError(f"there is no config file {path}") from None
    except OSError as error:
        raise FileError(f"cannot read the config {path}: {str(error.strerror).lower()}") from None
    except ValueError as error:
        kind = "JSON" if path.suffix == ".json" else "TOML"
        raise FileError(f"the config {path} is not {kind}: {error}") from None


def _first(error: ValidationError) -> str:
    """The first fault in words, and how many more there are."""
    fault = error.errors(include_url=False)[0]
    name = ".".join(str(part) for part in fault["loc"])
    more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
    if fault["type"] == "extra_forbidden":
        return f"there is no setting {name}{more}"
    message = fault["msg"].removeprefix("Value error, ")
    if not name or isinstance(fault["input"], dict):
        return f"{name + ': ' if name else ''}{message}{more}"
    return f"{name} is {fault['input']}: {message[:1].lower()}{message[1:]}{more}"
