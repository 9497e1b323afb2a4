"""Finds the installed profiler library and says what a process needs in its environment for NCCL to load it.

It loads nothing and starts nothing.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

from prism_sdk.errors import UsageError

__all__ = ["find_library", "profiler_environment"]

_PACKAGE = "prismtrace_nccl_profiler"


def find_library() -> Path:
    """The profiler library of the distribution prismtrace-nccl-profiler.

    Raises:
        UsageError: it is not installed.
    """
    spec = importlib.util.find_spec(_PACKAGE)
    if spec is None or spec.origin is None:
        raise UsageError(
            "the NCCL profiler is not installed", hint="pip install ./nccl_profiler (prismtrace-nccl-profiler)"
        )
    path = Path(spec.origin).with_name("libprism_nccl_profiler.so")
    if not path.is_file():
        raise UsageError(f"{path} is missing", hint="install prismtrace-nccl-profiler with pip: that compiles it")
    return path


def profiler_environment(records: Path) -> dict[str, str]:
    """Variables that make NCCL load the library and write record files into the folder `records`."""
    return {"NCCL_PROFILER_PLUGIN": str(find_library()), "PRISM_NCCL_OUTPUT": f"{records.absolute()}/"}
