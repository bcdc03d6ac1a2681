"""Counts that other people's tools got wrong: exact integers, each worked out beside its test.

Public reports: pytorch/pytorch#195460, allenai/olmoearth_pretrain#605, karpathy/nanoGPT#456,
pytorch/torchtitan#3225, huggingface/trl#6709, jranaraki/vllm-fit#14, vllm-project/vllm#29736,
alvarobartt/hf-mem#60, alvarobartt/hf-mem#70, ollama/ollama#16958, lablup/mlxcel#172,
rasbt/LLMs-from-scratch#922, huggingface/transformers#14960, karpathy/llama2.c#378,
Abdullah-Taha9/ui-training#29.
"""

from __future__ import annotations

from typing import Any

import pytest

from headwise.cost.config import parts_of
from headwise.cost.counting import count
from headwise.cost.explicit import explicit
from headwise.cost.kv_cache import kv_cache
from headwise.cost.parts import Component
from headwise.cost.workload import Workload

GPT2 = {
    "model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257,
    "n_positions": 1024,
}  # fmt: skip
LLAMA3_8B = {
    "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "intermediate_size": 14336, "vocab_size": 128256, "tie_word_embeddings": False,
}  # fmt: skip
LLAMA2_7B = {
    **LLAMA3_8B, "num_key_value_heads": 32, "intermediate_size": 11008, "vocab_size": 32000,
}  # fmt: skip
LLAMA3_70B = {
    **LLAMA3_8B, "hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64,
    "intermediate_size": 28672,
}  # fmt: skip
QWEN25_72B = {
    **LLAMA3_70B, "model_type": "qwen2", "intermediate_size": 29568, "vocab_size": 152064,
}  # fmt: skip
QWEN3_4B = {
    "model_type": "qwen3", "hidden_size": 2560, "num_hidden_layers": 36,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "intermediate_size": 9728, "vocab_size": 151936, "tie_word_embeddings": True,
}  # fmt: skip
GPT_OSS_120B = {
    "model_type": "gpt_oss", "hidden_size": 2880, "num_hidden_layers": 36,
    "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
    "intermediate_size": 2880, "num_local_experts": 128, "num_experts_per_tok": 4,
    "vocab_size": 201088, "sliding_window": 128,
}  # fmt: skip
GPT_OSS_20B = {**GPT_OSS_120B, "num_hidden_layers": 24, "num_local_experts": 32}
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3", "hidden_size": 7168, "num_hidden_layers": 61,
    "num_attention_heads": 128, "num_key_value_heads": 128, "intermediate_size": 18432,
    "moe_intermediate_size": 2048, "n_routed_experts": 256, "n_shared_experts": 1,
    "num_experts_per_tok": 8, "first_k_dense_replace": 3, "q_lora_rank": 1536,
    "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
    "vocab_size": 129280, "tie_word_embeddings": False,
}  # fmt: skip


def attention_flops(pairs: str) -> int:
    parts = explicit(d_model=12 * 64, layers=1, heads=12, vocab=1)
    found = count(parts, Workload(length=64, pairs=pairs)).by_component()
    return 2 * (found[Component.SCORES] + found[Component.MIX])


def flops_of(component: Component) -> int:
    """Of one token of GPT-2."""
    return 2 * count(parts_of(GPT2), Workload(length=1)).by_component()[component]


def cache(config: dict[str, Any], n: int = 1, batch: int = 1, windows: bool = True) -> int:
    """Bytes of the keys and values of ``n`` tokens in 16 bits; a window of W keeps W of them."""
    found = kv_cache(parts_of(config), tokens=n, batch=batch, dtype="bfloat16")
    return found.ideal if windows else found.paged


def parameters(config: dict[str, Any]) -> int:
    return count(parts_of(config), Workload(length=1)).parameters


def llama_parameters(
    vocab: int, d: int, layers: int, heads: int, kv: int, width: int, d_ff: int,
    *, tied: bool, qkv_bias: bool = False, qk_norm: bool = False,
) -> int:  # fmt: skip
    attention = 2 * d * heads * width + 2 * d * kv * width
    attention += (heads + 2 * kv) * width * qkv_bias + 2 * width * qk_norm
    return vocab * d * (2 - tied) + layers * (attention + 3 * d * d_ff + 2 * d) + d


def test_both_products_of_attention_count():
    assert attention_flops("all") == 4 * 12 * 64 * 64 * 64 == 12_582_912


def test_a_causal_mask_shows_n_times_n_plus_1_over_2_pairs():
    assert attention_flops("visible") == 4 * 12 * 64 * (64 * 65 // 2)


def test_a_tied_head_multiplies_and_a_picked_row_does_not():
    assert flops_of(Component.UNEMBEDDING) == 2 * 50257 * 768
    assert flops_of(Component.EMBEDDING) == flops_of(Component.POSITIONS) == 0


@pytest.mark.parametrize(
    ("config", "value"),
    [
        (LLAMA2_7B, 2 * 32 * 32 * 128 * 2),
        (LLAMA3_8B, 2 * 32 * 8 * 128 * 2),  # with all 32 heads it would be four times as much
        (GPT_OSS_120B, 2 * 36 * 8 * 64 * 2),
        (DEEPSEEK_V3, 61 * (512 + 64) * 2),
    ],
    ids=["llama 2 7b", "llama 3 8b", "gpt-oss 120b", "deepseek v3"],
)
def test_bytes_that_one_token_adds_to_the_cache(config, value):
    assert cache(config) == value


def test_the_cache_of_a_long_text():
    assert cache(LLAMA3_70B, 32768) == 2 * 80 * 8 * 128 * 2 * 32768 == 10 * 2**30


def test_windows_cap_the_cache_of_every_other_layer():
    one = 2 * 8 * 64 * 2 * 32
    assert cache(GPT_OSS_20B, 8192, batch=32) == one * (12 * 8192 + 12 * 128)
    assert cache(GPT_OSS_20B, 8192, batch=32, windows=False) == one * 24 * 8192 == 12 * 2**30


def test_parameters_of_gpt2():
    block = 4 * 768 + 768 * 2304 + 2304 + 768 * 768 + 768 + 2 * 768 * 3072 + 3072 + 768
    assert parameters(GPT2) == 50257 * 768 + 1024 * 768 + 12 * block + 2 * 768 == 124_439_808


@pytest.mark.parametrize(
    ("config", "value"),
    [
        (LLAMA3_8B, llama_parameters(128256, 4096, 32, 32, 8, 128, 14336, tied=False)),
        (
            QWEN3_4B,  # heads of 128, not of 2560 / 32 = 80
            llama_parameters(151936, 2560, 36, 32, 8, 128, 9728, tied=True, qk_norm=True),
        ),
        (
            QWEN25_72B,
            llama_parameters(152064, 8192, 80, 64, 8, 128, 29568, tied=False, qkv_bias=True),
        ),
    ],
    ids=["llama 3 8b", "qwen 3 4b", "qwen 2.5 72b"],
)
def test_parameters(config, value):
    assert parameters(config) == value


def test_a_wrong_width_of_a_head_is_noticed():
    right = llama_parameters(151936, 2560, 36, 32, 8, 128, 9728, tied=True, qk_norm=True)
    assert parameters({**QWEN3_4B, "head_dim": 80}) != right
