"""Adapters that were trained on a Hugging Face model, on the same model as our own modules.

A family says which stored tensors give each parameter (``Family.sources``). Read backwards, with
row numbers in the place of weights, that says where every row of a stored projection has gone. The
rows of a fused projection go to several of ours: with W cut by rows into W_1, W_2, … the change
s·B·A is cut into s·B_1·A, s·B_2·A, …, which is the same map, exactly.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from headwise.models.build import Model
from headwise.models.checkpoints.family import Family, Source
from headwise.models.checkpoints.loading import FAMILIES
from headwise.models.checkpoints.peft import Place, adapted_names, load_peft
from headwise.models.low_rank import LowRankLinear

__all__ = ["load_adapter", "places"]

_BLOCKS = ("encoder.blocks.", "decoder.blocks.")


def load_adapter(model: Model, folder: str | Path) -> tuple[str, ...]:
    """Attach a LoRA adapter that the peft library saved, unmerged; the paths that have one now.

    The adapter may come from a Hugging Face model of the family of ``model``, with or without a
    head on top; one for a model of no such family has our own names. ``low_rank.merge`` adds it
    into the weights. The parts of a fused projection get their own A, which start equal.

    Args:
        model: changed in place, once everything has been checked; only A and B stay trainable.
        folder: with adapter_config.json and adapter_model.safetensors.

    Raises:
        ModelError: a factor is missing, left over or of another shape, or the adapter is of a kind
            that W + s·B·A does not describe.

    Example:
        >>> import json, pathlib, tempfile
        >>> from safetensors.torch import save_file
        >>> folder = pathlib.Path(tempfile.mkdtemp())
        >>> path = "decoder.blocks.1.attention.branch.query"
        >>> config = {"peft_type": "LORA", "r": 3, "lora_alpha": 6, "target_modules": [path]}
        >>> _ = (folder / "adapter_config.json").write_text(json.dumps(config))
        >>> factors = {"A": torch.ones(3, 32), "B": torch.ones(32, 3)}
        >>> named = {f"base_model.model.{path}.lora_{x}.weight": t for x, t in factors.items()}
        >>> save_file(named, folder / "adapter_model.safetensors")
        >>> import headwise as hw
        >>> model = hw.models.build(hw.models.preset("tiny"))
        >>> hw.models.load_adapter(model, folder)
        ('decoder.blocks.1.attention.branch.query',)
    """
    said = model.architecture.family
    family = next((each for each in FAMILIES if said in each.model_types), None)
    names = None if family is None else places(model, family, adapted_names(folder))
    return load_peft(model, folder, names=names)


def places(model: Model, family: Family, adapted: Collection[str]) -> dict[str, Place]:
    """Where each projection of the Hugging Face model is in this one.

    ``adapted``: the projections of the adapter. Their names say whether the adapted model had a
    head on top; projections outside the blocks, which belong to one head or another, are left out
    unless they are among them.
    """
    sources = family.sources(model.architecture, {family.prefix + family.table})
    fused: dict[str, dict[str, Source]] = {}
    sizes: dict[str, int] = {}
    for path, module in model.named_modules():
        source = sources.get(f"{path}.weight")
        if source is None or not isinstance(module, nn.Linear | LowRankLinear):
            continue
        if isinstance(source.names, str):
            fused.setdefault(source.names.removesuffix(".weight"), {})[path] = source
            sizes[path] = module.out_features
    headless = not any(name.startswith(family.prefix) for name in adapted)
    found = {}
    for stored, parts in fused.items():
        name = stored.removeprefix(family.prefix) if headless else stored
        place = _place(parts, sizes)
        if place is not None and (name in adapted or next(iter(parts)).startswith(_BLOCKS)):
            found[name] = place
    return found


def _place(parts: Mapping[str, Source], sizes: Mapping[str, int]) -> Place | None:
    """The parts of one stored projection with their rows; None unless they are all its rows."""
    total = sum(sizes[path] for path in parts)
    rows = {path: _rows(source, sizes[path], total) for path, source in parts.items()}
    if not torch.equal(torch.cat(list(rows.values())).sort().values, torch.arange(total)):
        return None
    if len(rows) > 1:
        return list(rows.items())
    ((path, whole),) = rows.items()
    return path if torch.equal(whole, torch.arange(total)) else [(path, whole)]


def _rows(source: Source, out: int, total: int) -> Tensor:
    """Which outputs of a stored projection a parameter holds, whichever way round it is stored.

    The columns are not looked at: two are enough to see which axis is which.
    """
    numbers = torch.arange(total)
    for probe in (numbers[:, None].expand(total, 2), numbers.expand(2, total)):
        try:
            made = source.make(probe)
        except (RuntimeError, IndexError, ValueError):
            continue
        if made.shape == (out, 2) and torch.equal(made[:, 0], made[:, 1]):
            return made[:, 0]
    return numbers[:0]
