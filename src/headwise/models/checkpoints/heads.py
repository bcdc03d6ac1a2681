"""Whether the unembedding is the token table: decided by the tensors that are there.

head stored   configuration   the model
no            tied            tied
no            not tied        refused: the head is missing, and nothing stands in for it
yes           not tied        untied
yes           tied            tied if both are equal; otherwise untied, with the head that was
                              trained (transformers 5 does the same, with a warning)
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from headwise.errors import ModelError
from headwise.models.checkpoints.settings import Settings

__all__ = ["copied_head", "head_name", "is_tied"]

_KEY = "tie_word_embeddings"


def head_name(names: Collection[str], heads: tuple[str, ...]) -> str | None:
    """The stored name of the head, or None.

    Example:
        >>> head_name(["lm_head.weight"], ("lm_head.weight", "embed_out.weight"))
        'lm_head.weight'
    """
    return next((name for name in heads if name in names), None)


def is_tied(
    settings: Settings, names: Collection[str], heads: tuple[str, ...], *, default: bool
) -> bool:
    """Whether the token table is the head; equal copies are not among the names any more."""
    said = settings.flag(_KEY, default)
    if head_name(names, heads) is not None:
        return False
    if not said:
        raise ModelError(
            f"the checkpoint lacks {heads[0]}, and {settings.source} says that it is not the token"
            " table",
            to_do=f"fetch the missing tensor, or set {_KEY} to true if the two are one",
        )
    return True


def copied_head(
    settings: Settings,
    names: Collection[str],
    table: str,
    heads: tuple[str, ...],
    default: bool,
) -> Mapping[str, str]:
    """The head as a possible copy of the table, if the configuration ties them."""
    head = head_name(names, heads)
    if head is None or not settings.flag(_KEY, default):
        return {}
    return {head: table}
