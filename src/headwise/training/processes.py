"""One process, or several that train one model on shares of every batch (under ``torchrun``)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from headwise.errors import OptionError

__all__ = ["Processes", "chosen_device", "processes"]


@dataclass(frozen=True)
class Processes:
    """This process among all: its ``rank`` of ``count``, and where it computes."""

    device: torch.device
    rank: int = 0
    count: int = 1

    @property
    def first(self) -> bool:
        """Whether this is the process that writes."""
        return self.rank == 0

    def sum(self, values: Tensor) -> Tensor:
        """The sum over all processes, in every one of them."""
        if self.count > 1:
            dist.all_reduce(values)
        return values

    def wait(self) -> None:
        """Return when all processes are here."""
        if self.count > 1:
            dist.barrier()


@contextmanager
def processes(device: str) -> Iterator[Processes]:
    """The processes that ``torchrun`` started, joined while the block runs; else this one alone."""
    count = int(os.environ.get("WORLD_SIZE", "1"))
    where = chosen_device(device, int(os.environ.get("LOCAL_RANK", "0")))
    if count == 1:
        yield Processes(where)
        return
    joined = not dist.is_initialized()
    if joined:
        dist.init_process_group("nccl" if where.type == "cuda" else "gloo")
    try:
        yield Processes(where, dist.get_rank(), count)
    finally:
        if joined:
            dist.destroy_process_group()


def chosen_device(device: str, local_rank: int = 0) -> torch.device:
    """The device of a name; ``auto`` is the GPU of this process if there is one, else the CPU.

    Example:
        >>> chosen_device("cpu")
        device(type='cpu')
        >>> chosen_device("abacus")
        Traceback (most recent call last):
            ...
        headwise.errors.OptionError: there is no device 'abacus'; allowed: auto, cpu, cuda, ...
    """
    cuda = torch.cuda.is_available()
    if device == "auto":
        device = "cuda" if cuda else "cpu"
    try:
        found = torch.device(device)
    except RuntimeError:
        raise OptionError(
            f"there is no device {device!r}", allowed="auto, cpu, cuda, cuda:1, mps"
        ) from None
    missing = (found.type == "cuda" and not cuda) or (
        found.type == "mps" and not torch.backends.mps.is_available()
    )
    if missing or found.type not in ("cpu", "cuda", "mps"):
        raise OptionError(f"the device {device} is not there", allowed="auto, cpu", to_do="use cpu")
    if found.type == "cuda" and found.index is None:
        found = torch.device("cuda", local_rank)
    if found.type == "cuda":
        torch.cuda.set_device(found)
    return found
