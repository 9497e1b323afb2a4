"""Reads and writes PrismTrace files. Does not run, record or analyse training jobs, and imports no framework.

A map for newcomers, from the inside out::

    model      enums, process groups, the registry of tables and columns
    errors     what may be raised, and the one place where foreign exceptions become trace errors
    encoding   integer arrays <-> encoded streams;  columns  checks what callers hand in
    chunk      rows of one table of one rank <-> a self-contained chunk;  tables  read-only columns
    container  record frames, checksums, magic;  metas  the flatbuffers inside records
    index      where everything is, from the footer or by a scan;  source  byte ranges of a file
    writer     TraceWriter;  reader  TraceReader;  assemble  chunks -> one table
    merge      shards -> one file (joining: what they have in common);  recover  whole records of a damaged file
    slicing, redact  smaller and shareable copies;  align  clocks of several machines;  rewriting  what these share
    diff       what changed between two traces (structure, alignment, timing, differences do the work)
    notebook   tables and readers in HTML;  frames  as data frames of pandas, polars, pyarrow
    sharing    the same rows for many ranks;  alike  reads ranks of one role together
    rows       rows as Python values;  sizes  where the bytes go
    validate   contradictions (findings names them, rankchecks looks at one rank, matching and cycles across ranks)
    json_twin  a trace as JSON
"""

from prismtrace.align import Alignment, ClockCorrection, estimate_clocks
from prismtrace.compact import CompactReport, compact
from prismtrace.diff import diff
from prismtrace.differences import CATEGORIES as DIFF_CATEGORIES
from prismtrace.differences import StructureChange, TraceDiff, ValueChange
from prismtrace.errors import (
    PrismTraceError,
    TraceChecksumError,
    TraceDataError,
    TraceFormatError,
    TraceLimitError,
    TraceReadError,
    TraceResultError,
    TraceTruncatedError,
    TraceUnfinishedError,
    TraceUsageError,
    TraceVersionError,
    TraceWriteError,
)
from prismtrace.findings import Finding
from prismtrace.joining import Overlap, overlaps
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
from prismtrace.records import LostRange
from prismtrace.recover import RecoverReport, recover
from prismtrace.redact import RedactReport, redact
from prismtrace.rows import RowBatch, iter_rows
from prismtrace.sharing import add_alike
from prismtrace.sizes import ColumnSize, FileSizes, file_sizes
from prismtrace.slicing import SliceReport, slice_trace
from prismtrace.tables import (
    DictionaryColumn,
    EventTable,
    ListColumn,
    ScalarTable,
    StepTable,
    TrackTable,
    UnitTable,
)
from prismtrace.timing import TimingChange
from prismtrace.validate import has_errors, validate
from prismtrace.writer import TraceWriter, payload_digest

__all__ = [
    "ABSENT",
    "ABSENT32",
    "Alignment",
    "ClockCorrection",
    "ColumnSize",
    "ColumnType",
    "CompactReport",
    "DIFF_CATEGORIES",
    "DType",
    "DictionaryColumn",
    "EventKind",
    "EventTable",
    "FORMAT_VERSION",
    "FileSizes",
    "Finding",
    "GraphKind",
    "ListColumn",
    "LostRange",
    "Op",
    "Overlap",
    "Phase",
    "PrismTraceError",
    "ProcessGroup",
    "RecoverReport",
    "RedactReport",
    "ReduceOp",
    "RowBatch",
    "ScalarTable",
    "SliceReport",
    "StepTable",
    "StructureChange",
    "TableKind",
    "TimingChange",
    "TraceChecksumError",
    "TraceDataError",
    "TraceDiff",
    "TraceFormatError",
    "TraceLimitError",
    "TraceReadError",
    "TraceReader",
    "TraceResultError",
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
    "ValueChange",
    "add_alike",
    "compact",
    "diff",
    "estimate_clocks",
    "file_sizes",
    "has_errors",
    "iter_rows",
    "merge",
    "overlaps",
    "payload_digest",
    "recover",
    "redact",
    "slice_trace",
    "to_json",
    "validate",
    "write_json",
]
