"""NCCL's collectives among the ranks of a reduced communicator, called without torch's process groups.

Responsible for the calls of the library that torch has loaded; what is in the buffers is `reduced`'s. A process group
of torch would bring its watchdog, its streams and its share of the flight recorder into the program that is measured.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

from prism_sdk.errors import RunError
from prism_sdk.pruning import Pending
from prism_sdk.runtime.reducedgroups import Part, ReducedGroup
from prismtrace import ReduceOp

_ID_BYTES = 128
_PATIENCE_S = 120.0
_SUM, _PRODUCT, _MAX, _MIN = range(4)
_OPS = {ReduceOp.SUM: _SUM, ReduceOp.PRODUCT: _PRODUCT, ReduceOp.MAX: _MAX, ReduceOp.MIN: _MIN}
_TYPES = {
    torch.int8: 0, torch.uint8: 1, torch.bool: 1, torch.int32: 2, torch.int64: 4, torch.float16: 6, torch.float32: 7,
    torch.float64: 8, torch.bfloat16: 9,
}  # fmt: skip
"""ncclDataType_t; NCCL has no bool, and torch sends it as uint8."""


def share_device(*, as_other_host: bool) -> None:
    """Before NCCL begins in this process: let a communicator have two ranks on one GPU.

    NCCL refuses two ranks on one GPU of one host, so one of them says that it is on another, and they talk by sockets
    (NCCL 2.30 has NCCL_MULTI_RANK_GPU_ENABLE for it; torch may bring an older one). All ends use as few CTAs: the GPU
    gives itself to one process at a time, and the number of channels has to be the same.
    """
    if as_other_host:
        os.environ["NCCL_HOSTID"] = f"prism-{os.getpid()}"
    os.environ.setdefault("NCCL_MAX_CTAS", "2")


class _UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_char * _ID_BYTES),)


@cache
def _library() -> ctypes.CDLL:
    """libnccl as torch has loaded it.

    Raises:
        RunError: there is none.
    """
    try:
        library = ctypes.CDLL("libnccl.so.2")
    except OSError as error:
        raise RunError(
            f"NCCL cannot be loaded: {error}", hint="backend nccl needs a torch with CUDA and NCCL"
        ) from None
    library.ncclCommInitRank.argtypes = (ctypes.c_void_p, ctypes.c_int, _UniqueId, ctypes.c_int)
    library.ncclGetErrorString.restype = ctypes.c_char_p
    library.ncclGetErrorString.argtypes = (ctypes.c_int,)
    return library


def _check(code: int, what: str) -> None:
    if code:
        reason = _library().ncclGetErrorString(code).decode()
        raise RunError(f"NCCL: {what}: {reason}", hint="NCCL_DEBUG=WARN makes NCCL say more")


class _Done:
    """The end of what was issued on a stream (implements Pending)."""

    def __init__(self, event: Any) -> None:
        self.event = event

    def is_completed(self) -> bool:
        return bool(self.event.query())

    def wait(self) -> object:
        return self.event.synchronize()


class NcclGroup(ReducedGroup):
    """A communicator of NCCL. Calls are issued on `stream`; whoever reads results waits for that stream or the call."""

    def __init__(
        self, folder: Path, name: str, *, position: int, size: int, stream: Any, patience_s: float = _PATIENCE_S
    ) -> None:
        """Connect with the other positions, which do the same on other devices; they meet in a file in `folder`.

        Raises:
            RunError: NCCL refuses, or position 0 is not there within `patience_s`.
        """
        library, unique = _library(), _UniqueId()
        meeting = folder / f"nccl-{name}"
        if position == 0:
            _check(library.ncclGetUniqueId(ctypes.byref(unique)), "no unique id")
            draft = meeting.with_suffix(f".{os.getpid()}")
            draft.write_bytes(bytes(unique))
            draft.rename(meeting)
        else:
            until = time.monotonic() + patience_s
            while not meeting.exists():
                if time.monotonic() > until:
                    raise RunError(f"position 0 of communicator {name} is not there", hint="see what it printed")
                time.sleep(0.01)
            ctypes.memmove(ctypes.byref(unique), meeting.read_bytes(), _ID_BYTES)
        self._comm = ctypes.c_void_p()
        self.stream = stream
        _check(library.ncclCommInitRank(ctypes.byref(self._comm), size, unique, position), f"communicator {name}")

    def close(self) -> None:
        """Leave the communicator; nothing may be under way."""
        if self._comm.value:
            _check(_library().ncclCommDestroy(self._comm), "leaving")
            self._comm = ctypes.c_void_p()

    def all_reduce(self, buffer: torch.Tensor, op: ReduceOp) -> Pending:
        return self._call("ncclAllReduce", buffer, buffer, buffer, _op(op))

    def reduce(self, buffer: torch.Tensor, root: int, op: ReduceOp) -> Pending:
        return self._call("ncclReduce", buffer, buffer, buffer, _op(op), root)

    def broadcast(self, buffer: torch.Tensor, root: int) -> Pending:
        return self._call("ncclBroadcast", buffer, buffer, buffer, root)

    def all_gather(self, output: torch.Tensor, part: torch.Tensor) -> Pending:
        return self._call("ncclAllGather", part, output, part)

    def reduce_scatter(self, output: torch.Tensor, parts: torch.Tensor, op: ReduceOp) -> Pending:
        return self._call("ncclReduceScatter", parts, output, output, _op(op))

    def exchange(self, sends: Sequence[Part], receives: Sequence[Part]) -> Pending:
        library = _library()
        _check(library.ncclGroupStart(), "group start")
        try:
            for name, parts in (("ncclSend", sends), ("ncclRecv", receives)):
                for position, tensor in parts:
                    self._issue(getattr(library, name), name, [_at(tensor), *_sized(tensor), ctypes.c_int(position)])
        finally:
            code = library.ncclGroupEnd()
        _check(code, "messages")
        return self._done()

    def _call(self, name: str, send: torch.Tensor, receive: torch.Tensor, counted: torch.Tensor, *more: int) -> Pending:
        arguments = [_at(send), _at(receive), *_sized(counted), *map(ctypes.c_int, more)]
        self._issue(getattr(_library(), name), name, arguments)
        return self._done()

    def _issue(self, function: Callable[..., int], name: str, arguments: Sequence[Any]) -> None:
        _check(function(*arguments, self._comm, ctypes.c_void_p(self.stream.cuda_stream)), name)

    def _done(self) -> _Done:
        event = torch.cuda.Event()
        event.record(self.stream)
        return _Done(event)


def _at(tensor: torch.Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


def _sized(tensor: torch.Tensor) -> tuple[ctypes.c_size_t, ctypes.c_int]:
    if tensor.dtype not in _TYPES:
        raise RunError(f"NCCL has no {tensor.dtype}", hint="use another type, or a backend that moves it by the host")
    return ctypes.c_size_t(tensor.numel()), ctypes.c_int(_TYPES[tensor.dtype])


def _op(op: ReduceOp) -> int:
    if op not in _OPS:
        raise RunError(f"NCCL has no reduction {op.name}", hint="over NCCL the script itself would fail with it")
    return _OPS[op]
