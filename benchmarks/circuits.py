"""Products of 270 heads (the sizes of a 135M model) against the ways people compute them.

    python benchmarks/circuits.py [--peer PYTHON] [--heads 9 --layers 30 --d 576 --rank 64]
                                  [--vocab 49152] [--subset 3] [--repeats 3]

Weights are random and float32. ``ratio`` = the other way / ours, CPU time in one thread, median of
the repeats with smallest and largest, the two taking turns. Singular values of W_QK and W_OV:

* transformer-lens: ``FactoredMatrix(A, B).S``, the real library, run by the interpreter ``--peer``
  (an environment of its own) on the same saved weights, before and after ours; left out without it;
* each factor's SVD, then the SVD of the middle, in float32: what that library does, in torch;
* the dense product's SVD in float64, on ``--subset`` heads and scaled up: also the truth for the
  printed error, relative to the largest value.

Composition: time of each kind and growth of the peak memory (Linux), weights apart. Copying: ours
for all heads, against W_E W_V and W_O W_U of each head multiplied out, then the eigenvalues of
their r×r product, in float32, on ``--subset`` heads and scaled up.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import platform
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from peak import measured
from torch import Tensor

from headwise.circuits.composition import composition
from headwise.circuits.factored import Factored
from headwise.circuits.scores import sign_score, vocabulary_map

PEER = """
import json, sys, time
import torch
import transformer_lens
from transformer_lens import FactoredMatrix
torch.set_num_threads(1)
torch.set_grad_enabled(False)
weights = torch.load(sys.argv[1])
values, start = [], time.process_time()
for left, right in weights:
    values.append(FactoredMatrix(left, right).S)
seconds = time.process_time() - start
torch.save(values, sys.argv[2])
from importlib.metadata import version
print(json.dumps([seconds, version("transformer-lens"), torch.__version__]))
"""


def timed(run: Callable[[], object]) -> tuple[float, object]:
    gc.collect()
    start = time.process_time()
    result = run()
    return time.process_time() - start, result


def line(name: str, ours: list[float], theirs: list[float], note: str = "") -> None:
    ratios = sorted(b / a for a, b in zip(ours, theirs, strict=True))
    print(
        f"{name:44} {statistics.median(ours):8.3f} s {statistics.median(theirs):9.3f} s"
        f"   ratio {statistics.median(ratios):6.1f} ({ratios[0]:.1f} to {ratios[-1]:.1f})  {note}"
    )


def of_factors(left: Tensor, right: Tensor) -> Tensor:
    """SVD of each factor and of the middle."""
    _, s, v = torch.linalg.svd(left, full_matrices=False)
    u, ss, _ = torch.linalg.svd(right, full_matrices=False)
    middle = s[..., None] * (v @ u) * ss[..., None, :]
    return torch.linalg.svd(middle, full_matrices=False).S


def spectra(pairs: list[tuple[Tensor, Tensor]], a: argparse.Namespace) -> None:
    def own() -> list[Tensor]:
        return [Factored(*pair).singular_values() for pair in pairs]

    heads = a.layers * a.heads
    few = [[x.flatten(0, 1)[: a.subset].double() for x in pair] for pair in pairs]
    ours, torches, dense, peers = [], [], [], []
    about = ""
    for _ in range(a.repeats):
        seconds, values = timed(own)
        ours.append(seconds)
        torches.append(timed(lambda: [of_factors(*pair) for pair in pairs])[0])
        truth_seconds, truth = timed(lambda: [torch.linalg.svdvals(x @ y) for x, y in few])
        dense.append(truth_seconds * heads / a.subset)
        if a.peer:
            seconds, about, theirs = peer(a.peer, pairs)
            peers.append(seconds)
    worst = [
        max(
            (
                (got.flatten(0, 1)[: a.subset, : a.rank] - t[:, : a.rank]).abs().max() / t.max()
            ).item()
            for got, t in zip(values, truth, strict=True)
        )
        for values in ([values, theirs] if a.peer else [values])
    ]
    if a.peer:
        line(
            "singular values / transformer-lens", ours, peers, f"{about}; its error {worst[1]:.0e}"
        )
    line("singular values / SVD of factors, float32", ours, torches)
    line("singular values / dense float64, scaled up", ours, dense, f"our error {worst[0]:.0e}")


def peer(python: str, pairs: list[tuple[Tensor, Tensor]]) -> tuple[float, str, list[Tensor]]:
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder, "weights.pt"), Path(folder, "values.pt")
        torch.save(pairs, source)
        out = subprocess.run(
            [python, "-c", PEER, str(source), str(target)],
            check=True, capture_output=True, text=True,
        ).stdout  # fmt: skip
        seconds, version, torch_version = json.loads(out.splitlines()[-1])
        return seconds, f"transformer-lens {version}, torch {torch_version}", torch.load(target)


def compositions(qk: tuple[Tensor, Tensor], ov: tuple[Tensor, Tensor]) -> None:
    writers = [Factored(*layer) for layer in zip(*ov, strict=True)]
    queries = [Factored(*layer) for layer in zip(*qk, strict=True)]
    kinds = {"Q": queries, "K": [f.T for f in queries], "V": writers}
    for name, readers in kinds.items():
        gc.collect()
        ctypes.CDLL("libc.so.6").malloc_trim(0)  # or what was freed before would hide the growth
        seconds, more = measured(lambda r=readers: composition(writers, r), time.process_time)
        print(
            f"{name}-composition, all pairs: {seconds:.2f} CPU-s, {more:.0f} MiB more at the peak"
        )


def copying(ov: tuple[Tensor, Tensor], a: argparse.Namespace) -> None:
    embedding = torch.randn(a.vocab, a.d)
    unembedding = embedding.T

    def own() -> Tensor:
        return sign_score(Factored(*ov), vocabulary_map(embedding, unembedding))

    def one_by_one() -> Tensor:
        scores = []
        for left, right in zip(*(x.flatten(0, 1)[: a.subset] for x in ov), strict=True):
            values = torch.linalg.eigvals((right @ unembedding) @ (embedding @ left))
            scores.append(values.sum().real / values.abs().sum())
        return torch.stack(scores)

    ours, theirs = [], []
    for _ in range(a.repeats):
        seconds, got = timed(own)
        ours.append(seconds)
        seconds, want = timed(one_by_one)
        theirs.append(seconds * a.layers * a.heads / a.subset)
    error = (got.flatten()[: a.subset] - want).abs().max().item()
    line("copying / head by head, scaled up", ours, theirs, f"they differ by {error:.0e}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peer", help="a Python that has transformer-lens")
    sizes = {"heads": 9, "layers": 30, "d": 576, "rank": 64, "vocab": 49152}
    for name, value in {**sizes, "subset": 3, "repeats": 3}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    a = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    torch.manual_seed(0)
    print(
        f"torch {torch.__version__}, {platform.machine()}, one thread, float32 weights, {vars(a)}"
    )
    shape = (a.layers, a.heads)
    qk, ov = (
        (torch.randn(*shape, a.d, a.rank) / a.d**0.5, torch.randn(*shape, a.rank, a.d) / a.d**0.5)
        for _ in range(2)
    )
    print(f"{'ours / other way':44} {'ours':>10} {'other':>11}")
    compositions(qk, ov)
    spectra([qk, ov], a)
    copying(ov, a)


if __name__ == "__main__":
    main()
