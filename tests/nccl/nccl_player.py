"""Plays NCCL to the profiler library from Python, beside real operations of gloo, with kernel times that are known.

Layouts are written here as byte offsets, apart from those of the library: the two have to agree.
"""

from __future__ import annotations

import ctypes
import struct
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

_START = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p), ctypes.c_char_p)
_STOP = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
_STATE = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_char_p)
_INIT4 = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.POINTER(ctypes.c_void_p), ctypes.POINTER(ctypes.c_int), ctypes.c_char_p, ctypes.c_uint64,
    ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_void_p,
)  # fmt: skip
_INIT5 = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.POINTER(ctypes.c_void_p), ctypes.c_uint64, ctypes.POINTER(ctypes.c_int), ctypes.c_char_p,
    ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_void_p,
)  # fmt: skip
GROUP, COLL, P2P, KERNEL, GROUP_API, COLL_API, P2P_API, LAUNCH = 1, 2, 4, 64, 256, 512, 1024, 2048
WORDS = {
    word: ctypes.create_string_buffer(word.encode())
    for word in (
        "AllReduce", "AllGather", "ReduceScatter", "Broadcast", "Send", "Recv", "ncclFloat32", "ncclInt64", "ncclInt8",
        "RING", "SIMPLE",
    )
}  # fmt: skip


def address(word: str) -> int:
    return ctypes.addressof(WORDS[word])


class Nccl:
    """One process of NCCL, talking to the library by version 4 or 5 of the interface."""

    def __init__(self, library: str, *, version: int = 5, gpu_offset_ns: int = 0) -> None:
        self.version = version
        self.gpu_offset_ns = gpu_offset_ns
        self.library = ctypes.CDLL(library)
        table = (ctypes.c_void_p * 6).in_dll(self.library, f"ncclProfiler_v{version}")
        self.init = (_INIT5 if version >= 5 else _INIT4)(table[1])
        self.start, self.stop_event, self.state = _START(table[2]), _STOP(table[3]), _STATE(table[4])
        self.finalize = _STOP(table[5])
        self.late: list[tuple[int, int, int, int]] = []
        self.grouped: list[tuple[Communicator, dict[str, object], int]] | None = None

    def event(self, context: int, kind: int, parent: int = 0, fields: bytes = b"") -> int:
        head = struct.pack("<QQi4x" if self.version >= 5 else "<B7xQi4x", kind, parent, 0)
        handle = ctypes.c_void_p(1)
        assert self.start(context, ctypes.byref(handle), (head + fields).ljust(112, b"\0")) == 0
        return handle.value or 0

    def stop(self, handle: int) -> None:
        assert self.stop_event(handle) == 0

    @contextmanager
    def group(self) -> Iterator[None]:
        """As ncclGroupStart and ncclGroupEnd: what is called in between is launched at the end."""
        self.grouped = []
        yield
        calls, self.grouped = self.grouped, None
        self.launch(calls)

    def launch(self, calls: list[tuple[Communicator, dict[str, object], int]]) -> None:
        context = calls[0][0].context
        api = calls[0][0].api
        launch = self.event(context, LAUNCH, api, struct.pack("<Q", 0)) if self.version >= 5 else 0
        if launch:
            self.stop(launch)
        launched = time.monotonic_ns()
        group = self.event(context, GROUP)
        for comm, call, handle in calls:
            task = comm.task(call, handle, group)
            begin = launched + 1000
            self.late.append((comm.context, task, begin, begin + int(str(call["kernel_ns"]))))
            self.stop(task)
        self.stop(group)
        if api:
            self.stop(api)
            for comm, _, _ in calls:
                comm.api = 0
        self.progress()

    def progress(self) -> None:
        """As NCCL's proxy thread: tell of kernels that have ended."""
        for context, task, begin, end in self.late:
            while time.monotonic_ns() < end:
                pass
            for channel in range(2):
                gpu = begin + self.gpu_offset_ns, end + self.gpu_offset_ns
                kernel = self.event(context, KERNEL, task, struct.pack("<B7xQ", channel, gpu[0]))
                assert self.state(kernel, 22, struct.pack("<Q", gpu[1])) == 0
                self.stop(kernel)
        self.late.clear()


class Communicator:
    """One communicator; `hash` is equal on its ranks."""

    def __init__(self, nccl: Nccl, hash_: int, num_ranks: int, rank: int, name: str = "") -> None:
        self.nccl, self.hash, self.num_ranks, self.rank = nccl, hash_, num_ranks, rank
        context, mask = ctypes.c_void_p(), ctypes.c_int()
        place, flags, text = ctypes.byref(context), ctypes.byref(mask), name.encode() or None
        if nccl.version >= 5:
            assert nccl.init(place, hash_, flags, text, 1, num_ranks, rank, None) == 0
        else:
            assert nccl.init(place, flags, text, hash_, 1, num_ranks, rank, None) == 0
        assert mask.value and context.value
        self.context, self.api = context.value, 0
        self.seq: dict[str, int] = defaultdict(int)

    def call(
        self, func: str, count: int, *, dtype: str = "ncclFloat32", peer: int = 0, kernel_ns: int = 20000
    ) -> None:
        """As ncclAllReduce and the like."""
        call: dict[str, object] = {
            "func": func, "count": count, "dtype": dtype, "peer": peer, "kernel_ns": kernel_ns,
        }  # fmt: skip
        is_message, handle = func in ("Send", "Recv"), 0
        if self.nccl.version >= 5:
            first = self.nccl.grouped[0][0] if self.nccl.grouped else self
            if not first.api:
                first.api = self.nccl.event(self.context, GROUP_API, 0, struct.pack("<?3xi", False, 1))
            self.api = first.api
            words = struct.pack("<QQQ", address(func), count, address(dtype))
            rest = struct.pack("<Q?7x", 0, False) if is_message else struct.pack("<i4xQ?7x", peer, 0, False)
            handle = self.nccl.event(self.context, P2P_API if is_message else COLL_API, self.api, words + rest)
            self.nccl.stop(handle)
        if self.nccl.grouped is not None:
            self.nccl.grouped.append((self, call, handle))
        else:
            self.nccl.launch([(self, call, handle)])

    def task(self, call: dict[str, object], api: int, group: int) -> int:
        func, dtype = str(call["func"]), str(call["dtype"])
        count, peer = int(str(call["count"])), int(str(call["peer"]))
        parent = api if self.nccl.version >= 5 else group
        if func in ("Send", "Recv"):
            fields = struct.pack("<QQQQiB3xQ", address(func), 0, address(dtype), count, peer, 2, group)
            return self.nccl.event(self.context, P2P, parent, fields)
        if func in ("AllGather", "Broadcast"):  # NCCL counts bytes here
            count, dtype = count * {"ncclFloat32": 4, "ncclInt64": 8}[dtype], "ncclInt8"
        seq = self.seq[func]
        self.seq[func] += 1
        fields = struct.pack(
            "<QQQQQi4xQBB6xQQQ", seq, address(func), 1, 2, count, peer, address(dtype), 2, 16, address("RING"),
            address("SIMPLE"), group,
        )  # fmt: skip
        return self.nccl.event(self.context, COLL, parent, fields)
