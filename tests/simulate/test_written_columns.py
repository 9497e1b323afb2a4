"""What a written simulation says of units beside their times: all that is true of them, and nothing that is not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prism_sdk.cli.main import run
from prism_sdk.graph.shares import shared_anew
from prism_sdk.simulate import Scenario, load, simulate, write_timeline
from prismtrace import (
    ABSENT,
    DType,
    GraphKind,
    Op,
    ReduceOp,
    TableKind,
    TraceReader,
    TraceWriter,
    UnitKind,
    has_errors,
    validate,
)
from prismtrace.model import COLUMNS
from prismtrace.tables import ListColumn
from tests.graph.jobs import Program
from tests.simulate.pipelines import pipeline
from tests.simulate.reference import write

EXAMPLE = Path(__file__).parents[2] / "examples" / "sample_trace.py"
TIMES = {"start_ns", "end_ns", "transfer_ns", "gap_ns", "prism.lead_ns", "prism.issued_ns", "prism.provenance"}
#: Where a unit is: among the rows of its rank, in its group, among microbatches; and who its groups and partners are.
PLACES = {"awaits", "seq", "microbatch", "group_id", "peer"}
VALUES = {"payload_in", "payload_out", "prism.schedule"}
NAMED = {"prism.part": "param_gather", "prism.layer": "layers.0", "prism.schedule": "steady", "prism.adapter": "own"}


def _rich(path: Path) -> Path:
    """A pipeline whose units have a value in every column; the label says which unit of which rank it is."""
    plain = pipeline(path.with_suffix(".plain"), stages=2, replicas=2, microbatches=3, late_waits=True)
    facts = {
        "rank.1.fidelity": "full", "rank.1.sent_bytes": "9", "rank.3.coordinates": "dp=1,pp=1",
        "group.100.purpose": "pp",
    }  # fmt: skip
    with (
        TraceReader(plain) as reader,
        TraceWriter(
            path, graph_kind=GraphKind.CALIBRATED, world_size=4, metadata={**reader.metadata, **facts}
        ) as writer,
    ):
        writer.add_groups(reader.groups.values())
        digest = writer.add_payload(b"payload")
        for rank in reader.ranks:
            units = reader.units(rank)
            size = len(units)
            numbers = np.arange(size)
            talks = (units.kind >= UnitKind.COLLECTIVE) & (units.kind <= UnitKind.RECV)
            columns: dict[str, Any] = {
                **units.columns(),
                "label": [f"{rank}:{row}" for row in range(size)],
                "reduce_op": np.where(units.kind == UnitKind.COLLECTIVE, ReduceOp.AVG, 0).astype(np.uint8),
                "is_async": talks, "model_chunk": np.zeros(size, np.int32),
                "memory_bytes": 1000 + 10 * numbers,
                "payload_in": [digest if here else None for here in talks.tolist()],
                "payload_out": [digest if here else None for here in talks.tolist()],
                "splits_in": [[row] if row % 5 == 0 else None for row in range(size)],
                "splits_out": [[row, 1] if row % 7 == 0 else None for row in range(size)],
                "prism.issued_ns": numbers * 3, "prism.lead_ns": np.full(size, ABSENT),
                "moe.tokens_per_expert": [[row, 2] if row % 3 == 0 else None for row in range(size)],
                "own.number": numbers + 100 * rank,
                **{name: [word] * size for name, word in NAMED.items()},
            }  # fmt: skip
            writer.add_units(rank, columns)
            writer.add_steps(rank, {"step": [0, 1, 2], "start_ns": [ABSENT, 500, 1000], "end_ns": [500, 1000, 1500],
                                    "loss": [3.0, 2.0, 1.0], "num_losses": [1, 1, 1], "cpu_time_ns": [5, 5, 5],
                                    "memory_peak_bytes": [9000, 9100, 9200]})  # fmt: skip
            writer.add_scalars(rank, {"step": [0, 1, 2], "name": ["norm"] * 3, "value": [0.5, 0.25, 0.125]})
    return path


def _values(column: Any) -> list[Any]:
    """A column as plain values."""
    if isinstance(column, ListColumn):
        return [None if one is None else one.tolist() for one in column]
    return column.tolist() if isinstance(column, np.ndarray) else list(column)


def _absent(values: list[Any]) -> bool:
    return all(value in (None, ABSENT, -(2**31), 0, False) for value in values)


CHANGES: dict[str, tuple[list[str], set[str]]] = {
    "slower": (["--slow", "rank=1:1.5"], set()),
    "some steps": (["--steps", "1:3"], {"awaits"}),
    "reordered": (["--schedule", "gpipe"], PLACES | VALUES | {"memory_bytes"}),
    "more microbatches": (["--microbatches", "5"], PLACES | VALUES | {"memory_bytes"}),
    "fewer units": (["--remove", "op=all_reduce"], {"awaits", "seq"} | VALUES),
    "more replicas": (["--dp", "4"], {"group_id", "peer", "awaits"} | VALUES - {"prism.schedule"}),
    "fewer replicas of more microbatches": (["--dp", "1", "--microbatches", "4"], PLACES | VALUES | {"memory_bytes"}),
}


@pytest.mark.parametrize("change", CHANGES)
def test_every_column_is_kept_where_it_is_true(tmp_path: Path, change: str) -> None:
    options, others = CHANGES[change]
    source = _rich(tmp_path / "job.prism")
    assert run(["simulate", str(source), *options, "-o", str(tmp_path / "out.prism"), "--quiet"]) == 0
    assert not has_errors(validate(tmp_path / "out.prism"))
    with TraceReader(source) as before, TraceReader(tmp_path / "out.prism") as after:
        known = {rank: {name: _values(column) for name, column in before.units(rank).columns().items()}
                 for rank in before.ranks}  # fmt: skip
        names = set(known[0])
        # every column of the registry is spoken of here, and has a value in the source
        assert {spec.name for spec in COLUMNS[TableKind.UNITS]} <= names | TIMES
        for rank in after.ranks:
            units = after.units(rank)
            assert len(units)
            origins = [tuple(map(int, label.split(":"))) for label in units.label if label is not None]
            assert len(origins) == len(units)
            for name in names - TIMES - others:
                assert _values(units[name]) == [known[of][name][row] for of, row in origins], name
            # what was true of the old times alone, or of what is no more
            for name in {"prism.issued_ns", *(VALUES & others)}:
                assert name not in units.column_names or _absent(_values(units[name])), name
    again = simulate(load(tmp_path / "out.prism"))
    with TraceReader(tmp_path / "out.prism") as after:
        for position, rank in enumerate(after.ranks):
            assert again.times(position).start_ns.tolist() == after.units(rank).start_ns.tolist()


def test_steps_and_values_of_steps_go_with_the_units(tmp_path: Path) -> None:
    source = _rich(tmp_path / "job.prism")
    told: dict[str, Any] = {}
    for name, (options, _) in CHANGES.items():
        assert run(["simulate", str(source), *options, "-o", str(tmp_path / "out.prism"), "--overwrite"]) == 0
        with TraceReader(tmp_path / "out.prism") as reader:
            steps = reader.steps(0)
            told[name] = (steps.step.tolist(), np.isnan(steps.loss).all(), len(reader.scalars(0)),
                          steps.memory_peak_bytes.tolist())  # fmt: skip
    assert told["slower"] == ([0, 1, 2], False, 3, [9000, 9100, 9200])
    assert told["some steps"] == ([1, 2], False, 2, [9100, 9200])
    assert told["more replicas"] == ([0, 1, 2], True, 0, [9000, 9100, 9200])  # of a loss of others nothing is known
    assert told["fewer units"] == ([0, 1, 2], True, 0, [9000, 9100, 9200])


def test_a_rank_may_have_steps_without_units(tmp_path: Path) -> None:
    """It does nothing in those that are simulated: none of them ends on it."""
    path = tmp_path / "job.prism"
    with TraceWriter(path, graph_kind=GraphKind.CALIBRATED, world_size=2) as writer:
        for rank in range(2):
            rows = 2 - rank
            writer.add_units(rank, {"kind": [1] * rows, "step": [*range(rows)], "start_ns": [0] * rows,
                                    "end_ns": [10] * rows})  # fmt: skip
            writer.add_steps(rank, {"step": [0, 1], "end_ns": [10, 20]})
    write_timeline(simulate(load(path, steps=range(1, 2))), tmp_path / "out.prism")
    with TraceReader(tmp_path / "out.prism") as reader:
        assert reader.ranks == (0,) and reader.steps(0).step.tolist() == [1]


def test_a_rank_that_communicates_nothing_is_written(tmp_path: Path) -> None:
    program = Program(3, {1: (0, 1)})
    for rank in range(3):
        program.compute(rank, 10 + rank)
    for rank, unit in program.collective(1, lambda _: 5).items():
        program.wait(rank, unit)
    path = write(tmp_path / "job.prism", program.rows, program.groups, kind=GraphKind.CALIBRATED)
    for keep in (True, False):
        write_timeline(simulate(load(path, steps=range(1))), tmp_path / "out.prism", keep_columns=keep)
        with TraceReader(tmp_path / "out.prism") as reader:
            assert reader.units(2).end_ns.tolist() == [12] and reader.units(1).seq.tolist() == [ABSENT, 0, ABSENT]


def test_memory_of_another_schedule_is_in_the_file(tmp_path: Path) -> None:
    """The report predicts it; simulating the file gives the same."""
    plain = tmp_path / "sample.prism"
    subprocess.run([sys.executable, str(EXAMPLE), str(plain)], check=True, capture_output=True)
    timeline = Scenario(schedule="gpipe").run(plain)
    write_timeline(timeline, tmp_path / "gpipe.prism")
    assert load(tmp_path / "gpipe.prism").memory_bytes.tolist() == timeline.job.memory_bytes.tolist()
    assert timeline.job.memory_bytes.max() > load(plain).memory_bytes.max()


def test_what_is_said_of_ranks_and_groups_goes_to_their_copies(tmp_path: Path) -> None:
    source = _rich(tmp_path / "job.prism")
    write_timeline(Scenario(dp=3).run(source), tmp_path / "out.prism")
    with TraceReader(tmp_path / "out.prism") as reader:
        said = {key for key in reader.metadata if key.startswith(("rank.", "group."))}
        pipes = {number for number, group in reader.groups.items() if set(group.ranks) in ({0, 1}, {4, 5})}
    # the third replica does what the first one does; where replicas are on the grid of ranks is not known
    assert said == {"rank.1.fidelity", "rank.5.fidelity", *(f"group.{number}.purpose" for number in pipes)}


def _sharded(path: Path) -> Path:
    """Two replicas of two ranks: shards are gathered and scattered over replicas, tokens exchanged within them."""
    program = Program(4, {1: (0, 1), 2: (2, 3), 3: (0, 2), 4: (1, 3)})
    for step in range(2):
        program.step = step
        for op, groups in ((Op.ALL_GATHER, (3, 4)), (Op.REDUCE_SCATTER, (3, 4)), (Op.BROADCAST, (3, 4)),
                           (Op.BROADCAST, (1, 2)), (Op.ALL_TO_ALL, (1, 2))):  # fmt: skip
            for group in groups:
                units = program.collective(group, lambda _: 10, op=op)
                for rank, unit in units.items():
                    row = program.rows[rank][unit]
                    counts = {Op.ALL_GATHER: (50, 100), Op.REDUCE_SCATTER: (100, 50)}.get(op, (8, 8))
                    row |= {"num_elements_in": counts[0], "num_elements_out": counts[1], "dtype": int(DType.BFLOAT16)}
                    if op == Op.BROADCAST:
                        row["peer"] = max(program.groups[group].ranks)
                    program.wait(rank, unit)
        for rank in range(4):
            program.compute(rank, 100, phase=3)
    for group, name in ((3, "dp0"), (4, "dp1")):
        program.groups[group] = type(program.groups[group])(group, name, "data parallel", "gloo",
                                                            program.groups[group].ranks)  # fmt: skip
    return write(path, program.rows, program.groups, kind=GraphKind.CALIBRATED)


@pytest.mark.parametrize("replicas", [1, 4])
def test_sizes_and_roots_in_groups_of_another_size(tmp_path: Path, replicas: int) -> None:
    source = _sharded(tmp_path / "job.prism")
    write_timeline(Scenario(dp=replicas).run(source), tmp_path / "out.prism")
    assert not has_errors(validate(tmp_path / "out.prism"))
    with TraceReader(tmp_path / "out.prism") as reader:
        assert reader.ranks == tuple(range(2 * replicas))
        for rank in reader.ranks:
            units = reader.units(rank, steps=range(1))
            talks = units.kind == UnitKind.COLLECTIVE
            sizes = list(
                zip(units.num_elements_in[talks].tolist(), units.num_elements_out[talks].tolist(), strict=True)
            )
            assert sizes == [(100 // replicas, 100), (100, 100 // replicas), (8, 8), (8, 8), (8, 8)]
            over, within = units.peer[talks][2:4].tolist()
            # the root was the last rank of each group: in that of replicas the first of those that do as it did
            assert over == (rank % 2 + 2 if replicas > 1 else -(2**31)) and within == rank // 2 * 2 + 1


def test_shares_by_hand() -> None:
    ops = np.array(
        [Op.ALL_GATHER, Op.ALL_GATHER, Op.REDUCE_SCATTER, Op.GATHER, Op.SCATTER, Op.ALL_REDUCE, Op.ALL_GATHER]
    )
    dtypes = np.array([DType.FLOAT32, DType.INT64, *[DType.FLOAT32] * 5])
    given, got = shared_anew(ops, dtypes, np.array([5, 1, 10, 3, 6, 7, 5]), np.array([10, 2, 5, 6, 3, 7, ABSENT]),
                             before=2, after=4)  # fmt: skip
    assert given.tolist() == [3, 1, 12, 3, 12, 7, 3]
    assert got.tolist() == [12, 4, 3, 12, 3, 7, ABSENT]
