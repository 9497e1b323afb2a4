"""Names what a trace is made of: enums, process groups, and the registry of tables and columns.

Does not read or write bytes; the numbers here are the ones of spec/registry.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from types import MappingProxyType
from typing import Any, Final

import numpy as np

FORMAT_VERSION: Final = (1, 1)
"""The latest version of the format that this library reads and writes."""

BASE_VERSION: Final = (1, 0)
"""The version of files that need nothing which came later."""

ABSENT: Final = int(np.iinfo(np.int64).min)
"""What an absent value of an int64 column is in numpy; never a value on the wire."""

ABSENT32: Final = int(np.iinfo(np.int32).min)
"""What an absent value of an int32 column is in numpy; never a value on the wire."""


class GraphKind(IntEnum):
    """What the times of a graph are worth."""

    UNSPECIFIED = 0
    OBSERVED = 1
    BARE = 2
    CALIBRATED = 3
    EMULATED = 4

    @classmethod
    def _missing_(cls, value: object) -> GraphKind | None:
        """A kind of a later minor version, which is kept: a number without a name."""
        if not isinstance(value, int) or not 0 <= value < 256:
            return None
        kind = int.__new__(cls, value)
        kind._name_, kind._value_ = str(value), value
        return kind


class TableKind(IntEnum):
    """The tables that a rank may have."""

    UNSPECIFIED = 0
    UNITS = 1
    STEPS = 2
    SCALARS = 3
    EVENTS = 4
    TRACKS = 5


class EventKind(IntEnum):
    """What an event is."""

    UNSPECIFIED = 0
    SPAN = 1
    INSTANT = 2
    COUNTER = 3
    FLOW_START = 4
    FLOW_STEP = 5
    FLOW_END = 6
    METADATA = 7
    BEGIN = 8
    END = 9


class TrackKind(IntEnum):
    """What kind of line of execution a track is."""

    UNSPECIFIED = 0
    HOST = 1
    DEVICE_STREAM = 2
    COMMUNICATION = 3
    COUNTER = 4
    OTHER = 5


class UnitKind(IntEnum):
    """What a unit is."""

    UNSPECIFIED = 0
    COMPUTE = 1
    COLLECTIVE = 2
    SEND = 3
    RECV = 4
    WAIT = 5


class Phase(IntEnum):
    """Which part of a step a unit belongs to."""

    UNSPECIFIED = 0
    FORWARD = 1
    BACKWARD = 2
    OPTIMIZER = 3
    OTHER = 4


class Op(IntEnum):
    """Which operation a communication unit is."""

    UNSPECIFIED = 0
    ALL_REDUCE = 1
    BROADCAST = 2
    REDUCE = 3
    ALL_GATHER = 4
    GATHER = 5
    SCATTER = 6
    REDUCE_SCATTER = 7
    ALL_TO_ALL = 8
    BARRIER = 9
    SEND = 10
    RECV = 11


class ReduceOp(IntEnum):
    """How a reducing collective combines its members' values."""

    UNSPECIFIED = 0
    SUM = 1
    AVG = 2
    PRODUCT = 3
    MIN = 4
    MAX = 5
    BAND = 6
    BOR = 7
    BXOR = 8
    PREMUL_SUM = 9


class DType(IntEnum):
    """Element types, spelled as in PyTorch."""

    UNSPECIFIED = 0
    FLOAT32 = 1
    FLOAT64 = 2
    FLOAT16 = 3
    BFLOAT16 = 4
    FLOAT8_E4M3FN = 5
    FLOAT8_E5M2 = 6
    INT64 = 7
    INT32 = 8
    INT16 = 9
    INT8 = 10
    UINT8 = 11
    BOOL = 12
    COMPLEX64 = 13
    COMPLEX128 = 14

    @property
    def itemsize_bytes(self) -> int:
        """Bytes of one element; 0 for UNSPECIFIED."""
        return _ITEMSIZE[self.value]

    @property
    def text(self) -> str:
        """The spelling used in text: `float32`."""
        return self.name.lower()

    @classmethod
    def from_text(cls, text: str) -> DType:
        """The type spelled `text` (`float32` or `torch.float32`); UNSPECIFIED when there is none."""
        return cls.__members__.get(text.removeprefix("torch.").upper(), cls.UNSPECIFIED)


_ITEMSIZE = (0, 4, 8, 2, 2, 1, 1, 8, 4, 2, 1, 1, 1, 8, 16)


