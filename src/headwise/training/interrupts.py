"""Ctrl-C while training: the first asks to stop after the step, the second stops at once."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType

__all__ = ["Interrupts"]


class Interrupts:
    """While the block runs, ``asked`` says whether Ctrl-C was pressed; pressed again, it raises.

    In a thread other than the main one signals cannot be caught, and nothing changes.

    Example:
        >>> with Interrupts() as interrupts:
        ...     signal.raise_signal(signal.SIGINT)
        ...     interrupts.asked
        True
    """

    def __init__(self) -> None:
        self.asked = False
        self._before: signal._HANDLER = None

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._pressed)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    def _pressed(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
