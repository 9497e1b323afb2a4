"""Keeps a process on a machine that does one task of a cluster after the other, so that torch is loaded once for all.

Responsible for that process and its answers; which tasks there are, and where they run, is engines.py's.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from signal import SIGTERM
from typing import Protocol

from prism_sdk.errors import PrismError
from prism_sdk.runtime.host import RankHost
from prism_sdk.runtime.parents import die_with_parent
from prism_sdk.runtime.processes import KeptForkServer, wait_or_kill

REFUSED = 2
"""What a task ends with that Prism itself ended with an error: it would do so again."""
_FAILED = 1


class Task(Protocol):
    """Work that one machine does alone, and that leaves one file."""

    @property
    def label(self) -> str:
        """What it is, for messages: "the slice of ranks 0,1"."""

    @property
    def output(self) -> Path:
        """The file; a folder of all machines holds it."""

    @property
    def is_finished(self) -> bool:
        """Whether the file is there, and whole."""

    def run(self, make_host: Callable[..., RankHost]) -> None:
        """Do it, on this machine; `make_host` is what runs ranks."""


class Servant:
    """The process. It ends with the one that started it, or with the first task that failed."""

    def __init__(self, folder: str, environ: Mapping[str, str]) -> None:
        self._said = tempfile.TemporaryFile("a+b")  # noqa: SIM115  # both append, so reading moves nobody's place
        ours, theirs = socket.socketpair()
        argv = [sys.executable, "-m", "prism_sdk.runtime.servants", str(theirs.fileno())]
        with theirs:
            self._process = subprocess.Popen(
                argv, cwd=folder, env=dict(environ), pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL, stderr=self._said,
            )  # fmt: skip
        self._answers = ours.makefile("rw", encoding="utf-8")
        ours.close()

    @property
    def has_ended(self) -> bool:
        """Whether it does no more tasks."""
        return self._process.poll() is not None

    def do(self, path: str) -> tuple[int, str]:
        """Do the task in a file. Returns its exit status, and what was said on stderr."""
        begin = self._said.seek(0, os.SEEK_END)
        try:
            print(json.dumps(path), file=self._answers, flush=True)
            answer = self._answers.readline()
        except OSError:
            answer = ""
        code = int(answer) if answer else self._process.wait() or _FAILED
        self._said.seek(begin)
        said = self._said.read().decode(errors="replace")
        if code not in (0, REFUSED):
            self.close()
        return code, said

    def close(self) -> None:
        """End it."""
        with contextlib.suppress(OSError):
            self._answers.close()
        wait_or_kill(self._process)
        self._said.close()


def main(argv: Sequence[str]) -> int:
    """Do the tasks whose files are named at the socket argv[0]. Ends with the process that started it."""
    die_with_parent(signal_number=SIGTERM)
    desk = socket.socket(fileno=int(argv[0]))
    desk.set_inheritable(False)  # whoever holds it would seem to be still at work
    forkserver = KeptForkServer()
    make_host = partial(RankHost, start_server=forkserver.start)
    with desk, desk.makefile("rw", encoding="utf-8") as lines:
        while line := lines.readline():
            code = _do(Path(json.loads(line)), make_host)
            print(code, file=lines, flush=True)
            if code not in (0, REFUSED):
                break
    forkserver.close()
    return 0


def _do(path: Path, make_host: Callable[..., RankHost]) -> int:
    try:
        task: Task = pickle.loads(path.read_bytes())
        task.run(make_host)
    except PrismError as error:
        sys.stderr.write(f"{error}\n")
        return REFUSED
    except Exception:
        traceback.print_exc()
        return _FAILED
    finally:
        sys.stderr.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
