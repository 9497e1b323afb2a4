"""Carries out ``prism`` commands in one process, one after another; their launches share fork servers that are kept.

It holds no test, and looks into no trace. What it saves each command is its own start and the import of torch, some
three seconds of computing; tests of how launches start and end do not use it.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prism_sdk.runtime.processes import KeptForkServer

__all__ = ["Ended", "Workplace", "clean_environment", "serve"]

_GRACE_S = 10.0
_SERVE = "import sys; from prism_sdk.testing.workplace import serve; serve(sys.argv[1:])"


@dataclass(frozen=True)
class Ended:
    """How a command ended, and what it and its ranks have written."""

    code: int
    out: str
    err: str


def clean_environment() -> dict[str, str]:
    """The variables of this process without those of Prism, with one computing thread."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PRISM_")}
    environment.pop("PYTEST_CURRENT_TEST", None)
    if "PYTHONPATH" in environment:  # the commands are in another folder
        places = [os.path.abspath(one) for one in environment["PYTHONPATH"].split(os.pathsep) if one]
        environment["PYTHONPATH"] = os.pathsep.join(places)
    return environment | {"OMP_NUM_THREADS": "1"}


class Workplace:
    """Commands in one folder, and the process that carries them out, from the first one on.

    Args:
        folder: the current folder of the commands and of their ranks.
        environment: variables on top of those of the test; those of Prism are taken away.
        timeout_s: no command takes longer.
    """

    def __init__(self, folder: Path, *, environment: Mapping[str, str] | None = None, timeout_s: float = 120.0) -> None:
        self.folder = folder
        self.timeout_s = timeout_s
        self._environment = clean_environment() | dict(environment or {})
        self._files = [folder / f".workplace.{name}" for name in ("out", "err")]
        self._process: subprocess.Popen[bytes] | None = None
        self._end: weakref.finalize[..., Workplace] | None = None

    @property
    def pid(self) -> int | None:
        """Of the process; its children are the fork servers that are kept, and these have none between commands."""
        return None if self._process is None else self._process.pid

    def run(self, *words: str | Path) -> Ended:
        """Run ``prism`` with `words`."""
        process = self._started()
        assert process.stdin is not None and process.stdout is not None
        begun = [file.stat().st_size for file in self._files]
        process.stdin.write(json.dumps(list(map(str, words))).encode() + b"\n")
        process.stdin.flush()
        if not select.select([process.stdout], [], [], self.timeout_s)[0]:
            process.kill()
            self.close()
            raise TimeoutError(f"no end after {self.timeout_s:.0f} s: prism {' '.join(map(str, words))}")
        answer = process.stdout.readline()
        out, err = (_after(size, file) for size, file in zip(begun, self._files, strict=True))
        assert answer, f"it took along what carries out commands: prism {' '.join(map(str, words))}\n{err}"
        return Ended(int(answer), out, err)

    def run_apart(self, *words: str | Path) -> Ended:
        """The same in a process of its own: for plugins that change the process, and for environments of tests."""
        done = subprocess.run(
            [sys.executable, "-m", "prism_sdk.cli.main", *map(str, words)], cwd=self.folder, env=self._environment,
            text=True, capture_output=True, timeout=self.timeout_s, check=False,
        )  # fmt: skip
        return Ended(done.returncode, done.stdout, done.stderr)

    def close(self) -> None:
        """End the process, if there is one, and what it has started."""
        if self._end is not None:
            self._end()
        self._process = None

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            self.close()
            for file in self._files:
                file.touch()
            self._process = subprocess.Popen(
                [sys.executable, "-c", _SERVE, *map(str, map(Path.absolute, self._files))], cwd=self.folder,
                env=self._environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            )  # fmt: skip
            self._end = weakref.finalize(self, _end, self._process)
        return self._process


def _after(size: int, file: Path) -> str:
    with file.open("rb") as opened:
        opened.seek(size)
        return opened.read().decode(errors="replace")


def _end(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.communicate(timeout=_GRACE_S)  # no further command comes: it ends its fork servers
    process.kill()  # these end with it
    process.communicate()


class _Servers(KeptForkServer):
    """Fork servers that are kept: one for observed jobs, and one for others, whose hashes are repeatable."""

    def __init__(self) -> None:
        super().__init__()
        self._kept: dict[str | None, KeptForkServer] = {}

    def start(self, environment: Mapping[str, str], *more: Any) -> Any:
        key = environment.get("PYTHONHASHSEED")
        if key not in self._kept:
            self._kept[key] = KeptForkServer()
        return self._kept[key].start(environment, *more)

    def close(self) -> None:
        """Calibrations want to end theirs."""

    def end(self) -> None:
        for server in self._kept.values():
            server.close()


def serve(files: Sequence[str]) -> None:
    """Carry out the commands that come on stdin; what they and their ranks print is appended to `files`."""
    commands, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, file in enumerate(files, 1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_APPEND), number)
    from prism_sdk.cli.main import run
    from prism_sdk.runtime.calibrating import SliceContext
    from prism_sdk.runtime.host import RankHost

    servers = _Servers()
    RankHost.start_server = servers.start
    SliceContext.make_forkserver = lambda: servers
    for command in commands:
        code = run(json.loads(command))
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(ValueError):
                stream.flush()
        print(int(code), file=answers)
    servers.end()
