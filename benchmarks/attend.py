"""Streaming ``attend`` under masks that the fused kernel cannot express, against dense attention.

    python benchmarks/attend.py [--lengths 2048 4096 8192] [--heads 4] [--kv-heads 4] [--width 64]
                                [--threads 1] [--repeats 5] [--masks window packed ALiBi softcap]

Forward + backward with a window of 256 keys, five packed documents, ALiBi and softcap, all causal.
The baseline is F.scaled_dot_product_attention with the mask as the n×n boolean (window, packed) or
float (ALiBi) tensor that is the only way to say it; building that tensor is not timed. Softcap has
no such form: its baseline is the eager softmax over the whole matrix. Baseline and ``attend`` take
turns in one process. ``ratio`` is the median over the repeats of attend / baseline in the same
turn, with the smallest and the largest beside it (below 1, ``attend`` is faster): first of CPU
time, summed over all threads, so that other processes on the machine disturb it little, then of
wall time.

``saved`` is what autograd keeps between forward and backward, each storage counted once; ``peak``
by how much the peak memory of a fresh process grows in the first forward + backward (Linux), the
baseline's mask added. Slopes are least squares of log bytes on log n: 1 is linear, 2 quadratic.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import platform
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from peak import growth
from torch import Tensor

from headwise.attention.masks import Causal, Documents, Mask, Window
from headwise.attention.streaming import attend
from headwise.positions.alibi import alibi, alibi_bias, slopes

Run = Callable[[Tensor, Tensor, Tensor], Tensor]
MIB = 2**20
NAMES = ("window", "packed", "ALiBi", "softcap", "causal")
CAP = 30.0


class Shape(NamedTuple):
    n: int
    heads: int
    kv_heads: int
    width: int

    def inputs(self) -> list[Tensor]:
        torch.manual_seed(0)
        sizes = (self.heads, self.kv_heads, self.kv_heads)
        return [torch.randn(1, h, self.n, self.width, requires_grad=True) for h in sizes]


def pair(name: str, shape: Shape) -> tuple[Run, Run, int]:
    """Streaming, baseline, and the bytes of the baseline's mask."""
    n, gqa = shape.n, shape.heads != shape.kv_heads
    if name == "causal":  # what the fused kernel can express, for comparison
        return (
            lambda q, k, v: attend(q, k, v, mask=Causal()),
            lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=gqa),
            0,
        )
    mask: Mask = Causal()
    if name == "window":
        mask = Causal() & Window(256)
    if name == "packed":
        mask = Causal() & Documents((torch.arange(n) // -(-n // 5))[None])
    dense = mask.dense(0, n, n).contiguous()
    if name == "softcap":
        return (
            lambda q, k, v: attend(q, k, v, mask=mask, softcap=CAP),
            lambda q, k, v: eager(q, k, v, ~dense),
            dense.nbytes,
        )
    if name == "ALiBi":
        slope, every = slopes(shape.heads), torch.arange(n)
        bias, function = alibi(slope, every, every)[None], alibi_bias(slope)
        bias.masked_fill_(~dense, -math.inf)
        return (
            lambda q, k, v: attend(q, k, v, mask=mask, bias=function),
            lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=bias, enable_gqa=gqa),
            bias.nbytes,
        )
    return (
        lambda q, k, v: attend(q, k, v, mask=mask),
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=dense, enable_gqa=gqa),
        dense.nbytes,
    )


