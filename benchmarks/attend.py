"""Time of streaming ``attend``, forward and forward + backward, against torch's fused attention.

    python benchmarks/attend.py [--lengths 2048 4096] [--heads 3] [--width 64] [--repeats 5]

For each problem, streaming and the baseline alternate in one process on one thread; the figures
are CPU times of the thread, so that other processes on the machine disturb them little. The
baseline is F.scaled_dot_product_attention with the same mask: given as ``is_causal`` where it can
be, else as the n×n boolean or float mask that is the only way to say it; softcap has no fused form
and is compared with the eager definition. ``ratio`` is the median over repeats of streaming /
baseline, with the smallest and the largest beside it: below 1, streaming is faster.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from headwise.attention.definition import attention
from headwise.attention.masks import Causal, Documents, Mask, Window
from headwise.attention.streaming import attend

Run = Callable[[Tensor, Tensor, Tensor], Tensor]


def problems(n: int, heads: int) -> dict[str, tuple[Run, Run]]:
    """Name -> (streaming, baseline)."""
    packed = Causal() & Documents((torch.arange(n) // (n // 5))[None])
    window = Causal() & Window(256)
    slopes = 2.0 ** (-8.0 * torch.arange(1, heads + 1) / heads)

    def alibi(b: int, part: slice, query: Tensor, key: range) -> Tensor:
        distance = query[:, None] - torch.arange(key.start, key.stop)[None]
        return -slopes[part, None, None] * distance

    def dense(mask: Mask) -> Run:
        keep = mask.dense(0, n, n)
        return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=keep)

    every = torch.arange(n)
    distance = every[:, None] - every[None]
    float_mask = (-slopes[:, None, None] * distance).masked_fill(distance < 0, float("-inf"))
    return {
        "full": (attend, F.scaled_dot_product_attention),
        "causal": (
            lambda q, k, v: attend(q, k, v, mask=Causal()),
            lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        ),
        "window 256": (lambda q, k, v: attend(q, k, v, mask=window), dense(window)),
        "packed x5": (lambda q, k, v: attend(q, k, v, mask=packed), dense(packed)),
        "ALiBi": (
            lambda q, k, v: attend(q, k, v, mask=Causal(), bias=alibi),
            lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=float_mask[None]),
        ),
        "softcap (eager)": (
            lambda q, k, v: attend(q, k, v, mask=Causal(), softcap=30.0),
            lambda q, k, v: attention(q, k, v, mask=Causal(), softcap=30.0),
        ),
    }


def seconds(run: Run, inputs: list[Tensor], gradient: bool) -> float:
    """CPU time of one call."""
    inputs = [x.detach().requires_grad_(gradient) for x in inputs]
    start = time.thread_time()
    out = run(*inputs)
    if gradient:
        out.backward(torch.ones_like(out))
        # torch runs backward on this thread for CPU tensors, so its time is counted.
    return time.thread_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 4096])
    parser.add_argument("--heads", type=int, default=3)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", nargs="+", help="names of problems")
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(
        f"torch {torch.__version__}, Python {platform.python_version()}, 1 thread CPU time, float32"
    )
    for n in args.lengths:
        torch.manual_seed(0)
        inputs = [torch.randn(1, args.heads, n, args.width) for _ in range(3)]
        print(f"\nq, k, v (1, {args.heads}, {n}, {args.width}), {args.repeats} repeats")
        print(f"{'':16} {'':18} {'baseline':>9} {'attend':>9} {'ratio':>6}  [spread]")
        for name, (ours, theirs) in problems(n, args.heads).items():
            if args.only and name not in args.only:
                continue
            for gradient in (False, True):
                seconds(ours, inputs, gradient), seconds(theirs, inputs, gradient)
                pairs = [
                    (seconds(theirs, inputs, gradient), seconds(ours, inputs, gradient))
                    for _ in range(args.repeats)
                ]
                ratios = [b / a for a, b in pairs]
                a, b = (statistics.median(x) for x in zip(*pairs, strict=True))
                what = "forward + backward" if gradient else "forward"
                print(
                    f"{name:16} {what:18} {a:8.3f}s {b:8.3f}s {statistics.median(ratios):6.2f}"
                    f"  [{min(ratios):.2f}, {max(ratios):.2f}]",
                    flush=True,
                )


if __name__ == "__main__":
    main()
