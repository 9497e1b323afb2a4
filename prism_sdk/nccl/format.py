"""The layout of record files of the NCCL profiler, as numpy types and enumerations (spec/nccl-records.md).

It reads nothing and knows nothing of what the records mean together.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final

import numpy as np

from prismtrace import DType, Op

__all__ = [
    "ABSENT_SEQ",
    "BLOCK",
    "BLOCK_MARKER",
    "BlockKind",
    "CLOCK",
    "COMM",
    "COUNTERS",
    "DTYPE_OF",
    "ELEMENT_BYTES",
    "EventType",
    "FLAG_CAPTURED",
    "FLAG_SYMMETRIC",
    "HEADER",
    "MAGIC",
    "MORE",
    "OP_OF",
    "RecordKind",
    "START",
    "STATE",
    "STATE_GPU_STOP",
    "STOP",
    "STRING",
    "TASK",
    "VERSION",
]

MAGIC: Final = b"\x8ePrNccl\n"
VERSION: Final = 1
BLOCK_MARKER: Final = 0x4B4C4250
ABSENT_SEQ: Final = int(np.iinfo(np.int64).min)
STATE_GPU_STOP: Final = (22, 31)
FLAG_CAPTURED: Final = 1
FLAG_SYMMETRIC: Final = 4


class BlockKind(IntEnum):
    """What a block holds."""

    RECORDS = 1
    STRINGS = 2
    COMMS = 3
    CLOCK = 4
    COUNTERS = 5
    END = 6


class RecordKind(IntEnum):
    """What 32 bytes of a block of records are."""

    START = 1
    STOP = 2
    STATE = 3
    TASK = 4
    MORE = 5


class EventType(IntEnum):
    """NCCL's event types, by the number of their bit in the event mask."""

    GROUP = 0
    COLL = 1
    P2P = 2
    PROXY_OP = 3
    PROXY_STEP = 4
    PROXY_CTRL = 5
    KERNEL_CH = 6
    NET = 7
    GROUP_API = 8
    COLL_API = 9
    P2P_API = 10
    KERNEL_LAUNCH = 11
    CE_COLL = 12
    CE_SYNC = 13
    CE_BATCH = 14
    KERNEL_PHASE = 15


HEADER: Final = np.dtype(
    [
        ("magic", "S8"), ("version", "<u4"), ("header_bytes", "<u4"), ("pid", "<i4"), ("rank", "<i4"),
        ("local_rank", "<i4"), ("world_size", "<i4"), ("monotonic_ns", "<i8"), ("realtime_ns", "<i8"),
        ("event_mask", "<u4"), ("sample_every", "<u4"), ("record_bytes", "<u4"), ("reserved", "<u4"),
        ("host", "S64"), ("boot_id", "S40"), ("padding", "V24"),
    ]
)  # fmt: skip
BLOCK: Final = np.dtype(
    [
        ("marker", "<u4"), ("kind", "<u2"), ("ring", "<u2"), ("num_bytes", "<u4"), ("thread_id", "<i4"),
        ("checksum", "<u8"), ("header_checksum", "<u8"),
    ]
)  # fmt: skip
START: Final = np.dtype(
    [
        ("kind", "u1"), ("type", "u1"), ("a", "u1"), ("b", "u1"), ("c", "<u2"), ("comm", "<u2"), ("id", "<u8"),
        ("time_ns", "<i8"), ("parent", "<u8"),
    ]
)  # fmt: skip
STOP: Final = np.dtype(
    [("kind", "u1"), ("type", "u1"), ("reserved", "V6"), ("id", "<u8"), ("time_ns", "<i8"), ("reserved2", "V8")]
)
STATE: Final = np.dtype(
    [
        ("kind", "u1"), ("type", "u1"), ("state", "u1"), ("reserved", "V5"), ("id", "<u8"), ("time_ns", "<i8"),
        ("value", "<u8"),
    ]
)  # fmt: skip
TASK: Final = np.dtype(
    [
        ("kind", "u1"), ("func", "u1"), ("dtype", "u1"), ("algo", "u1"), ("proto", "u1"), ("channels", "u1"),
        ("warps", "u1"), ("flags", "u1"), ("count", "<u8"), ("seq", "<i8"), ("root", "<i4"), ("variant", "u1"),
        ("version", "u1"), ("reserved", "V2"),
    ]
)  # fmt: skip
MORE: Final = np.dtype([("kind", "u1"), ("type", "u1"), ("reserved", "V6"), ("value", "<u8", (3,))])
STRING: Final = np.dtype([("code", "<u4"), ("length", "<u4"), ("text", "S56")])
COMM: Final = np.dtype(
    [
        ("number", "<u4"), ("rank", "<i4"), ("num_ranks", "<i4"), ("num_nodes", "<i4"), ("hash", "<u8"),
        ("created_ns", "<i8"), ("destroyed_ns", "<i8"), ("device", "<i4"), ("interface_version", "<i4"),
        ("thread_id", "<i4"), ("name_bytes", "<i4"), ("device_uuid", "V16"), ("name", "S96"), ("padding", "V24"),
    ]
)  # fmt: skip
CLOCK: Final = np.dtype([("monotonic_ns", "<i8"), ("realtime_ns", "<i8"), ("reserved", "V16")])
COUNTERS: Final = np.dtype(
    [
        ("ring", "<u2"), ("reserved", "V6"), ("num_records", "<u8"), ("lost_starts", "<u8"), ("lost_stops", "<u8"),
        ("lost_states", "<u8"), ("no_ring", "<u8"), ("sampled_out", "<u8"), ("orphans", "<u8"),
    ]
)  # fmt: skip

assert HEADER.itemsize == 192 and COMM.itemsize == 192 and COUNTERS.itemsize == 64 and STRING.itemsize == 64
assert all(kind.itemsize == 32 for kind in (BLOCK, START, STOP, STATE, TASK, MORE, CLOCK))

OP_OF: Final = {
    "AllReduce": Op.ALL_REDUCE,
    "Broadcast": Op.BROADCAST,
    "Reduce": Op.REDUCE,
    "AllGather": Op.ALL_GATHER,
    "ReduceScatter": Op.REDUCE_SCATTER,
    "AlltoAll": Op.ALL_TO_ALL,
    "Gather": Op.GATHER,
    "Scatter": Op.SCATTER,
    "Send": Op.SEND,
    "Recv": Op.RECV,
}
"""What NCCL calls a function -> the operation."""

DTYPE_OF: Final = {
    "ncclInt8": DType.INT8,
    "ncclUint8": DType.UINT8,
    "ncclInt32": DType.INT32,
    "ncclInt64": DType.INT64,
    "ncclFloat16": DType.FLOAT16,
    "ncclFloat32": DType.FLOAT32,
    "ncclFloat64": DType.FLOAT64,
    "ncclBfloat16": DType.BFLOAT16,
    "ncclFloat8e4m3": DType.FLOAT8_E4M3FN,
    "ncclFloat8e5m2": DType.FLOAT8_E5M2,
}
"""What NCCL calls an element type -> the trace's; types that a trace has no number for are left out."""

ELEMENT_BYTES: Final = {
    "ncclInt8": 1,
    "ncclUint8": 1,
    "ncclFloat8e4m3": 1,
    "ncclFloat8e5m2": 1,
    "ncclFloat16": 2,
    "ncclBfloat16": 2,
    "ncclInt32": 4,
    "ncclUint32": 4,
    "ncclFloat32": 4,
    "ncclInt64": 8,
    "ncclUint64": 8,
    "ncclFloat64": 8,
    "Unknown": 1,  # NCCL has no name for its uint8
}
"""Bytes of an element."""
