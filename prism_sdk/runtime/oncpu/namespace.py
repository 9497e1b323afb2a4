"""Answers what programs ask of `torch.cuda`: devices, streams, events, random state, memory. It computes nothing."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch

_NAME = "CPU in place of a GPU"
_MEMORY_BYTES = 80 << 30
_CAPABILITY = (9, 0)  # programs choose data types and kernels by it


class Stream:
    """Everything happens at once on a CPU, so a stream has nothing to do."""

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        self.device = torch.device("cpu")
        self.priority = priority
        self.cuda_stream = 0
        self.stream_id = 0

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def wait_stream(self, stream: Any) -> None:
        """Nothing to wait for."""

    def wait_event(self, event: Any) -> None:
        """Nothing to wait for."""

    def query(self) -> bool:
        """Everything is done."""
        return True

    def is_capturing(self) -> bool:
        """No graphs here."""
        return False

    def record_event(self, event: Event | None = None) -> Event:
        """An event that happens now."""
        event = event or Event()
        event.record()
        return event

    @staticmethod
    def priority_range() -> tuple[int, int]:
        """As on a GPU."""
        return 0, -1


class Event:
    """Happens when it is recorded."""

    def __init__(self, enable_timing: bool = False, *_: Any, **__: Any) -> None:
        self._time_ns: int | None = None

    def record(self, stream: Any = None) -> None:
        """Now."""
        self._time_ns = time.perf_counter_ns()

    def wait(self, stream: Any = None) -> None:
        """Nothing to wait for."""

    def query(self) -> bool:
        """It has happened."""
        return True

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def elapsed_time(self, end_event: Event) -> float:
        """Milliseconds of the CPU between two recordings."""
        if self._time_ns is None or end_event._time_ns is None:
            raise ValueError("Both events must be recorded before calculating elapsed time.")
        return (end_event._time_ns - self._time_ns) / 1e6


def install(*, num_devices: int) -> None:
    """Replace functions and classes of `torch.cuda`. Each name gets a function of its own, as torch._dynamo wants."""
    cuda: Any = torch.cuda
    current = [0]

    def answer(value: Any = None) -> Callable[..., Any]:
        return lambda *args, **kwargs: value

    @contextlib.contextmanager
    def nothing(*_: Any, **__: Any) -> Iterator[None]:
        yield

    def set_device(device: Any) -> None:
        index: int | None = device if isinstance(device, int) else torch.device(device).index
        if index is not None and index >= 0:
            if index >= num_devices:
                raise RuntimeError(f"invalid device ordinal {index}: there are {num_devices} devices")
            current[0] = index

    default = Stream()
    cuda.Stream, cuda.Event, cuda.ExternalStream = Stream, Event, Stream
    cuda.current_stream, cuda.default_stream = answer(default), answer(default)
    cuda.stream, cuda.StreamContext = (lambda stream=None: nothing()), (lambda stream=None: nothing())
    cuda.device, cuda.device_of = (lambda device=None: nothing()), (lambda tensor=None: nothing())
    for name in (
        "set_stream", "synchronize", "empty_cache", "init", "ipc_collect", "_lazy_init", "reset_peak_memory_stats",
        "reset_max_memory_allocated", "set_per_process_memory_fraction",
    ):  # fmt: skip
        setattr(cuda, name, answer())
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"):
        setattr(cuda, name, answer(0))
    cuda.set_device, cuda.current_device = set_device, lambda: current[0]
    cuda.is_available, cuda.is_initialized = answer(True), answer(True)
    cuda.device_count = answer(num_devices)
    cuda.is_bf16_supported, cuda.is_current_stream_capturing = answer(True), answer(False)
    cuda.get_device_capability, cuda.get_device_name = answer(_CAPABILITY), answer(_NAME)
    cuda.get_device_properties = answer(
        SimpleNamespace(
            name=_NAME, major=_CAPABILITY[0], minor=_CAPABILITY[1], total_memory=_MEMORY_BYTES,
            multi_processor_count=132,
        )
    )  # fmt: skip
    cuda.memory_stats, cuda.mem_get_info = (lambda *_, **__: {}), answer((_MEMORY_BYTES, _MEMORY_BYTES))
    cuda._lazy_call = lambda function, **_: function()
    cuda.nvtx.range_push, cuda.nvtx.range_pop, cuda.nvtx.mark = answer(0), answer(0), answer()
    _random(cuda, num_devices)
    _tensor_types(cuda)
    _accelerator(cuda)


def _random(cuda: Any, num_devices: int) -> None:
    """The state of the CPU's generator stands for that of each GPU: the program has one of them."""
    cuda.default_generators = (torch.default_generator,) * num_devices
    for module in (cuda, cuda.random):
        module.get_rng_state = lambda device="cuda": torch.get_rng_state()
        module.set_rng_state = lambda state, device="cuda": torch.set_rng_state(state)
        module.get_rng_state_all = lambda: [torch.get_rng_state()]
        module.set_rng_state_all = lambda states: torch.set_rng_state(states[0])
        module.manual_seed = lambda seed: torch.default_generator.manual_seed(int(seed))
        module.manual_seed_all = lambda seed: torch.default_generator.manual_seed(int(seed))
        module.initial_seed = lambda: torch.default_generator.initial_seed()


def _accelerator(cuda: Any) -> None:
    """Torch that is built for CUDA takes a CPU for one here, and asks by the general names too (optimizers of 2.14)."""
    general = torch.accelerator
    names = {
        "current_stream": "current_stream", "set_stream": "set_stream", "synchronize": "synchronize",
        "current_device_index": "current_device", "current_device_idx": "current_device",
        "set_device_index": "set_device", "set_device_idx": "set_device",
    }  # fmt: skip
    for name, meant in names.items():
        if hasattr(general, name):
            setattr(general, name, getattr(cuda, meant))


def _tensor_types(cuda: Any) -> None:
    for name in ("Float", "Double", "Half", "BFloat16", "Long", "Int", "Short", "Char", "Byte", "Bool"):
        setattr(cuda, f"{name}Tensor", getattr(torch, f"{name}Tensor"))
