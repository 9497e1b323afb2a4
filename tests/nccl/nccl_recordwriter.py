"""Writes record files by the letter of spec/nccl-records.md, apart from the library: the reader agrees with both."""

from __future__ import annotations

import struct
from pathlib import Path

ABSENT = -(2**63)


def checksum(data: bytes) -> int:
    words = struct.unpack(f"<{len(data) // 8}Q", data)
    return sum(word * (2 * place + 1) for place, word in enumerate(words)) % 2**64


class RecordWriter:
    """Collects blocks; every method returns the id or number of what it added."""

    def __init__(self, *, rank: int = 0, world_size: int = 2, boot_id: str = "boot") -> None:
        self.blocks: list[bytes] = []
        self.records = b""
        self.codes: dict[str, int] = {}
        self.num_events = 0
        self.header = struct.pack(
            "<8sIIiiiiqqIIII64s40s24x", b"\x8ePrNccl\n", 1, 192, 100 + rank, rank, rank, world_size, 0, 10**18, 0xFFFF,
            1, 32, 0, b"host", boot_id.encode(),
        )  # fmt: skip

    def block(self, kind: int, body: bytes, *, ring: int = 0, thread: int = 7) -> None:
        head = struct.pack("<IHHIiQ", 0x4B4C4250, kind, ring, len(body), thread, checksum(body))
        self.blocks.append(head + struct.pack("<Q", checksum(head)) + body)

    def comm(self, number: int, hash_: int, *, ranks: int, rank: int, uuid: bytes = b"", name: str = "") -> int:
        self.block(3, struct.pack(
            "<IiiiQqqiiii16s96s24x", number, rank, ranks, 1, hash_, 0, ABSENT, 0, 5, 7, len(name), uuid, name.encode()
        ))  # fmt: skip
        return number

    def code(self, text: str) -> int:
        if text and text not in self.codes:
            self.codes[text] = len(self.codes) + 1
            self.block(2, struct.pack("<II56s", self.codes[text], len(text), text.encode()))
        return self.codes.get(text, 0)

    def start(
        self, kind: int, comm: int, time_ns: int, *, parent: int = 0, a: int = 0, more: tuple[int, ...] = ()
    ) -> int:
        self.num_events += 1
        id_ = self.num_events << 12 | kind
        self.records += struct.pack("<BBBBHHQqQ", 1, kind, a, 0, 0, comm, id_, time_ns, parent)
        if more:
            self.records += struct.pack("<BB6x3Q", 5, kind, *more)
        return id_

    def task(
        self, kind: int, comm: int, time_ns: int, func: str, count: int, *, parent: int = 0, group: int = 0,
        seq: int = ABSENT, dtype: str = "ncclFloat32", algo: str = "RING", proto: str = "LL", channels: int = 1,
        peer: int = 0,
    ) -> int:  # fmt: skip
        codes = [self.code(word) for word in (func, dtype, algo, proto)]
        id_ = self.start(kind, comm, time_ns, parent=parent)
        self.records += struct.pack("<8BQqiBB2x", 4, *codes, channels, 16, 0, count, seq, peer, 0, 5)
        self.records += struct.pack("<BB6x3Q", 5, kind, group, 0, 0)
        return id_

    def stop(self, id_: int, time_ns: int) -> None:
        self.records += struct.pack("<BB6xQq8x", 2, id_ & 15, id_, time_ns)

    def kernel(self, comm: int, task: int, gpu: tuple[int, int], told_ns: int, *, channel: int = 0) -> None:
        """A kernel channel that ran at `gpu` on the GPU's clock, and of which the host heard at `told_ns`."""
        id_ = self.start(6, comm, told_ns, parent=task, a=channel, more=(gpu[0], 0, 0))
        self.records += struct.pack("<BBB5xQqQ", 3, 6, 22, id_, told_ns, gpu[1])
        self.stop(id_, told_ns)

    def collective(
        self, comm: int, time_ns: int, func: str, count: int, seq: int, gpu: tuple[int, int], told_ns: int,
        **more: object,
    ) -> int:  # fmt: skip
        """A call, its launch and its kernel."""
        api = self.start(8, comm, time_ns)
        call = self.task(9, comm, time_ns, func, count, parent=api, algo="", proto="")
        self.stop(self.start(11, comm, time_ns, parent=api, more=(0, 0, 0)), time_ns + 10)
        group = self.start(0, comm, time_ns + 20)
        task = self.task(1, comm, time_ns + 20, func, count, parent=call, group=group, seq=seq, **more)
        for one in (call, task, group, api):
            self.stop(one, time_ns + 30)
        self.kernel(comm, task, gpu, told_ns)
        return task

    def flush(self, **thread: int) -> None:
        if self.records:
            self.block(1, self.records, **thread)
        self.records = b""

    def data(self, *, end: bool = True) -> bytes:
        self.flush()
        if end:
            self.block(6, struct.pack("<qIIQQ", 0, 1, 0, 0, 0))
        return self.header + b"".join(self.blocks)

    def write(self, path: Path, *, end: bool = True) -> Path:
        path.write_bytes(self.data(end=end))
        return path
