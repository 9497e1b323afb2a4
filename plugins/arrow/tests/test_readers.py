"""DuckDB, Polars and pandas answer real questions from what was exported."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from arrow_samples import convert, write_sample
from prismtrace_arrow.exporting import ArrowExporter, ParquetExporter

from prismtrace import TraceReader, UnitKind


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_sample(tmp_path_factory.mktemp("readers") / "a.prism", num_ranks=4, steps=3)


@pytest.fixture(scope="module")
def folder(trace: Path) -> Path:
    convert(ParquetExporter(), trace, trace.parent / "parquet", names="true")
    convert(ArrowExporter(), trace, trace.parent / "arrow", names="true")
    return trace.parent


def waits(trace: Path) -> dict[int, int]:
    """Nanoseconds that each rank waits, from the trace itself."""
    result = {}
    with TraceReader(trace) as reader:
        for rank in reader.ranks:
            units = reader.units(rank)
            rows = units.kind == UnitKind.WAIT
            result[rank] = int((units.end_ns[rows] - units.start_ns[rows]).sum())
    return result


def test_duckdb(trace: Path, folder: Path) -> None:
    duckdb = pytest.importorskip("duckdb", reason="DuckDB is not installed")
    with duckdb.connect() as connection:
        found = connection.execute(
            f"select rank, sum(end_ns - start_ns) from '{folder}/parquet/units.parquet' "
            "where kind_name = 'wait' group by rank order by rank"
        ).fetchall()
        assert dict(found) == waits(trace)
        awaited = connection.execute(
            f"select count(*), count(distinct g.name) from '{folder}/parquet/units.parquet' w "
            f"join '{folder}/parquet/units.parquet' c on c.rank = w.rank and c.unit_index = w.awaits "
            f"join '{folder}/parquet/groups.parquet' g on g.group_id = c.group_id "
            "where len(g.ranks) = 4 and c.op_name = 'all_reduce'"
        ).fetchone()
        assert awaited == (12, 1)
        nulls = connection.execute(
            f"select count(*) from '{folder}/parquet/units.parquet' where end_ns is null and start_ns is not null"
        ).fetchone()
        assert nulls == (12,)
        import pyarrow as pa

        with pa.OSFile(str(folder / "arrow" / "units.arrow")) as file:
            units = pa.ipc.open_file(file).read_all()
        assert len(units) == 60
        assert connection.execute("select max(splits_in[1]) from units").fetchone() == (512,)


def test_polars(trace: Path, folder: Path) -> None:
    pl = pytest.importorskip("polars", reason="Polars is not installed")
    for units in (
        pl.scan_parquet(folder / "parquet" / "units.parquet"),
        pl.read_ipc(folder / "arrow" / "units.arrow").lazy(),
    ):
        waiting = units.filter(pl.col("kind") == int(UnitKind.WAIT)).group_by("rank")
        found = waiting.agg((pl.col("end_ns") - pl.col("start_ns")).sum().alias("ns")).collect()
        assert dict(found.select("rank", "ns").iter_rows()) == waits(trace)
        assert units.select(pl.col("label").drop_nulls().unique().sort()).collect()["label"].to_list() == [
            "forward",
            "grüße",
        ]
        assert units.select(pl.col("splits_in").list.sum().max()).collect().item() == 1024


def test_pandas(trace: Path, folder: Path) -> None:
    pd = pytest.importorskip("pandas", reason="pandas is not installed")
    for units in (
        pd.read_parquet(folder / "parquet" / "units.parquet"),
        pd.read_feather(folder / "arrow" / "units.arrow"),
    ):
        rows = units[units["kind_name"] == "wait"]
        ns = (rows["end_ns"] - rows["start_ns"]).groupby(rows["rank"]).sum()
        assert {int(rank): int(value) for rank, value in ns.items()} == waits(trace)
        assert units["end_ns"].isna().sum() == 12
        assert str(units["op_name"].dtype) == "category"
    exact = pd.read_parquet(folder / "parquet" / "units.parquet", dtype_backend="numpy_nullable")
    with TraceReader(trace) as reader:
        expected = np.concatenate([reader.units(rank).start_ns for rank in reader.ranks])
    assert exact["start_ns"].to_numpy("int64").tolist() == expected.tolist()
