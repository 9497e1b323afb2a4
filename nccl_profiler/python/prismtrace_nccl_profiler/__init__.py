"""Says where the NCCL profiler library lies. It does not load it: NCCL does, by NCCL_PROFILER_PLUGIN."""

from __future__ import annotations

from pathlib import Path

__all__ = ["library_path"]


def library_path() -> Path:
    """The shared library, to be given to NCCL as NCCL_PROFILER_PLUGIN.

    Raises:
        FileNotFoundError: the distribution was not installed but copied, so that nothing was compiled.
    """
    path = Path(__file__).with_name("libprism_nccl_profiler.so")
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing: install prismtrace-nccl-profiler with pip")
    return path

