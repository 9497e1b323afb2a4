"""Ranks that are stored by roles and read together give what they give one by one."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import alike_sample
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from prismtrace import (
    PrismTraceError,
    ProcessGroup,
    TraceReader,
    TraceWriter,
    add_alike,
    compact,
    rankchecks,
    slice_trace,
    validate,
)
from prismtrace.alike import alike_ranks
from prismtrace.model import COLUMNS
from prismtrace.rewriting import TABLES, read_table
from prismtrace.tables import Column


def contents(path: Path) -> list[object]:
    """All that readers see."""
    with TraceReader(path) as reader:
        tables = []
        for rank in reader.ranks:
            for kind in TABLES:
                table = read_table(reader, kind, rank)
                names = [*(spec.name for spec in COLUMNS[kind]), *table.named_specs]
                rows = {name: _plain(table[name]) for name in names}
                tables.append((rank, kind, table.row_index.tolist(), rows))
        return [reader.ranks, dict(reader.groups), dict(reader.metadata), reader.payload_digests, tables]


def _plain(column: Column) -> list[object]:
    if isinstance(column, np.ndarray):
        return ["nan" if value != value else value for value in column.tolist()]
    return [row.tolist() if isinstance(row, np.ndarray) else row for row in column]


def outcome(call: Callable[[], object]) -> object:
    """What a call returns, or the error that it raises."""
    try:
        return call()
    except PrismTraceError as error:
        return type(error), str(error).partition(": ")[2]


def one_by_one(patch: pytest.MonkeyPatch, module: str) -> None:
    """Lets no ranks be read together."""
    patch.setattr(sys.modules[module], "alike_ranks", lambda reader, ranks: ([], sorted(ranks)))


def damaged(path: Path, data: st.DataObject) -> Path:
    """The same file with one byte of a chunk changed."""
    raw = bytearray(path.read_bytes())
    with TraceReader(path) as reader:
        chunk = data.draw(st.sampled_from(reader._index.chunk_entries.tolist()))
    raw[chunk[0] + data.draw(st.integers(0, chunk[1] - 1))] ^= data.draw(st.integers(1, 255))
    path.write_bytes(raw)
    return path


@settings(max_examples=20, deadline=None, phases=[Phase.generate])
@given(data=st.data())
def test_a_slice_is_that_of_ranks_one_by_one(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("alike")
    source = alike_sample.write_job(data, folder / "job.prism")
    if data.draw(st.booleans()):
        compact(source, folder / "compact.prism")  # shifts, and ranks with values of their own
        source = folder / "compact.prism"
    if data.draw(st.integers(0, 3)) == 0:
        damaged(source, data)
    how = {
        "ranks": data.draw(st.none() | st.sets(st.integers(0, 7), min_size=1)),
        "steps": data.draw(st.none() | st.builds(range, st.integers(0, 2), st.integers(1, 3))),
        "time_ns": data.draw(st.none() | st.just((80, 210)) | st.just((None, 120))),
    }
    together = outcome(lambda: slice_trace(source, folder / "a.prism", **how))
    with pytest.MonkeyPatch.context() as patch:
        one_by_one(patch, "prismtrace.slicing")
        alone = outcome(lambda: slice_trace(source, folder / "b.prism", **how))
    assert together == alone
    assert (folder / "a.prism").exists() == (folder / "b.prism").exists()
    if (folder / "a.prism").exists():
        assert contents(folder / "a.prism") == contents(folder / "b.prism")


def test_ranks_of_a_role_are_cut_together(tmp_path: Path) -> None:
    """All of them, whatever their number: a slice of a slice too; nothing has to be found again."""
    source, cut, again = (tmp_path / f"{name}.prism" for name in ("a", "b", "c"))
    write_alike(source, num_ranks=600)
    told: list[tuple[int, int]] = []
    slice_trace(source, cut, steps=range(1, 2), progress=lambda done, total: told.append((done, total)))
    slice_trace(cut, again, steps=range(1, 2), storing=lambda done, total: pytest.fail("ranks were cut one by one"))
    assert told == [(600, 600)]
    for path in (cut, again):
        with TraceReader(path) as reader:
            assert [len(ranks) for ranks in reader.roles.values()] == [600]
            assert reader.units(17).peer.tolist() == [18, 18]
    assert contents(cut) == contents(again)


def write_alike(path: Path, *, num_ranks: int) -> None:
    """One role whose ranks have another peer each."""
    columns = {"kind": [3] * 4, "step": [0, 0, 1, 1], "peer": np.ones(4, np.int32), "start_ns": [1, 2, 3, 4]}
    others = (np.arange(num_ranks) + 1)[None, :] % num_ranks
    with TraceWriter(path, world_size=num_ranks) as writer:
        add_alike(writer, range(num_ranks), columns, role=5, replaced={"peer": (np.zeros(4, np.int64), others)})


def test_ranks_with_rows_of_their_own_are_alone(tmp_path: Path) -> None:
    write_alike(tmp_path / "a.prism", num_ranks=5)
    with TraceWriter.append(tmp_path / "a.prism") as writer:
        writer.add_steps(3, {"step": [0]})
    with TraceReader(tmp_path / "a.prism") as reader:
        together, alone = alike_ranks(reader, reader.ranks)
        assert [(alike.ranks, alone) for alike in together] == [((0, 1, 2, 4), [3])]
        assert alike_ranks(reader, [3, 4]) == ([], [3, 4])


@settings(max_examples=25, deadline=None, phases=[Phase.generate])
@given(data=st.data())
def test_findings_are_those_of_ranks_one_by_one(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("alike") / "job.prism"
    source = alike_sample.write_job(data, path, in_order=data.draw(st.integers(0, 3)) > 0)
    if data.draw(st.integers(0, 3)) == 0:
        damaged(source, data)
    together = validate(source)
    with pytest.MonkeyPatch.context() as patch:
        one_by_one(patch, "prismtrace.validate")
        assert validate(source) == together


def test_a_role_without_findings_is_looked_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And its ranks are still matched with each other: a message that one of them lacks is missed."""
    looked_at = []
    whole = rankchecks.RankTables.__init__

    def counting(self: rankchecks.RankTables, reader: TraceReader, rank: int) -> None:
        looked_at.append(rank)
        whole(self, reader, rank)

    monkeypatch.setattr(rankchecks.RankTables, "__init__", counting)
    columns = {"kind": [3, 4], "op": [10, 11], "group_id": [1, 1], "seq": [0, 0], "peer": [1, 2]}
    ring = np.arange(90)
    around = (np.array([0, 1]), np.array([(ring + 1) % 90, (ring - 1) % 90]))
    with TraceWriter(tmp_path / "a.prism", world_size=90) as writer:
        writer.add_group(ProcessGroup(1, ranks=tuple(range(90))))
        add_alike(writer, range(90), columns, role=5, replaced={"peer": around})
    assert validate(tmp_path / "a.prism") == []
    assert looked_at == [0]
    around[1][1, 40] = 41
    with TraceWriter(tmp_path / "b.prism", world_size=90) as writer:
        writer.add_group(ProcessGroup(1, ranks=tuple(range(90))))
        add_alike(writer, range(90), columns, role=5, replaced={"peer": around})
    assert [(item.code, item.where) for item in validate(tmp_path / "b.prism")] == [
        ("PT033", "39 -> 40, group 1, tag none, seq 0"), ("PT033", "41 -> 40, group 1, tag none, seq 0"),
    ]  # fmt: skip
    assert looked_at == [0, 0]
