"""Says what this process has on a GPU, whoever allocated it: contexts, NCCL's buffers and torch's memory together.

Responsible for asking NVIDIA's management library, as nvidia-smi does; torch is asked by who wants to know its share.
"""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress
from pathlib import Path

from prism_sdk.runtime.oncuda.driver import libcuda
from prism_sdk.runtime.roles.recorded import RecordedRoles
from prismtrace import TraceReader

OTHERS_KEY = "rank.{}.device_other_bytes"
"""Of the metadata: what an observed rank had on its device beside what torch had reserved."""

_MOST_PROCESSES = 1024


class _Process(ctypes.Structure):  # nvmlProcessInfo_t
    _fields_ = (
        ("pid", ctypes.c_uint), ("used", ctypes.c_ulonglong), ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    )  # fmt: skip


def others_of(trace: Path) -> dict[int, int]:
    """By rank what a trace says under `OTHERS_KEY`, in bytes, of it or of the rank that stands for it.

    Ranks of which it says nothing are left out.
    """
    with TraceReader(trace) as reader:
        known = ((rank, reader.metadata.get(OTHERS_KEY.format(rank))) for rank in reader.ranks)
        found = {rank: int(text) for rank, text in known if text and text.isdigit()}
        roles = RecordedRoles.of(reader) if found else None
        stands_for = [] if roles is None else roles.stands_for.tolist()
        return {rank: found[other] for rank, other in enumerate(stands_for) if other in found} | found


def process_bytes(device: int) -> int | None:
    """Bytes of this process on the device of that number; None where nobody can tell, as in some containers."""
    with suppress(OSError, AttributeError):
        cuda, management = libcuda(), ctypes.CDLL("libnvidia-ml.so.1")
        name, handle = ctypes.create_string_buffer(64), ctypes.c_void_p()
        number, ordinal = ctypes.c_uint(_MOST_PROCESSES), ctypes.c_int()
        processes = (_Process * _MOST_PROCESSES)()
        failed = (
            cuda.cuDeviceGet(ctypes.byref(ordinal), device)
            or cuda.cuDeviceGetPCIBusId(name, len(name), ordinal)
            or management.nvmlInit_v2()
            or management.nvmlDeviceGetHandleByPciBusId_v2(name, ctypes.byref(handle))
            or management.nvmlDeviceGetComputeRunningProcesses_v3(handle, ctypes.byref(number), processes)
        )
        if not failed:
            mine = [one.used for one in processes[: number.value] if one.pid == os.getpid()]
            return int(mine[0]) if mine and mine[0] < 1 << 63 else None  # the largest of all: not available
    return None
