"""Number formats: the bits of the sources, the bytes of real files."""

from __future__ import annotations

import os
from fractions import Fraction
from pathlib import Path

import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from headwise.cost.explicit import explicit
from headwise.cost.formats import FORMATS, format_of, stored_bytes
from headwise.errors import OptionError
from headwise.gguf_header import read_gguf_header
from tests.cost import tiny

BITS = {
    "float32": 32, "bfloat16": 16, "float16": 16, "float8": 8, "int8": 8, "mxfp4": Fraction(17, 4),
    "int4": Fraction(33, 8), "int4_zero": Fraction(133, 32), "nf4": Fraction(9, 2),
    "q4_0": Fraction(9, 2), "q4_1": 5, "q5_0": Fraction(11, 2), "q5_1": 6, "q8_0": Fraction(17, 2),
    "q2_k": Fraction(21, 8), "q3_k": Fraction(55, 16), "q4_k": Fraction(9, 2),
    "q5_k": Fraction(11, 2), "q6_k": Fraction(105, 16), "iq4_nl": Fraction(9, 2),
}  # fmt: skip


@pytest.mark.parametrize("name", BITS)
def test_bits_of_a_number(name):
    assert FORMATS[name].bits == BITS[name]


def test_double_quantisation_costs_an_eighth_of_a_bit():
    """Dettmers et al. 2023, section 3: 8/64 + 32/(64 · 256) = 0.127 bits."""
    assert FORMATS["nf4_double"].bits == 4 + Fraction(8, 64) + Fraction(32, 64 * 256)


@pytest.mark.parametrize(
    "name", [name for name in FORMATS if hasattr(GGMLQuantizationType, name.upper())]
)
def test_blocks_are_those_of_ggml(name):
    block, size = GGML_QUANT_SIZES[GGMLQuantizationType[name.upper()]]
    assert (FORMATS[name].block, FORMATS[name].size) == (block, size)


def test_a_block_never_crosses_a_row():
    form = FORMATS["q4_0"]
    assert form.bytes(rows=3, width=33) == 3 * 2 * 18
    assert form.bytes(rows=1, width=99) == 4 * 18
    assert FORMATS["int8"].bytes(rows=3, width=7) == 3 * (7 + 4)
    assert FORMATS["nf4_double"].bytes(rows=257, width=64) == 257 * 33 + 2 * 4


def test_plain_types_are_parameters_times_size():
    parts = tiny.parts("llama", head=True)
    numbers = sum(each.numel() for each in tiny.model_of("llama", head=True).parameters())
    assert stored_bytes(parts, "bfloat16") == 2 * numbers
    assert stored_bytes(parts, "float64") == 8 * numbers


def test_scopes():
    """GGUF: vectors in float32; layers: only the matrices of blocks, the rest in bfloat16."""
    parts = explicit(d_model=64, layers=3, heads=4, vocab=97)
    blocks, tables, vectors = 3 * 12 * 64 * 64, 2 * 97 * 64, 7 * 64
    assert stored_bytes(parts, "q4_0") == (blocks + tables) * 18 // 32 + 4 * vectors
    assert stored_bytes(parts, "mxfp4") == blocks * 17 // 32 + 2 * (tables + vectors)


@pytest.mark.real_model
def test_a_real_file_tensor_by_tensor():
    folder = os.environ.get("HEADWISE_MODELS")
    path = next(Path(folder or "").rglob("SmolLM2-135M-Instruct.Q4_1.gguf"), None)
    assert path is not None
    names = {kind.value: kind.name.lower() for kind in GGMLQuantizationType}
    sizes = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}
    for tensor in read_gguf_header(path).tensors.values():
        name = names[tensor.kind]
        *rows, width = tensor.shape
        form = FORMATS[sizes.get(name, name)]
        assert form.bytes(rows=rows[0] if rows else 1, width=width) == tensor.size


def test_an_unknown_format_is_refused():
    with pytest.raises(OptionError, match="the number format 'q9_9'"):
        format_of("q9_9")
