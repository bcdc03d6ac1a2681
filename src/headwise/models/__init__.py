"""The transformer from its definitions: parts, models put together from them, and their files.

Three tiers: parts take parts (``Decoder``, ``Block``, ``PreNorm``, ``MultiHeadAttention``);
builders take sizes (``decoder_sizes``); presets are published sizes by name
(``preset("gpt2-small")``).
"""

from headwise.models.architecture import (
    Architecture,
    Embedding,
    Relative,
    Rotary,
    Stack,
    Unembedding,
)
from headwise.models.attention import MultiHeadAttention
from headwise.models.block import Block, Branch, ParallelBlock, PostNorm, PreNorm, Sandwich
from headwise.models.build import Model, build, skeleton
from headwise.models.cache import Cache
from headwise.models.checkpoints.adapters import load_adapter
from headwise.models.context import Context
from headwise.models.decoder import Decoder
from headwise.models.encoder import Encoder
from headwise.models.feed_forward import MLP, GatedMLP
from headwise.models.generation import Generated, generate, stream
from headwise.models.low_rank import (
    LowRankLinear,
    add_low_rank,
    merge,
    remove_low_rank,
    unmerge,
)
from headwise.models.norms import (
    AcrossHeads,
    LayerNorm,
    OffsetRMSNorm,
    RMSNorm,
    layer_norm,
    rms_norm,
)
from headwise.models.presets import (
    PRESETS,
    decoder_sizes,
    encoder_sizes,
    preset,
    transformer_sizes,
)
from headwise.models.sampling import (
    Choice,
    Draw,
    Forbid,
    RepetitionPenalty,
    Temperature,
    TopK,
    TopP,
    choice,
    greedy,
)
from headwise.models.seq2seq import EncoderDecoder

__all__ = [
    "MLP",
    "PRESETS",
    "AcrossHeads",
    "Architecture",
    "Block",
    "Branch",
    "Cache",
    "Choice",
    "Context",
    "Decoder",
    "Draw",
    "Embedding",
    "Encoder",
    "EncoderDecoder",
    "Forbid",
    "GatedMLP",
    "Generated",
    "LayerNorm",
    "LowRankLinear",
    "Model",
    "MultiHeadAttention",
    "OffsetRMSNorm",
    "ParallelBlock",
    "PostNorm",
    "PreNorm",
    "RMSNorm",
    "Relative",
    "RepetitionPenalty",
    "Rotary",
    "Sandwich",
    "Stack",
    "Temperature",
    "TopK",
    "TopP",
    "Unembedding",
    "add_low_rank",
    "build",
    "choice",
    "decoder_sizes",
    "encoder_sizes",
    "generate",
    "greedy",
    "layer_norm",
    "load_adapter",
    "merge",
    "preset",
    "remove_low_rank",
    "rms_norm",
    "skeleton",
    "stream",
    "transformer_sizes",
    "unmerge",
]
