"""Heads cut down to rank r, in the model itself, and what that costs on a text.

    W_QK,r = U_r U_rᵀ W_Q W_Kᵀ        W_Q is replaced by U_r U_rᵀ W_Q
    W_OV,r = U_r U_rᵀ W_V W_O         W_V is replaced by U_r U_rᵀ W_V
           = W_V W_O V_r V_rᵀ         or W_O by W_O V_r V_rᵀ, where heads share their values

U_r, V_r: the first r singular directions of the product, so that each is its nearest product of
rank r (Eckart and Young). One factor of the two changes and the shapes stay. Exactly this is done
to the model, or it is refused:

- W_QK with rotary positions is another matrix at every distance, W_Q R_Δ W_Kᵀ, and no one cut is
  the nearest of rank r to all of them; nor is W_QK a fixed product behind norms of queries and
  keys. W_OV can be cut in both.
- W_Q belongs to one head, so shared keys do not stand in the way.
- A key bias adds the same to a whole row of logits, which the softmax does not see; it does where
  a softcap or a learned sink comes in between.
- A value bias adds b_V W_O to what is written, since a row's weights sum to 1. It stays exact when
  W_V is cut. When W_O is cut, what it loses is put into the bias of the output projection; with a
  learned sink the weights do not sum to 1, and that is refused.

Folded, the product is diag(γ) W_V W_O: what is nearest then is what the head makes of the stream
itself, not of the norm's output. W_O is cut to its directions V_r, and β W_V W_O, which the norm's
bias adds, is kept whole as a value bias is. Where gains differ much between coordinates, it loses
less (SmolLM2-135M, all heads at rank 48 of 64, 256 tokens: 5.4 nats per token against 7.1; whole
3.2).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import torch
from torch import nn

from headwise.circuits.cuts import Circuit, Cut, find_cuts
from headwise.errors import OptionError
from headwise.observation.loaded import LoadedModel
from headwise.observation.loading import wrap_model
from headwise.observation.loss import mean_loss
from headwise.observation.text import Text, tokenize

__all__ = [
    "LossByRank",
    "check_circuits",
    "check_rank",
    "cut_to",
    "loss_by_rank",
    "truncated",
]

_CIRCUITS: Final = ("qk", "ov")
_OV: Final[tuple[Circuit, ...]] = ("ov",)
Heads = Iterable[tuple[int, int]]


@contextmanager
def truncated(
    model: nn.Module,
    rank: int,
    *,
    circuits: Collection[Circuit] = _OV,
    heads: Heads | None = None,
    folded: bool = False,
) -> Iterator[None]:
    """Inside, W_QK and/or W_OV of the chosen heads have rank r at most; then all is as before.

    The weights are written in place and put back bit for bit, also after an exception.

    Args:
        model: a transformers model or one of Headwise's own.
        rank: r, from 1 to d_head (d_value for W_OV); d_head changes nothing but rounding.
        circuits: "qk", "ov" or both.
        heads: (layer, head), layers counted as in ``head_weights(model).layers`` (None: all).
        folded: W_OV with the gain of the norm before it.

    Raises:
        OptionError: a rank, circuit, layer or head that is not there, or a circuit of a layer that
            cannot be cut exactly; the reason is named.

    Example:
        >>> from transformers import GPT2Config, GPT2Model
        >>> model = GPT2Model(GPT2Config(n_embd=12, n_head=3, n_layer=1, vocab_size=11))
        >>> weight = model.h[0].attn.c_attn.weight
        >>> before = weight.clone()
        >>> with truncated(model, 2, circuits=["ov"]):
        ...     int(torch.linalg.matrix_rank(weight[:, 24:28], atol=1e-6))  # W_V of head 0
        2
        >>> torch.equal(weight, before)
        True
    """
    chosen = None if heads is None else list(heads)
    cuts = find_cuts(model, check_circuits(circuits), chosen, folded)
    with cut_to(rank, cuts):
        yield


@dataclass(frozen=True)
class LossByRank:
    """The mean loss in nats per token with the heads at each rank, and ``whole``: as they are."""

    ranks: tuple[int, ...]
    losses: tuple[float, ...]
    whole: float

    @property
    def changes(self) -> tuple[float, ...]:
        """Loss less that of the whole model."""
        return tuple(loss - self.whole for loss in self.losses)

    def smallest(self, tolerance: float) -> int | None:
        """The smallest rank from which on no measured rank costs more than ``tolerance`` nats.

        None where even the largest does.

        Example:
            >>> LossByRank((1, 2, 4, 8), (2.9, 2.0, 2.4, 2.01), whole=2.0).smallest(0.02)
            8
        """
        if not tolerance >= 0:
            raise OptionError(f"the tolerance is {tolerance}", allowed="0 or more, in nats")
        found = None
        for rank, change in sorted(zip(self.ranks, self.changes, strict=True), reverse=True):
            if not change <= tolerance:
                break
            found = rank
        return found


def loss_by_rank(
    model: nn.Module | LoadedModel,
    text: Text,
    ranks: Sequence[int],
    *,
    circuits: Collection[Circuit] = _OV,
    heads: Heads | None = None,
    folded: bool = False,
    tokens: int | None = None,
    window: int | None = None,
) -> LossByRank:
    """The loss of a text with the chosen heads at each of some ranks.

    A head's own singular directions are found once; each rank is one reading of the text.

    Args:
        model: in memory; with its tokenizer (``load_model``) it reads a text, else token ids.
        text: see ``scan``; token ids are read as they are.
        ranks: each from 1 to d_head.
        circuits, heads, folded: see ``truncated``.
        tokens, window: see ``scan``.

    Raises:
        OptionError: see ``truncated``.
        ModelError: the model has no language-model head.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(n_embd=12, n_head=3, n_layer=1, vocab_size=11))
        >>> found = loss_by_rank(model, [1, 2, 3, 4, 5], [1, 4])
        >>> found.ranks, found.smallest(1e-3) is not None
        ((1, 4), True)
    """
    loaded = model if isinstance(model, LoadedModel) else wrap_model(model)
    chosen = None if heads is None else list(heads)
    cuts = find_cuts(loaded.model, check_circuits(circuits), chosen, folded)
    if not ranks:
        raise OptionError("no rank is named", allowed="one or more")
    for rank in ranks:
        check_rank(rank, _width(cuts))
    documents = tokenize(loaded, text, tokens=tokens, window=window)
    whole = mean_loss(loaded, documents)
    losses = []
    for rank in ranks:
        with cut_to(rank, cuts):
            losses.append(mean_loss(loaded, documents))
    return LossByRank(tuple(ranks), tuple(losses), whole)


@contextmanager
def cut_to(rank: int, cuts: Sequence[Cut]) -> Iterator[None]:
    """Every cut made; what each has changed is put back in the opposite order."""
    check_rank(rank, _width(cuts))
    done: list[Cut] = []
    try:
        with torch.no_grad():
            for cut in cuts:
                done.append(cut)
                cut.make(rank)
        yield
    finally:
        with torch.no_grad():
            for cut in reversed(done):
                cut.undo()


def check_circuits(circuits: Collection[Circuit]) -> tuple[Circuit, ...]:
    """The circuits, each once; refused where one of them is none."""
    wrong = [each for each in circuits if each not in _CIRCUITS]
    if wrong or not circuits or isinstance(circuits, str):
        raise OptionError(f"the circuits are {circuits!r}", allowed='a list of "qk" and "ov"')
    return tuple(dict.fromkeys(circuits))


def check_rank(rank: int, most: int) -> None:
    """Refuse a rank that the heads cannot have."""
    if isinstance(rank, bool) or not isinstance(rank, int) or not 1 <= rank <= most:
        raise OptionError(f"the rank is {rank}", allowed=f"1 to {most}, the width of a head")


def _width(cuts: Sequence[Cut]) -> int:
    return min(cut.most for cut in cuts)
