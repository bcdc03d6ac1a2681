"""Tiny GGUF files, written with the gguf library from random models and trained tokenizers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from tokenizers import Tokenizer, pre_tokenizers, trainers
from tokenizers.models import BPE
from transformers import AutoConfig, AutoModelForCausalLM

ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
}
VOCABULARY = 263


def build(family: str, **changes: Any) -> Any:
    """A random model of the family whose sizes are all different."""
    torch.manual_seed(5)
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 97,
        "rope_theta": 7000.0,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        **changes,
    }
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes)).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # biases and norms away from 0 and 1
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def interleaved(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """Row by row: entry i of the first half to row 2i of its head, of the second to row 2i + 1."""
    out = torch.empty_like(tensor)
    width = tensor.shape[0] // heads
    for head in range(heads):
        for i in range(width // 2):
            out[head * width + 2 * i] = tensor[head * width + i]
            out[head * width + 2 * i + 1] = tensor[head * width + width // 2 + i]
    return out


def write(
    path: Path,
    family: str,
    model: Any,
    *,
    tokenizer: Mapping[str, Any] | None = None,
    quantise: gguf.GGMLQuantizationType | None = None,
    metadata: Mapping[str, Any] | None = None,
    leave_out: tuple[str, ...] = (),
    extra: Mapping[str, np.ndarray] | None = None,
) -> None:
    """The model as a GGUF file; ``metadata``: further whole numbers and words of the family."""
    config = model.config
    writer = gguf.GGUFWriter(path, family)
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(7000.0)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    for key, value in (metadata or {}).items():
        kind = {str: writer.add_string, float: writer.add_float32, int: writer.add_uint32}
        kind[type(value)](f"{family}.{key}", value)
    add_tokenizer(writer, tokenizer)
    names = gguf.get_tensor_name_map(ARCHITECTURES[family], config.num_hidden_layers)
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    for name, tensor in model.state_dict().items():
        base, _, kind_of = name.rpartition(".")
        target = f"{names.get_name(base)}.{kind_of}"
        if target in leave_out:
            continue
        part = target.split(".")[-2]
        if family == "llama" and part in heads:
            tensor = interleaved(tensor, heads[part])
        array = tensor.float().numpy()
        if quantise is not None and array.ndim == 2:
            writer.add_tensor(target, gguf.quants.quantize(array, quantise), raw_dtype=quantise)
        else:
            writer.add_tensor(target, array)
    for target, array in (extra or {}).items():
        writer.add_tensor(target, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_tokenizer(writer: gguf.GGUFWriter, given: Mapping[str, Any] | None) -> None:
    """Tokens, merges, their kinds and the name of the split."""
    if given is None:
        return
    writer.add_tokenizer_model(given.get("model", "gpt2"))
    if "pre" in given:
        writer.add_tokenizer_pre(given["pre"])
    writer.add_token_list(given["tokens"])
    writer.add_token_types(given["types"])
    writer.add_token_merges(given["merges"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    if "add_bos" in given:
        writer.add_add_bos_token(given["add_bos"])
    if "add_eos" in given:
        writer.add_add_eos_token(given["add_eos"])


def trained(text: str, pre: str, size: int = 700) -> dict[str, Any]:
    """A vocabulary of byte-level BPE trained on a text: two control tokens, one user-defined."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=["<begin>", "<end>", "<tool>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([text], trainer)
    vocabulary = tokenizer.get_vocab()
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    return {
        "pre": pre,
        "tokens": sorted(vocabulary, key=vocabulary.__getitem__),
        "types": [3, 3, 4] + [1] * (len(vocabulary) - 3),
        "merges": [" ".join(pair) for pair in merges],
    }
