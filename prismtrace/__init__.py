"""Reads and writes PrismTrace files. Does not run, record or analyse training jobs, and imports no framework.

A map for newcomers, from the inside out:

    model      enums, process groups, the registry of tables and columns
    errors     what may be raised, and the one place where foreign exceptions become trace errors
    encoding   integer arrays <-> encoded streams;  columns  checks what callers hand in
    chunk      rows of one table of one rank <-> a self-contained chunk;  tables  read-only columns
    container  record frames, checksums, magic;  metas  the flatbuffers inside records
    index      where everything is, from the footer or by a scan;  source  byte ranges of a file
    writer     TraceWriter;  reader  TraceReader;  assemble  chunks -> one table
    merge      shards -> one file;  recover  whole records of a damaged file
    validate   contradictions (findings names them, matching looks across ranks);  json_twin  a trace as JSON
"""

from prismtrace.errors import (
    PrismTraceError,
    TraceChecksumError,
    TraceDataError,
    TraceFormatError,
    TraceLimitError,
    TraceReadError,
    TraceTruncatedError,
    TraceUnfinishedError,
    TraceUsageError,
    TraceVersionError,
    TraceWriteError,
)
from prismtrace.findings import Finding
from prismtrace.json_twin import to_json, write_json
from prismtrace.merge import merge
from prismtrace.model import (
    ABSENT,
    ABSENT32,
    FORMAT_VERSION,
    ColumnType,
    DType,
    EventKind,
    GraphKind,
    Op,
    Phase,
    ProcessGroup,
    ReduceOp,
    TableKind,
    TrackKind,
    UnitKind,
)
from prismtrace.reader import TraceReader
from prismtrace.recover import LostRange, RecoverReport, recover
from prismtrace.tables import (
    DictionaryColumn,
    EventTable,
    ListColumn,
    ScalarTable,
    StepTable,
    TrackTable,
    UnitTable,
)
from prismtrace.validate import has_errors, validate
from prismtrace.writer import TraceWriter, payload_digest

__all__ = [
    "ABSENT",
    "ABSENT32",
    "ColumnType",
    "DType",
    "DictionaryColumn",
    "EventKind",
    "EventTable",
    "FORMAT_VERSION",
    "Finding",
    "GraphKind",
    "ListColumn",
    "LostRange",
    "Op",
    "Phase",
    "PrismTraceError",
    "ProcessGroup",
    "RecoverReport",
    "ReduceOp",
    "ScalarTable",
    "StepTable",
    "TableKind",
    "TraceChecksumError",
    "TraceDataError",
    "TraceFormatError",
    "TraceLimitError",
    "TraceReadError",
    "TraceReader",
    "TraceTruncatedError",
    "TraceUnfinishedError",
    "TraceUsageError",
    "TraceVersionError",
    "TraceWriteError",
    "TraceWriter",
    "TrackKind",
    "TrackTable",
    "UnitKind",
    "UnitTable",
    "has_errors",
    "merge",
    "payload_digest",
    "recover",
    "to_json",
    "validate",
    "write_json",
]
