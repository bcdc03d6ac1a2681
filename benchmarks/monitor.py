"""Cost of a monitor: a training step with and without it, in turns in one process.

    python benchmarks/monitor.py [--length 1024] [--threads 1] [--repeats 3] [--layers L] [--eager]

The model has the shape of SmolLM2-135M with random weights, in float32; a step is forward,
backward and AdamW on one sequence. What takes turns:

    plain                no monitor
    not recording        a monitor, in a step that it does not record
    all rows             a step that is recorded, every query row
    all rows, spectra    the same with the spectral norms of all heads
    64 rows              a step that is recorded, 64 query rows
    output_attentions    with --eager: eager attention that returns its matrices, as without a tool

``ratio`` is the median over the repeats of CPU time / plain CPU time in the same turn, smallest and
largest beside it. With ``every=10`` nine steps of ten are not recorded, and with ``spectra=10`` one
record of ten has spectral norms: that mean is printed. ``peak`` is by how much the largest memory
of the process during the step is above that of the plain step, in per cent of the latter (Linux).
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import transformers
from peak import measured

import headwise as hw
from headwise.cli.heap import keep_large_blocks_out_of_the_heap

Setting = Callable[[], AbstractContextManager[Any]]


def build(layers: int) -> Any:
    config = transformers.LlamaConfig(
        hidden_size=576, intermediate_size=1536, num_hidden_layers=layers, num_attention_heads=9,
        num_key_value_heads=3, vocab_size=49152, tie_word_embeddings=True,
        max_position_embeddings=8192, use_cache=False,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).train()


@contextmanager
def eager(model: Any) -> Iterator[None]:
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(before)


@contextmanager
def monitored(model: Any, *, recording: bool = True, **options: Any) -> Iterator[None]:
    with hw.Monitor(model, every=10, **{"spectra": 0, **options}) as monitor:
        if not recording:
            monitor.step = 1
        yield
    assert len(monitor.records) == int(recording)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--eager", action="store_true")
    args = parser.parse_args()
    keep_large_blocks_out_of_the_heap()
    torch.set_num_threads(args.threads)
    model = build(args.layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    ids = torch.randint(49152, (1, args.length))

    def step(length: int = args.length, **options: Any) -> None:
        given = ids[:, :length]
        model(input_ids=given, labels=given, **options).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    settings: dict[str, tuple[Setting, Callable[..., None]]] = {
        "plain": (nullcontext, step),
        "not recording": (lambda: monitored(model, recording=False), step),
        "all rows": (lambda: monitored(model), step),
        "all rows, spectra": (lambda: monitored(model, spectra=1), step),
        "64 rows": (lambda: monitored(model, rows=64), step),
    }
    if args.eager:
        settings["output_attentions"] = (
            lambda: eager(model),
            lambda length=args.length: step(length, output_attentions=True),
        )
    print(
        f"{sum(p.numel() for p in model.parameters()) / 1e6:.0f}M parameters, {args.length} tokens,"
        f" torch {torch.__version__}, transformers {transformers.__version__}, Python "
        f"{platform.python_version()}, CPU time, {args.threads} threads",
        flush=True,
    )
    for setting, run in settings.values():  # compiled code is loaded, optimizer states are there
        with setting():
            run(64)
    turns: dict[str, list[tuple[float, float]]] = {name: [] for name in settings}
    for _ in range(args.repeats):
        for name, (setting, run) in settings.items():
            with setting():
                turns[name].append(measured(run, time.process_time))
    report(turns, held())


def held() -> float:
    """MiB that the process holds between steps."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmRSS")) / 1024


def report(turns: dict[str, list[tuple[float, float]]], before: float) -> None:
    plain = turns["plain"]
    largest = before + max(m for _, m in plain)
    middle = {}
    for name, spent in turns.items():
        ratios = [a / b for (a, _), (b, _) in zip(spent, plain, strict=True)]
        middle[name] = statistics.median(ratios)
        more = max(m for _, m in spent) - max(m for _, m in plain)
        print(
            f"  {name:20} {statistics.median(t for t, _ in spent):8.2f} s"
            f"  ratio {middle[name]:6.3f} [{min(ratios):.3f}, {max(ratios):.3f}]"
            f"  peak {more:+6.0f} MiB ({more / largest:+.1%})"
        )
    spectra = middle["all rows, spectra"] - middle["all rows"]
    mean = (9 * middle["not recording"] + middle["all rows"] + max(spectra, 0.0) / 10) / 10
    print(f"  every=10, all rows: {mean - 1:+.1%}; every=1, rows=64: {middle['64 rows'] - 1:+.1%}")


if __name__ == "__main__":
    main()
