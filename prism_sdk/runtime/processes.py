"""Starts the fork server of a launch and ends what it has started.

Responsible for processes as the operating system sees them; what ranks say to each other is host.py's.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from prism_sdk.errors import PrismError, RunError
from prism_sdk.runtime import wire

GRACE_S = 5.0  # between SIGTERM and SIGKILL, as long as no rank ends; each rank that ends renews it
_FORKSERVER = """
import sys
if sys.path[0] == "":
    sys.path.pop(0)
from prism_sdk.runtime.forkserver import main
sys.exit(main(sys.argv[1:]))
"""


def kill_group(pid: int, number: int) -> None:
    """Signal a rank's process group: data loader workers go with it."""
    for call in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            call(pid, number)
            return  # the group has the rank in it, unless the rank was not far enough yet to have one


def allow_descriptors(num_ranks: int) -> None:
    """One socket a rank; the fork server and the ranks keep the limit that the user set."""
    needed = num_ranks + 128
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < needed:
        limit = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


def start_forkserver(
    environment: Mapping[str, str], descriptors: Sequence[int], library: Path | None, adapters: Sequence[str]
) -> tuple[subprocess.Popen[bytes], wire.Channel]:
    """Start the process that forks ranks; it and the ranks inherit `descriptors` under their numbers.

    It loads `library` first; `adapters` are those that each rank will activate.
    """
    ours, theirs = socket.socketpair()
    # -u: torchrun starts ranks so. -c and not -m: the current folder is no place to import from
    process = subprocess.Popen(
        [sys.executable, "-u", "-c", _FORKSERVER, str(theirs.fileno()), str(library or ""), *adapters],
        pass_fds=[theirs.fileno(), *descriptors], env=dict(environment), start_new_session=True,
    )  # fmt: skip
    theirs.close()
    return process, wire.Channel(ours)


def forkserver_ended(process: subprocess.Popen[bytes]) -> PrismError:
    """Its socket closes a little before its end can be seen."""
    how = "but still runs"
    with contextlib.suppress(subprocess.TimeoutExpired):
        code = process.wait(GRACE_S)
        how = f"exit status {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"
    hint = "memory may have run out: run fewer ranks at once" if process.returncode == -signal.SIGKILL else None
    return RunError(f"the fork server, the process that starts ranks, ended unexpectedly ({how})", hint=hint)
