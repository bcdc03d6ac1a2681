"""Sums that outlive ``torch.inference_mode``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["ordinary_tensors"]


@contextmanager
def ordinary_tensors() -> Iterator[None]:
    """Inside, new tensors are ordinary ones; inference mode has no say, gradients stay off in it.

    A tensor made in inference mode can never be written to outside of it; the sums of a scan are,
    when a model is run both ways or scans are merged.

    Example:
        >>> with torch.inference_mode(), ordinary_tensors():
        ...     x = torch.zeros(2)
        >>> x.is_inference()
        False
    """
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield
