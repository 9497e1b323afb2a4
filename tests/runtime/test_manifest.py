"""What a sandbox rank is expected to do and which values it is given, read from small graphs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from prism_sdk.graph.errors import UnmatchedUnitError
from prism_sdk.graph.plan import Stream
from prism_sdk.runtime.calls import COMBINED
from prism_sdk.runtime.manifest import OWN, Script, read_scripts
from prismtrace import (
    ABSENT,
    ABSENT32,
    DType,
    GraphKind,
    Op,
    ProcessGroup,
    ReduceOp,
    TraceReader,
    TraceWriter,
    UnitKind,
)

REDUCTIONS = (Op.ALL_REDUCE, Op.REDUCE, Op.REDUCE_SCATTER)


class Graph:
    """Writes a graph of three ranks; rank r gives `n * 10 + r` to the n-th operation, which results in `n * 10 + 9`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: dict[int, list[dict[str, Any]]] = {0: [], 1: [], 2: []}
        self.num = 0
        self.seqs: dict[Any, int] = {}
        self.step = 0
        self.has_payloads = True

    def seq(self, key: Any) -> int:
        self.seqs[key] = self.seqs.get(key, -1) + 1
        return self.seqs[key]

    def value(self, who: int) -> bytes | None:
        return bytes([self.num * 10 + who]) * 4 if self.has_payloads else None

    def add(self, rank: int, kind: UnitKind, op: Op, **columns: Any) -> None:
        row = {"kind": kind, "op": op, "step": self.step, "dtype": DType.FLOAT32, "num_elements_in": 1,
               "num_elements_out": 1, "group_id": 1, "peer": ABSENT32, "tag": ABSENT, "reduce_op": 0}  # fmt: skip
        self.rows[rank].append({**row, **columns})

    def collective(self, op: Op, *, root: int | None = None, ranks: tuple[int, ...] = (0, 1, 2)) -> None:
        self.num += 1
        group = 1 if len(ranks) == 3 else 2
        seq = self.seq(group)
        for rank in ranks:
            gives = op is not Op.BARRIER and (op not in (Op.BROADCAST, Op.SCATTER) or rank == root)
            takes = op in REDUCTIONS and (op is not Op.REDUCE or rank == root)
            more = {"splits_in": [1 + rank, 2, 3]} if op is Op.ALL_TO_ALL else {}
            self.add(
                rank, UnitKind.COLLECTIVE, op, group_id=group, seq=seq, peer=ABSENT32 if root is None else root,
                reduce_op=ReduceOp.SUM if op in REDUCTIONS else 0, payload_in=self.value(rank) if gives else None,
                payload_out=self.value(9) if takes else None, **more,
            )  # fmt: skip

    def message(self, source: int, destination: int, tag: int = 0) -> None:
        self.num += 1
        seq = self.seq((source, destination, tag))
        self.add(source, UnitKind.SEND, Op.SEND, peer=destination, tag=tag, seq=seq, payload_in=self.value(source))
        self.add(destination, UnitKind.RECV, Op.RECV, peer=source, tag=tag, seq=seq)

    def scripts(self, *sandbox: int, num_steps: int = 0) -> dict[int, Script]:
        with TraceWriter(self.path, graph_kind=GraphKind.CALIBRATED, world_size=3) as writer:
            for group_id, ranks in ((1, (0, 1, 2)), (2, (0, 2))):
                writer.add_group(
                    ProcessGroup(group_id=group_id, name=f"g{group_id}", description="", backend="gloo", ranks=ranks)
                )
            for rank, rows in self.rows.items():
                names = {name for row in rows for name in row}
                table: dict[str, list[Any]] = {name: [row.get(name) for row in rows] for name in names}
                for name in ("payload_in", "payload_out"):
                    if name in table:
                        table[name] = [None if v is None else writer.add_payload(v) for v in table[name]]
                writer.add_units(rank, table)
                if num_steps:
                    writer.add_steps(rank, {"step": list(range(num_steps)), "end_ns": list(range(num_steps))})
        with TraceReader(self.path) as reader:
            return read_scripts(reader, sandbox)

    def given(self, script: Script) -> list[dict[int, int]]:
        """For each expectation: source -> the value that it is given."""
        with TraceReader(self.path) as reader:
            items = [reader.payload(item.digest)[0] for item in script.sequence.items]
        assert all(item.num_bytes == 4 for item in script.sequence.items)
        return [dict(zip(one.sources, items[one.first_item :], strict=False)) for one in script.expected]


@pytest.fixture
def graph(tmp_path: Path) -> Graph:
    return Graph(tmp_path / "graph.prism")


@pytest.mark.parametrize(
    ("op", "root", "wanted"),  # what rank 0, alone in the sandbox, is given
    [
        (Op.ALL_REDUCE, None, {COMBINED: 19, OWN: 10}),
        (Op.REDUCE_SCATTER, None, {COMBINED: 19, OWN: 10}),
        (Op.REDUCE, 0, {COMBINED: 19, OWN: 10}),
        (Op.REDUCE, 1, {}),
        (Op.ALL_GATHER, None, {1: 11, 2: 12}),
        (Op.ALL_TO_ALL, None, {1: 11, 2: 12}),
        (Op.GATHER, 0, {1: 11, 2: 12}),
        (Op.GATHER, 2, {}),
        (Op.BROADCAST, 0, {}),
        (Op.BROADCAST, 2, {2: 12}),
        (Op.SCATTER, 0, {}),
        (Op.SCATTER, 1, {1: 11}),
        (Op.BARRIER, None, {}),
    ],
)
def test_what_a_rank_is_given(graph: Graph, op: Op, root: int | None, wanted: dict[int, int]) -> None:
    graph.collective(op, root=root)
    script = graph.scripts(0)[0]
    assert graph.given(script) == [wanted]
    assert script.has_values
    (one,) = script.expected
    assert (one.op, one.group_ranks, one.peer, one.seq) == (op, (0, 1, 2), root, 0)
    assert one.stream == Stream(UnitKind.COLLECTIVE, 1)


