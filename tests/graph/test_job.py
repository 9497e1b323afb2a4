from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prism_sdk.graph.errors import GraphError, InconsistentUnitError, UnmatchedUnitError
from prism_sdk.graph.job import COLUMN_TYPES, JobGraph
from prism_sdk.graph.timing import schedule
from prismtrace import ABSENT, GraphKind, Op, TraceReader, TraceWriter, UnitKind
from tests.graph.jobs import Program, message_key, random_program


def _job() -> Program:
    p = Program(3, {1: (0, 1, 2), 2: (0, 2)})
    for step in range(3):
        p.step = step
        for rank in range(3):
            p.compute(rank, 10 + rank)
        for group in (1, 2):
            for rank, unit in p.collective(group, lambda _: 5).items():
                p.wait(rank, unit)
        p.send(1, 0, 1, 7, 2)
        p.wait(1, p.recv(1, 0, 1, 7, 3))
    return p


def _write(path: Path, program: Program) -> None:
    with TraceWriter(path, graph_kind=GraphKind.CALIBRATED, world_size=program.world_size) as writer:
        for group in program.groups.values():
            writer.add_group(group)
        for rank, columns in program.columns().items():
            writer.add_units(rank, columns)


def test_load_from_a_file_equals_memory(tmp_path: Path) -> None:
    path = tmp_path / "job.prism"
    _write(path, _job())
    memory = _job().graph()
    with TraceReader(path) as reader:
        for graph in (JobGraph.load(path), JobGraph.load(str(path)), JobGraph.load(reader)):
            assert (graph.graph_kind, graph.world_size, graph.ranks) == (GraphKind.CALIBRATED, 3, (0, 1, 2))
            for name in COLUMN_TYPES:
                np.testing.assert_array_equal(graph.columns[name], memory.columns[name])
                assert not graph.columns[name].flags.writeable
            np.testing.assert_array_equal(schedule(graph).end_ns, schedule(memory).end_ns)


def test_load_some_ranks_and_steps(tmp_path: Path) -> None:
    path = tmp_path / "job.prism"
    _write(path, _job())
    part = JobGraph.load(path, steps=range(1, 3))
    assert set(part.columns["step"]) == {1, 2} and part.event_is_whole.all()
    rows = part.rows(0)
    assert part.unit_index(rows.start) == 6
    awaited = part.awaited_row[rows.start + 2]
    assert awaited == rows.start + 1 and part.unit_index(int(awaited)) == part.columns["awaits"][rows.start + 2]
    one = JobGraph.load(path, ranks=[1])
    assert one.ranks == (1,) and not one.has_all_ranks and not one.event_is_whole.any()
    with pytest.raises(GraphError, match="no units of rank 9"):
        JobGraph.load(path, ranks=[9])
    with pytest.raises(GraphError, match="rank 0 is not in the graph"):
        one.rows(0)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32))
def test_every_communication_row_is_in_one_event_of_its_key(seed: int) -> None:
    graph = random_program(seed).graph()
    c = graph.columns
    seen = []
    for event in range(graph.num_events):
        rows = graph.event_rows[graph.event_offsets[event] : graph.event_offsets[event + 1]].tolist()
        seen += rows
        assert (graph.event_of_row[rows] == event).all() and graph.event_is_whole[event]
        if c["kind"][rows[0]] == UnitKind.COLLECTIVE:
            assert {(c["group_id"][r], c["seq"][r]) for r in rows} == {(c["group_id"][rows[0]], c["seq"][rows[0]])}
            assert [graph.rank_of_row[r] for r in rows] == list(graph.groups[int(c["group_id"][rows[0]])].ranks)
            previous = graph.event_previous[event]
            assert (previous >= 0) == (c["seq"][rows[0]] > 0)
            if previous >= 0:
                assert c["seq"][graph.event_rows[graph.event_offsets[previous]]] == c["seq"][rows[0]] - 1
        else:
            assert [c["kind"][r] for r in rows] == [UnitKind.SEND, UnitKind.RECV]
            assert message_key(graph, rows[0]) == message_key(graph, rows[1])
    assert sorted(seen) == np.flatnonzero((c["kind"] >= 2) & (c["kind"] <= 4)).tolist()
    place = {row: i for i, row in enumerate(graph.linear_order.tolist())}
    assert len(place) == (c["kind"] != UnitKind.COMPUTE).sum()
    for row in np.flatnonzero(graph.awaited_row >= 0).tolist():
        event = graph.event_of_row[graph.awaited_row[row]]
        for member in graph.event_rows[graph.event_offsets[event] : graph.event_offsets[event + 1]].tolist():
            sent = c["kind"][graph.awaited_row[row]] == UnitKind.SEND
            assert place[member] < place[row] or (sent and c["kind"][member] == UnitKind.RECV)


