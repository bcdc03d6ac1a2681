"""A GGUF file: the sizes that its header says, and the bytes that its tensors take.

The keys of the metadata become those of a configuration, and what only the tensors show (the
vocabulary, biases, whether the unembedding is stored) is read from their table.
Source: the GGUF specification, github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from headwise.cost.gguf_names import BUFFERS, FAMILIES, GPT2_KEYS, KEYS, PARTS, SHOWN
from headwise.cost.parts import Component, Parts
from headwise.errors import ModelError
from headwise.gguf_header import ArrayLength, GgufHeader, GgufTensor, read_gguf_header

__all__ = ["Stored", "StoredPart", "gguf_config", "read_stored"]


@dataclass(frozen=True, slots=True)
class StoredPart:
    """Some tensors of a file: how many, the numbers in them, and their bytes."""

    tensors: int
    numbers: int
    bytes: int

    @property
    def bits_per_weight(self) -> float:
        """8 · bytes / numbers, the scales of the blocks included."""
        return 8 * self.bytes / self.numbers


@dataclass(frozen=True, slots=True)
class Stored:
    """What the tensors of a file take, exactly, by type of quantisation and by component.

    Attributes:
        whole: all tensors, without the padding between them.
        by_type: by GGML's names of types, such as "Q4_K".
        by_component: by what the tensors belong to.
    """

    whole: StoredPart
    by_type: Mapping[str, StoredPart]
    by_component: Mapping[Component, StoredPart]


def read_stored(
    path: Path, read: Callable[[Mapping[str, Any], str], Parts]
) -> tuple[Parts, Stored]:
    """The parts of the model in a GGUF file, by ``read`` from a configuration; and its bytes.

    Raises:
        ModelError: the file is foreign, truncated, in pieces, or of an unknown family.
    """
    header, tensors = _whole(path)
    parts = read(gguf_config(header, tensors, str(path)), str(path))
    stored = _stored(tensors)
    numbers = sum(
        _numbers(tensor) for name, tensor in tensors.items() if _part_name(name) not in BUFFERS
    )
    made = sum(m.parameters for _, _, m in parts.matrices()) + sum(
        v.size for _, _, v in parts.vectors()
    )
    if numbers != made:
        note = f"the tensors of {path.name} hold {numbers:,} numbers, its sizes make {made:,}"
        parts = replace(parts, notes=(*parts.notes, note))
    return parts, stored


def gguf_config(
    header: GgufHeader, tensors: Mapping[str, GgufTensor], where: str
) -> dict[str, Any]:
    """The configuration that a header amounts to, under the keys of transformers."""
    family = header.family
    if family not in FAMILIES:
        raise ModelError(
            f"{where} holds a model of the architecture {family!r}",
            allowed=", ".join(sorted(FAMILIES)),
            to_do="or give the sizes as options: --d-model, --layers, --heads, …",
        )

    def said(key: str) -> Any:
        value = header.metadata.get(f"{family}.{key}")
        if isinstance(value, ArrayLength):
            raise ModelError(
                f"{family}.{key} has one value for each layer in {where}",
                allowed="the same value in every layer",
                to_do="give the sizes as options",
            )
        return value

    found: dict[str, Any] = {name: said(key) for name, key in KEYS.items()}
    found |= {name: _shows(tensors, ends) for name, ends in SHOWN.items()}
    found["model_type"] = FAMILIES[family]
    if family == "llama" and found["num_local_experts"]:
        found["model_type"] = "mixtral"
    found["vocab_size"] = _vocabulary(tensors, where)
    found["tie_word_embeddings"] = "output.weight" not in tensors
    if found["model_type"] in ("gpt2", "gpt_bigcode"):
        found |= {name: found[key] for name, key in GPT2_KEYS.items()}
    if family == "deepseek2":
        found |= _latent(said)
    return found


def _latent(said: Callable[[str], Any]) -> dict[str, Any]:
    """MLA: the widths of its heads, which newer files keep under keys of their own."""
    width = said("attention.key_length_mla") or said("attention.key_length")
    rotary = said("rope.dimension_count")
    whole = isinstance(width, int) and isinstance(rotary, int)
    return {
        "qk_rope_head_dim": rotary,
        "qk_nope_head_dim": width - rotary if whole else None,
        "v_head_dim": said("attention.value_length_mla") or said("attention.value_length"),
    }


def _shows(tensors: Mapping[str, GgufTensor], ends: tuple[str, ...]) -> bool:
    return any(f"blk.{layer}.{end}" in tensors for end in ends for layer in (0, 1))


def _vocabulary(tensors: Mapping[str, GgufTensor], where: str) -> int:
    if "token_embd.weight" not in tensors:
        raise ModelError(
            f"{where} has no tensor token_embd.weight",
            allowed="a whole model",
            to_do="name the file with the weights, not an adapter or a projector",
        )
    return tensors["token_embd.weight"].shape[0]


_PIECE: Final = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")


def _whole(path: Path) -> tuple[GgufHeader, dict[str, GgufTensor]]:
    """The header with the metadata, and the tensors of all pieces of a model that is split."""
    piece = _PIECE.search(path.name)
    if piece is None:
        header = _opened(path)
        return header, header.tensors
    count = int(piece[2])
    stem = path.name[: piece.start()]
    paths = [path.with_name(f"{stem}-{i:05d}-of-{count:05d}.gguf") for i in range(1, count + 1)]
    missing = next((each for each in paths if not each.is_file()), None)
    if missing is not None or not paths:
        raise ModelError(
            f"{path} is one of {count} pieces, and {missing} is not there",
            to_do="put all pieces in one folder",
        )
    headers = [_opened(each) for each in paths]
    return headers[0], {name: t for header in headers for name, t in header.tensors.items()}


def _opened(path: Path) -> GgufHeader:
    try:
        return read_gguf_header(path)
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror or error}") from error


def _stored(tensors: Mapping[str, GgufTensor]) -> Stored:
    from gguf import GGMLQuantizationType

    def parts(key: Callable[[str, GgufTensor], Any]) -> dict[Any, StoredPart]:
        groups: dict[Any, list[GgufTensor]] = {}
        for name, tensor in tensors.items():
            groups.setdefault(key(name, tensor), []).append(tensor)
        return {name: _sum(group) for name, group in groups.items()}

    return Stored(
        whole=_sum(tensors.values()),
        by_type=parts(lambda _, tensor: GGMLQuantizationType(tensor.kind).name),
        by_component=parts(lambda name, _: _component(name)),
    )


def _sum(tensors: Iterable[GgufTensor]) -> StoredPart:
    group = list(tensors)
    return StoredPart(len(group), sum(map(_numbers, group)), sum(t.size for t in group))


def _numbers(tensor: GgufTensor) -> int:
    numbers = 1
    for size in tensor.shape:
        numbers *= size
    return numbers


def _part_name(name: str) -> str:
    """``blk.7.attn_q.weight`` → ``attn_q``; ``output.weight`` → ``output``."""
    return re.sub(r"^blk\.\d+\.|\.(weight|bias)$", "", name)


def _component(name: str) -> Component:
    part = _part_name(name)
    if part in PARTS:
        return PARTS[part]
    return Component.NORMS if part.endswith("norm") else Component.HEAD
