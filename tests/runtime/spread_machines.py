"""Machines of a spread recording in place of those of a cluster: processes of this one.

It holds no tests.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from prism_sdk.runtime.config import LaunchConfig, LaunchMode, LaunchResult, PayloadMode
from prism_sdk.runtime.progress import Progress
from prism_sdk.runtime.spread.host import Starter
from prism_sdk.runtime.spread.recording import record_spread


class LocalStarter(Starter):
    """Starts each machine as a process here; they share nothing but the file system and the loopback interface."""

    address = "127.0.0.1"

    def __init__(self) -> None:
        self.running: dict[str, subprocess.Popen[str]] = {}
        self.exit_codes: dict[str, int] = {}

    def start(self, name: str, arguments: Sequence[str], key: bytes) -> None:
        argv = [sys.executable, "-m", "prism_sdk.runtime.spread.branch", *arguments]
        process = subprocess.Popen(argv, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert process.stdin is not None
        process.stdin.write(f"{key.hex()}\n")
        process.stdin.close()
        self.running[name] = process

    def why_ended(self, name: str) -> str | None:
        code = self.running[name].poll()
        return None if code is None else f"exit status {code}"

    def stop(self, name: str) -> None:
        process = self.running.pop(name)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(5)
        process.kill()
        self.exit_codes[name] = process.wait()
        if process.stderr is not None:
            process.stderr.close()


def record(
    script: Path, output: Path, arguments: Sequence[str] = (), *, num_ranks: int, machines: Sequence[tuple[str, int]],
    starter: LocalStarter | None = None, roles: str | None = None, payloads: PayloadMode = PayloadMode.FULL,
    say: Callable[[str], None] = lambda text: None,
) -> LaunchResult:  # fmt: skip
    """Record a job over `machines` (names, and slots of each); `say` gets the lines that a user sees."""
    config = LaunchConfig(
        LaunchMode.RECORD, str(script), output, arguments=tuple(arguments), nproc_per_node=num_ranks, roles=roles,
        payloads=payloads, adapters=(), quiet=True,
    )  # fmt: skip
    with Progress(config.mode, quiet=True, environ=os.environ) as progress:
        progress.say = say  # type: ignore[method-assign]
        return record_spread(config, progress, starter=starter or LocalStarter(), machines=machines)
