"""Cost of ``measure`` (output and every statistic) against fused attention and against eager.

    python benchmarks/measure.py [--lengths 4096 8192] [--width 64] [--heads 2] [--kv-heads 2]
                                 [--threads 1] [--window W] [--repeats 7] [--eager] [--memory]

In one process, the fused kernel, ``measure`` and (with --eager) dense attention with the same
statistics take turns. With one thread the figure is the thread's CPU time; with more it is wall
time, which other processes on the machine disturb. ``ratio`` is the median over the repeats of
time / fused time in the same turn, with the smallest and largest beside it. --memory prints by how
much the peak memory of the process grows in the first call, results included; give one length, or
a later one finds freed memory to use again.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from peak import growth
from torch import Tensor

from headwise.attention import measure
from headwise.attention.masks import Causal, Window


def eager(q: Tensor, k: Tensor, v: Tensor, pool: int) -> tuple[Tensor, ...]:
    """The whole matrix, head by head, and the same numbers from it."""
    n, group = q.shape[2], q.shape[1] // k.shape[1]
    hidden = torch.ones(n, n, dtype=torch.bool).triu(1)
    index = torch.arange(n, dtype=q.dtype)
    out = []
    for head in range(q.shape[1]):
        s = (q[0, head] @ k[0, head // group].T) * q.shape[-1] ** -0.5
        s = s.masked_fill_(hidden, -torch.inf)
        a = torch.softmax(s, -1)
        out += [
            a @ v[0, head // group],
            torch.logsumexp(s, -1),
            s.amax(-1),
            torch.special.entr(a).sum(-1),
            (a * a).sum(-1),
            index - a @ index,
            a[:, 0],
            a.diagonal(-1),
            a.sum(0),
            a.view(n // pool, pool, n // pool, pool).sum((1, 3)),
        ]
    return tuple(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 8192])
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--heads", type=int, default=2)
    parser.add_argument("--kv-heads", type=int, default=None)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--window", type=int, default=None)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--memory", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    clock = time.thread_time if args.threads == 1 else time.perf_counter
    unit = "CPU time of 1 thread" if args.threads == 1 else f"wall time, {args.threads} threads"
    print(f"torch {torch.__version__}, Python {platform.python_version()}, float32, {unit}")
    small = torch.zeros(1, 1, 8, args.width)
    measure(small, small, small, mask=Causal())  # compiles, or loads what was compiled before
    print("peer: F.scaled_dot_product_attention(is_causal=True)")
    for n in args.lengths:
        torch.manual_seed(0)
        shape = (1, args.heads, n, args.width)
        kv = (1, args.kv_heads or args.heads, n, args.width)
        q, k, v = torch.randn(shape), torch.randn(kv), torch.randn(kv)
        pool = max(1, n // 128)
        mask = Causal() if args.window is None else Causal() & Window(args.window)
        runs: dict[str, Callable[[], object]] = {
            "fused": lambda q=q, k=k, v=v: F.scaled_dot_product_attention(
                q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1]
            ),
            "measure": lambda q=q, k=k, v=v, pool=pool, mask=mask: measure(
                q, k, v, mask=mask, pool=pool, workers=args.threads
            ),
        }
        if args.eager:
            runs["eager"] = lambda q=q, k=k, v=v, pool=pool: eager(q, k, v, pool)
        more = {name: growth(run) for name, run in runs.items()} if args.memory else {}
        times: dict[str, list[float]] = {name: [] for name in runs}
        for repeat in range(args.repeats + 1):
            for name, run in runs.items():
                start = clock()
                run()
                if repeat:  # the first turn warms up
                    times[name].append(clock() - start)
        label = f"q {shape}, kv heads {kv[1]}" + (f", window {args.window}" if args.window else "")
        print(f"\n{label}, {args.repeats} repeats")
        for name, spent in times.items():
            ratios = [a / b for a, b in zip(spent, times["fused"], strict=True)]
            print(
                f"  {name:8} {statistics.median(spent) * 1e3:9.1f} ms"
                f"  ratio {statistics.median(ratios):5.2f} [{min(ratios):.2f}, {max(ratios):.2f}]"
                + (f"  peak +{more[name]:.0f} MiB" if more else ""),
                flush=True,
            )


if __name__ == "__main__":
    main()
