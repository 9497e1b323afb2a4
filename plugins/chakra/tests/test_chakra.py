"""The importer and the exporter `chakra` on excerpts of a published file and on made ones."""

from __future__ import annotations

import gzip
import io
import os
import tarfile
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prismtrace_chakra import wire
from prismtrace_chakra.exporter import ChakraExporter
from prismtrace_chakra.importers import ChakraImporter
from prismtrace_chakra.wire import AttributeName, block, packed, varint

import prismtrace
from prism_sdk.abc import ConversionReport
from prism_sdk.errors import UsageError
from prismtrace import (
    ABSENT,
    DType,
    GraphKind,
    Op,
    ProcessGroup,
    TraceFormatError,
    TraceReader,
    TraceReadError,
    TraceTruncatedError,
    TraceWriter,
    UnitKind,
    UnitTable,
)

DATA = Path(__file__).parent / "data"
EXCERPT = DATA / "excerpt.0.et"
Unit = tuple[int, int, int, int, int]


def load(sources: Path | Sequence[Path], output: Path, **options: str) -> ConversionReport:
    given = [sources] if isinstance(sources, Path) else sources
    return ChakraImporter().import_trace(given, output=output, options=options, report=lambda line: None)


def attribute(name: str, value: int | str | bool) -> bytes:
    kind = "bool" if isinstance(value, bool) else "string" if isinstance(value, str) else "int64"
    return AttributeName(name, kind).one(value)


def node(
    number: int, kind: int, *, deps: Iterable[int] = (), start: int = 0, duration: int = 0, **attributes: int | str
) -> bytes:
    name = str(attributes.pop("name", f"node{number}"))
    parts = [b"\x08" + varint(number), block(2, name.encode()), b"\x18" + varint(kind), packed(5, list(deps))]
    if start:
        parts.append(b"\x30" + varint(start))
    if duration:
        parts.append(b"\x38" + varint(duration))
    return b"".join([*parts, *(attribute(key, value) for key, value in attributes.items())])


def write(path: Path, *nodes: bytes, description: bytes = b"") -> Path:
    messages = (block(1, b"0.0.4") + description, *nodes)
    path.write_bytes(b"".join(varint(len(message)) + message for message in messages))
    return path


def shape(units: UnitTable) -> list[Unit]:
    """What both a trace and its way through Chakra have: kinds, operations, peers, waits, elements."""
    columns = (units.kind, units.op, units.peer, units.awaits, units.num_elements_in)
    return list(zip(*(column.tolist() for column in columns), strict=True))


def test_the_published_file(tmp_path: Path) -> None:
    report = load(EXCERPT, tmp_path / "out.prism")
    assert report.counts["collective"] == 7
    assert report.counts["host_calls_of_communication"] == 14
    assert report.counts["cycles"] > 0
    assert report.counts["dangling_dependencies"] > 0
    with TraceReader(report.output) as reader:
        units = reader.units(0)
        assert reader.graph_kind is GraphKind.BARE
        collectives = units.kind == UnitKind.COLLECTIVE
        ops = [Op(value) for value in units.op[collectives].tolist()]
        assert ops == [Op.BROADCAST] * 2 + [Op.ALL_REDUCE] * 5
        assert units.num_elements_in[collectives].tolist() == [53120, 53, 2049000, 7875584, 6563840, 6637568, 2431040]
        assert {DType(value) for value in units.dtype[collectives].tolist()} == {DType.FLOAT32, DType.INT64}
    notes = "\n".join(report.notes)
    assert "comm_type 0 means ALL_REDUCE" in notes
    assert "no start times" in notes
    assert "cycles of dependencies" in notes and "(the first: 3511)" in notes
    assert prismtrace.validate(report.output) == []


