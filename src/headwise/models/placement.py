"""In which dtype and on which device a model is loaded: checked before a weight is read."""

from __future__ import annotations

from typing import Final

import torch

from headwise.errors import OptionError

__all__ = ["chosen_device", "chosen_dtype"]

DTYPES: Final = ("float32", "bfloat16", "float16", "float64")


def chosen_dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    """The dtype of a name; None, the checkpoint's own, stays None.

    Example:
        >>> chosen_dtype("bfloat16")
        torch.bfloat16
    """
    if dtype is None or isinstance(dtype, torch.dtype):
        return dtype
    if dtype not in DTYPES:
        raise OptionError(f"--dtype is {dtype!r}", allowed=", ".join(DTYPES))
    found: torch.dtype = getattr(torch, dtype)
    return found


def chosen_device(device: str | torch.device | None) -> str:
    """A device that can be used here, "auto" among them; None is the first GPU, else the CPU.

    Example:
        >>> chosen_device("cpu")
        'cpu'
    """
    if device is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device == "auto":
        return "auto"
    try:
        place = torch.device(device)
        torch.empty(0, device=place)
    except NotImplementedError:  # the message of torch is a page long
        raise _no_device(device, "torch was not built for it") from None
    except (RuntimeError, AssertionError) as error:
        first = str(error).split("\n")[0].split(". ")[0][:200]
        raise _no_device(device, first) from None
    if place.type == "meta":
        raise _no_device(device, "it holds no numbers")
    return str(place)


def _no_device(device: str | torch.device, reason: str) -> OptionError:
    return OptionError(
        f"--device is {str(device)!r}, which cannot be used here ({reason})",
        allowed="cpu, cuda, cuda:N, mps, auto",
    )
