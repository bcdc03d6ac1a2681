"""A GGUF file whose tensors have the shapes of a model's parts, under llama.cpp's names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from headwise.cost.parts import Component, Layer, Matrix, Parts

NAMES = {
    "W_Q": "attn_q", "W_K": "attn_k", "W_V": "attn_v", "W_O": "attn_output", "W_gate": "ffn_gate",
    "W_up": "ffn_up", "W_down": "ffn_down", "W_in": "ffn_up", "W_out": "ffn_down",
    "router": "ffn_gate_inp", "shared gate": "ffn_gate_inp_shexp", "W_DQ": "attn_q_a",
    "W_UQ": "attn_q_b", "W_DKV, W_KR": "attn_kv_a_mqa", "W_UK": "attn_k_b", "W_UV": "attn_v_b",
    "norm 1": "attn_norm", "norm 2": "ffn_norm", "norm 3": "post_attention_norm",
    "norm 4": "post_ffw_norm", "query norm": "attn_q_norm", "key norm": "attn_k_norm",
    "latent norm": "attn_kv_a_norm", "query latent norm": "attn_q_a_norm", "sinks": "attn_sinks",
    "tokens": "token_embd", "positions": "position_embd", "unembedding": "output",
    "final norm": "output_norm",
}  # fmt: skip
ENDS = {Component.EXPERTS: "_exps", Component.SHARED_EXPERTS: "_shexp"}


def named(matrix: Matrix) -> str:
    end = ENDS.get(matrix.component, "") if matrix.name.startswith("W_") else ""
    return NAMES[matrix.name] + end


def of_matrix(matrix: Matrix, before: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    """A matrix as rows of what comes out; a table as it is."""
    if matrix.tied:
        return
    tall = matrix.rows.value == "none"
    shape = (matrix.d_in, matrix.d_out) if tall else (matrix.d_out, matrix.d_in)
    copies = (matrix.copies,) if matrix.copies > 1 else ()
    yield f"{before}{named(matrix)}.weight", (*copies, *shape)
    if matrix.bias:
        yield f"{before}{named(matrix)}.bias", (*copies, matrix.bias)


def of_layer(layer: Layer, norm_bias: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
    before = f"blk.{layer.number}."
    for matrix in layer.matrices:
        yield from of_matrix(matrix, before)
    for vector in layer.vectors:
        halves = 2 if norm_bias and vector.name.startswith("norm") else 1
        for end in ("weight", "bias")[:halves]:
            yield f"{before}{NAMES[vector.name]}.{end}", (vector.size // halves,)


def shapes(parts: Parts, norm_bias: bool) -> dict[str, tuple[int, ...]]:
    """Every tensor of a decoder, and its shape with the outermost axis first."""
    (stack,) = parts.stacks
    found: dict[str, tuple[int, ...]] = {}
    for matrix in stack.matrices:
        found |= dict(of_matrix(matrix, ""))
    for layer in stack.layers:
        found |= dict(of_layer(layer, norm_bias))
    for vector in stack.vectors:
        found[f"{NAMES[vector.name]}.weight"] = (vector.size // (1 + norm_bias),)
        if norm_bias:
            found[f"{NAMES[vector.name]}.bias"] = (vector.size // 2,)
    return found


def write(
    path: Path,
    family: str,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, tuple[int, ...]],
    *,
    quantised: gguf.GGMLQuantizationType | None = None,
) -> Path:
    """Zeros of those shapes in float16, or quantised where rows are long enough."""
    writer = gguf.GGUFWriter(path, family)
    for key, value in metadata.items():
        add = {bool: writer.add_bool, int: writer.add_uint32, list: writer.add_array}
        add[type(value)](f"{family}.{key}", value)
    for name, shape in tensors.items():
        zeros = np.zeros(shape, dtype=np.float16)
        if quantised is not None and len(shape) > 1 and shape[-1] % 32 == 0:
            packed = gguf.quants.quantize(zeros.astype(np.float32), quantised)
            writer.add_tensor(name, packed, raw_dtype=quantised)
        else:
            writer.add_tensor(name, zeros)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
