"""Where the two members of a pair stand in a vector: side by side, or half a width apart.

    interleaved   (0, 1), (2, 3), …           the papers, Meta's Llama, GPT-J, GGUF files
    half          (0, w/2), (1, w/2 + 1), …   Hugging Face, GPT-NeoX

Both carry the same information; mixing them up gives other numbers and no error.
"""

from __future__ import annotations

from enum import StrEnum

import torch
from torch import Tensor

from headwise.errors import OptionError

__all__ = ["Layout", "half_order"]


class Layout(StrEnum):
    """The place of a pair's two members; ``Layout("half")`` also comes from its word.

    Example:
        >>> Layout("half") is Layout.HALF
        True
    """

    HALF = "half"
    INTERLEAVED = "interleaved"

    @classmethod
    def _missing_(cls, value: object) -> Layout:
        raise OptionError(
            f"the layout of pairs is {value!r}",
            allowed=" or ".join(repr(str(layout)) for layout in cls),
            to_do="take the one that the checkpoint was trained with",
        )


def half_order(width: int) -> Tensor:
    """The order that turns interleaved columns into half columns: 0, 2, 4, …, 1, 3, 5, ….

    ``x[..., half_order(w)]`` is in half layout when x is interleaved; rows of a head's W_Q and W_K
    are moved in the same way. An odd width keeps its unpaired column at the end of the first half.

    Example:
        >>> half_order(6).tolist()
        [0, 2, 4, 1, 3, 5]
    """
    if width < 1:
        raise OptionError(
            f"a width of {width} has no columns",
            allowed="1 or more",
            to_do="give the width of the vectors",
        )
    columns = torch.arange(width)
    return torch.cat((columns[0::2], columns[1::2]))
