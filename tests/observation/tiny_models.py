"""Tiny random models and a tokenizer of single bytes, saved as a user would have them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers, processors
from tokenizers.models import BPE
from transformers import AutoConfig, AutoModel, PreTrainedTokenizerFast
from transformers.models.auto import modeling_auto as auto

VOCABULARY = 263
CONTEXT = 97
SPECIAL = ("<pad>", "<bos>", "<eos>", "<mask>")
_TOKENS = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {
        "hidden_size": 24,
        "intermediate_size": 31,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": CONTEXT,
    },
    "gpt2": {"n_embd": 24, "n_layer": 2, "n_head": 4, "n_positions": CONTEXT},
    "gemma2": {
        "hidden_size": 24,
        "intermediate_size": 31,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 6,
        "max_position_embeddings": CONTEXT,
    },
    "opt": {
        "hidden_size": 24,
        "ffn_dim": 31,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "word_embed_proj_dim": 24,
        "max_position_embeddings": CONTEXT,
    },
    "bert": {
        "hidden_size": 24,
        "intermediate_size": 31,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": CONTEXT,
    },
    "t5": {
        "d_model": 24,
        "d_kv": 6,
        "d_ff": 31,
        "num_layers": 2,
        "num_heads": 4,
        "decoder_start_token_id": 0,
    },
    "bloom": {"hidden_size": 24, "n_layer": 1, "n_head": 4},
    "vit": {"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 4},
}

_HEADS = {
    "causal": auto.MODEL_FOR_CAUSAL_LM_MAPPING,
    "masked": auto.MODEL_FOR_MASKED_LM_MAPPING,
    "seq2seq": auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
}


def tokenizer(*, around: bool = False) -> PreTrainedTokenizerFast:
    """One token per byte; with ``around``, <bos> before and <eos> after each text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *alphabet])}
    raw = Tokenizer(BPE(vocabulary, []))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    if around:
        raw.post_processor = processors.TemplateProcessing(
            single="<bos> $A <eos>", special_tokens=[("<bos>", 1), ("<eos>", 2)]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=raw,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        mask_token="<mask>",
    )


def build(architecture: str, head: str | None = "causal", **changes: Any) -> Any:
    """A random model in evaluation mode; ``head`` is causal, masked, seq2seq or None."""
    torch.manual_seed(7)
    sizes = {**_TOKENS, **CONFIGS[architecture], **changes}
    config = AutoConfig.for_model(architecture, **sizes)
    table = AutoModel._model_mapping if head is None else _HEADS[head]
    return table[type(config)](config).eval()


def save(
    folder: Path,
    architecture: str = "llama",
    head: str | None = "causal",
    *,
    with_tokenizer: bool = True,
    around: bool = False,
    shard: str = "5GB",
    **changes: Any,
) -> Path:
    """The model and its tokenizer in a folder."""
    build(architecture, head, **changes).save_pretrained(folder, max_shard_size=shard)
    if with_tokenizer:
        tokenizer(around=around).save_pretrained(folder)
    return folder


def save_gguf(path: Path, *, architecture: str = "llama", leave_out: str | None = None) -> Any:
    """A tiny llama as a GGUF file, float32; the transformers model it was written from."""
    import gguf

    model = build("llama", rms_norm_eps=1e-5)
    config = model.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(VOCABULARY)
    _add_tokenizer(writer)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        base, _, kind = name.rpartition(".")
        target = f"{names.get_name(base)}.{kind}"
        if target == leave_out:
            continue
        writer.add_tensor(target, _permuted(target, tensor, config).float().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def _permuted(name: str, tensor: torch.Tensor, config: Any) -> torch.Tensor:
    """GGUF llama files pair rotary dimensions (2i, 2i+1); transformers pairs (i, i + d/2)."""
    heads = {
        "attn_q": config.num_attention_heads,
        "attn_k": config.num_key_value_heads,
    }.get(name.split(".")[-2])
    if heads is None:
        return tensor
    rows, width = tensor.shape
    paired = tensor.reshape(heads, 2, rows // heads // 2, width).transpose(1, 2)
    return paired.reshape(rows, width).contiguous()


def _add_tokenizer(writer: Any) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*SPECIAL, *alphabet, "ab"]
    tokens += [f"<unused{i}>" for i in range(VOCABULARY - len(tokens))]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types(np.array([3] * 4 + [1] * (len(tokens) - 4), dtype=np.int32).tolist())
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
