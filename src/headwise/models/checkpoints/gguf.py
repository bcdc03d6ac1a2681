"""GGUF files of the Llama family: sizes from the metadata, tensors one at a time in float32.

Tensors come out under the names and in the layout of Hugging Face's Llama. Files of llama.cpp's
``llama`` family store queries and keys for rotary positions on neighbouring entries (interleaved);
their rows are put back in halves. Those of ``qwen2`` and ``qwen3`` are in halves already.
Source: the GGUF specification, github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from headwise.errors import ModelError
from headwise.gguf_header import GgufHeader
from headwise.models.checkpoints.checks import check_gguf, listed

__all__ = ["GgufFile", "GgufSizes", "RopeScaling", "halves"]

_INTERLEAVED: Final = ("llama", "mistral")
_FAMILIES: Final = (*_INTERLEAVED, "qwen2", "qwen3")
_FACTORS: Final = "rope_freqs.weight"
_OUTSIDE: Final = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_INSIDE: Final = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_BLOCK: Final = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
# Keys of the family that are read, and those that may stand there with one harmless value.
_KEYS: Final = frozenset(
    (
        "block_count",
        "context_length",
        "embedding_length",
        "feed_forward_length",
        "vocab_size",
        "attention.head_count",
        "attention.head_count_kv",
        "attention.key_length",
        "attention.value_length",
        "attention.layer_norm_rms_epsilon",
        "attention.sliding_window",
        "rope.dimension_count",
        "rope.freq_base",
        "rope.scaling.type",
        "rope.scaling.factor",
        "rope.scaling.original_context_length",
        "rope.scaling.attn_factor",
        "rope.scaling.yarn_beta_fast",
        "rope.scaling.yarn_beta_slow",
        "rope.scaling.finetuned",
    )
)
_HARMLESS: Final[dict[str, Any]] = {
    "expert_count": 0,
    "expert_used_count": 0,
    "attention.causal": True,
    "tensor_data_layout": "Meta AI original pth",
}


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How rotary frequencies are stretched: "linear" or "yarn", as the metadata say."""

    kind: str
    factor: float
    trained: int | None = None
    attention_factor: float = 1.0  # on top of YaRN's own
    beta_fast: float = 32.0
    beta_slow: float = 1.0


@dataclass(frozen=True, kw_only=True)
class GgufSizes:
    """Sizes and choices of a Llama-family model, from the metadata and the tensors present."""

    family: str
    vocab: int
    d_model: int
    layers: int
    heads: int
    kv_heads: int
    d_head: int
    d_ff: int
    context: int
    norm_eps: float
    rope_base: float
    rope_width: int
    rope_scaling: RopeScaling | None
    rope_factors: tuple[float, ...] | None  # each divides one frequency (Llama 3.1)
    window: int | None
    tied: bool
    qkv_bias: bool
    qk_norm: bool