def _drop(rank: int, index: int) -> Callable[[Program], None]:
    def change(p: Program) -> None:
        del p.rows[rank][index]
        for row in p.rows[rank]:
            row.pop("awaits", None)

    return change


def _set(rank: int, index: int, **columns: Any) -> Callable[[Program], None]:
    return lambda p: p.rows[rank][index].update(columns)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (_drop(1, 1), UnmatchedUnitError, ["all_reduce seq 0 in group g1 [0, 1, 2]", "missing ranks [1]"]),
        (_drop(1, 3), UnmatchedUnitError, ["send of rank 0 with rank 1, tag 7, seq 0", "no partner (rank 0 unit 5)"]),
        (_set(1, 8, seq=0), UnmatchedUnitError, ["not one send and one receive", "more than once"]),
        (_set(1, 1, dtype=2), InconsistentUnitError, ["disagree in dtype", "rank 0 unit 1: float32", "float64"]),
        (_set(2, 1, op=int(Op.BROADCAST)), InconsistentUnitError, ["disagree in op", "rank 2 unit 1: broadcast"]),
        (_set(2, 1, num_elements_in=9), InconsistentUnitError, ["num_elements_in", "rank 2 unit 1: 9"]),
        (_set(1, 3, num_elements_out=5), InconsistentUnitError, ["sender and receiver", "rank 1 unit 3: 5"]),
        (_set(0, 7, seq=0), InconsistentUnitError, ["rank 0 unit 7 has seq 0, not above"]),
        (_set(0, 1, seq=ABSENT), UnmatchedUnitError, ["without a sequence number", "rank 0 unit 1"]),
        (_set(1, 3, peer=np.iinfo(np.int32).min), UnmatchedUnitError, ["without a peer", "rank 1 unit 3"]),
        (_set(0, 1, group_id=99), GraphError, ["rank 0 unit 1 is in group 0x63, which the trace lacks"]),
        (_set(1, 1, group_id=2), InconsistentUnitError, ["rank 1 unit 1 is no member of group g2 [0, 2]"]),
        (_set(0, 2, awaits=0), InconsistentUnitError, ["rank 0 unit 2 waits for unit 0, which is no communication"]),
        (_set(0, 2, awaits=3), InconsistentUnitError, ["waits for unit 3"]),
        (_set(0, 2, awaits=-2), InconsistentUnitError, ["waits for unit -2"]),
        (_set(0, 0, kind=6), InconsistentUnitError, ["rank 0 unit 0 has the unknown kind 6"]),
    ],
)
def test_faults_are_named(change: Callable[[Program], None], error: type[GraphError], words: list[str]) -> None:
    p = _job()
    change(p)
    with pytest.raises(error) as caught:
        p.graph()
    for word in words:
        assert word in str(caught.value)


def test_absent_values_agree_with_everything_and_uneven_gathers_are_legal() -> None:
    p = _job()
    p.rows[0][1] |= {"num_elements_in": ABSENT, "num_elements_out": ABSENT, "dtype": 0}
    for rank, row in ((0, 3), (2, 3)):
        p.rows[rank][row] |= {"op": int(Op.ALL_GATHER), "num_elements_in": 3 + rank}
    assert p.graph().num_events == 9


def test_an_empty_graph_is_an_error() -> None:
    with pytest.raises(GraphError, match="no units at all"):
        JobGraph.from_columns({}, world_size=1, groups={})
