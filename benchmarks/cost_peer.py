"""One counter on one random model, in a process of its own: ``cost.py`` starts it and times it.

It reads a job from standard input and needs no Headwise, so that any interpreter can run it.
Attention is transformers' default unless the job says ``eager``. What a counter returns is turned
into FLOPs = 2 · multiply-adds; fvcore counts multiply-adds, and is doubled.
"""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from typing import Any

import torch
import transformers
from transformers.utils.logging import disable_progress_bar, set_verbosity_error


def built(job: dict[str, Any], device: str) -> Any:
    settings = dict(job["config"])
    config = transformers.AutoConfig.for_model(settings.pop("model_type"), **settings)
    config.use_cache = False
    options = {"attn_implementation": "eager"} if job["eager"] else {}
    if device == "meta":  # the counter has no formula for the grouped products of experts
        config._experts_implementation = "batched_mm"
    with torch.device(device):
        return getattr(transformers, job["class"])._from_config(config, **options).eval()


def flop_counter(job: dict[str, Any]) -> int:
    """torch's own; on the meta device the mask is given, as it cannot be built from shapes."""
    from torch.utils.flop_counter import FlopCounterMode

    device, n = job["device"], job["length"]
    model = built(job, device)
    inputs = {"input_ids": torch.zeros(1, n, dtype=torch.long, device=device)}
    if device == "meta":
        inputs["attention_mask"] = torch.zeros(1, 1, n, n, device=device)
    with FlopCounterMode(display=False) as counter:
        model(**inputs)
    return counter.get_total_flops()


def calflops(job: dict[str, Any]) -> int:
    from calflops import calculate_flops

    ids = torch.zeros(1, job["length"], dtype=torch.long)
    inputs = {"input_ids": ids, "attention_mask": torch.ones(ids.shape)}
    found, _, _ = calculate_flops(
        model=built(job, "cpu"), kwargs=inputs, print_results=False, output_as_string=False
    )
    return round(found)


class First(torch.nn.Module):
    """The first output alone: fvcore traces, and a trace returns tensors."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.model(ids)[0]


def fvcore(job: dict[str, Any]) -> int:
    from fvcore.nn import FlopCountAnalysis

    ids = torch.zeros(1, job["length"], dtype=torch.long)
    analysis = FlopCountAnalysis(First(built(job, "cpu")), (ids,))
    analysis.unsupported_ops_warnings(False).uncalled_modules_warnings(False)
    return 2 * round(analysis.total())


def main() -> None:
    job = json.load(sys.stdin)
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    set_verbosity_error()
    disable_progress_bar()
    tools = {"FlopCounterMode": flop_counter, "calflops": calflops, "fvcore": fvcore}
    flops = tools[job["tool"]](job)
    names = ("torch", "transformers", *(() if job["tool"] == "FlopCounterMode" else (job["tool"],)))
    print()  # after whatever a counter has printed
    print(json.dumps({"flops": flops, "versions": {name: version(name) for name in names}}))


if __name__ == "__main__":
    main()