def job(path: Path, *, ranks: int = 2) -> Path:
    """A trace with every kind of unit."""
    group = ProcessGroup(2**64 - 3, "dp", "data parallel", "nccl", tuple(range(ranks)))
    with TraceWriter(
        path, graph_kind=GraphKind.CALIBRATED, world_size=ranks, metadata={"job.status": "complete"}
    ) as writer:
        writer.add_group(group)
        for rank in range(ranks):
            first, second = (UnitKind.SEND, UnitKind.RECV) if rank % 2 == 0 else (UnitKind.RECV, UnitKind.SEND)
            ops = {UnitKind.SEND: Op.SEND, UnitKind.RECV: Op.RECV}
            kinds = [1, 2, 5, 1, first, 5, second, 5, 2, 2, 5]
            comm = [kind in (2, 3, 4) for kind in kinds]
            start = 1_795_984_319_922_421_793 + 1777 * np.arange(len(kinds))
            writer.add_units(
                rank,
                {
                    "kind": kinds,
                    "op": [0, Op.ALL_REDUCE, 0, 0, ops[first], 0, ops[second], 0, Op.REDUCE_SCATTER, Op.ALL_TO_ALL, 0],
                    "start_ns": start,
                    "end_ns": start + 999,
                    "group_id": [group.group_id if each else 0 for each in comm],
                    "seq": [None, 0, None, None, 0, None, 0, None, 1, 2, None],
                    "dtype": [DType.BFLOAT16 if each else 0 for each in comm],
                    "num_elements_in": [16 if kind in (2, 3) else None for kind in kinds],
                    "num_elements_out": [16 if kind in (2, 4) else None for kind in kinds],
                    "peer": [(rank ^ 1) if kind in (3, 4) else None for kind in kinds],
                    "tag": [7 if kind in (3, 4) else None for kind in kinds],
                    "awaits": [None, None, 1, None, None, 4, None, 6, None, None, 9],
                    "splits_in": [[8, 8] if k == 9 else None for k in range(len(kinds))],
                    "label": ["forward", *[None] * (len(kinds) - 1)],
                    "step": [3] * len(kinds),
                    "payload_in": [prismtrace.payload_digest(b"x") if k == 1 else None for k in range(len(kinds))],
                    "reduce_op": [1 if k in (1, 8) else 0 for k in range(len(kinds))],
                    "is_async": comm,
                },
            )
    return path


def test_a_trace_survives_the_way_through_chakra(tmp_path: Path) -> None:
    source = job(tmp_path / "job.prism")
    exported = ChakraExporter().export_trace(source, output=tmp_path / "out.chakra", options={}, report=print)
    assert sorted(path.name for path in exported.output.iterdir()) == ["trace.0.et", "trace.1.et"]
    back = load(exported.output, tmp_path / "back.prism")
    with TraceReader(source) as before, TraceReader(back.output) as after:
        assert before.groups == after.groups
        assert (before.graph_kind, before.world_size) == (after.graph_kind, after.world_size)
        assert after.metadata["job.status"] == "complete"
        for rank in before.ranks:
            left, right = before.units(rank), after.units(rank)
            for spec in prismtrace.model.UNIT_COLUMNS:
                ours, theirs = getattr(left, spec.name), getattr(right, spec.name)
                if isinstance(ours, np.ndarray):
                    assert (ours == theirs).all(), spec.name
                else:
                    assert [str(value) for value in ours] == [str(value) for value in theirs], spec.name


def test_what_others_read_has_the_same_structure(tmp_path: Path) -> None:
    source = job(tmp_path / "job.prism")
    options = {"prism_attributes": "false", "prefix": "run"}
    exported = ChakraExporter().export_trace(source, output=tmp_path / "out", options=options, report=print)
    assert any("nanoseconds are lost" in note for note in exported.notes)
    nodes = list(wire.frames((exported.output / "run.1.et").read_bytes(), path="x"))[1:]
    messages = [wire.parse(wire.classes()[1], raw, path="x", offset=0) for _, raw in nodes]
    assert [wire.NODE_TYPES[m.type] for m in messages[:7]] == [
        "COMP", "COMM_COLL", "COMP", "COMP", "COMM_RECV", "COMP", "COMM_SEND",
    ]  # fmt: skip
    assert [list(m.ctrl_deps) for m in messages[:7]] == [[], [1], [1], [3], [4], [4], [6]]
    assert [list(m.data_deps) for m in messages[:8]] == [[], [], [2], [], [], [5], [], [7]]
    sent = wire.attributes(messages[6])
    assert {name: value for name, (_, value) in sent.items()} == {
        "is_cpu_op": False, "comm_size": 32, "comm_src": 1, "comm_dst": 0, "comm_tag": 7, "pg_name": "dp",
    }  # fmt: skip
    assert wire.attributes(messages[8])["comm_type"] == ("int64", 7)
    report = load(exported.output, tmp_path / "back.prism")
    assert report.counts["send"] == report.counts["recv"] == 2
    with TraceReader(source) as before, TraceReader(report.output) as after:
        (group,) = after.groups.values()
        assert (group.name, group.ranks) == ("dp", (0, 1))
        for rank in (0, 1):
            ours = [unit[:3] for unit in shape(before.units(rank)) if unit[0] in (2, 3, 4)]
            theirs = [unit[:3] for unit in shape(after.units(rank)) if unit[0] in (2, 3, 4)]
            assert ours == theirs
            units = after.units(rank)
            waits = units.awaits[units.kind == UnitKind.WAIT]
            assert all(units.kind[waits] != UnitKind.COMPUTE)
            assert len(waits) == 4
    assert [f for f in prismtrace.validate(report.output) if f.severity == "error"] == []


