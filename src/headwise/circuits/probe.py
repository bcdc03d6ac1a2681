"""A few tokens through a model, with all kept that says what its attention is made of."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

from headwise.errors import ModelError
from headwise.models.attention import MultiHeadAttention
from headwise.observation.architecture import position_limit
from headwise.observation.capture import Captured, captured
from headwise.observation.driver import Document, driver, is_own
from headwise.observation.evaluating import evaluating
from headwise.observation.survey import Survey

__all__ = ["Probe", "probe"]

TOKENS: Final = (11, 7)  # of the text, and of the decoder of an encoder-decoder


@dataclass(frozen=True, eq=False)
class Probe:
    """What one pass showed: attention calls by module, and what went through other modules."""

    calls: Mapping[str, Captured]
    inputs: Mapping[str, Tensor]
    outputs: Mapping[str, Tensor]
    norms: tuple[str, ...]  # the modules that are norms by the name of their class


def probe(model: nn.Module, found: Survey, watched: set[str]) -> Probe:
    """Run random tokens (or a random picture; always the same ones), with eyes on some modules."""
    inputs: dict[str, Tensor] = {}
    outputs: dict[str, Tensor] = {}
    norms = tuple(
        path
        for path, module in model.named_modules()
        if "norm" in type(module).__name__.lower() and not any(True for _ in module.children())
    )

    def keep(path: str) -> Any:
        def after(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            if not isinstance(output, Tensor):  # a stack of transformers
                output = getattr(output, "last_hidden_state", output[0])
            outputs[path] = output
            if args and isinstance(args[0], Tensor):
                inputs[path] = args[0]

        return after

    with ExitStack() as restore:
        restore.enter_context(evaluating(model))
        restore.enter_context(torch.no_grad())
        for path in watched.union(norms):
            handle = model.get_submodule(path).register_forward_hook(keep(path))
            restore.callback(handle.remove)
        calls = restore.enter_context(captured(model, found))
        _run(model)
    return Probe(calls, inputs, outputs, norms)


def _run(model: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    own = any(isinstance(module, MultiHeadAttention) for module in model.modules())
    if own and not is_own(model):
        raise ModelError(
            f"{type(model).__name__} is made of Headwise's parts but cannot be run by itself, so"
            " its weights cannot be checked",
            allowed="a Decoder, an Encoder or an EncoderDecoder",
            to_do="pass validate=False",
        )
    picture = None if own else _picture_size(model)
    if picture is not None:
        place = next(model.parameters())
        given = {"pixel_values": torch.randn(picture, generator=generator).to(place)}
        if model.main_input_name == "input_ids":
            words = model.config.get_text_config().vocab_size
            ids = torch.randint(words, (1, TOKENS[0]), generator=generator)
            given["input_ids"] = ids.to(place.device)
        model(**given)
        return
    run = driver(model)
    most = model.architecture.context if is_own(model) else position_limit(model)
    lengths = TOKENS if most is None else tuple(min(n, most) for n in TOKENS)
    text, target = (torch.randint(run.vocabulary, (n,), generator=generator) for n in lengths)
    run.run([Document(text, target)])


def _picture_size(model: Any) -> tuple[int, int, int, int] | None:
    """The shape of one picture; None for models that read text alone."""
    config = model.config
    reads = model.main_input_name == "pixel_values"
    config = getattr(config, "vision_config", config if reads else None)
    size = getattr(config, "image_size", None)
    if size is None:
        return None
    height, width = (size, size) if isinstance(size, int) else size
    return 1, getattr(config, "num_channels", 3), height, width
