"""Cost of observing a whole model: every statistic of every head, against the plain forward.

    python benchmarks/observe.py MODEL [--lengths 2048 8192] [--threads 1] [--repeats 3]
                                       [--eager] [--layers L] [--allow-long] [--memory]

MODEL is what ``headwise report`` takes. In one process, the plain forward (the model's own fused
attention), the same forward under ``hw.observe`` and, with --eager, what people do today, take
turns: eager attention with a hook that reduces the weights of each layer to the same kind of
numbers and drops them; and ``output_attentions=True``. The body of the model runs, without logits.

With one thread the time is the CPU time of the process, with more it is wall time. ``ratio`` is
the median over the repeats of time / plain time in the same turn, smallest and largest beside it.
``peak`` is the growth of the process's peak memory during one forward (Linux), largest of all;
--memory makes one turn only, in a process as the program ``headwise`` sets it up, where the peak
is what is needed and not how the heap happens to be cut.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from peak import measured

import headwise as hw
from headwise.cli.heap import keep_large_blocks_out_of_the_heap
from headwise.observation.reading import default_text
from headwise.observation.text import tokenize

Run = Callable[[], object]


@contextmanager
def eager_attention(model: Any, reduce: bool) -> Iterator[None]:
    """The model's own eager attention, its weights reduced layer by layer if asked."""
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    kept: list[tuple[torch.Tensor, ...]] = []

    def hook(module: Any, args: Any, output: Any) -> Any:
        a = output[1]
        index = torch.arange(a.shape[-1], dtype=a.dtype)
        kept.append(
            (
                torch.special.entr(a).sum(-1),
                (a * a).sum(-1),
                a.amax(-1),
                a @ index,
                a[..., 0].clone(),  # a view would keep the whole matrix
                a.diagonal(-1, -2, -1).clone(),
                a.sum(-2),
            )
        )
        return (output[0], None)

    modules = [m for name, m in model.named_modules() if name.endswith("self_attn")]
    handles = [m.register_forward_hook(hook) for m in modules] if reduce else []
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        model.set_attn_implementation(before)


def document(loaded: Any, tokens: int, allow_long: bool) -> torch.Tensor:
    """The first tokens of the text that ships with the package, repeated if it is too short."""
    text = default_text()
    while True:
        try:
            return tokenize(loaded, text, tokens=tokens, allow_long=allow_long)[0].ids[None]
        except hw.errors.TextError:
            text += text


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 8192])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--layers", type=int, help="keep only the first layers of a decoder")
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--allow-long", action="store_true")
    parser.add_argument("--memory", action="store_true")
    args = parser.parse_args()
    if args.memory:
        args.repeats = 1
        keep_large_blocks_out_of_the_heap()
    torch.set_num_threads(args.threads)
    clock = time.process_time if args.threads == 1 else time.perf_counter
    loaded = hw.load_model(args.model)
    body = loaded.model.base_model
    if args.layers:
        body.layers = body.layers[: args.layers]
    kind = "CPU time, 1 thread" if args.threads == 1 else f"wall time, {args.threads} threads"
    print(
        f"{loaded.name}, torch {torch.__version__}, transformers {transformers.__version__}, "
        f"Python {platform.python_version()}, {next(body.parameters()).dtype}, {kind}"
    )
    with torch.no_grad(), hw.observe(body):
        body(document(loaded, 64, False), use_cache=False)  # compiled code is loaded
    for n in args.lengths:
        ids = document(loaded, n, args.allow_long)

        def plain(ids: torch.Tensor = ids) -> object:
            return body(ids, use_cache=False)

        def observed(ids: torch.Tensor = ids) -> object:
            with hw.observe(body):
                return body(ids, use_cache=False)

        def reducing(ids: torch.Tensor = ids) -> object:
            with eager_attention(body, reduce=True):
                return body(ids, use_cache=False)

        def attentions(ids: torch.Tensor = ids) -> object:
            with eager_attention(body, reduce=False):
                return body(ids, use_cache=False, output_attentions=True)

        runs: dict[str, Run] = {"plain": plain, "observe": observed}
        if args.eager:
            runs |= {"eager, reducing hook": reducing, "output_attentions": attentions}
        turns: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
        warm_up = 0 if args.memory else 1
        for repeat in range(args.repeats + warm_up):
            for name, run in runs.items():
                with torch.no_grad():
                    turn = measured(run, clock)
                if repeat >= warm_up:
                    turns[name].append(turn)
        print(f"\n{n} tokens, {args.repeats} repeats")
        for name, spent in turns.items():
            ratios = [a / b for (a, _), (b, _) in zip(spent, turns["plain"], strict=True)]
            print(
                f"  {name:22} {statistics.median(t for t, _ in spent):8.2f} s"
                f"  ratio {statistics.median(ratios):5.2f} [{min(ratios):.2f}, {max(ratios):.2f}]"
                f"  peak +{max(m for _, m in spent):.0f} MiB",
                flush=True,
            )


if __name__ == "__main__":
    main()
