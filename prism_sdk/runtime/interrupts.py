"""What Ctrl-C and its like mean while a launch runs: they are noted, and the launch ends in its own time.

Responsible for the launcher's signal handlers; ending the processes is host.py's.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

from prism_sdk.errors import RunError

_ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PATIENCE = 3  # the first ends the ranks, the second kills them, the third breaks off the saving of what was recorded


class Interrupted(RunError):
    """The user pressed Ctrl-C, or the launcher was asked to end. The command ends as a shell reports a signal."""

    def __init__(self, signal_number: int) -> None:
        super().__init__(f"interrupted by {signal.Signals(signal_number).name}")
        self.signal_number = signal_number
        self.exit_code = 128 + signal_number  # type: ignore[assignment]  # not one of ExitCode's


class Interrupts:
    """Notes SIGINT, SIGTERM and SIGHUP for the length of a launch, so that none of them breaks off the clean-up."""

    def __init__(self) -> None:
        self.number: int | None = None
        self.count = 0
        self._previous: dict[int, Any] = {}

    @property
    def active(self) -> bool:
        """Whether somebody listens already."""
        return bool(self._previous)

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            for number in _ENDING_SIGNALS:
                if signal.getsignal(number) is not signal.SIG_IGN:  # nohup stays nohup
                    self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}

    def _note(self, number: int, _frame: FrameType | None) -> None:
        if self.number is None:
            self.number = number
        self.count += 1
        if self.count >= _PATIENCE:
            raise KeyboardInterrupt


@contextlib.contextmanager
def ending_by_exception() -> Iterator[None]:
    """Between launches: SIGTERM and SIGHUP raise `Interrupted`, so that all is closed as after Ctrl-C."""

    def end(number: int, _frame: FrameType | None) -> None:
        raise Interrupted(number)

    previous: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        numbers = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) is signal.SIG_DFL]
        previous = {number: signal.signal(number, end) for number in numbers}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
