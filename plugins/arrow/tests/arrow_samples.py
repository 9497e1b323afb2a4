"""Traces for the tests of this plugin, and what it means that two of them are the same. Holds no test."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np

from prism_sdk.abc import ConversionReport, TraceExporter
from prismtrace import GraphKind, Op, ProcessGroup, ReduceOp, TableKind, TraceReader, TraceWriter, UnitKind
from prismtrace.model import COLUMNS, ColumnSpec, ColumnType
from prismtrace.tables import DictionaryColumn, ListColumn, Table

_INT64 = st.integers(-(2**63) + 1, 2**63 - 1)
_VALUES: dict[ColumnType, st.SearchStrategy[Any]] = {
    ColumnType.UINT8: st.integers(0, 255),
    ColumnType.INT32: st.integers(-(2**31) + 1, 2**31 - 1),
    ColumnType.INT64: _INT64,
    ColumnType.UINT64: st.integers(0, 2**64 - 1),
    ColumnType.FLOAT64: st.floats(allow_nan=False),
    ColumnType.BOOL: st.booleans(),
    ColumnType.STRING: st.text(st.characters(codec="utf-8"), max_size=6),
    ColumnType.DIGEST: st.binary(min_size=16, max_size=16),
    ColumnType.LIST_INT64: st.lists(_INT64, max_size=4),
}


def _values(spec: ColumnSpec) -> st.SearchStrategy[Any]:
    return st.none() | _VALUES[spec.type] if spec.optional else _VALUES[spec.type]


@st.composite
def tables_of(draw: st.DrawFn, table: TableKind) -> dict[str, list[Any]]:
    """Columns of one table with a common number of rows; some are left out."""
    num_rows = draw(st.integers(0, 8))
    chosen = draw(st.lists(st.sampled_from(COLUMNS[table]), unique_by=lambda spec: spec.name, max_size=8))
    return {spec.name: draw(st.lists(_values(spec), min_size=num_rows, max_size=num_rows)) for spec in chosen}


def write_sample(path: Path, *, num_ranks: int = 2, steps: int = 2) -> Path:
    """Compute, a synchronous all-reduce, a message to the next rank: every kind of column is in use."""
    group = ProcessGroup(2**63 + 11, "dp", "data parallel", "nccl", tuple(range(num_ranks)))
    with TraceWriter(path, graph_kind=GraphKind.OBSERVED, world_size=num_ranks, metadata={"job.status": "ü"}) as writer:
        writer.add_group(group)
        blob = writer.add_payload(b"payload " * 64)
        for step in range(steps):
            for rank in range(num_ranks):
                base, first = 10_000 * step + rank, 5 * step
                sends = rank % 2 == 0
                writer.add_units(
                    rank,
                    {
                        "kind": [UnitKind.COMPUTE, 2, UnitKind.WAIT, UnitKind.SEND if sends else UnitKind.RECV, 5],
                        "phase": [1, 2, 2, 4, 4],
                        "step": [step] * 5,
                        "start_ns": [base, base + 1000, base + 1000, base + 3000, base + 3000],
                        "end_ns": [base + 1000, base + 3000, base + 3000, None, base + 3500],
                        "group_id": [0, group.group_id, 0, group.group_id, 0],
                        "seq": [None, step, None, step, None],
                        "op": [0, Op.ALL_REDUCE, 0, Op.SEND if sends else Op.RECV, 0],
                        "reduce_op": [0, ReduceOp.SUM, 0, 0, 0],
                        "dtype": [0, 1, 0, 7, 0],
                        "num_elements_in": [None, 1024, None, 8, None],
                        "peer": [None, None, None, rank ^ 1, None],
                        "tag": [None, None, None, 0, None],
                        "is_async": [False, True, False, False, False],
                        "awaits": [None, None, first + 1, None, first + 3],
                        "memory_bytes": [2**40, None, None, None, 0],
                        "label": ["forward", None, None, "grüße", None],
                        "payload_in": [None, blob, None, None, None],
                        "splits_in": [None, [512, 512], None, [], None],
                    },
                )
                loss = None if step else 1.5
                writer.add_steps(rank, {"step": [step], "end_ns": [base + 3500], "loss": [loss], "num_losses": [1]})
                writer.add_scalars(rank, {"step": [step], "name": ["loss"], "value": [float("nan")]})
    return path


def convert(exporter: TraceExporter, source: Path, output: Path, **options: str) -> ConversionReport:
    """One export."""
    return exporter.export_trace(source, output=output, options=options, report=print)


def assert_same_trace(
    one: Path, other: Path, *, only: Sequence[str] | None = None, payloads: bool = True, about: bool = True
) -> None:
    """Every column of every table of every rank, the groups, the metadata, and the payloads where they were kept."""
    with TraceReader(one) as a, TraceReader(other) as b:
        if about:
            assert (a.graph_kind, a.world_size, dict(a.groups)) == (b.graph_kind, b.world_size, dict(b.groups))
            assert dict(a.metadata) == dict(b.metadata)
        assert a.ranks == b.ranks
        for rank in a.ranks:
            for name in only or [kind.name.lower() for kind in COLUMNS]:
                _assert_same_table(getattr(a, name)(rank), getattr(b, name)(rank))
        if payloads:
            kept = [(digest, a.payload(digest)) for digest in a.payload_digests]
            assert kept == [(digest, b.payload(digest)) for digest in b.payload_digests]


def _assert_same_table(a: Table, b: Table) -> None:
    assert len(a) == len(b)
    names = {spec.name for spec in COLUMNS[a.table]} | set(a.columns()) | set(b.columns())
    for name in names:
        x, y = (table.columns().get(name) if "." in name else getattr(table, name) for table in (a, b))
        if isinstance(x, DictionaryColumn):
            assert list(x) == list(y), name
        elif isinstance(x, ListColumn):
            assert [None if v is None else v.tolist() for v in x] == [None if v is None else v.tolist() for v in y], (
                name
            )
        else:
            assert x.dtype == y.dtype and np.array_equal(x, y, equal_nan=x.dtype.kind == "f"), name
