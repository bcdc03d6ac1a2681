"""``headwise cost`` beside other counters: CPU time from a cold start, and what each counts.

    python benchmarks/cost.py [--peer PYTHON] [--repeats 3] [--lengths 128 2048]

Three models are counted at each length, batch 1, from configurations inside this script: GPT-2 and
SmolLM2-135M in their published sizes (GPT-2's position table as long as the longest length), and a
small mixture of experts in the form of Mixtral. ``headwise cost`` alone also counts one of 1.03T
parameters, with the sizes of Kimi K2. Every count is a process of its own; its CPU time is the
system's account of that process, user and system, start of the interpreter and imports included,
in one thread. The files have been read before, so that the disk plays no part. The tools take
turns: median of the repeats with smallest and largest; ``/ ours`` likewise, within a turn.

* FlopCounterMode on the meta device, by the recipe of ``headwise cost --verify``, but forward only;
* FlopCounterMode on the CPU with the default attention (n = 128 only): the usual way;
* calflops and fvcore on the CPU, default attention and eager, run by the interpreter ``--peer`` (an
  environment of its own); left out without it.

Models of the other counters are random, float32. ``of exact`` = counted FLOPs / 2 · multiply-adds
of all matrix products in closed form, with all n² pairs. calflops adds elementwise operations to
its FLOPs; fvcore counts multiply-adds, and is doubled here.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import headwise

PEER = Path(__file__).with_name("cost_peer.py")
ALONE = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
OURS = "headwise cost"


@dataclass(frozen=True)
class Model:
    """A configuration, and the sizes its closed form is made of, written down once more.

    ``q`` and ``kv`` are the widths of all queries and of all keys; ``mlps`` MLPs of ``matrices``
    matrices are used by each token, chosen by a router over ``experts``.
    """

    name: str
    kind: str
    config: dict[str, Any]
    layers: int
    d: int
    q: int
    kv: int
    f: int
    matrices: int
    vocab: int
    mlps: int = 1
    experts: int = 0

    def flops(self, n: int) -> int:
        """2 · (L (n d (2q + 2kv) + 2n²q + n (mlps · m d f + d E)) + n d V)."""
        d, q = self.d, self.q
        mlp = n * (self.mlps * self.matrices * d * self.f + d * self.experts)
        block = n * d * (2 * q + 2 * self.kv) + 2 * n * n * q + mlp
        return 2 * (self.layers * block + n * d * self.vocab)


def models(longest: int) -> list[Model]:
    gpt2 = {
        "model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257,
        "n_positions": longest,
    }  # fmt: skip
    smollm2 = {
        "model_type": "llama", "hidden_size": 576, "num_hidden_layers": 30,
        "num_attention_heads": 9, "num_key_value_heads": 3, "intermediate_size": 1536,
        "vocab_size": 49152, "tie_word_embeddings": True, "max_position_embeddings": 8192,
    }  # fmt: skip
    mixture = {
        "model_type": "mixtral", "hidden_size": 512, "num_hidden_layers": 8,
        "num_attention_heads": 8, "num_key_value_heads": 2, "intermediate_size": 1024,
        "vocab_size": 32000, "num_local_experts": 8, "num_experts_per_tok": 2,
        "tie_word_embeddings": False, "max_position_embeddings": 8192,
    }  # fmt: skip
    return [
        Model("GPT-2", "GPT2LMHeadModel", gpt2, 12, 768, 768, 768, 3072, 2, 50257),
        Model("SmolLM2-135M", "LlamaForCausalLM", smollm2, 30, 576, 576, 192, 1536, 3, 49152),
        Model(
            "mixture of 8 experts", "MixtralForCausalLM", mixture, 8, 512, 512, 128, 1024, 3, 32000,
            mlps=2, experts=8,
        ),
    ]  # fmt: skip


LARGE = {
    "model_type": "kimi_k2", "hidden_size": 7168, "num_hidden_layers": 61,
    "num_attention_heads": 64, "num_key_value_heads": 64, "q_lora_rank": 1536,
    "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "intermediate_size": 18432, "moe_intermediate_size": 2048, "n_routed_experts": 384,
    "num_experts_per_tok": 8, "n_shared_experts": 1, "first_k_dense_replace": 1,
    "vocab_size": 163840, "tie_word_embeddings": False, "max_position_embeddings": 131072,
}  # fmt: skip


def cpu_seconds(command: Sequence[str], text: str = "") -> tuple[float, str, str]:
    """CPU time of one process, what it printed, and the last line of its errors if it failed."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        command, input=text, capture_output=True, text=True, env={**os.environ, **ALONE}
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    failed = "" if done.returncode == 0 else done.stderr.strip().splitlines()[-1]
    return spent, done.stdout, failed


