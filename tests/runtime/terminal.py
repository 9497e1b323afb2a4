"""A terminal to run `prism` on: a real pty, and an emulator that knows what stands on its screen.

It holds no tests.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pyte

SECONDS = 120.0
_OF_TERMINALS = {"NO_COLOR", "FORCE_COLOR", "COLORTERM", "TERM", "TTY_COMPATIBLE", "COLUMNS", "LINES"}


class Screen(pyte.HistoryScreen):
    """pyte's screen; it keeps what scrolls off the top, as terminals do."""


class Terminal:
    """Runs one command on a pty of its own, as its controlling terminal."""

    def __init__(self, *, columns: int = 100, rows: int = 24) -> None:
        self.screen = Screen(columns, rows, history=5000, ratio=0.5)
        self._stream = pyte.ByteStream(self.screen)
        self._master, self._slave = pty.openpty()
        self._set_size(columns, rows)
        self.raw = b""
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, words: Sequence[str | Path], *, folder: Path, stdout: int | None = None, **env: str) -> None:
        slave = self._slave
        clean = {k: v for k, v in os.environ.items() if not k.startswith("PRISM_") and k not in _OF_TERMINALS}

        def prepare() -> None:
            os.setsid()
            fcntl.ioctl(slave, termios.TIOCSCTTY, 0)
            for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTSTP):
                signal.signal(number, signal.SIG_DFL)

        self.process = subprocess.Popen(
            [str(word) for word in words], cwd=folder, env={**clean, "TERM": "xterm-256color", **env}, stdin=slave,
            stdout=slave if stdout is None else stdout, stderr=slave, preexec_fn=prepare,
        )  # fmt: skip

    def type(self, data: bytes) -> None:
        os.write(self._master, data)

    def resize(self, columns: int, rows: int) -> None:
        self.screen.resize(rows, columns)
        self._set_size(columns, rows)

    def read(self, seconds: float = 0.1) -> None:
        """Take what comes within `seconds`."""
        deadline = time.monotonic() + seconds
        while select.select([self._master], [], [], max(deadline - time.monotonic(), 0))[0]:
            with contextlib.suppress(OSError):
                data = os.read(self._master, 65536)
                self.raw += data
                self._stream.feed(data)

    def until(self, condition: Callable[[], bool], *, within_s: float = SECONDS) -> None:
        deadline = time.monotonic() + within_s
        while not condition():
            assert time.monotonic() < deadline, "\n".join(self.lines())
            self.read(0.05)

    def finish(self) -> int:
        """Wait for the command, read the rest, and return its exit code."""
        assert self.process is not None
        self.until(lambda: self.process is not None and self.process.poll() is not None)
        self.read(0.2)
        return self.process.returncode

    def lines(self) -> list[str]:
        """The rows of the screen."""
        return [line.rstrip() for line in self.screen.display]

    def everything(self) -> list[str]:
        """What scrolled away, then the screen."""
        columns = self.screen.columns
        above = ["".join(row[x].data for x in range(columns)).rstrip() for row in self.screen.history.top]
        return above + self.lines()

    def close(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self._master)
        os.close(self._slave)

    def _set_size(self, columns: int, rows: int) -> None:
        fcntl.ioctl(self._slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
