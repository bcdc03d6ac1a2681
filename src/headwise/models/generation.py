"""Generation: token after token, each chosen from the logits and read in turn.

The prompt is read in one pass; after it, each step reads one column of new tokens against the
key-value cache, and only the last position is turned into logits. ``stream`` yields the columns as
they are made, ``generate`` collects them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from headwise.attention.masks import KeyPadding
from headwise.errors import ModelError, NonFiniteError, OptionError, ShapeError, TextError
from headwise.models.build import Model
from headwise.models.cache import Cache
from headwise.models.compiled_step import compiled_step
from headwise.models.decoder import Decoder
from headwise.models.lean import lean_step
from headwise.models.sampling import Choice
from headwise.models.seq2seq import EncoderDecoder

__all__ = ["Choose", "Generated", "generate", "room", "stream"]

Choose = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class Generated:
    """The new tokens ``batch step``; behind a stop token a row is filled with padding.

    ``lengths`` (``batch``) counts the new tokens of each row, its stop token included.
    """

    ids: Tensor
    lengths: Tensor

    def rows(self) -> list[list[int]]:
        """The new tokens of each row, without padding."""
        lengths = self.lengths.tolist()
        return [row[:n] for row, n in zip(self.ids.tolist(), lengths, strict=True)]


def generate(
    model: Model,
    ids: Tensor,
    *,
    tokens: int,
    choose: Choose | None = None,
    stop: Collection[int] = (),
    mask: Tensor | None = None,
    start: int | None = None,
    pad: int = 0,
) -> Generated:
    """Up to ``tokens`` new tokens behind each prompt; the arguments are those of ``stream``.

    Example:
        >>> from headwise.models import build, preset
        >>> model = build(preset("tiny"))
        >>> prompts = torch.tensor([[0, 0, 5], [1, 2, 3]])
        >>> together = generate(model, prompts, tokens=4, mask=prompts > 0)
        >>> alone = generate(model, prompts[:1, 2:], tokens=4)
        >>> together.lengths.tolist(), together.rows()[0] == alone.rows()[0]
        ([4, 4], True)
    """
    columns = list(
        stream(model, ids, tokens=tokens, choose=choose, stop=stop, mask=mask, start=start, pad=pad)
    )
    new = torch.stack(columns, 1)
    ended = torch.isin(new, torch.tensor(sorted(stop), dtype=new.dtype, device=new.device))
    first = torch.where(ended.any(1), ended.int().argmax(1) + 1, len(columns))
    return Generated(new, first)


def stream(
    model: Model,
    ids: Tensor,
    *,
    tokens: int,
    choose: Choose | None = None,
    stop: Collection[int] = (),
    mask: Tensor | None = None,
    start: int | None = None,
    pad: int = 0,
) -> Iterator[Tensor]:
    """Columns of new tokens (``batch``), each as soon as it is chosen.

    Everything is checked at the call, before anything is computed. Ends when every row has a stop
    token, or after ``tokens`` columns.

    Args:
        model: a decoder, or an encoder–decoder.
        ids: the prompts ``batch position``, padded on the left; of an encoder–decoder, the source.
        tokens: the most new tokens of a row.
        choose: from logits ``batch vocab`` and the tokens seen in each row, to ids ``batch``;
            None: greedy.
        stop: ids that end a row.
        mask: boolean ``batch position``, False where a row is padded; None: no padding.
        start: the id that an encoder–decoder's answer starts from; None: its own, if it has one.
        pad: the id that fills a row behind its stop token.

    Raises:
        ShapeError: ids or a mask that are no batch of left-padded rows.
        TextError: an empty prompt.
        OptionError: prompt and answer are longer than the context, or a missing start.
        ModelError: an encoder, which predicts no next token.
        NonFiniteError: the model gives NaN or infinity.

    Example:
        >>> from headwise.models import build, preset
        >>> model = build(preset("tiny"))
        >>> [column.shape for column in stream(model, torch.tensor([[1, 2, 3]]), tokens=2)]
        [torch.Size([1]), torch.Size([1])]
    """
    device = model.embedding.tokens.weight.device
    ids, mask = _prompts(ids.to(device), None if mask is None else mask.to(device))
    if tokens < 1:
        raise OptionError(f"{tokens} new tokens", allowed="1 or more")
    prepare: Callable[[], _Reader]
    if isinstance(model, EncoderDecoder):
        start = model.architecture.start_token if start is None else start
        if start is None:
            raise OptionError(
                "an encoder–decoder without a start",
                to_do="give the id its answers start from (decoder_start_token_id)",
            )
        _check_length(model, 1, tokens)
        prepare = partial(_answering, model, ids, mask, tokens)
        ids, mask = torch.full_like(ids[:, :1], start), None
    elif isinstance(model, Decoder):
        if start is not None:
            raise OptionError(
                f"the start {start} for a decoder", to_do="put it in front of the prompt's ids"
            )
        ids, mask = _trimmed(ids, mask)
        _check_length(model, ids.shape[1], tokens)
        prepare = partial(_continuing, model, ids, mask, tokens)
    else:
        raise ModelError(
            "generation with an encoder, which predicts no next token",
            allowed="a decoder or an encoder–decoder",
        )
    return _columns(model, prepare, ids, mask, tokens, choose or Choice(), frozenset(stop), pad)


def room(model: Model, prompt: int) -> int | None:
    """How many new tokens the context leaves behind a prompt; None: any number.

    Example:
        >>> from headwise.models import build, preset
        >>> room(build(preset("tiny")), 60)
        4
    """
    if model.allow_long and model.architecture.embedding.positions != "learned":
        return None
    read = 1 if isinstance(model, EncoderDecoder) else prompt
    return model.architecture.context - read


def _columns(
    model: nn.Module,
    prepare: Callable[[], _Reader],
    ids: Tensor,
    mask: Tensor | None,
    tokens: int,
    choose: Choose,
    stop: frozenset[int],
    pad: int,
) -> Iterator[Tensor]:
    with _without_dropout(model):
        read = prepare()
        logits = read(ids)
        seen = _seen(ids, mask, logits.shape[-1])
        running = [True] * len(ids)
        for step in range(tokens):
            column = _chosen(choose, logits, seen)
            if stop:
                if not all(running):
                    column = column.where(torch.tensor(running, device=ids.device), pad)
                new = column.tolist()
                running = [on and id not in stop for on, id in zip(running, new, strict=True)]
            # A copy, made outside inference mode: a tensor like any other.
            yield column.clone()
            if step + 1 == tokens or not any(running):
                return
            logits = read(column[:, None])


class _Reader:
    """Reads columns of ids into the cache: ``batch position`` -> ``batch vocab``, of the last."""

    def __init__(
        self,
        model: Decoder | EncoderDecoder,
        hidden: Callable[..., Tensor],
        cache: Cache,
        mask: KeyPadding | None = None,
        positions: Tensor | None = None,
    ) -> None:
        self.hidden, self.unembed, self.cache = hidden, model.unembed, cache
        self.mask = mask
        self.positions = positions  # of the ids that are read next; None: counted by the model
        self.step: Callable[[Tensor], Tensor] | None = None
        if isinstance(model, Decoder) and mask is None:
            self.step = compiled_step(model, cache) or lean_step(model, cache)

    @torch.inference_mode()
    def __call__(self, ids: Tensor) -> Tensor:
        if self.step is not None and ids.shape[1] == 1 and self.cache.length:
            return self.unembed(self.step(ids))
        hidden = self.hidden(ids, position_ids=self.positions, mask=self.mask, cache=self.cache)
        if self.positions is not None:
            self.positions = self.positions[:, -1:] + 1
        return self.unembed(hidden[:, -1])


def _continuing(model: Decoder, ids: Tensor, mask: Tensor | None, tokens: int) -> _Reader:
    capacity = ids.shape[1] + tokens - 1
    cache = _cache(model, len(ids), capacity)
    if mask is None:
        return _Reader(model, model.hidden, cache)
    # One mask for all steps: it covers the answer before it is written.
    keep = mask.new_ones(len(ids), capacity)
    keep[:, : mask.shape[1]] = mask
    return _Reader(model, model.hidden, cache, KeyPadding(keep), _positions(mask))


@torch.inference_mode()
def _answering(model: EncoderDecoder, ids: Tensor, mask: Tensor | None, tokens: int) -> _Reader:
    visible = None if mask is None else KeyPadding(mask)
    positions = None if mask is None else _positions(mask)
    source = model.encode(ids, mask=visible, position_ids=positions)
    hidden = partial(model.hidden, source=source, source_mask=visible)
    return _Reader(model, hidden, _cache(model, len(ids), tokens))


def _positions(mask: Tensor) -> Tensor:
    """Each row counts its own tokens from 0; what stands on padding is never seen."""
    return (mask.cumsum(1) - 1).clamp(min=0)


@torch.inference_mode()
def _cache(model: Decoder | EncoderDecoder, batch: int, capacity: int) -> Cache:
    table = model.embedding.tokens.weight
    return Cache.empty(
        model.architecture, batch=batch, capacity=capacity, dtype=table.dtype, device=table.device
    )


@torch.inference_mode()
def _seen(ids: Tensor, mask: Tensor | None, vocab: int) -> Tensor:
    """Which tokens each row holds: boolean ``batch vocab``."""
    seen = ids.new_zeros(len(ids), vocab, dtype=torch.bool)
    if mask is None:
        return seen.scatter_(1, ids, True)
    row, place = mask.nonzero(as_tuple=True)
    seen[row, ids[row, place]] = True
    return seen


@torch.inference_mode()
def _chosen(choose: Choose, logits: Tensor, seen: Tensor) -> Tensor:
    """The next column, which is then seen too."""
    if not bool(logits.amax(-1).isfinite().all()):
        raise NonFiniteError(
            "the logits of the next token are not finite",
            to_do="load the model in float32, or look for NaN in its weights",
        )
    column = choose(logits.float(), seen)
    seen.scatter_(1, column[:, None], True)
    return column


@contextmanager
def _without_dropout(model: nn.Module) -> Iterator[None]:
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _prompts(ids: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The prompts, and their mask where something is padded."""
    if ids.dim() != 2 or ids.dtype not in (torch.int64, torch.int32):
        raise ShapeError(
            f"prompts of shape {tuple(ids.shape)} and type {ids.dtype}",
            allowed="whole numbers (batch, position)",
            to_do="give one row of ids for each prompt: ids[None]",
        )
    if mask is not None and (mask.dtype != torch.bool or mask.shape != ids.shape):
        raise ShapeError(
            f"a padding mask of shape {tuple(mask.shape)} and type {mask.dtype} for prompts of"
            f" shape {tuple(ids.shape)}",
            allowed="booleans of the same shape, False where a row is padded",
            to_do="for a 0/1 mask: mask.bool()",
        )
    if not ids.numel() or (mask is not None and not bool(mask.any(1).all())):
        raise TextError("an empty prompt", to_do="give every row one token at least")
    ids = ids.long()
    return ids, None if mask is None or bool(mask.all()) else mask


def _trimmed(ids: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Without the columns in which every row is padded."""
    if mask is None:
        return ids, None
    if not bool((mask == mask.cummax(1).values).all()):
        raise ShapeError(
            "prompts with padding behind or between their tokens",
            allowed="padding on the left of each row",
            to_do="move the padding in front, where the answer does not follow it",
        )
    first = int(mask.any(0).int().argmax())
    ids, mask = ids[:, first:], mask[:, first:]
    return ids, None if bool(mask.all()) else mask


def _check_length(model: Model, prompt: int, tokens: int) -> None:
    left, context = room(model, prompt), model.architecture.context
    if left is not None and tokens > left:
        raise OptionError(
            f"a prompt of {prompt} and {tokens} new tokens for a context of {context}",
            allowed=f"{left} new tokens" if left > 0 else f"a prompt of {context - 1} or fewer",
            to_do="shorten the prompt or ask for fewer tokens",
        )
