"""The real decoder, a quantised file, read by the library and by transformers."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from headwise.models import Cache, Decoder
from headwise.models.checkpoints import load
from tests.parity.loaded_checks import relative_error

__all__ = ["smollm2"]

_TEXT = (
    "It was the best of times, it was the worst of times: a head reads 12,345 keys, moves what it"
    " has read, and n² − n of them are never seen again. <|im_start|>user\nWhy?<|im_end|>\n"
)


@torch.no_grad()
def smollm2(folder: Path) -> dict[str, float]:
    """Each check of the one GGUF file of a folder, and its error: 0 for the same tokens."""
    file = next(folder.glob("*.gguf"))
    loaded = load(file)
    ours, tokenizer = loaded.model, loaded.tokenizer
    assert isinstance(ours, Decoder)
    assert tokenizer is not None
    theirs = AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=file.name, dtype=torch.float32
    ).eval()
    encoded = tokenizer.encode(_TEXT * 4).ids
    same = (
        encoded == AutoTokenizer.from_pretrained(folder, gguf_file=file.name)(_TEXT * 4).input_ids
    )
    ids = torch.tensor([encoded])
    want = theirs(ids).logits
    cache = Cache.empty(ours.architecture, batch=1, capacity=ids.shape[1])
    pieces = [ours(piece, cache=cache) for piece in ids.split(64, dim=1)]
    return {
        "logits": relative_error(ours(ids), want),
        "cache": relative_error(torch.cat(pieces, 1), want),
        "text": 0.0 if same else float("inf"),
    }