def ours(config: dict[str, Any], n: int) -> tuple[float, dict[str, Any]]:
    """The whole command: its tables printed, and a JSON file written."""
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder, "config.json"), Path(folder, "cost.json")
        source.write_text(json.dumps(config), encoding="utf-8")
        program = str(Path(sysconfig.get_path("scripts"), "headwise"))
        command = [program, "cost", str(source), "--length", str(n), "--json", str(target)]
        spent, _, failed = cpu_seconds(command)
        if failed:
            raise SystemExit(failed)
        return spent, json.loads(target.read_text(encoding="utf-8"))


def others(peer: str | None, n: int) -> dict[str, tuple[str, dict[str, Any]]]:
    """The interpreter and the job of every other counter."""
    counter = {"tool": "FlopCounterMode"}
    found = {
        "FlopCounterMode, meta": (sys.executable, {**counter, "device": "meta", "eager": True})
    }
    if n == 128:
        job = {**counter, "device": "cpu", "eager": False}
        found["FlopCounterMode, CPU, default"] = (sys.executable, job)
    if peer:
        for tool in ("calflops", "fvcore"):
            found[f"{tool}, default"] = (peer, {"tool": tool, "eager": False})
            found[f"{tool}, eager"] = (peer, {"tool": tool, "eager": True})
    return found


def spread(values: Sequence[float], digits: int) -> str:
    low, middle, high = min(values), statistics.median(values), max(values)
    return f"{middle:7.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def compared(model: Model, n: int, a: argparse.Namespace) -> dict[str, str]:
    """One table; the versions that the others ran with."""
    jobs = others(a.peer, n)
    seconds: dict[str, list[float]] = {name: [] for name in (OURS, *jobs)}
    counted: dict[str, int | str] = {}
    versions: dict[str, str] = {}
    for _ in range(a.repeats):
        spent, found = ours(model.config, n)
        seconds[OURS].append(spent)
        counted[OURS] = found["forward"]["flops"]
        for name, (python, job) in jobs.items():
            job = {**job, "config": model.config, "class": model.kind, "length": n}
            spent, printed, failed = cpu_seconds([python, str(PEER)], json.dumps(job))
            seconds[name].append(spent)
            result = {} if failed else json.loads(printed.splitlines()[-1])
            counted[name] = failed or result["flops"]
            versions |= result.get("versions", {})
    exact = model.flops(n)
    print(f"\n{model.name}, 1 × {n} tokens: {exact:,} FLOPs exact")
    print(f"  {'counter':30} {'FLOPs':>18} {'of exact':>9}   {'CPU seconds':22} / ours")
    for name, spent in seconds.items():
        ratios = [x / y for x, y in zip(spent, seconds[OURS], strict=True)]
        flops = counted[name]
        told = (
            f"{flops:18,} {flops / exact:9.4f}"
            if isinstance(flops, int)
            else f"failed: {flops[:60]}"
        )
        print(f"  {name:30} {told}   {spread(spent, 2):22} {spread(ratios, 1)}", flush=True)
    return versions


def large(lengths: Sequence[int], repeats: int) -> None:
    for n in lengths:
        runs = [ours(LARGE, n) for _ in range(repeats)]
        found = runs[-1][1]
        print(
            f"\n1T parameters, 1 × {n} tokens: {found['parameters']['total']:,} parameters,"
            f" {found['forward']['flops']:,} FLOPs\n"
            f"  {OURS}: CPU seconds {spread([spent for spent, _ in runs], 2)}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--peer", help="a Python that has torch, transformers, calflops and fvcore")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--lengths", type=int, nargs="+", default=[128, 2048])
    a = parser.parse_args()
    print(
        f"Headwise {headwise.__version__}, Python {platform.python_version()},"
        f" {platform.machine()}, one thread; others: float32, batch 1;"
        f" {a.repeats} repeats, median [smallest, largest]"
    )
    ours(LARGE, 128)  # reads the files once
    large(a.lengths, a.repeats)
    versions: dict[str, str] = {}
    for model in models(max(a.lengths)):
        for n in a.lengths:
            versions |= compared(model, n, a)
    print("\n" + ", ".join(f"{name} {number}" for name, number in versions.items()))


if __name__ == "__main__":
    main()
