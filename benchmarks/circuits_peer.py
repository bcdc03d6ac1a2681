"""What transformer-lens reads and computes, by an interpreter of its own, beside ours."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from headwise.circuits.composition import composition
from headwise.circuits.factored import Factored
from headwise.circuits.head_weights import HeadWeights, head_weights

__all__ = ["compared", "spectra"]

SPECTRA = """
import json, sys, time
import torch
from importlib.metadata import version
from transformer_lens import FactoredMatrix
torch.set_num_threads(1)
torch.set_grad_enabled(False)
weights = torch.load(sys.argv[1])
values, start = [], time.process_time()
for left, right in weights:
    values.append(FactoredMatrix(left, right).S)
seconds = time.process_time() - start
torch.save(values, sys.argv[2])
print(json.dumps([seconds, version("transformer-lens"), torch.__version__]))
"""

MODEL = """
import sys
import torch
from transformers import AutoModelForCausalLM
from transformer_lens.model_bridge import TransformerBridge
from transformer_lens.utilities import composition_scores
torch.set_num_threads(1)
torch.set_grad_enabled(False)
folder, target, layers = sys.argv[1], sys.argv[2], [int(i) for i in sys.argv[3].split(",")]
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
bridge = TransformerBridge.boot_transformers(folder, hf_model=model, dtype=torch.float32)
found = {}
for name in ("W_Q", "W_K", "W_V", "W_O", "b_Q", "b_K", "b_V", "b_O"):
    try:
        found[name] = getattr(bridge, name)
    except AttributeError:  # what it says where there are no biases
        continue
qk, ov = bridge.QK, bridge.OV
found |= {"S of W_QK": qk.S, "S of W_OV": ov.S}
few = [type(qk)(x.A[layers], x.B[layers]) for x in (qk, ov)]
found |= {"W_QK": few[0].AB, "W_OV": few[1].AB}
readers = {"Q": few[0], "K": few[0].T, "V": few[1]}
for letter, reader in readers.items():
    found[f"{letter}-composition"] = composition_scores(few[1], reader, broadcast_dims=True)
torch.save(found, target)
"""


def spectra(
    python: str, pairs: list[tuple[Tensor, Tensor]]
) -> tuple[float, str, list[Tensor]]:  # fmt: skip
    """CPU seconds of ``FactoredMatrix(…).S`` of all pairs, the versions, and the values."""
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder, "weights.pt"), Path(folder, "values.pt")
        torch.save(pairs, source)
        out = _run(python, SPECTRA, str(source), str(target))
        seconds, version, torch_version = json.loads(out.splitlines()[-1])
        return seconds, f"transformer-lens {version}, torch {torch_version}", torch.load(target)


def compared(python: str, model: PreTrainedModel, name: str) -> None:
    """Print how far what transformer-lens reads in a model is from what is read here.

    Weights and biases of all heads (key-value heads as stored), singular values of all products;
    products and composition of every pair on five layers. Raw: no norm is folded into them.
    """
    weights = head_weights(model)
    layers = sorted({round(i * (len(weights.layers) - 1) / 4) for i in range(5)})
    ours = _ours(weights, layers)
    theirs = _theirs(python, model, layers)
    heads = sum(layer.heads for layer in weights.layers)
    print(f"{name}: {heads} heads; products and composition of layers {layers}")
    for what in sorted({*ours, *theirs}):
        if what not in ours or what not in theirs:
            print(f"  {what:14} only {'ours' if what in ours else 'theirs'}")
            continue
        own, other = ours[what].double(), theirs[what].double()
        assert own.shape == other.shape, (what, own.shape, other.shape)
        off, size = (own - other).abs().max().item(), other.abs().max().item()
        print(
            f"  {what:14} {tuple(own.shape)!s:24} differs by {off:.1e}, relative {off / size:.1e}"
        )


def _ours(weights: HeadWeights, layers: list[int]) -> dict[str, Tensor]:
    every = weights.layers
    found = {
        f"W_{name[0].upper()}": torch.stack([getattr(layer, name) for layer in every])
        for name in ("query", "key", "value", "output")
    }
    for name in ("query_bias", "key_bias", "value_bias", "output_bias"):
        biases = [getattr(layer, name) for layer in every]
        if all(b is not None for b in biases):
            found[f"b_{name[0].upper()}"] = torch.stack(biases)
    qk, ov = ([getattr(layer, which)() for layer in every] for which in ("qk", "ov"))
    for which, products in (("W_QK", qk), ("W_OV", ov)):
        found[f"S of {which}"] = torch.stack([each.singular_values() for each in products])
        found[which] = torch.stack([products[i].dense() for i in layers])
    writers, reading = [ov[i] for i in layers], [qk[i] for i in layers]
    for letter, readers in (("Q", reading), ("K", [f.T for f in reading]), ("V", writers)):
        found[f"{letter}-composition"] = _pairs(writers, readers)
    return found


def _pairs(writers: list[Factored], readers: list[Factored]) -> Tensor:
    """``layer head layer head``; 0 where the reader is no later."""
    value = composition(writers, readers).value.nan_to_num(0)
    shape = (len(writers), writers[0].left.shape[0], len(readers), readers[0].left.shape[0])
    return value.view(shape)


def _theirs(python: str, model: PreTrainedModel, layers: list[int]) -> dict[str, Tensor]:
    """transformer-lens reads no GGUF: it is given the same numbers as a Hugging Face folder."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        _tokenizer().save_pretrained(folder)  # asked for, and not used: nothing is read
        target = Path(folder, "found.pt")
        _run(python, MODEL, folder, str(target), ",".join(map(str, layers)))
        found: dict[str, Tensor] = torch.load(target)
    later = torch.tensor(layers)[:, None, None, None] < torch.tensor(layers)[:, None]
    for name in found:
        if name.endswith("composition"):  # they score all pairs, also those that cannot be
            found[name] = found[name] * later
        elif name.startswith("S of"):
            found[name] = found[name][..., : found["W_Q"].shape[-1]]
    return found


def _tokenizer() -> Any:
    words = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    return PreTrainedTokenizerFast(
        tokenizer_object=words, bos_token="b", eos_token="b", pad_token="b"
    )


def _run(python: str, script: str, *arguments: str) -> str:
    quiet = {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    done = subprocess.run(
        [python, "-c", script, *arguments], capture_output=True, text=True, env=quiet
    )
    if done.returncode:
        raise SystemExit(f"{python} failed:\n{done.stderr}")
    return done.stdout