class ColumnType(IntEnum):
    """How the values of a column look in numpy and in a chunk."""

    UNSPECIFIED = 0
    UINT8 = 1
    INT32 = 2
    INT64 = 3
    UINT64 = 4
    FLOAT64 = 5
    BOOL = 6
    STRING = 7
    DIGEST = 8
    LIST_INT64 = 9

    @property
    def dtype(self) -> np.dtype[Any]:
        """The numpy type of the column's array (of the codes, for STRING and DIGEST; of the elements, for lists)."""
        return _NUMPY[self.value]


_NUMPY: tuple[np.dtype[Any], ...] = tuple(
    np.dtype(code) for code in ("u1", "u1", "<i4", "<i8", "<u8", "<f8", "?", "<i4", "<i4", "<i8")
)


EnumClass = type[IntEnum]


@dataclass(frozen=True)
class ColumnSpec:
    """One column of the registry.

    `optional` columns may be absent in any row; others have `default` where the writer said nothing.
    `reference` names the column that the values are close to, `delta` says that they are close to the row before:
    both are hints for writers.
    """

    column_id: int
    name: str
    type: ColumnType
    optional: bool = False
    unit: str = ""
    reference: str | None = None
    delta: bool = False
    enum: EnumClass | None = None
    description: str = ""

    @property
    def default(self) -> int | float | bool:
        """What a row without a value holds in numpy."""
        if self.type is ColumnType.FLOAT64:
            return float("nan") if self.optional else 0.0
        if self.type is ColumnType.BOOL:
            return False
        if self.type in (ColumnType.STRING, ColumnType.DIGEST):
            return -1
        if not self.optional:
            return 0
        return ABSENT32 if self.type is ColumnType.INT32 else ABSENT


_T = ColumnType

UNIT_COLUMNS: Final[tuple[ColumnSpec, ...]] = (
    ColumnSpec(1, "kind", _T.UINT8, enum=UnitKind, description="what the unit is"),
    ColumnSpec(2, "phase", _T.UINT8, enum=Phase, description="part of the step"),
    ColumnSpec(3, "step", _T.INT32, True, description="optimizer step the unit belongs to"),
    ColumnSpec(4, "start_ns", _T.INT64, True, "ns", delta=True, description="start; arrival of a communication unit"),
    ColumnSpec(5, "end_ns", _T.INT64, True, "ns", "start_ns", True, description="end; completion of a communication"),
    ColumnSpec(6, "group_id", _T.UINT64, description="process group; 0 = none"),
    ColumnSpec(7, "seq", _T.INT64, True, delta=True, description="ordinal in the group, or in the point-to-point lane"),
    ColumnSpec(8, "op", _T.UINT8, enum=Op, description="communication operation"),
    ColumnSpec(9, "reduce_op", _T.UINT8, enum=ReduceOp, description="how values are combined"),
    ColumnSpec(10, "dtype", _T.UINT8, enum=DType, description="element type"),
    ColumnSpec(11, "num_elements_in", _T.INT64, True, "elements", description="elements this rank contributes"),
    ColumnSpec(12, "num_elements_out", _T.INT64, True, "elements", description="elements this rank receives"),
    ColumnSpec(13, "peer", _T.INT32, True, description="global rank of the root, or of the other side"),
    ColumnSpec(14, "tag", _T.INT64, True, description="point-to-point tag"),
    ColumnSpec(15, "is_async", _T.BOOL, description="the host went on without waiting"),
    ColumnSpec(16, "awaits", _T.INT64, True, delta=True, description="WAIT: unit_index of the communication unit"),
    ColumnSpec(17, "transfer_ns", _T.INT64, True, "ns", description="completion minus last arrival"),
    ColumnSpec(18, "gap_ns", _T.INT64, True, "ns", description="idle between the last predecessor and the start"),
    ColumnSpec(19, "memory_bytes", _T.INT64, True, "bytes", delta=True, description="high water while the unit ran"),
    ColumnSpec(20, "microbatch", _T.INT32, True, description="microbatch index"),
    ColumnSpec(21, "stage", _T.INT32, True, description="pipeline stage"),
    ColumnSpec(22, "model_chunk", _T.INT32, True, description="model chunk (virtual stage)"),
    ColumnSpec(23, "label", _T.STRING, True, description="name given by an adapter or the user"),
    ColumnSpec(24, "payload_in", _T.DIGEST, True, description="what this rank contributed"),
    ColumnSpec(25, "payload_out", _T.DIGEST, True, description="what this rank received"),
    ColumnSpec(26, "splits_in", _T.LIST_INT64, True, "elements", description="elements sent to each member"),
    ColumnSpec(27, "splits_out", _T.LIST_INT64, True, "elements", description="elements received from each member"),
)
"""The columns of the units table, by id."""

