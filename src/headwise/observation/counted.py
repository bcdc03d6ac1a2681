"""The planner held against a real count: the model on the meta device, under FlopCounterMode.

Nothing is allocated: parameters and every product exist as shapes only. Attention is eager and
experts are multiplied one by one, so that the counter sees every product; the mask is given in four
dimensions, because transformers cannot build it from shapes.
"""

from __future__ import annotations

import importlib
import inspect
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from headwise.cost.config import parts_of
from headwise.cost.counting import count
from headwise.cost.workload import Workload
from headwise.errors import ModelError
from headwise.observation.quiet import quiet

__all__ = ["Verified", "verify"]

_META = torch.device("meta")


@dataclass(frozen=True, slots=True)
class Verified:
    """Predicted beside counted: parameters, and FLOPs of a forward pass, and with its backward."""

    model_class: str
    length: int
    batch: int
    parameters: int
    counted_parameters: int
    forward: int
    counted_forward: int
    training: int
    counted_training: int

    @property
    def equal(self) -> bool:
        """Whether all three are equal, to the unit."""
        return (self.parameters, self.forward, self.training) == (
            self.counted_parameters,
            self.counted_forward,
            self.counted_training,
        )


def verify(
    config: Mapping[str, Any], *, length: int, batch: int = 1, source: int | None = None
) -> Verified:
    """Count a model of transformers on the meta device, and say what the planner predicts.

    Args:
        config: the configuration, as in ``config.json``.
        length, batch, source: see ``Workload``.

    Raises:
        ModelError: a family that the planner or transformers does not know, or a model that does
            not run on the meta device.

    Example:
        >>> tiny = {"model_type": "gpt2", "n_embd": 24, "n_layer": 2, "n_head": 3,
        ...         "vocab_size": 53, "n_positions": 17}
        >>> found = verify(tiny, length=11)
        >>> found.equal, found.counted_parameters
        (True, 16176)
    """
    parts = parts_of(config)
    workload = Workload(length=length, batch=batch, source=source, attention="materialised")
    predicted = count(parts, workload)
    importlib.import_module("transformers")  # what is loaded inside quiet() would not be silenced
    with quiet():
        model = _on_meta(config, parts.model_class)
        inputs = _inputs(model, workload)
        try:
            with FlopCounterMode(display=False) as forward:
                model(**inputs)
            with FlopCounterMode(display=False) as training:
                _total(model(**inputs)).backward()
        except (RuntimeError, ValueError, TypeError, AttributeError, IndexError) as error:
            raise ModelError(
                f"{parts.model_class} does not run on the meta device: {_line(error)}"
            ) from error
    return Verified(
        model_class=parts.model_class,
        length=length,
        batch=batch,
        parameters=predicted.parameters,
        counted_parameters=sum(p.numel() for p in model.parameters()),
        forward=predicted.flops,
        counted_forward=forward.get_total_flops(),
        training=predicted.training_flops,
        counted_training=training.get_total_flops(),
    )


def _on_meta(config: Mapping[str, Any], name: str) -> nn.Module:
    import transformers

    form = getattr(transformers, name, None)
    if form is None:
        raise ModelError(f"transformers {transformers.__version__} has no class {name}")
    settings: dict[str, Any] = json.loads(json.dumps(dict(config)))
    kind = settings.pop("model_type")
    try:
        made = _of_class(transformers.AutoConfig.for_model(kind, **settings), form.config_class)
        made._experts_implementation = "batched_mm"
        if getattr(made, "pad_token_id", None) is None:
            made.pad_token_id = 0  # classifiers of sequences refuse batches without one
        with _META:
            model: nn.Module = form._from_config(made, attn_implementation="eager")
    except Exception as error:  # validators of configurations raise types of several libraries
        raise ModelError(f"transformers cannot build {name}: {_line(error)}") from error
    model.tie_weights()  # type: ignore[operator]
    return model.eval()


def _of_class(config: Any, wanted: type) -> Any:
    """The configuration, or that of its tower which the class is built from."""
    towers = (getattr(config, name, None) for name in ("text_config", "vision_config"))
    return next((each for each in (config, *towers) if isinstance(each, wanted)), config)


def _line(error: Exception) -> str:
    """What an error of another library says, on one line."""
    return " ".join(str(error).split()) or type(error).__name__


def _inputs(model: Any, workload: Workload) -> dict[str, Tensor]:
    """Shapes for whatever the model reads: tokens, a picture, or sound."""
    config, batch, length = model.config, workload.batch, workload.length
    tokens = torch.zeros(batch, length, dtype=torch.long, device=_META)
    if "pixel_values" in inspect.signature(model.forward).parameters:
        return _pictures(model, tokens, workload)
    if model.main_input_name == "input_features":
        sound = torch.zeros(
            batch, config.num_mel_bins, 2 * config.max_source_positions, device=_META
        )
        return {"input_features": sound, "decoder_input_ids": tokens}
    if config.is_encoder_decoder:
        read = torch.zeros(batch, workload.encoded, dtype=torch.long, device=_META)
        return {"input_ids": read, "decoder_input_ids": tokens}
    mask = torch.zeros(batch, 1, length, length, device=_META)
    found = {"input_ids": tokens, "attention_mask": mask}
    if config.model_type == "opt":  # counts positions by the mask unless they are given
        found["position_ids"] = tokens
    return found


def _pictures(model: Any, tokens: Tensor, workload: Workload) -> dict[str, Tensor]:
    vision = getattr(model.config, "vision_config", model.config)
    size, channels = vision.image_size, vision.num_channels
    height, width = (size, size) if isinstance(size, int) else size
    picture = torch.zeros(workload.batch, channels, height, width, device=_META)
    if "input_ids" not in inspect.signature(model.forward).parameters:
        return {"pixel_values": picture}
    mask = torch.zeros(workload.batch, 1, *tokens.shape[-1:] * 2, device=_META)
    return {"pixel_values": picture, "input_ids": tokens, "attention_mask": mask}


def _total(outputs: Any) -> Tensor:
    """One number that every output has a part in."""
    found = [
        value.sum()
        for value in outputs.values()
        if isinstance(value, Tensor) and value.requires_grad and value.is_floating_point()
    ]
    if not found:
        raise ModelError("the model has no output with a gradient")
    return torch.stack(found).sum()
