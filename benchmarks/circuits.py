"""Products of 270 heads (the sizes of a 135M model) against the ways people compute them.

    python benchmarks/circuits.py [--peer PYTHON] [--heads 9 --layers 30 --d 576 --rank 64]
                                  [--vocab 49152] [--subset 3] [--repeats 3]
                                  [--model PATH] [--large]

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

With ``--peer``, the weights of all heads of a random GPT-2 and of ``--model``, their products,
singular values and composition, as transformer-lens has them: the largest differences,
and those by the largest value. With ``--model``, CPU time of the whole of ``headwise circuits`` by
parts, loading apart. ``--large`` runs nothing but V-composition of 1,024 heads of d 4,096 (of all
kinds it needs the fewest weights): some 25 minutes of CPU time, 5 GiB.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import circuits_peer
import torch
from peak import measured
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.utils.logging import disable_progress_bar

import headwise as hw
from headwise.circuits.composition import composition, extra_bytes
from headwise.circuits.factored import Factored
from headwise.circuits.scores import sign_score, vocabulary_map


def give_back() -> None:
    """What was freed before would hide the growth of the peak."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)


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
            seconds, about, theirs = circuits_peer.spectra(a.peer, pairs)
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


def compositions(qk: tuple[Tensor, Tensor], ov: tuple[Tensor, Tensor]) -> None:
    writers = [Factored(*layer) for layer in zip(*ov, strict=True)]
    queries = [Factored(*layer) for layer in zip(*qk, strict=True)]
    kinds = {"Q": queries, "K": [f.T for f in queries], "V": writers}
    for name, readers in kinds.items():
        give_back()
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


def same_weights(a: argparse.Namespace) -> None:
    """The heads of real models, as transformer-lens reads them and as they are read here."""
    config = GPT2Config(
        n_embd=60, n_layer=7, n_head=5, vocab_size=127, n_positions=67,
        bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    gpt2 = GPT2LMHeadModel(config)
    for parameter in gpt2.parameters():
        parameter.add_(0.1 * torch.randn(parameter.shape))  # or its biases would be 0
    circuits_peer.compared(a.peer, gpt2, "random GPT-2, with biases")
    if a.model:
        loaded = hw.load_model(a.model, dtype="float32", device="cpu")
        circuits_peer.compared(a.peer, loaded.model, loaded.name)


def whole(a: argparse.Namespace) -> None:
    """All that ``headwise circuits`` does after the model is loaded, by parts."""
    loaded = hw.load_model(a.model, device="cpu")
    parts: list[tuple[str, float]] = []

    def told(done: int, total: int, what: str) -> None:
        parts.append(("layers" if what.startswith("layer ") else what, time.process_time()))

    start = time.process_time()
    (seconds, more), found = measured_with(lambda: hw.circuits(loaded, progress=told))
    ends = [at for _, at in parts[1:]] + [start + seconds]
    spent = {"weights, read and checked": parts[0][1] - start}
    for (what, begin), end in zip(parts, ends, strict=True):
        spent[what] = spent.get(what, 0) + end - begin
    with tempfile.TemporaryDirectory() as folder:
        spent["the page"] = timed(lambda: hw.report(found, Path(folder, "heads.html")))[0]
        spent["or .nc"] = timed(lambda: found.save(Path(folder, "heads.nc")))[0]
        spent["or .csv"] = timed(lambda: found.save(Path(folder, "heads.csv")))[0]
    print(
        f"headwise circuits {loaded.name}, loading and files apart: {seconds:.2f} CPU-s,"
        f" {more:.0f} MiB more at the peak; by parts, CPU-s:"
    )
    for what, each in spent.items():
        print(f"  {what:26} {each:6.2f}")


def measured_with(run: Callable[[], object]) -> tuple[tuple[float, float], object]:
    """``measured`` with what the run gave."""
    give_back()
    given = []
    numbers = measured(lambda: given.append(run()), time.process_time)
    return numbers, given[0]


def large() -> None:
    """V-composition of 1,024 heads: it needs W_V and W_O alone, 4 GiB, and no head shares them."""
    layers, heads, d, rank = 32, 32, 4096, 128
    torch.set_num_threads(2)
    products = [
        Factored(torch.randn(heads, d, rank) / d**0.5, torch.randn(heads, rank, d) / d**0.5)
        for _ in range(layers)
    ]
    need = extra_bytes(products, products)
    seconds, more = measured(
        lambda: composition(products, products, memory=need), time.process_time
    )
    print(
        f"V-composition of {layers * heads:,} heads, d {d}, rank {rank}, 2 threads: {seconds:.0f}"
        f" CPU-s, {more:.0f} MiB more at the peak ({need / 2**20:.0f} foretold),"
        f" weights {2 * 4 * layers * heads * d * rank / 2**20:,.0f} MiB"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peer", help="a Python that has transformer-lens")
    parser.add_argument("--model", help="a folder, a .gguf file or an id: its heads as well")
    parser.add_argument("--large", action="store_true", help="only 1,024 heads of 4,096; long")
    sizes = {"heads": 9, "layers": 30, "d": 576, "rank": 64, "vocab": 49152}
    for name, value in {**sizes, "subset": 3, "repeats": 3}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    a = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    torch.manual_seed(0)
    disable_progress_bar()
    print(
        f"torch {torch.__version__}, {platform.machine()}, one thread, float32 weights, {vars(a)}"
    )
    if a.large:
        large()
        return
    shape = (a.layers, a.heads)
    qk, ov = (
        (torch.randn(*shape, a.d, a.rank) / a.d**0.5, torch.randn(*shape, a.rank, a.d) / a.d**0.5)
        for _ in range(2)
    )
    print(f"{'ours / other way':44} {'ours':>10} {'other':>11}")
    compositions(qk, ov)
    spectra([qk, ov], a)
    copying(ov, a)
    if a.peer:
        same_weights(a)
    if a.model:
        whole(a)


if __name__ == "__main__":
    main()
