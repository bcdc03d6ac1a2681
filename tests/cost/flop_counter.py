"""What transformers builds and torch counts: the figures that the planner has to meet."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from headwise.cost.config import parts_of
from headwise.cost.counting import Counts, count
from headwise.cost.parts import Parts
from headwise.cost.workload import Workload


def built(name: str, config: Any, device: str = "meta") -> nn.Module:
    """The model of a class, with attention as plain products, without dropout."""
    own = copy.deepcopy(config)  # decoders by themselves write into theirs
    with torch.device(device):
        model = getattr(transformers, name)._from_config(own, attn_implementation="eager")
    return model.eval()


def stored(model: nn.Module) -> int:
    """Its parameters, tied ones once."""
    return sum(parameter.numel() for parameter in model.parameters())


def planned(name: str, config: Any) -> Parts:
    """What the planner makes of the configuration, as it is written into config.json."""
    return parts_of({**config.to_dict(), "architectures": [name]})


def counted(name: str, config: Any, workload: Workload) -> Counts:
    """The planner's counts of a class under a workload."""
    return count(planned(name, config), workload)


def floats(found: Any) -> Iterator[Tensor]:
    """Every output that a gradient can come from."""
    if isinstance(found, Tensor):
        if found.requires_grad:
            yield found
    elif isinstance(found, Mapping):
        for each in found.values():
            yield from floats(each)
    elif isinstance(found, list | tuple):
        for each in found:
            yield from floats(each)


def flops(model: nn.Module, inputs: Mapping[str, Any]) -> tuple[int, int]:
    """FLOPs of the forward pass, and of forward and backward pass from all outputs."""
    with FlopCounterMode(display=False) as forward:
        found = model(**inputs)
    with FlopCounterMode(display=False) as backward:
        torch.stack([each.sum() for each in floats(found)]).sum().backward()
    return forward.get_total_flops(), forward.get_total_flops() + backward.get_total_flops()
