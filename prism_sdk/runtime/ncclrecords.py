"""The record files of the NCCL profiler in one launch: where they lie, writing out the last of them, joining them.

Responsible for `prism observe --nccl-profiler`; what the records mean is the business of prism_sdk.nccl.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from pathlib import Path

from prism_sdk.errors import OutputError, PrismError
from prismtrace import PrismTraceError

_SUFFIX = ".nccl"
LIBRARY_NAME = "libprism_nccl_profiler.so"


def records_directory(output: Path) -> Path:
    """The folder beside `output` that holds the ranks' record files; it stays after the job."""
    return output.with_name(output.name + _SUFFIX)


def prepare_records(output: Path) -> Path:
    """An empty folder for the record files; those of an earlier run under this name go, as its trace does."""
    folder = records_directory(output)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for left in folder.glob("*.ncclrec*"):
            left.unlink()
    except OSError as error:
        raise OutputError(str(folder), reason=error.strerror or str(error)) from error
    return folder


def join_records(output: Path, report: Callable[[str], None]) -> None:
    """Join what NCCL did to the trace. It never fails a job that ran well: what went wrong is reported."""
    from prism_sdk.nccl.attach import attach
    from prism_sdk.nccl.job import load_job

    folder = records_directory(output)
    files = sorted(folder.glob("*.ncclrec*"))
    if not files:
        report("the NCCL profiler recorded nothing: the job used no NCCL communicator of more than one rank")
        folder.rmdir()
        return
    try:
        found = attach(output, load_job(files), output, overwrite=True)
    except (PrismError, PrismTraceError, OSError) as error:
        report(f"what NCCL did is not in the trace: {error}; the records are in {folder}")
        return
    report(
        f"NCCL: {found.num_joined} of {found.num_tasks} operations belong to units of the trace; "
        f"`prism nccl report {folder}` shows bandwidths"
    )
    for text in found.findings[:8]:
        report(f"NCCL: {text}")


def flush_profiler(library: str) -> None:
    """Make the profiler library write out what it holds, if NCCL has loaded it: this process is about to end."""
    if not library.endswith(LIBRARY_NAME):
        return
    try:
        loaded = ctypes.CDLL(library, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError:
        return
    loaded.prism_nccl_flush()