def test_one_rank_may_be_one_file(tmp_path: Path) -> None:
    source = job(tmp_path / "job.prism", ranks=1)
    done = ChakraExporter().export_trace(source, output=tmp_path / "out.et", options={}, report=print)
    assert done.output.is_file()
    assert load(done.output, tmp_path / "back.prism").counts["units"] == 11


def test_an_existing_folder_is_not_replaced(tmp_path: Path) -> None:
    source = job(tmp_path / "job.prism")
    (tmp_path / "out").mkdir()
    with pytest.raises(UsageError, match="exists"):
        ChakraExporter().export_trace(source, output=tmp_path / "out", options={}, report=print)
    with pytest.raises(UsageError, match="prefix"):
        ChakraExporter().export_trace(source, output=tmp_path / "new", options={"prefix": "a/b"}, report=print)
    assert not (tmp_path / "new").exists()


def test_ranks_in_folders_archives_and_gzip_are_one_job(tmp_path: Path) -> None:
    folder = tmp_path / "ranks"
    folder.mkdir()
    for rank in range(3):
        write(
            folder / f"run.{rank}.et", node(1, wire.COMP), node(2, wire.COMM_COLL, deps=[1], comm_type=2, comm_size=64)
        )
    archive = tmp_path / "ranks.tar.gz"
    with tarfile.open(archive, "w:gz") as made:
        made.add(folder, "ranks")
    one = tmp_path / "run.2.et.gz"
    one.write_bytes(gzip.compress((folder / "run.2.et").read_bytes()))
    for sources in (folder, archive, [folder / "run.0.et", folder / "run.1.et", one]):
        report = load(sources, tmp_path / "out.prism")
        with TraceReader(report.output) as reader:
            assert reader.ranks == (0, 1, 2)
            (group,) = reader.groups.values()
            assert group.ranks == (0, 1, 2)
            assert reader.units(2).op.tolist() == [0, Op.ALL_GATHER]
            assert reader.units(2).seq.tolist() == [ABSENT, 0]
        assert prismtrace.validate(report.output) == []


def test_whose_rank_it_is(tmp_path: Path) -> None:
    plain = write(tmp_path / "plain.et", node(1, wire.COMP))
    with pytest.raises(UsageError, match="does not say of which rank"):
        load(plain, tmp_path / "out.prism")
    load(plain, tmp_path / "out.prism", rank="5")
    with TraceReader(tmp_path / "out.prism") as reader:
        assert (reader.ranks, reader.world_size) == ((5,), 6)
    stated = write(tmp_path / "x.9.et", node(1, wire.COMP), description=AttributeName("rank", "int64", field=2).one(4))
    report = load(stated, tmp_path / "out.prism")
    assert any("its name says 9" in note for note in report.notes)
    with TraceReader(tmp_path / "out.prism") as reader:
        assert reader.ranks == (4,)
    twin = write(tmp_path / "y.4.et", node(1, wire.COMP))
    with pytest.raises(UsageError, match="both of rank 4"):
        load([stated, twin], tmp_path / "out.prism")
    with pytest.raises(UsageError, match="says the rank of one file"):
        load([stated, twin], tmp_path / "out.prism", rank="1")
    with pytest.raises(UsageError, match="in a world of 3"):
        load(twin, tmp_path / "out.prism", world_size="3")


def test_times_become_units_that_do_not_overlap(tmp_path: Path) -> None:
    path = write(
        tmp_path / "t.0.et",
        node(1, wire.COMP, start=1_000, duration=500),
        node(2, wire.COMP, start=1_200, duration=900),
        node(3, wire.COMM_COLL, start=1_900, duration=50, comm_type=0, comm_size=8, name="ncclKernel_AllGather"),
        node(4, wire.COMP, deps=[3], start=1_950, duration=10),
    )
    report = load(path, tmp_path / "out.prism")
    with TraceReader(report.output) as reader:
        units = reader.units(0)
        assert reader.graph_kind is GraphKind.OBSERVED
        assert units.kind.tolist() == [1, 2, 5, 1]
        assert units.op[1] == Op.ALL_GATHER
        assert units.start_ns.tolist() == [1_000_000, 1_900_000, ABSENT, 2_100_000]
        assert units.end_ns.tolist() == [2_100_000, 1_950_000, ABSENT, 2_100_000]
    assert any("named after another" in note for note in report.notes)
    assert prismtrace.validate(report.output) == []


