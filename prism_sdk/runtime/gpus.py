"""Counts the GPUs that a launch may use, and says whether a job uses any, without loading torch.

Responsible for asking the driver; which rank runs on which device is oncuda/devices.py's.
"""

from __future__ import annotations

import ctypes
from contextlib import suppress

from prism_sdk.runtime.oncuda.driver import libcuda
from prismtrace import TraceReader


def num_gpus() -> int:
    """The CUDA devices that CUDA_VISIBLE_DEVICES leaves; 0 where there is no driver. Opens no context."""
    with suppress(OSError, AttributeError):
        driver = libcuda()
        count = ctypes.c_int(0)
        if driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0:
            return int(count.value)
    return 0


def uses_gpus(reader: TraceReader, *, device: str | None) -> bool:
    """Whether a recorded job communicates over NCCL, unless it is to run on CPUs."""
    if (device or reader.metadata.get("job.device")) == "cpu":
        return False
    return any("nccl" in group.backend for group in reader.groups.values())
