"""Positions: sinusoidal, learned, rotary with its scalings, ALiBi and T5's relative buckets.

Every function takes explicit position ids (or an offset), so that padding, packed documents and
cached decoding are the caller's numbers and nobody's guess.
"""

from headwise.positions.alibi import alibi, alibi_bias, slopes
from headwise.positions.layout import Layout, half_order
from headwise.positions.learned import LearnedPositions
from headwise.positions.relative import t5_bias, t5_bias_function, t5_bucket
from headwise.positions.rotary import (
    Rotation,
    Spread,
    apply_rotation,
    frequencies,
    rotate,
    rotation,
    spread,
    turn,
)
from headwise.positions.scalings import (
    DynamicNTK,
    Frequencies,
    Linear,
    Llama3,
    LongRope,
    Proportional,
    Scaling,
    YaRN,
)
from headwise.positions.sinusoidal import shift_matrix, sinusoidal, sinusoidal_table

__all__ = [
    "DynamicNTK",
    "Frequencies",
    "Layout",
    "LearnedPositions",
    "Linear",
    "Llama3",
    "LongRope",
    "Proportional",
    "Rotation",
    "Scaling",
    "Spread",
    "YaRN",
    "alibi",
    "alibi_bias",
    "apply_rotation",
    "frequencies",
    "half_order",
    "rotate",
    "rotation",
    "shift_matrix",
    "sinusoidal",
    "sinusoidal_table",
    "slopes",
    "spread",
    "t5_bias",
    "t5_bias_function",
    "t5_bucket",
    "turn",
]
