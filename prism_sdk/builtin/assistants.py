"""Starts the assistant process of a replay backend, and ends it.

Responsible for the process, its facts and its connections to the sandbox ranks; what it does is its own module's.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from prism_sdk.abc import AssistContext
from prism_sdk.runtime.processes import wait_or_kill


@contextlib.contextmanager
def connections(num: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Connections between sandbox ranks and an assistant: the descriptors of the ranks' ends, and of the others."""
    pairs = [socket.socketpair() for _ in range(num)]
    try:
        yield tuple(ours.fileno() for ours, _ in pairs), tuple(theirs.fileno() for _, theirs in pairs)
    finally:
        for pair in pairs:
            for end in pair:
                end.close()


@contextlib.contextmanager
def assistant(
    context: AssistContext, program: Sequence[str], facts: object, *, name: str, descriptors: Sequence[int],
    describe: Callable[[Mapping[str, Any]], str], environment: Mapping[str, str] | None = None,
) -> Iterator[None]:  # fmt: skip
    """Run `python PROGRAM FACTS PARENT` from before the sandbox ranks start to after they have ended.

    Args:
        context: the launcher's.
        program: arguments of the interpreter, before the file with the pickled `facts` and this process's id.
        facts: what the process is told.
        name: what to call it where it ends too early.
        descriptors: open files that it inherits.
        describe: makes a line for the user of the summary that the process may leave at its end, beside the file with
            its facts and with the suffix ``.json``.
        environment: variables that it gets unless they are set.
    """
    path = context.work_dir / "assistant"
    path.write_bytes(pickle.dumps(facts))
    process = subprocess.Popen(
        [sys.executable, *program, str(path), str(os.getpid())], pass_fds=[*descriptors], start_new_session=True,
        env={**(environment or {}), **os.environ},
    )  # fmt: skip
    context.watch(process, name)
    try:
        yield
    finally:
        process.terminate()
        wait_or_kill(process)
        summary = path.with_suffix(".json")
        if summary.exists():
            context.report(describe(json.loads(summary.read_text())))