class GgufFile(Mapping[str, Callable[[], Tensor]]):
    """An open GGUF file: a mapping from each Hugging Face name to what reads the tensor."""

    def __init__(self, path: Path, header: GgufHeader) -> None:
        self.path = path
        self.header = header
        self._stored = _names(path, header)
        self.sizes = _sizes(path, header, self)

    @classmethod
    def open(cls, path: str | Path) -> GgufFile:
        """Read the header, and refuse what is broken, of another family or not known.

        Raises:
            ModelError: with what was found; no weight was read.

        Example:
            >>> GgufFile.open("/no/such.gguf")
            Traceback (most recent call last):
                ...
            headwise.errors.ModelError: there is no file /no/such.gguf
        """
        here = Path(path).expanduser()
        if not here.is_file():
            raise ModelError(f"there is no file {here}")
        header = check_gguf(here, arrays=True)
        if header.family not in _FAMILIES:
            raise ModelError(
                f"{here} is a GGUF file of the family {header.family!r}",
                allowed=", ".join(_FAMILIES),
                to_do="use the model's Hugging Face folder",
            )
        if header.metadata.get("split.count", 1) > 1:
            raise ModelError(
                f"{here} is one of {header.metadata['split.count']} parts of a model",
                to_do="join them with llama.cpp's gguf-split --merge",
            )
        return cls(here, header)

    def __getitem__(self, name: str) -> Callable[[], Tensor]:
        if name not in self._stored:
            raise KeyError(name)
        return partial(self.read, name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def __len__(self) -> int:
        return len(self._stored)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor, from the header."""
        return self.header.tensors[self._located(name)].shape

    def dtype(self, name: str) -> torch.dtype:
        """float32: tensors are dequantised as they are read."""
        self._located(name)
        return torch.float32

    def read(self, name: str) -> Tensor:
        """One tensor, dequantised to float32, its rotary entries in halves."""
        stored = self._located(name)
        tensor = _dequantised(self.path, self.header, stored)
        heads = {"q_proj": self.sizes.heads, "k_proj": self.sizes.kv_heads}
        part = name.split(".")[-2]
        if part in heads and self.header.family in _INTERLEAVED:
            return halves(tensor, heads[part])
        return tensor

    def config(self) -> dict[str, Any]:
        """The sizes in the words of a Hugging Face config.json."""
        s = self.sizes
        config = {
            "model_type": "mistral" if s.family == "llama" and s.window else s.family,
            "vocab_size": s.vocab,
            "hidden_size": s.d_model,
            "intermediate_size": s.d_ff,
            "num_hidden_layers": s.layers,
            "num_attention_heads": s.heads,
            "num_key_value_heads": s.kv_heads,
            "head_dim": s.d_head,
            "max_position_embeddings": s.context,
            "rms_norm_eps": s.norm_eps,
            "rope_theta": s.rope_base,
            "hidden_act": "silu",
            "tie_word_embeddings": s.tied,
        }
        if s.rope_width != s.d_head:
            config["partial_rotary_factor"] = s.rope_width / s.d_head
        if config["model_type"] == "mistral":
            config["sliding_window"] = s.window
        elif s.qkv_bias and s.family != "qwen2":
            config["attention_bias"] = True
        scaling = _scaling_words(s)
        return config if scaling is None else {**config, "rope_scaling": scaling}

    def _located(self, name: str) -> str:
        if name not in self._stored:
            raise ModelError(f"{self.path} has no tensor {name}", allowed=listed(self._stored))
        return self._stored[name]


def halves(tensor: Tensor, heads: int) -> Tensor:
    """Rows of queries or keys for interleaved rotary positions, reordered for those in halves.

    Within each head, row 2i + s goes to s · d_head/2 + i (s is 0 or 1).

    Example:
        >>> halves(torch.arange(8), 2).tolist()
        [0, 2, 1, 3, 4, 6, 5, 7]
    """
    pairs = tensor.shape[0] // heads // 2
    split = tensor.reshape(heads, pairs, 2, *tensor.shape[1:])
    return split.transpose(1, 2).reshape(tensor.shape)


def _names(path: Path, header: GgufHeader) -> dict[str, str]:
    """Hugging Face name -> stored name; every tensor of the file is known or refused."""
    found, unknown = {}, []
    for stored in header.tensors:
        block = _BLOCK.fullmatch(stored)
        if stored in _OUTSIDE:
            found[_OUTSIDE[stored]] = stored
        elif block and block[2] in _INSIDE:
            found[f"model.layers.{block[1]}.{_INSIDE[block[2]]}.{block[3]}"] = stored
        elif stored != _FACTORS:
            unknown.append(stored)
    if unknown:
        raise ModelError(
            f"{path} has tensors that are not of a Llama-family model: {listed(unknown)}",
            to_do="use the model's Hugging Face folder",
        )
    return found


def _sizes(path: Path, header: GgufHeader, tensors: Mapping[str, object]) -> GgufSizes:
    given = _Metadata(path, header)
    d_model, heads = given.whole("embedding_length"), given.whole("attention.head_count")
    d_head = given.whole("attention.key_length", d_model // heads)
    if given.whole("attention.value_length", d_head) != d_head:
        raise given.refusal("attention.value_length", f"{d_head}, the width of keys")
    window = given.whole("attention.sliding_window", 0, 0) or None
    if window is not None and header.family.startswith("qwen"):
        raise given.refusal("attention.sliding_window", "none in this family")
    table = header.tensors.get("token_embd.weight")
    if table is None:
        raise ModelError(f"{path} has no tensor token_embd.weight")
    scaling = _scaling(given)
    factors = None
    if _FACTORS in header.tensors:
        if scaling is not None:
            raise given.refusal("rope.scaling.type", f"none beside {_FACTORS}")
        factors = tuple(_dequantised(path, header, _FACTORS).tolist())
    return GgufSizes(
        family=header.family,
        vocab=table.shape[0],
        d_model=d_model,
        layers=given.whole("block_count"),
        heads=heads,
        kv_heads=given.whole("attention.head_count_kv", heads),
        d_head=d_head,
        d_ff=given.whole("feed_forward_length"),
        context=given.whole("context_length"),
        norm_eps=given.number("attention.layer_norm_rms_epsilon"),
        rope_base=given.number("rope.freq_base", 10000.0),
        rope_width=given.whole("rope.dimension_count", d_head),
        rope_scaling=scaling,
        rope_factors=factors,
        window=window,
        tied="lm_head.weight" not in tensors,
        qkv_bias=any(name.endswith("q_proj.bias") for name in tensors),
        qk_norm=any(name.endswith("q_norm.weight") for name in tensors),
    )


class _Metadata:
    """The keys of the family, each known, present and of its kind, or refused by name."""

    def __init__(self, path: Path, header: GgufHeader) -> None:
        self.path, self.family = path, header.family
        prefix = f"{header.family}."
        self.values = {
            key.removeprefix(prefix): value
            for key, value in header.metadata.items()
            if key.startswith(prefix)
        }
        for key, value in self.values.items():
            harmless = key in _HARMLESS and value == _HARMLESS[key]
            if key not in _KEYS and not harmless:
                raise ModelError(
                    f"{path} has {prefix}{key} = {value!r}, which is not known here",
                    to_do="use the model's Hugging Face folder",
                )

    def whole(self, key: str, otherwise: int | None = None, least: int = 1) -> int:
        value = self.values.get(key, otherwise)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self.refusal(key, f"one whole number, {least} or more")
        return value

    def number(self, key: str, otherwise: float | None = None) -> float:
        value = self.values.get(key, otherwise)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.refusal(key, "one number")
        return float(value)

    def refusal(self, key: str, allowed: str) -> ModelError:
        found = f"has {self.family}.{key} = {self.values[key]!r}" if key in self.values else ""
        return ModelError(f"{self.path} {found or f'lacks {self.family}.{key}'}", allowed=allowed)


def _scaling(given: _Metadata) -> RopeScaling | None:
    kind = given.values.get("rope.scaling.type", "none")
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise given.refusal("rope.scaling.type", "none, linear, yarn")
    trained = given.whole("rope.scaling.original_context_length", 0, 0) or None
    return RopeScaling(
        kind=kind,
        factor=given.number("rope.scaling.factor"),
        trained=trained,
        attention_factor=given.number("rope.scaling.attn_factor", 1.0),
        beta_fast=given.number("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=given.number("rope.scaling.yarn_beta_slow", 1.0),
    )


def _scaling_words(s: GgufSizes) -> dict[str, Any] | None:
    if s.rope_factors is not None:
        # LongRoPE divides each frequency by a factor; one table for short and long is just that.
        return {
            "rope_type": "longrope",
            "short_factor": list(s.rope_factors),
            "long_factor": list(s.rope_factors),
            "factor": 1.0,
            "original_max_position_embeddings": s.context,
            "attention_factor": 1.0,
        }
    scaling = s.rope_scaling
    if scaling is None:
        return None
    words: dict[str, Any] = {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.kind == "linear":
        return words
    trained = scaling.trained or s.context
    own = 0.1 * math.log(scaling.factor) + 1 if scaling.factor > 1 else 1.0
    return {
        **words,
        "original_max_position_embeddings": trained,
        "beta_fast": scaling.beta_fast,
        "beta_slow": scaling.beta_slow,
        "attention_factor": own * scaling.attention_factor,
    }


def _dequantised(path: Path, header: GgufHeader, stored: str) -> Tensor:
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    entry = header.tensors[stored]
    kind = GGMLQuantizationType(entry.kind)
    raw = np.fromfile(path, dtype=np.uint8, count=entry.size, offset=entry.start)
    rows = raw.reshape(*entry.shape[:-1], -1)
    try:
        values = dequantize(rows, kind)
    except NotImplementedError:
        raise ModelError(
            f"{stored} in {path} is quantised as {kind.name}, which cannot be read",
            to_do="quantise the model in another way, or use its Hugging Face folder",
        ) from None
    return torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32)).reshape(entry.shape)
