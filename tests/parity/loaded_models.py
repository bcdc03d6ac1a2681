"""Tiny random models of the families that the library loads, and what is checked of each.

``CASES`` is the one list: a family is added by a function that makes a transformers model and the
checks that it has to pass. Tests and ``benchmarks/parity.py`` go through it with ``errors``.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tests.parity.loaded_checks import BARE, DECODER, LONG, WINDOW, Check, saved

__all__ = ["CASES", "ROPES", "Case", "decoder", "errors", "shaken"]

WORDS = 127

_GPT = {
    "n_embd": 60, "n_layer": 3, "n_head": 5, "vocab_size": WORDS, "n_positions": 101,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_TEXT = {
    "hidden_size": 60, "intermediate_size": 97, "num_hidden_layers": 3, "num_attention_heads": 6,
    "vocab_size": WORDS, "max_position_embeddings": 101, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
_GROUPED = {**_TEXT, "num_key_value_heads": 2, "head_dim": 14}
_NEOX = {**_TEXT, "num_attention_heads": 3, "rotary_pct": 0.3}
_WINDOW = 7

ROPES: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 3.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "yarn": {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32,
        "beta_fast": 2.0, "beta_slow": 0.5,
    },
    "llama3": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    "longrope": {
        "rope_type": "longrope", "factor": 4.0, "original_max_position_embeddings": 16,
        "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6],
        "long_factor": [1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5],
    },
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A family or a variant of one, how transformers makes it, and what is checked."""

    name: str
    make: Callable[[], PreTrainedModel]
    checks: Mapping[str, Check]


def shaken(model: PreTrainedModel) -> PreTrainedModel:
    """Every parameter random, gains and biases too: a wrong place for any of them shows."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() >= 2:
                parameter.copy_(0.15 * noise)
            else:
                parameter.add_(0.3 * noise)
    return model.eval()


def decoder(name: str, kind: str, sizes: dict[str, Any], **more: Check) -> Case:
    """A case of a decoder: transformers' model of a kind and size, and all checks of decoders."""

    def make() -> PreTrainedModel:
        config = AutoConfig.for_model(kind, **sizes)
        return shaken(AutoModelForCausalLM.from_config(config))

    return Case(name, make, {**DECODER, **more})


def _scaled(name: str) -> Case:
    """Llama with a rotary scaling; those that look at the length turn old keys otherwise than a
    cache that grows, so of them only whole passes are compared."""
    context = 32 if name == "dynamic" else 128
    rope = {"rope_theta": 500.0, **ROPES[name]}
    sizes = {**_GROUPED, "rope_parameters": rope, "max_position_embeddings": context}
    case = decoder(f"llama, rope {name}", "llama", sizes, **LONG)
    return case if name not in ("dynamic", "longrope") else Case(case.name, case.make, LONG)


CASES: list[Case] = [
    decoder("gpt2", "gpt2", _GPT, **BARE),
    decoder(
        "gpt2, scaled by layer, untied", "gpt2",
        {**_GPT, "scale_attn_by_inverse_layer_idx": True, "tie_word_embeddings": False,
         "n_inner": 83, "activation_function": "gelu"},
    ),
    decoder("gpt2, no scale", "gpt2", {**_GPT, "scale_attn_weights": False}),
    decoder("gpt_neox", "gpt_neox", _NEOX),
    decoder(
        "gpt_neox, in sequence, no biases, tied", "gpt_neox",
        {**_NEOX, "use_parallel_residual": False, "attention_bias": False, "rotary_pct": 1.0,
         "tie_word_embeddings": True}, **BARE,
    ),
    decoder("llama", "llama", _GROUPED),
    decoder(
        "llama, biases, tied", "llama",
        {**_TEXT, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}, **BARE,
    ),
    *(_scaled(name) for name in ROPES),
    decoder("mistral", "mistral", {**_GROUPED, "sliding_window": _WINDOW}, **WINDOW),
    decoder("mistral, no window", "mistral", {**_GROUPED, "sliding_window": None}),
    decoder("qwen2", "qwen2", {**_GROUPED, "tie_word_embeddings": True}, **BARE),
    decoder(
        "qwen2, windows above layer 1", "qwen2",
        {**_GROUPED, "use_sliding_window": True, "sliding_window": _WINDOW, "max_window_layers": 1},
        **WINDOW,
    ),
    decoder("qwen3", "qwen3", _GROUPED),
    decoder(
        "qwen3, biases, window in layer 1", "qwen3",
        {**_GROUPED, "attention_bias": True, "use_sliding_window": True, "sliding_window": _WINDOW,
         "layer_types": ["full_attention", "sliding_attention", "full_attention"]},
        **WINDOW,
    ),
    decoder(
        "gemma2", "gemma2",
        {**_GROUPED, "sliding_window": _WINDOW, "query_pre_attn_scalar": 19,
         "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}, **BARE, **WINDOW,
    ),
    decoder(
        "gemma2, no caps, biases, untied", "gemma2",
        {**_GROUPED, "sliding_window": _WINDOW, "attn_logit_softcapping": None,
         "final_logit_softcapping": None, "attention_bias": True, "tie_word_embeddings": False},
    ),
]  # fmt: skip


def errors(case: Case) -> Iterator[tuple[str, float]]:
    """Each check of a case and its largest relative error."""
    model = case.make()
    with tempfile.TemporaryDirectory() as place:
        folder = saved(model, Path(place))
        for name, check in case.checks.items():
            yield name, check(model, folder)
