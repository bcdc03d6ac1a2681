"""Which GGUF files transformers can load, asked before a weight is read."""

from __future__ import annotations

from pathlib import Path

from headwise.errors import ModelError
from headwise.gguf_header import GgufHeader
from headwise.models.checkpoints.checks import check_gguf

__all__ = ["check_loadable_gguf"]


def check_loadable_gguf(path: Path) -> GgufHeader:
    """The header of a GGUF file that is whole and of a family that transformers can load."""
    header = check_gguf(path)
    families = _gguf_families()
    if _family(header.family) not in families:
        raise ModelError(
            f"{path} is a GGUF file of the family {header.family!r}, which transformers cannot"
            " load",
            allowed=", ".join(sorted(families)),
            to_do="use the model's Hugging Face folder",
        )
    return header


def _gguf_families() -> set[str]:
    from transformers.integrations.gguf import GGUF_CONFIG_ARCHS
    from transformers.modeling_gguf_pytorch_utils import GGUF_SUPPORTED_ARCHITECTURES

    return (set(GGUF_SUPPORTED_ARCHITECTURES) | set(GGUF_CONFIG_ARCHS)) - {"general", "tokenizer"}


def _family(architecture: str) -> str:
    """A GGUF family under transformers' name for it."""
    renamed = {"qwen2moe": "qwen2_moe", "qwen3moe": "qwen3_moe", "t5encoder": "t5"}
    return renamed.get(architecture, architecture.replace("-", "_"))
