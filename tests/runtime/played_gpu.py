"""A GPU that is played on the CPU for whole runs: backend `nccl` with gloo in the place of NCCL.

It holds no test. It is a plugin (`--plugin tests/runtime/played_gpu.py --backend played-nccl`), and what the assistant
of that backend runs. Everything is the backend's own but libcuda, NCCL and what torch says of CUDA: streams do all at
once, and a stream that is told to wait blocks whoever tells it. Addresses are those of the host.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from prism_sdk.abc import ReplayBackend
from prism_sdk.builtin.nccl import NcclBackend
from prism_sdk.hookspecs import hookimpl
from prism_sdk.pruning import Pending
from prism_sdk.runtime import emulate, emulating
from prism_sdk.runtime.oncuda import communicators, holding, joining, neighbours
from prism_sdk.runtime.reducedgroups import TorchGroup

CPU = torch.device("cpu")


class Event:
    """Of something that is done already (implements Pending too)."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        return None

    def wait(self) -> None:
        return None


class Queue:
    """A stream of a device that does everything at once."""

    def __init__(self, number: int = 0, device: Any = None) -> None:
        self.cuda_stream = number
        self.events: list[Any] = []

    def query(self) -> bool:
        return True

    def record_event(self) -> Event:
        return Event()

    def wait_event(self, event: Any) -> None:
        self.events.append(event)


class Device:
    """Stands for libcuda."""

    def __init__(self) -> None:
        self.num_streams = 0
        self.said: list[tuple[str, int]] = []
        self.kept: list[torch.Tensor] = []

    def stream_write(self, stream: int, address: int, value: int) -> None:
        self.said.append(("write", stream))
        ctypes.c_uint32.from_address(address).value = value

    def stream_wait(self, stream: int, address: int, value: int) -> None:
        self.said.append(("wait", stream))
        word, until = ctypes.c_int32.from_address(address), time.monotonic() + 20
        while word.value - value < 0:
            assert time.monotonic() < until
            time.sleep(0.00002)

    def register(self, address: int, num_bytes: int) -> int:
        return address

    def allocate(self, num_bytes: int) -> int:
        self.kept.append(torch.full((num_bytes,), 0x55, dtype=torch.uint8))
        return int(self.kept[-1].data_ptr())

    def free_bytes(self) -> int:
        return 0

    def copy_in(self, stream: int, target: int, source: int, num_bytes: int) -> None:
        ctypes.memmove(target, source, num_bytes)

    def copy(self, stream: int, target: int, source: int, num_bytes: int) -> None:
        self.said.append(("copy", stream))
        ctypes.memmove(target, source, num_bytes)

    def create_stream(self, *, is_urgent: bool) -> int:
        self.num_streams += 1
        return self.num_streams


def memory_at(address: int, num_bytes: int) -> Any:
    """The memory of the device, which is the host's."""
    return np.frombuffer((ctypes.c_uint8 * num_bytes).from_address(address), np.uint8)


class GlooGroup(TorchGroup):
    """Stands for NcclGroup; a call has ended when it returns."""

    def __init__(
        self, folder: Path, name: str, *, position: int, size: int, stream: Any, patience_s: float = 60.0
    ) -> None:
        from torch._C._distributed_c10d import FileStore, PrefixStore, ProcessGroupGloo

        gloo: Any = ProcessGroupGloo
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname="127.0.0.1", lazy_init=False)]
        options._threads = 1
        store = PrefixStore(name, FileStore(str(folder / f"played-{name}"), -1))
        self.calls: list[str] = []
        self.stream = stream
        super().__init__(gloo(store, position, size, options))

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if name not in ("all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter", "exchange"):
            return found

        def at_once(*arguments: Any) -> Pending:
            found(*arguments).wait()  # once: a second wait of gloo's messages is for another one
            self.calls.append(name)
            return Event()

        return at_once


def play() -> None:
    """Play a GPU in this process from now on."""
    cuda: Any = torch.cuda
    program, device = Queue(), Device()
    cuda.current_stream = lambda device=None: program
    cuda.ExternalStream = Queue
    cuda.stream = lambda stream: contextlib.nullcontext()
    cuda.synchronize = lambda device=None: None
    cuda.set_device = lambda device: None
    cuda.is_current_stream_capturing = lambda: False
    modules: Any = (holding, joining, neighbours)
    for module in modules:
        module.Driver = lambda: device
    for module in (holding, communicators):  # type: ignore[assignment]
        module.DeviceMemory = memory_at
    communicators.NcclGroup = GlooGroup  # type: ignore[assignment,misc]
    neighbours.device_at = lambda index: CPU
    emulate.device_of = lambda call: CPU
    emulating.has_gpu = lambda: True


class PlayedBackend(NcclBackend):
    """The backend, on as many GPUs as are wanted."""

    name = "played-nccl"
    program = (str(Path(__file__)),)

    def num_devices(self) -> int:
        return 8


@hookimpl
def prism_register_backends() -> list[ReplayBackend]:
    play()
    return [PlayedBackend()]


if __name__ == "__main__":
    play()
    neighbours.Neighbours.__init__.__kwdefaults__["num_devices"] = lambda: 8
    sys.exit(neighbours.main(sys.argv[1:]))
