"""Where a parameter stands: the transformer block it is in, and which part of the block it is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from torch import nn

__all__ = ["blocks", "projection"]

# The names that transformers' families give to the projections of attention.
_ATTENTION: Final = {
    "q": {"q_proj", "query", "q_lin", "q", "q_attn", "q_a_proj", "q_b_proj", "wq"},
    "k": {"k_proj", "key", "k_lin", "k", "wk"},
    "v": {"v_proj", "value", "v_lin", "v", "wv"},
    "o": {"o_proj", "output", "out_proj", "out_lin", "o", "dense", "c_proj", "Wo", "wo"},
    "qkv": {
        "c_attn",
        "query_key_value",
        "qkv_proj",
        "qkv",
        "Wqkv",
        "in_proj",
        "kv_proj",
        "kv_a_proj_with_mqa",
        "kv_b_proj",
    },
}
_MLP: Final = ("mlp", "feedforward", "feed_forward", "ffn", "moe", "expert", "intermediate")
_MLP_LEAVES: Final = {"fc1", "fc2", "fc_in", "fc_out", "wi", "wo", "lin1", "lin2", "dense"}


def blocks(model: nn.Module) -> Iterator[tuple[str, int, nn.Module]]:
    """The transformer blocks: (module path, number within its stack, module).

    A block is a member of a ``ModuleList`` that holds an attention module and is in no other block.
    """
    inside: str | None = None
    for name, module in model.named_modules():
        if inside is not None and name.startswith(inside):
            continue
        path, _, number = name.rpartition(".")
        if not number.isdigit() or not isinstance(model.get_submodule(path), nn.ModuleList):
            continue
        if any("Attention" in type(part).__name__ for part in module.modules()):
            inside = name + "."
            yield name, int(number), module


def projection(model: nn.Module, parameter: str) -> tuple[int | None, str]:
    """The block number (None outside the blocks) and the kind, one of ``records.PROJECTIONS``.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> tiny = GPT2Config(n_embd=6, n_head=2, n_layer=1, vocab_size=11, n_positions=5)
        >>> projection(GPT2LMHeadModel(tiny), "transformer.h.0.attn.c_attn.weight")
        (0, 'qkv')
    """
    parts = parameter.split(".")[:-1]
    chain = [(name, module) for name, module in _chain(model, parts)]
    number = _block_number(model, chain)
    owner = chain[-1][1] if chain else model
    leaf = parts[-1] if parts else ""
    if "norm" in type(owner).__name__.lower():
        return number, "norm"
    if any("Attention" in type(module).__name__ for _, module in chain):
        name = parameter.rpartition(".")[2] if leaf not in _known() else leaf
        name = name.removesuffix("_weight").removesuffix("_bias")
        return number, next((kind for kind, names in _ATTENTION.items() if name in names), "other")
    if isinstance(owner, nn.Embedding):
        return number, "embedding"
    words = " ".join(f"{name} {type(module).__name__}".lower() for name, module in chain)
    if number is not None and (leaf in _MLP_LEAVES or any(word in words for word in _MLP)):
        return number, "mlp"
    return number, "other"


def _known() -> set[str]:
    return set().union(*_ATTENTION.values())


def _chain(model: nn.Module, parts: list[str]) -> Iterator[tuple[str, nn.Module]]:
    module = model
    for part in parts:
        module = module.get_submodule(part)
        yield part, module


def _block_number(model: nn.Module, chain: list[tuple[str, nn.Module]]) -> int | None:
    above: nn.Module = model
    for name, module in chain:
        holds = isinstance(above, nn.ModuleList) and name.isdigit()
        if holds and any("Attention" in type(part).__name__ for part in module.modules()):
            return int(name)
        above = module
    return None