STEP_COLUMNS: Final[tuple[ColumnSpec, ...]] = (
    ColumnSpec(1, "step", _T.INT32, delta=True, description="optimizer step"),
    ColumnSpec(2, "start_ns", _T.INT64, True, "ns", delta=True, description="end of the previous step"),
    ColumnSpec(3, "end_ns", _T.INT64, False, "ns", "start_ns", True, description="end of the step"),
    ColumnSpec(4, "loss", _T.FLOAT64, True, description="mean of the scalar roots of backward"),
    ColumnSpec(5, "num_losses", _T.INT32, description="how many scalar roots the loss is the mean of"),
    ColumnSpec(6, "memory_peak_bytes", _T.INT64, True, "bytes", delta=True, description="high water of the step"),
    ColumnSpec(7, "cpu_time_ns", _T.INT64, True, "ns", description="CPU time of the rank in the step"),
)
"""The columns of the steps table, by id."""

SCALAR_COLUMNS: Final[tuple[ColumnSpec, ...]] = (
    ColumnSpec(1, "step", _T.INT32, delta=True, description="optimizer step"),
    ColumnSpec(2, "name", _T.STRING, True, description="what the value is"),
    ColumnSpec(3, "value", _T.FLOAT64, description="the value; NaN is a value"),
)
"""The columns of the scalars table, by id."""

EVENT_COLUMNS: Final[tuple[ColumnSpec, ...]] = (
    ColumnSpec(1, "name", _T.STRING, True, description="what happened"),
    ColumnSpec(2, "category", _T.STRING, True, description="category given by the profiler"),
    ColumnSpec(3, "kind", _T.UINT8, enum=EventKind, description="what the event is"),
    ColumnSpec(4, "track", _T.INT32, True, description="row of the tracks table"),
    ColumnSpec(5, "start_ns", _T.INT64, True, "ns", delta=True, description="start; the time of an instant"),
    ColumnSpec(6, "end_ns", _T.INT64, True, "ns", "start_ns", True, description="end"),
    ColumnSpec(7, "correlation_id", _T.INT64, True, delta=True, description="joins a launch and what it launched"),
    ColumnSpec(8, "flow_id", _T.INT64, True, delta=True, description="joins the events of one flow"),
    ColumnSpec(9, "unit", _T.INT64, True, delta=True, description="unit_index of the unit the event belongs to"),
)
"""The columns of the events table, by id."""

TRACK_COLUMNS: Final[tuple[ColumnSpec, ...]] = (
    ColumnSpec(1, "name", _T.STRING, True, description="name of the line of execution"),
    ColumnSpec(2, "process", _T.STRING, True, description="name of its process"),
    ColumnSpec(3, "kind", _T.UINT8, enum=TrackKind, description="what the track is"),
    ColumnSpec(4, "process_id", _T.INT64, True, description="id of the process"),
    ColumnSpec(5, "thread_id", _T.INT64, True, description="id of the thread"),
    ColumnSpec(6, "device", _T.INT32, True, description="device index"),
    ColumnSpec(7, "stream", _T.INT64, True, description="id of the stream on the device"),
)
"""The columns of the tracks table, by id."""

COLUMNS: Final = MappingProxyType(
    {
        TableKind.UNITS: UNIT_COLUMNS,
        TableKind.STEPS: STEP_COLUMNS,
        TableKind.SCALARS: SCALAR_COLUMNS,
        TableKind.EVENTS: EVENT_COLUMNS,
        TableKind.TRACKS: TRACK_COLUMNS,
    }
)
"""The registry: table -> columns."""

FIRST_NAMED_COLUMN: Final = 1 << 15
"""From this column id on columns are named in the chunk itself."""

ROLE_RANK: Final = -1
"""What stands in place of a rank in a chunk that belongs to a role."""

BEGINS_KEY: Final = "rank.{}.begins_ns"
"""Metadata: the host clock at which a rank of a calibrated graph begins, before its row 0; 0 where it is absent."""


def named_spec(name: str, kind: ColumnType, *, column_id: int = FIRST_NAMED_COLUMN) -> ColumnSpec:
    """The description of a column that the registry does not have."""
    optional = kind not in (ColumnType.UINT8, ColumnType.UINT64, ColumnType.BOOL)
    return ColumnSpec(column_id, name, kind, optional, delta=True)


@dataclass(frozen=True)
class ProcessGroup:
    """A set of ranks that communicates. `ranks` are global ranks in group order."""

    group_id: int
    name: str = ""
    description: str = ""
    backend: str = ""
    ranks: tuple[int, ...] = ()

    @property
    def size(self) -> int:
        """Number of members."""
        return len(self.ranks)