def eager(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
    """Capped attention over the whole matrix."""
    group = q.shape[1] // k.shape[1]
    if group > 1:
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    s = torch.tanh(q @ k.mT * (q.shape[-1] ** -0.5 / CAP)) * CAP
    return torch.softmax(s.masked_fill(hidden, -math.inf), -1) @ v


def step(run: Run, inputs: list[Tensor]) -> None:
    """Forward + backward."""
    for x in inputs:
        x.grad = None
    out = run(*inputs)
    out.backward(torch.ones_like(out))


def timed(run: Run, inputs: list[Tensor]) -> tuple[float, float]:
    """CPU seconds of all threads, wall seconds."""
    cpu, wall = time.process_time(), time.perf_counter()
    step(run, inputs)
    return time.process_time() - cpu, time.perf_counter() - wall


def saved_bytes(run: Run, inputs: list[Tensor]) -> int:
    """Bytes of the storages that autograd keeps for the backward pass."""
    storages: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = run(*inputs)  # alive until here: no storage is freed and its address used again
    del out
    return sum(storages.values())


def peak_bytes(name: str, shape: Shape, which: int, threads: int) -> int:
    """Growth of peak memory in the first step, in a process that has done nothing before."""
    torch.set_num_threads(threads)
    step(pair(name, Shape(256, *shape[1:]))[which], Shape(256, *shape[1:]).inputs())  # loads code
    *runs, size = pair(name, shape)
    inputs = shape.inputs()

    return round(growth(lambda: step(runs[which], inputs)) * MIB) + size * which


def fresh_peak(name: str, shape: Shape, which: int, threads: int) -> int:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(peak_bytes, (name, shape, which, threads))


def measured(name: str, shape: Shape, threads: int, repeats: int) -> list[int]:
    """Print one line of the table; the saved and the peak bytes of ``attend``."""
    peaks = [fresh_peak(name, shape, which, threads) for which in (0, 1)]
    *runs, _ = pair(name, shape)
    inputs = shape.inputs()
    saved = [saved_bytes(run, inputs) for run in runs]
    turns = [[timed(run, inputs) for run in reversed(runs)] for _ in range(repeats + 1)][1:]
    cpu, wall = ([ours[i] / theirs[i] for theirs, ours in turns] for i in (0, 1))
    theirs, ours = (statistics.median(turn[i][0] for turn in turns) for i in (0, 1))
    print(
        f"{name:8} {shape.n:6} {theirs:8.3f}s {ours:8.3f}s  {statistics.median(cpu):5.2f}"
        f" [{min(cpu):.2f}, {max(cpu):.2f}]  {statistics.median(wall):5.2f}"
        f" [{min(wall):.2f}, {max(wall):.2f}]  {saved[1] / MIB:8.1f} {saved[0] / MIB:6.1f}"
        f"  {peaks[1] / MIB:8.1f} {peaks[0] / MIB:6.1f}",
        flush=True,
    )
    return [saved[0], peaks[0]]


def slope(lengths: list[int], values: list[int]) -> float:
    """Least squares of log value on log length."""
    x, y = ([math.log(a) for a in series] for series in (lengths, values))
    return statistics.linear_regression(x, y).slope


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 4096, 8192])
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--kv-heads", type=int, default=None)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--masks", nargs="+", choices=NAMES, default=list(NAMES[:4]))
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    kv_heads = args.kv_heads or args.heads
    print(
        f"torch {torch.__version__}, Python {platform.python_version()}, float32,"
        f" threads: {args.threads}, forward + backward, {args.repeats} repeats after a warm-up\n"
        f"batch 1, heads {args.heads}, kv heads {kv_heads}, d_head {args.width}\n\n"
        f"{'':15} {'CPU time':>19}  {'ratio [spread]':>18} {'ratio (wall)':>19}"
        f"  {'saved, MiB':>15}  {'peak, MiB':>15}\n"
        f"{'mask':8} {'n':>6} {'baseline':>9} {'attend':>9}  {'':18} {'':19}"
        f"  {'baseline':>8} {'attend':>6}  {'baseline':>8} {'attend':>6}"
    )
    for name in args.masks:
        memory = [
            measured(name, Shape(n, args.heads, kv_heads, args.width), args.threads, args.repeats)
            for n in args.lengths
        ]
        if len(args.lengths) > 1:
            saved, peak = (slope(args.lengths, list(x)) for x in zip(*memory, strict=True))
            print(f"{name:8} slope of attend's bytes in n: saved {saved:.3f}, peak {peak:.3f}\n")


if __name__ == "__main__":
    main()