def test_an_all_to_all_knows_how_the_others_split(graph: Graph) -> None:
    graph.collective(Op.ALL_TO_ALL)
    (one,) = graph.scripts(1)[1].expected
    assert one.send_bytes == {0: (4, 8, 12), 2: (12, 8, 12)}


def test_sources_are_group_ranks(graph: Graph) -> None:
    graph.collective(Op.ALL_GATHER, ranks=(0, 2))
    assert graph.given(graph.scripts(2)[2]) == [{0: 10}]


def test_communication_without_a_group_is_refused(graph: Graph) -> None:
    """As imports of profiles have it: nobody knows whom it meets."""
    graph.add(0, UnitKind.COLLECTIVE, Op.ALL_REDUCE, group_id=0)
    with pytest.raises(UnmatchedUnitError, match="rank 0 has communication that names no group"):
        graph.scripts(0)


def test_messages_come_from_the_other_end(graph: Graph) -> None:
    graph.message(1, 0, tag=5)
    graph.message(0, 2)
    graph.message(1, 0, tag=5)
    script = graph.scripts(0)[0]
    assert graph.given(script) == [{0: 11}, {}, {0: 31}]
    assert [(one.op, one.peer, one.tag, one.seq) for one in script.expected] == [
        (Op.RECV, 1, 5, 0), (Op.SEND, 2, 0, 0), (Op.RECV, 1, 5, 1)
    ]  # fmt: skip
    assert script.expected[0].stream == Stream(UnitKind.RECV, 1, 1, 0, 5)
    assert script.expected[1].stream == Stream(UnitKind.SEND, 1, 0, 2, 0)


def test_between_sandbox_ranks_nothing_is_replayed(graph: Graph) -> None:
    graph.collective(Op.ALL_REDUCE, ranks=(0, 2))
    graph.message(0, 2)
    graph.collective(Op.ALL_GATHER)
    scripts = graph.scripts(0, 2)
    for rank, script in scripts.items():
        assert script.rank == rank
        assert [one.stream is None for one in script.expected] == [True, True, False]
        assert [one.sources for one in script.expected[:2]] == [(), ()]
    # the other sandbox rank's contribution is among what an operation of all ranks is given
    assert graph.given(scripts[0])[2] == {1: 31, 2: 32}


def test_where_the_last_whole_step_begins_and_ends(graph: Graph) -> None:
    graph.collective(Op.BROADCAST, root=1)
    for graph.step in (0, 1):
        graph.collective(Op.ALL_GATHER)
        graph.collective(Op.ALL_REDUCE)
    graph.step = 2  # behind the last optimizer step: the end of the job
    graph.collective(Op.ALL_REDUCE)
    script = graph.scripts(0, num_steps=2)[0]
    assert (script.last_step, script.round_begin, script.round_end) == (1, 3, 5)
    assert len(script.sequence.items) == 1 + 4 + 4 + 2
    assert script.sequence.repeat_from == 5
    assert script.items_per_round == 6
    assert [one.first_item for one in script.expected] == [0, 1, 3, 5, 7, 9]


def test_without_steps_everything_is_the_last_step(graph: Graph) -> None:
    graph.collective(Op.ALL_GATHER)
    script = graph.scripts(0)[0]
    assert (script.round_begin, script.round_end, script.sequence.repeat_from) == (0, 1, 0)


def test_a_rank_that_never_communicates_has_an_empty_script(graph: Graph) -> None:
    graph.add(1, UnitKind.COMPUTE, Op.UNSPECIFIED)
    script = graph.scripts(1)[1]
    assert (script.expected, script.sequence.items, script.has_values) == ((), (), True)


@pytest.mark.parametrize("what", [lambda g: g.collective(Op.ALL_GATHER), lambda g: g.message(1, 0)])
def test_values_that_were_not_recorded(graph: Graph, what: Callable[[Graph], None]) -> None:
    graph.collective(Op.ALL_REDUCE)
    graph.has_payloads = False
    what(graph)
    graph.has_payloads = True
    graph.collective(Op.ALL_GATHER)
    script = graph.scripts(0)[0]
    assert not script.has_values
    assert graph.given(script) == [{COMBINED: 19, OWN: 10}, {}, {1: 31, 2: 32}]


def test_results_alone_are_values_too(graph: Graph) -> None:
    """`--payloads results` keeps no contributions of reductions."""
    graph.collective(Op.ALL_REDUCE)
    for rows in graph.rows.values():
        rows[0]["payload_in"] = None
    script = graph.scripts(0)[0]
    assert script.has_values
    assert graph.given(script) == [{COMBINED: 19}]


def test_saved_and_loaded(graph: Graph, tmp_path: Path) -> None:
    graph.collective(Op.ALL_TO_ALL)
    graph.message(1, 0)
    script = graph.scripts(0)[0]
    script.save(tmp_path / "script")
    assert Script.load(tmp_path / "script") == script


def test_expectations_in_words(graph: Graph) -> None:
    graph.collective(Op.REDUCE, root=2)
    graph.message(0, 2)
    words = [one.describe() for one in graph.scripts(0)[0].expected]
    assert words == [
        "reduce sum with rank 2 of 1 to 1 elements float32 over ranks 0,1,2",
        "send with rank 2 of 1 to 1 elements float32 over ranks 0,1,2",
    ]
