"""Random tokens that repeat, as documents that a model reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headwise.errors import OptionError
from headwise.observation.driver import Document
from headwise.observation.loaded import LoadedModel

__all__ = ["Repeated", "repeated_tokens"]


@dataclass(frozen=True, eq=False)
class Repeated:
    """Documents of one length, the repetition in each, and how many tokens stand before it."""

    documents: tuple[Document, ...]
    period: int
    copies: int
    front: int  # special tokens before the repetition
    target_front: int  # the same in what an encoder-decoder's decoder is fed

    @property
    def length(self) -> int:
        """Tokens that are read by one stack, special ones included."""
        return len(self.documents[0].ids)

    def before(self, role: str) -> int:
        """Tokens before the repetition, in the stack with this role."""
        fed = self.documents[0].target is not None and role == "decoder"
        return self.target_front if fed else self.front


def repeated_tokens(
    loaded: LoadedModel, *, period: int, copies: int, seeds: Sequence[int]
) -> Repeated:
    """Draw ``period`` distinct ordinary tokens per seed, and repeat them ``copies`` times.

    Ordinary: neither special to the tokenizer nor named by the model's configuration, nor beyond
    the tokenizer's vocabulary, where checkpoints have untrained rows. An encoder-decoder reads the
    repetition as its source, and after its start token as its target.

    Example:
        >>> from transformers import LlamaConfig, LlamaModel
        >>> from headwise.observation.loading import wrap_model
        >>> config = LlamaConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=1,
        ...                      num_attention_heads=2, vocab_size=31)
        >>> loaded = wrap_model(LlamaModel(config))
        >>> ids = repeated_tokens(loaded, period=3, copies=2, seeds=[0]).documents[0].ids
        >>> len(ids), ids[:3].tolist() == ids[3:].tolist()
        (6, True)
    """
    sizes = (
        ("period", period, 2),
        ("number of copies", copies, 2),
        ("number of seeds", len(seeds), 1),
    )
    for name, value, least in sizes:
        if value < least:
            raise OptionError(f"the {name} is {value}", allowed=f"{least} or more")
    ordinary = _ordinary(loaded)
    if len(ordinary) < period:
        raise OptionError(
            f"{period} distinct tokens of {loaded.name}, which has {len(ordinary)} that are not"
            " special",
            allowed=f"a period of 2 to {len(ordinary)}",
        )
    front, back = _around(loaded, ordinary)
    start = loaded.driver.start_token if loaded.kind == "encoder-decoder" else None
    _check_length(loaded, period * copies + max(len(front) + len(back), start is not None))
    documents = []
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        drawn = ordinary[torch.randperm(len(ordinary), generator=generator)[:period]]
        tokens = drawn.repeat(copies)
        target = None if start is None else torch.cat((torch.tensor([start]), tokens))
        documents.append(Document(torch.cat((front, tokens, back)), target))
    return Repeated(tuple(documents), period, copies, len(front), 1)


def _check_length(loaded: LoadedModel, length: int) -> None:
    limits = [n for n in (loaded.context, loaded.position_limit) if n is not None]
    if limits and length > min(limits):
        raise OptionError(
            f"{length:,} tokens, special ones included, and {loaded.name} reads at most"
            f" {min(limits):,}",
            to_do="lower the period or the number of copies",
        )


def _special(loaded: LoadedModel) -> set[int]:
    """Every id that is no ordinary token."""
    found = set(getattr(loaded.tokenizer, "all_special_ids", None) or ())
    config: Any = getattr(loaded.model, "config", None)
    facts = config.to_dict() if hasattr(config, "to_dict") else {}
    for name, value in facts.items():
        if name.endswith("_token_id"):
            found.update(value if isinstance(value, list) else [value])
    found.add(loaded.driver.start_token)
    return {each for each in found if isinstance(each, int)}


def _ordinary(loaded: LoadedModel) -> Tensor:
    size = loaded.driver.vocabulary
    if loaded.tokenizer is not None:
        inner = getattr(loaded.tokenizer, "tokenizer", None)
        known = len(loaded.tokenizer) if inner is None else inner.get_vocab_size()
        size = min(size, known)
    ids = torch.arange(size)
    return ids[~torch.isin(ids, torch.tensor(sorted(_special(loaded)), dtype=torch.long))]


def _around(loaded: LoadedModel, ordinary: Tensor) -> tuple[Tensor, Tensor]:
    """The special tokens that the tokenizer puts before and after every text."""
    nothing = torch.zeros(0, dtype=torch.long)
    if loaded.tokenizer is None:
        return nothing, nothing
    text = loaded.tokenizer.decode([int(ordinary[len(ordinary) // 2])])
    ids = torch.tensor(loaded.tokenizer(text)["input_ids"], dtype=torch.long)
    special = torch.isin(ids, torch.tensor(sorted(_special(loaded)), dtype=torch.long))
    inside = (~special).nonzero()[:, 0]
    if not inside.numel():
        return nothing, nothing
    return ids[: int(inside[0])], ids[int(inside[-1]) + 1 :]