def test_defects_are_counted(tmp_path: Path) -> None:
    path = write(
        tmp_path / "d.0.et",
        node(1, wire.COMP, deps=[2]),
        node(2, wire.COMP, deps=[1]),
        node(3, wire.COMP, deps=[77]),
        node(3, wire.COMP),
    )
    counts = load(path, tmp_path / "out.prism").counts
    assert (counts["cycles"], counts["dangling_dependencies"], counts["duplicate_ids"]) == (1, 1, 1)


def test_a_cut_file_is_read_and_refused_when_strict(tmp_path: Path) -> None:
    cut = tmp_path / "cut.0.et"
    cut.write_bytes(EXCERPT.read_bytes()[:-5])
    report = load(cut, tmp_path / "out.prism")
    assert report.counts["truncated_files"] == 1
    assert any("was cut" in note for note in report.notes)
    with pytest.raises(TraceTruncatedError, match=r"cut\.0\.et: byte"):
        load(cut, tmp_path / "strict.prism", strict="true")
    assert not (tmp_path / "strict.prism").exists()


def test_input_that_is_no_trace(tmp_path: Path) -> None:
    output = tmp_path / "out.prism"
    empty = tmp_path / "empty.0.et"
    empty.write_bytes(b"")
    with pytest.raises(TraceFormatError, match="holds no node"):
        load(empty, output)
    folder = tmp_path / "folder"
    folder.mkdir()
    with pytest.raises(TraceReadError):
        load(folder, output)
    with pytest.raises(TraceReadError, match="No such file"):
        load(tmp_path / "missing.0.et", output)
    pipe = tmp_path / "pipe.0.et"
    os.mkfifo(pipe)
    with pytest.raises(TraceReadError, match="not a regular file"):
        load(pipe, output)
    damaged = tmp_path / "damaged.0.et.gz"
    damaged.write_bytes(gzip.compress(b"x" * 1000)[:-9])
    with pytest.raises(TraceFormatError, match="gzip data are damaged"):
        load(damaged, output)
    archive = tmp_path / "bad.tar.gz"
    archive.write_bytes(gzip.compress(b"\xff" * 2000))
    with pytest.raises(TraceFormatError, match="archive is damaged"):
        load(archive, output)
    with pytest.raises(UsageError, match="not an option"):
        load(EXCERPT, output, nonsense="1")
    with pytest.raises(UsageError, match="neither true nor false"):
        load(EXCERPT, output, strict="perhaps")
    assert list(tmp_path.glob(".*.part")) == []
    assert not output.exists()


def test_recognises(tmp_path: Path) -> None:
    importer = ChakraImporter()
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        archive.add(EXCERPT, "a/x.0.et")
    assert importer.recognises(EXCERPT, EXCERPT.read_bytes()[:1000])
    assert importer.recognises(Path("x.tar"), buffer.getvalue()[: 1 << 16])
    assert importer.recognises(DATA, b"")
    assert importer.recognises(Path("noname"), EXCERPT.read_bytes()[:1000])
    assert not importer.recognises(Path("x.json"), b'{"schema": 1}')
    assert not importer.recognises(tmp_path, b"")


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 9),
            st.lists(st.integers(0, 9), max_size=2),
            st.integers(0, 2**64 - 1),
            st.integers(0, 2**64 - 1),
            st.integers(-3, 12),
            st.integers(-(2**63), 2**63 - 1),
        ),
        min_size=1,
        max_size=12,
    )
)
def test_whatever_nodes_say_the_trace_is_sound(
    tmp_path: Path, nodes: list[tuple[int, list[int], int, int, int, int]]
) -> None:
    made = [
        node(
            k,
            kind,
            deps=deps,
            start=start,
            duration=duration,
            comm_type=comm,
            comm_size=size,
            comm_dst=size,
            comm_src=size,
        )
        for k, (kind, deps, start, duration, comm, size) in enumerate(nodes)
    ]
    report = load(write(tmp_path / "h.0.et", *made), tmp_path / "h.prism")
    assert [finding for finding in prismtrace.validate(report.output) if finding.severity == "error"] == []


def test_a_folder_without_its_files_is_named(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "a.txt").write_text("x")
    with pytest.raises(TraceReadError, match="folder: holds no file"):
        ChakraImporter().import_trace([tmp_path / "folder"], output=tmp_path / "o", options={}, report=print)


def test_the_last_rank_there_can_be(tmp_path: Path) -> None:
    last = {"rank": str(2**31 - 1)}
    ChakraImporter().import_trace([EXCERPT], output=tmp_path / "o", options=last, report=lambda line: None)
    with TraceReader(tmp_path / "o") as reader:
        assert (reader.ranks, reader.world_size) == ((2**31 - 1,), 0)
