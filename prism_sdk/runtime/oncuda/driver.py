"""The functions of the CUDA driver that torch does not offer, through ctypes: the one place that opens libcuda.

Responsible for calling them and for turning their errors into one of Prism's; what they are used for is not decided
here. It needs no torch. Where a function wants a context, the calling thread must have torch's current: any call of
torch on the device before sees to that.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any

from prism_sdk.errors import RunError

_NON_BLOCKING = 1
_GEQ = 0  # CU_STREAM_WAIT_VALUE_GEQ
_HOST_PORTABLE_MAPPED = 1 | 2


@cache
def libcuda() -> ctypes.CDLL:
    """The driver's library, which opens no device by itself. Raises OSError where there is none."""
    return ctypes.CDLL("libcuda.so.1")


class DriverError(RunError):
    """The CUDA driver has refused something."""

    def __init__(self, function: str, code: int, name: str) -> None:
        super().__init__(f"the CUDA driver refuses {function}: {name} ({code})")
        self.function, self.code = function, code


class DeviceMemory:
    """A block of device memory that torch takes over as it is."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,), "typestr": "|u1", "data": (address, False), "version": 3, "strides": None,
        }  # fmt: skip


class Driver:
    """What is done with streams and memory of a device; needs one. Raises OSError or AttributeError without."""

    def __init__(self) -> None:
        self._cuda = libcuda()
        u64, u32, ptr, size = ctypes.c_uint64, ctypes.c_uint32, ctypes.c_void_p, ctypes.c_size_t
        self._wait = self._function("cuStreamWaitValue32_v2", ptr, u64, u32, u32)
        self._write = self._function("cuStreamWriteValue32_v2", ptr, u64, u32, u32)
        self._register = self._function("cuMemHostRegister_v2", ptr, size, u32)
        self._device_pointer = self._function("cuMemHostGetDevicePointer_v2", ptr, ptr, u32)
        self._alloc = self._function("cuMemAlloc_v2", ptr, size)
        self._free_bytes = self._function("cuMemGetInfo_v2", ptr, ptr)
        self._copy_in = self._function("cuMemcpyHtoDAsync_v2", u64, ptr, size, ptr)
        self._copy = self._function("cuMemcpyDtoDAsync_v2", u64, u64, size, ptr)
        u32s = (u32,) * 7
        self._launch = self._function("cuLaunchKernel", ptr, *u32s, ptr, ptr, ptr)
        self._create_stream = self._function("cuStreamCreateWithPriority", ptr, u32, ctypes.c_int)
        self._priorities = self._function("cuCtxGetStreamPriorityRange", ptr, ptr)

    def _function(self, name: str, *types: Any) -> Any:
        function = getattr(self._cuda, name)
        function.argtypes, function.restype = types, ctypes.c_int
        return function

    def _check(self, code: int, function: str) -> None:
        if code:
            text = ctypes.c_char_p()
            self._cuda.cuGetErrorName(code, ctypes.byref(text))
            raise DriverError(function, code, (text.value or b"unknown error").decode())

    def stream_write(self, stream: int, address: int, value: int) -> None:
        """`stream` writes 32 bits to device-visible memory when everything before is done, which is seen first."""
        # without that barrier it would take less time, but driver 580 refuses it on an H200 (CUDA_ERROR_INVALID_VALUE)
        self._check(self._write(stream, address, value, 0), "cuStreamWriteValue32")

    def stream_wait(self, stream: int, address: int, value: int) -> None:
        """`stream` goes on once the 32 bits at `address` are `value`, or at most 2**31 - 1 beyond."""
        self._check(self._wait(stream, address, value, _GEQ), "cuStreamWaitValue32")

    def register(self, address: int, num_bytes: int) -> int:
        """Pin host memory and let the device see it; returns its address there."""
        self._check(self._register(address, num_bytes, _HOST_PORTABLE_MAPPED), "cuMemHostRegister")
        seen = ctypes.c_uint64()
        self._check(self._device_pointer(ctypes.byref(seen), address, 0), "cuMemHostGetDevicePointer")
        return seen.value

    def allocate(self, num_bytes: int) -> int:
        """Device memory outside torch's allocator, for the life of the process."""
        address = ctypes.c_uint64()
        self._check(self._alloc(ctypes.byref(address), num_bytes), f"cuMemAlloc of {num_bytes} bytes")
        return address.value

    def free_bytes(self) -> int:
        """What the current device has free, whoever uses it."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self._check(self._free_bytes(ctypes.byref(free), ctypes.byref(total)), "cuMemGetInfo")
        return free.value

    def copy_in(self, stream: int, target: int, source: int, num_bytes: int) -> None:
        """Copy from the host on `stream`; asynchronous if the host memory is pinned."""
        self._check(self._copy_in(target, source, num_bytes, stream), "cuMemcpyHtoDAsync")

    def copy(self, stream: int, target: int, source: int, num_bytes: int) -> None:
        """Copy within the device on `stream`."""
        self._check(self._copy(target, source, num_bytes, stream), "cuMemcpyDtoDAsync")

    def launch(self, function: Any, num_blocks: int, num_threads: int, stream: int, values: Sequence[Any]) -> None:
        """Start a kernel of one dimension on `stream`; `values` are its arguments, of types of ctypes."""
        pointers = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
        code = self._launch(function, num_blocks, 1, 1, num_threads, 1, 1, 0, stream, pointers, None)
        self._check(code, "cuLaunchKernel")

    def create_stream(self, *, is_urgent: bool) -> int:
        """A stream of the highest or the lowest priority, none of torch's pool: the program's streams stay its own."""
        least, greatest = ctypes.c_int(), ctypes.c_int()
        self._check(self._priorities(ctypes.byref(least), ctypes.byref(greatest)), "cuCtxGetStreamPriorityRange")
        stream = ctypes.c_void_p()
        priority = greatest.value if is_urgent else least.value
        self._check(self._create_stream(ctypes.byref(stream), _NON_BLOCKING, priority), "cuStreamCreateWithPriority")
        return stream.value or 0
