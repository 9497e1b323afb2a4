"""Runs a script on the ranks of one machine without Prism, for what an oracle needs: what it computes by itself.

With a device `cpu` the one thing of Prism's in it answers for GPUs, as `prism ... --device cpu` does, so that a script
that says `cuda` and `nccl` runs over gloo: torch's own collectives, and no interception. Ranks are forked by a process
that has loaded torch, which this module is as well (`-m`).
"""

from __future__ import annotations

import importlib
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from prism_sdk.runtime.rendezvous import free_port
from prism_sdk.testing.workplace import clean_environment

__all__ = ["run_plain"]


def run_plain(
    script: Path, arguments: Sequence[str] = (), *, num_ranks: int, device: str | None = None,
    modules: Sequence[str] = (), timeout_s: float = 120.0,
) -> str:  # fmt: skip
    """What all ranks of a script print where no part of Prism looks on; compare its losses with those of a launch.

    Args:
        script: a path.
        arguments: those of the script.
        num_ranks: processes of this machine, each with one computing thread.
        device: ``cpu`` for a script that wants GPUs where there are none.
        modules: what all ranks import, and takes long: it is imported once.
        timeout_s: it takes no longer.

    Raises:
        AssertionError: a rank ended with an error; it has what was written to the standard error.
        subprocess.TimeoutExpired: they did not end.
    """
    program = [str(num_ranks), device or "-", ",".join(modules), str(script), *arguments]
    with subprocess.Popen(
        [sys.executable, "-m", "prism_sdk.testing.plain", *program], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, env=clean_environment(), start_new_session=True,
    ) as process:  # fmt: skip
        try:
            out, err = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    assert process.returncode == 0, f"{script} ended with {process.returncode} without Prism:\n{err}"
    return out


def _be_rank(rank: int, num_ranks: int, port: int, program: list[str]) -> None:
    world = {"WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks, "RANK": rank, "LOCAL_RANK": rank}
    os.environ.update({key: str(value) for key, value in world.items()}, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    sys.stdout.reconfigure(line_buffering=True, write_through=False)  # type: ignore[union-attr]  # whole lines
    sys.argv = program
    sys.path.insert(0, str(Path(program[0]).parent))
    runpy.run_path(program[0], run_name="__main__")


def main(argv: Sequence[str]) -> int:
    """All ranks; ends the others where one fails, which would else wait for it."""
    import torch  # noqa: F401

    num_ranks, device, modules, *program = int(argv[0]), *argv[1:]
    if device == "cpu":
        from prism_sdk.runtime import oncpu

        oncpu.install(num_devices=num_ranks)
    for name in filter(None, modules.split(",")):
        importlib.import_module(name)
    port = free_port()
    children: set[int] = set()
    for rank in range(num_ranks):
        if child := os.fork():
            children.add(child)
            continue
        _be_rank(rank, num_ranks, port, program)
        return 0
    code = 0
    while children:
        child, status = os.wait()
        children.discard(child)
        if status and not code:
            code = abs(os.waitstatus_to_exitcode(status))
            for other in children:
                os.kill(other, signal.SIGTERM)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
