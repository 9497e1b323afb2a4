"""A few rows at the bottom of a terminal that ranks write to at the same time.

Responsible for where the rows are and for giving them back; what they say comes from progress.py, colours from rich.

The rows are outside of the terminal's scrolling region, so whatever anybody writes (ranks write to the terminal
themselves, without a detour through us) scrolls above them. Each update is one ``write``, which the kernel does not mix
with others, and puts the cursor back to where it was.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from types import FrameType
from typing import Any

from rich.console import Console
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from prism_sdk.runtime.progress import Sample, clock, memory_text, ranks_text, steps_text

NUM_ROWS = 3
_MIN_ROWS, _MIN_COLUMNS = 8, 30  # on anything smaller the rows would be in the way
_TEXT_COLUMNS = 62  # of the first row; what is wider than that is for the bar
_BAR_COLUMNS = (10, 30)

_SAVE, _RESTORE = "\x1b7", "\x1b8"
_WHOLE_SCREEN = "\x1b[r"
_DOWN = "\x1bD"  # scrolls at the bottom, and unlike a line feed stays in its column
_CLEAR_ROW = "\x1b[2K"
_CLEAR_REST = "\x1b[0m\x1b[K"


class LiveArea:
    """Shows samples in the last rows of the terminal behind descriptor `fd`."""

    def __init__(self, fd: int, console: Console) -> None:
        self._fd, self._console = fd, console
        self._size: tuple[int, int] | None = None  # columns and rows of the terminal that has our rows; None: none has
        self._lock = threading.RLock()  # a signal's handler may come while its own thread draws
        self._closed = False
        self._previous: dict[int, Any] = {}

    @classmethod
    def at(cls, fd: int, *, term: str) -> LiveArea | None:
        """None where the terminal cannot do it, or is too small."""
        columns, rows = _size(fd)
        console = Console(stderr=True, force_terminal=True, width=columns)
        if console.is_dumb_terminal or not term or columns < _MIN_COLUMNS or rows < _MIN_ROWS:
            return None
        area = cls(fd, console)
        area._catch_signals()
        return area

    def show(self, sample: Sample) -> None:
        with self._lock:
            if self._closed or not self._in_foreground():
                self._size = None  # the shell gave the whole screen to somebody else
                return
            size = _size(self._fd)
            if size[0] < _MIN_COLUMNS or size[1] < _MIN_ROWS:
                self._write(self._leave())
                return
            room = "" if size == self._size else self._make_room()
            self._size = size
            columns, rows = size
            top = rows - NUM_ROWS
            lines = self._render(sample, columns - 1)  # a full row would make some terminals wrap
            drawn = "".join(f"\x1b[{top + 1 + i};1H\x1b[0m{line}{_CLEAR_REST}" for i, line in enumerate(lines))
            self._write(f"{room}{_SAVE}\x1b[1;{top}r{drawn}{_RESTORE}")

    def close(self) -> None:
        """Give the rows back."""
        for number, handler in self._previous.items():
            with contextlib.suppress(ValueError):
                signal.signal(number, handler)
        self._previous = {}
        # a thread that hangs in a write to a stopped terminal has the lock: then there is nothing to give back yet
        if self._lock.acquire(timeout=1.0):
            try:
                self._closed = True
                self._write(self._leave())
            finally:
                self._lock.release()

    def _leave(self) -> str:
        if self._size is None:
            return ""
        rows = self._size[1]
        self._size = None
        cleared = "".join(f"\x1b[{rows - i};1H{_CLEAR_ROW}" for i in range(NUM_ROWS))
        return f"{_SAVE}{_WHOLE_SCREEN}\x1b[0m{cleared}{_RESTORE}"

    @staticmethod
    def _make_room() -> str:
        """The rows below the cursor, by scrolling where there are none; what was there is never overwritten."""
        return f"{_SAVE}{_WHOLE_SCREEN}{_RESTORE}{_DOWN * NUM_ROWS}\x1b[{NUM_ROWS}A"

    def _render(self, sample: Sample, columns: int) -> list[str]:
        self._console.width = columns
        with self._console.capture() as captured:
            for row in _rows(sample, columns):
                self._console.print(row, no_wrap=True, overflow="ellipsis", crop=True, soft_wrap=False)
        lines = captured.get().splitlines()[:NUM_ROWS]
        return lines + [""] * (NUM_ROWS - len(lines))

    def _write(self, text: str) -> None:
        data = text.encode(self._console.encoding, "replace")
        with contextlib.suppress(OSError):  # a terminal that is gone must not end the job
            while data:
                data = data[os.write(self._fd, data) :]

    def _in_foreground(self) -> bool:
        try:
            return os.tcgetpgrp(self._fd) == os.getpgrp()
        except OSError:
            return True  # not our controlling terminal: nobody else is given it

    # -- signals that would leave the terminal with our rows ---------------------------------------------------------

    def _catch_signals(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        for number in (signal.SIGTERM, signal.SIGTSTP):
            if signal.getsignal(number) is signal.SIG_DFL:
                self._previous[number] = signal.signal(number, self._step_aside)

    def _step_aside(self, number: int, _frame: FrameType | None) -> None:
        """Give the rows back, let the signal do what it does, and go on if it was Ctrl-Z and `fg` came."""
        with self._lock:
            self._write(self._leave())
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            time.sleep(0)  # the signal is delivered here at the latest
            signal.signal(number, self._step_aside)


def _rows(sample: Sample, columns: int) -> list[Text | Table]:
    eta = "" if sample.remaining_s is None else f", {clock(sample.remaining_s)} left"
    head = Text(f"prism {sample.verb}  ", style="bold")
    head.append(clock(sample.elapsed_s) + eta, style="not bold")
    where = ", ".join(part for part in (sample.doing, "" if sample.ranks is None else steps_text(sample.ranks)) if part)
    if where:
        head.append(f"  {where}", style="not bold cyan")
    ranks = Text("ranks   ", style="dim")
    if sample.ranks is not None:
        ranks.append(ranks_text(sample.ranks), style="not dim")
        if sample.switches_per_s is not None:
            ranks.append(f", {sample.switches_per_s:.0f} switches/s", style="not dim")
    else:
        ranks.append("-")
    memory = Text("memory  ", style="dim")
    memory.append(memory_text(sample).replace(" memory", "") or "-", style="not dim")
    width = min(columns - _TEXT_COLUMNS, _BAR_COLUMNS[1])
    if sample.fraction is None or width < _BAR_COLUMNS[0]:
        return [head, ranks, memory]
    first = Table.grid(expand=True, padding=(0, 1))
    first.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
    first.add_column(width=width)
    first.add_row(head, ProgressBar(total=1.0, completed=sample.fraction, width=width))
    return [first, ranks, memory]


def _size(fd: int) -> tuple[int, int]:
    """Columns and rows; 0 and 0 where nobody knows."""
    try:
        size = os.get_terminal_size(fd)
    except OSError:
        return 0, 0
    return size.columns, size.lines
