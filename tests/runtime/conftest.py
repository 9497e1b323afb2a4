"""Runs `prism` as a user does, on small scripts, and looks after what it leaves behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from prism_sdk.testing.workplace import Ended, Workplace
from prismtrace import TraceReader
from tests.runtime.laboratory import Laboratory

SECONDS = 120.0  # no launch of these tests takes longer, or it hangs: some take 60 where eight others want the CPUs
WORKPLACE_MARK = f"prism-workplace-{os.getpid()}"


def _default_signals() -> None:
    """A test run that was started with nohup or in the background ignores these, and Prism respects that."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


class Bench:
    """A folder, scripts in it, and commands run on them."""

    def __init__(self, folder: Path, workplace: Workplace) -> None:
        self.folder = folder
        self._workplace = workplace
        self.output = folder / "out.prism"
        self.mark = f"prism-test-{os.getpid()}-{time.monotonic_ns()}"
        self._running: list[subprocess.Popen[str]] = []

    def script(self, text: str, name: str = "train.py") -> Path:
        path = self.folder / name
        path.write_text(textwrap.dedent(text))
        return path

    def start(
        self,
        *words: str | Path,
        env: dict[str, str] | None = None,
        prepare: Callable[[], None] = _default_signals,
        **options: Any,
    ) -> subprocess.Popen[str]:
        """Start a command; `prepare` runs in the child before it."""
        environment = {k: v for k, v in os.environ.items() if not k.startswith("PRISM_")}
        process = subprocess.Popen(
            [str(word) for word in words], text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=self.folder,
            env={**environment, "BENCH_MARK": self.mark, **(env or {})}, preexec_fn=prepare,
            **options,
        )  # fmt: skip
        self._running.append(process)
        return process

    def prism(
        self, mode: str, script: Path | str, *options: str, arguments: tuple[str, ...] = (), **more: Any
    ) -> subprocess.Popen[str]:
        """Start a launch; `finish` waits for it."""
        flags = [] if "-o" in options else ["-o", str(self.output)]
        return self.start(
            sys.executable, "-m", "prism_sdk.cli.main", mode, *flags, *options, "--", script, *arguments, **more
        )

    def finish(self, process: subprocess.Popen[str], *, text: str | None = None) -> Ended:
        out, err = process.communicate(text, timeout=SECONDS)
        return Ended(process.returncode, out, err)

    def run(self, mode: str, script: Path | str, *options: str, **more: Any) -> Ended:
        return self.finish(self.prism(mode, script, *options, **more))

    def run_shared(self, mode: str, script: Path | str, *options: str, arguments: tuple[str, ...] = ()) -> Ended:
        """As `run`, for tests of what a job does and not of how it is started: in the workplace, and in its folder."""
        flags = () if "-o" in options else ("-o", str(self.output))
        ended = self._workplace.run(mode, *flags, *options, "--", script, *arguments)
        _assert_gone(lambda: _left_by(self._workplace), 3.0)
        return ended

    def metadata(self, path: Path | None = None) -> dict[str, str]:
        with TraceReader(path or self.output) as reader:
            return dict(reader.metadata)

    def alive(self) -> dict[int, str]:
        """Processes that descend from our commands, wherever they hang now."""
        return _marked(self.mark)

    def assert_nothing_left(self, *, within_s: float = 3.0) -> None:
        _assert_gone(self.alive, within_s)

    def wait_for(self, condition: Callable[[], bool], *, within_s: float = 30.0) -> None:
        deadline = time.monotonic() + within_s
        while not condition():
            assert time.monotonic() < deadline, "what was waited for did not happen"
            time.sleep(0.02)

    def close(self) -> None:
        for process in self._running:
            if process.poll() is None:
                process.kill()
            process.communicate()
        for pid in self.alive():
            os.kill(pid, signal.SIGKILL)


def _assert_gone(alive: Callable[[], dict[int, str]], within_s: float) -> None:
    deadline = time.monotonic() + within_s
    while alive() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert alive() == {}


def _marked(mark: str) -> dict[int, str]:
    """Processes that have the mark; the environment gives them away."""
    found = {}
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and mark.encode() in (entry / "environ").read_bytes():
                found[int(entry.name)] = (entry / "cmdline").read_text().replace("\0", " ")
        except OSError:
            continue
    return found


def _left_by(workplace: Workplace) -> dict[int, str]:
    """Processes of commands that have ended; the workplace and its fork servers stay."""
    assert workplace.pid is not None
    staying = {workplace.pid, *(server.pid for server in psutil.Process(workplace.pid).children())}
    return {pid: line for pid, line in _marked(WORKPLACE_MARK).items() if pid not in staying}


@pytest.fixture(scope="session")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workplace]:
    workplace = Workplace(tmp_path_factory.mktemp("workplace"), environment={"BENCH_MARK": WORKPLACE_MARK})
    yield workplace
    workplace.close()


@pytest.fixture
def bench(tmp_path: Path, workplace: Workplace) -> Iterator[Bench]:
    bench = Bench(tmp_path, workplace)
    yield bench
    bench.close()


@pytest.fixture(scope="session")
def lab(workplace: Workplace) -> Laboratory:
    """One for all tests: what one file has recorded another need not record again."""
    return Laboratory(workplace)
