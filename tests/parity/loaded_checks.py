"""Checks of a loaded decoder against transformers' own: each gives the largest relative error.

The error is max |ours − theirs| / max |theirs| over the logits of real tokens. Another kind of
model brings checks of its own; a check takes transformers' model and the folder it was saved in.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import logging

from headwise.attention.masks import Documents
from headwise.models import Cache, Decoder
from headwise.models.checkpoints import load

__all__ = ["BARE", "DECODER", "LONG", "WINDOW", "Check", "relative_error", "saved"]

Check = Callable[[PreTrainedModel, Path], float]

LENGTH, BATCH = 43, 2
CHUNKS = (1, 5, 17)


def relative_error(ours: Tensor, theirs: Tensor) -> float:
    """max |ours − theirs| / max |theirs|; a NaN on either side is an infinite error."""
    error = float((ours - theirs).abs().max() / theirs.abs().max())
    return error if error == error else float("inf")


def saved(model: PreTrainedModel, folder: Path, **how: object) -> Path:
    """The folder, with the model in it as transformers writes it."""
    logging.disable_progress_bar()
    model.save_pretrained(folder, **how)
    return folder


def _ours(folder: Path) -> Decoder:
    model = load(folder).model
    assert isinstance(model, Decoder)
    assert not model.training
    return model


def _ids(vocab: int, length: int = LENGTH, batch: int = BATCH) -> Tensor:
    generator = torch.Generator().manual_seed(11)
    return torch.randint(3, vocab, (batch, length), generator=generator)


@torch.no_grad()
def _theirs(model: PreTrainedModel, ids: Tensor, **given: Tensor) -> Tensor:
    logits: Tensor = model(input_ids=ids, use_cache=False, **given).logits
    return logits


@torch.no_grad()
def logits(model: PreTrainedModel, folder: Path) -> float:
    """A plain batch."""
    ids = _ids(model.config.vocab_size)
    return relative_error(_ours(folder)(ids), _theirs(model, ids))


@torch.no_grad()
def shards(model: PreTrainedModel, folder: Path) -> float:
    """The same from a folder with many weight files."""
    ids = _ids(model.config.vocab_size)
    with tempfile.TemporaryDirectory() as place:
        split = saved(model, Path(place), max_shard_size="60KB")
        assert len(list(split.glob("*.safetensors"))) > 2
        return relative_error(_ours(split)(ids), _theirs(model, ids))


@torch.no_grad()
def bare(model: PreTrainedModel, folder: Path) -> float:
    """The same from the base model alone, whose tensors have no prefix and no head."""
    ids = _ids(model.config.vocab_size)
    with tempfile.TemporaryDirectory() as place:
        base = saved(model.base_model, Path(place))
        return relative_error(_ours(base)(ids), _theirs(model, ids))


@torch.no_grad()
def left_padding(model: PreTrainedModel, folder: Path) -> float:
    """Sequences of unequal length, padded on the left, with explicit positions."""
    ids, keep, positions = _padded(model)
    theirs = _theirs(model, ids, attention_mask=keep.long(), position_ids=positions)
    ours = _ours(folder)(ids, position_ids=positions, mask=keep)
    return relative_error(ours[keep], theirs[keep])


def _padded(model: PreTrainedModel) -> tuple[Tensor, Tensor, Tensor]:
    ids = _ids(model.config.vocab_size)
    keep = torch.ones_like(ids, dtype=torch.bool)
    keep[1, :13] = False
    return ids, keep, (keep.long().cumsum(1) - 1).clamp(min=0)


@torch.no_grad()
def cache(model: PreTrainedModel, folder: Path) -> float:
    """Piece by piece with a cache, in pieces of several sizes, against one pass."""
    ids = _ids(model.config.vocab_size)
    theirs, ours = _theirs(model, ids), _ours(folder)
    errors = []
    for size in CHUNKS:
        kept = Cache.empty(ours.architecture, batch=BATCH, capacity=LENGTH)
        pieces = [ours(piece, cache=kept) for piece in ids.split(size, dim=1)]
        errors.append(relative_error(torch.cat(pieces, 1), theirs))
    return max(errors)


@torch.no_grad()
def padded_cache(model: PreTrainedModel, folder: Path) -> float:
    """The same with padding on the left."""
    ids, keep, positions = _padded(model)
    theirs = _theirs(model, ids, attention_mask=keep.long(), position_ids=positions)
    ours = _ours(folder)
    kept = Cache.empty(ours.architecture, batch=BATCH, capacity=LENGTH)
    pieces, stop = [], 0
    for piece in ids.split(17, dim=1):
        start, stop = stop, stop + piece.shape[1]
        place = positions[:, start:stop]
        pieces.append(ours(piece, position_ids=place, mask=keep[:, :stop], cache=kept))
    return relative_error(torch.cat(pieces, 1)[keep], theirs[keep])


@torch.no_grad()
def documents(model: PreTrainedModel, folder: Path) -> float:
    """Three documents in one sequence, against each document alone."""
    lengths = (19, 7, 17)
    ids = _ids(model.config.vocab_size, batch=1)
    theirs = torch.cat([_theirs(model, part) for part in ids.split(lengths, dim=1)], 1)
    positions = torch.cat([torch.arange(n) for n in lengths])
    which = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))
    ours = _ours(folder)(ids, position_ids=positions, mask=Documents(which[None]))
    return relative_error(ours, theirs)


@torch.no_grad()
def window(model: PreTrainedModel, folder: Path) -> float:
    """Much longer than the window, in one pass and piece by piece."""
    ids = _ids(model.config.vocab_size, 97)
    assert model.config.sliding_window < 97 // 4
    theirs, ours = _theirs(model, ids), _ours(folder)
    kept = Cache.empty(ours.architecture, batch=BATCH, capacity=97)
    pieces = [ours(piece, cache=kept) for piece in ids.split(23, dim=1)]
    found = (ours(ids), torch.cat(pieces, 1))
    return max(relative_error(each, theirs) for each in found)


@torch.no_grad()
def beyond(model: PreTrainedModel, folder: Path) -> float:
    """Within the trained length, then beyond it: rotary scalings that look at the length."""
    ours = _ours(folder)
    ours.allow_long = True
    errors = []
    for length in (11, LENGTH, 97):
        ids = _ids(model.config.vocab_size, length)
        errors.append(relative_error(ours(ids), _theirs(model, ids)))
    return max(errors)


DECODER: dict[str, Check] = {
    "logits": logits,
    "shards": shards,
    "left padding": left_padding,
    "cache": cache,
    "cache, padded": padded_cache,
    "documents": documents,
}
BARE: dict[str, Check] = {"base model": bare}
LONG: dict[str, Check] = {"trained length": beyond}
WINDOW: dict[str, Check] = {"window": window}
