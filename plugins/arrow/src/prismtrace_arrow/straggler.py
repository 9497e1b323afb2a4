"""The importer ``straggler``: the published tables of ByteDance's straggler study, with groups, peers and seq.

How columns are read and units written is in ``mapping``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from prism_sdk.abc import ConversionReport, TraceImporter
from prism_sdk.interop import options as reading
from prismtrace import ABSENT, GraphKind, ProcessGroup, TraceWriter, UnitKind
from prismtrace_arrow.mapping import (
    Meaning,
    Report,
    Units,
    joined,
    lay_out_steps,
    open_table,
    read_units,
    write_units,
)
from prismtrace_arrow.sinks import whole_file
from prismtrace_arrow.straggler_graph import graph_of

_COLUMNS: Final = {
    "rank": "rank",
    "start_ns": "start_ts",
    "duration_ns": "duration",
    "type": "optype",
    "step": "step",
    "stage": "stage",
    "microbatch": "mb_id",
    "model_chunk": "mc",
    "seq": "seq_id",
    "group_id": "dp_rank",
}
_VALUES: Final = {
    "forward-compute": "forward compute",
    "backward-compute": "backward compute",
    "forward-send": "forward send",
    "forward-recv": "forward recv",
    "backward-send": "backward send",
    "backward-recv": "backward recv",
    "grads-reduce-scatter": "backward reduce_scatter",
    "params-all-gather": "optimizer all_gather",
    "embedding-grads-all-reduce": "backward all_reduce",
    "layernorm-grads-all-reduce": "backward all_reduce",
    "optimizer": "optimizer compute",
    "optimizer-clip-main-grad": "optimizer compute",
    "gc": "other compute",
    "first-op": "other compute",
}
PRESET: Final = Meaning(_COLUMNS, _VALUES, time="s", clock="step", absent=-1, keep="straggler")
_FORWARD, _BACKWARD = 0, 1
_ROUNDING_NS: Final = 5000
_DATA_PARALLEL: Final = ("grads-reduce-scatter", "params-all-gather")
_OPTIONS: Final = ("column.", "value.", "time", "clock", "absent", "keep", "world_size", "lossless", "dependencies")


class StragglerImporter(TraceImporter):
    """Reads a ``trace-*.parquet`` of the straggler study; what each column becomes is in the README."""

    name = "straggler"
    description = "operation tables of ByteDance's straggler study (trace-*.parquet)"

    def recognises(self, source: Path, head: bytes) -> bool:
        """A Parquet file with the columns of the study."""
        try:
            if not head.startswith(b"PAR1"):
                return False
            return {"optype", "start_ts", "duration", "dp_rank"} <= set(open_table(source).schema.names)
        except Exception:
            return False

    def import_trace(
        self, sources: Sequence[Path], *, output: Path, options: Mapping[str, str], report: Report
    ) -> ConversionReport:
        """Read the tables of one job."""
        reading.check_known(options, _OPTIONS, of=f"the importer {self.name}")
        meaning = Meaning.of_options(options, preset=PRESET)
        units = joined([read_units(open_table(path), meaning) for path in sources])
        if meaning.clock == "step":
            lay_out_steps(units)
        trim_host_units(units)
        if reading.choice(options, "dependencies", ("true", "false"), default="false") == "true":
            return _import_graph(units, output)
        groups = connect(units)
        traced = len(np.unique(units.rank))
        world_size = reading.integer(options, "world_size", default=traced, low=traced, high=2**31 - 1) or traced
        if len(units) and int(units.rank.max()) >= world_size:
            world_size = min(int(units.rank.max()) + 1, 2**31 - 1)
        metadata = {"import.format": self.name, "import.time_unit": meaning.time}
        with (
            whole_file(output) as temporary,
            TraceWriter(
                temporary, graph_kind=GraphKind.OBSERVED, world_size=world_size, metadata=metadata, overwrite=True
            ) as writer,
        ):
            for group in groups:
                writer.add_group(group)
            counts = write_units(writer, units)
        return ConversionReport(output, {**counts, "groups": len(groups)}, tuple(units.notes))


def _import_graph(units: Units, output: Path) -> ConversionReport:
    ranks, first = np.unique(units.rank, return_index=True)
    dp, stage = units.numbers("group_id")[first], units.numbers("stage")[first]
    dp_of = dict(zip(ranks.tolist(), dp.astype(np.int64).tolist(), strict=True))
    stage_of = dict(zip(ranks.tolist(), stage.tolist(), strict=True))
    graph = graph_of(units, dp_of=dp_of.__getitem__, stage_of=stage_of.__getitem__)
    metadata = {"import.format": StragglerImporter.name, "import.dependencies": "true"}
    world_size = int(ranks.max()) + 1
    count = 0
    with (
        whole_file(output) as temporary,
        TraceWriter(
            temporary, graph_kind=GraphKind.CALIBRATED, world_size=world_size, metadata=metadata, overwrite=True
        ) as writer,
    ):
        for group in graph.groups.values():
            writer.add_group(group)
        for rank, columns in graph.columns.items():
            writer.add_units(rank, columns)
            count += len(columns["kind"])
    notes = (*units.notes, "the graph was made up from the study's dependencies: it can be simulated")
    return ConversionReport(output, {"units": count, "groups": len(graph.groups)}, notes)


def trim_host_units(units: Units) -> None:
    """End a compute unit where the next one starts when it reaches past it by less than clocks and float32 err."""
    start, end = units.numbers("start_ns"), units.numbers("end_ns")
    rows = np.flatnonzero((units.numbers("kind") == UnitKind.COMPUTE) & (end != ABSENT) & (start != ABSENT))
    if len(rows) < 2:
        return
    over = end[rows[:-1]] - start[rows[1:]]
    same = units.rank[rows[:-1]] == units.rank[rows[1:]]
    fixed = np.flatnonzero(same & (over > 0) & (over <= _ROUNDING_NS))
    if len(fixed):
        trimmed = end.copy()
        trimmed[rows[fixed]] = np.maximum(start[rows[fixed]], start[rows[fixed + 1]])
        units.columns["end_ns"] = trimmed
        units.notes.append(f"{len(fixed)} compute units reached at most 5 us into the next one: trimmed")


def connect(units: Units) -> list[ProcessGroup]:
    """Find the groups, and give communication units their group, peer, tag and seq.

    The study numbers operations within their type and step. Here a collective counts in its group, a message in its
    lane, over the whole job: in order of step and of the study's number.
    """
    place = _Places(units)
    label = units.texts("label")
    names = np.array([*label.values, ""], object)[label.codes]
    op = units.numbers("op")
    group_id = np.zeros(len(units), np.uint64)
    peer, tag, seq = (np.full(len(units), ABSENT, np.int64) for _ in range(3))
    for rank in np.unique(units.rank).tolist():
        mine = units.rank == rank
        for text in np.unique(names[mine & (op > 0)]).tolist():
            rows = np.flatnonzero(mine & (names == text))
            if text in _DATA_PARALLEL:
                group_id[rows] = place.group("dp", rank)
            elif text.startswith("embedding"):
                group_id[rows] = place.group("embedding", rank)
            elif text.endswith(("-send", "-recv")):
                direction = _FORWARD if text.startswith("forward") else _BACKWARD
                ahead = (direction == _FORWARD) == text.endswith("-send")
                group_id[rows] = place.group("pp", rank)
                peer[rows] = place.neighbour(rank, 1 if ahead else -1)
                tag[rows] = direction
            else:
                group_id[rows] = place.group("self", rank)
        _count(units, mine & (op > 0), seq, (group_id, op * (tag != ABSENT), tag, peer))
    units.columns.update(group_id=group_id, peer=peer, tag=tag, seq=seq)
    units.notes.append("process groups and peers are derived from dp_rank and stage; waiting is inside communication")
    return place.groups()


def _count(units: Units, rows: NDArray[np.bool_], seq: NDArray[np.int64], lane: tuple[NDArray[Any], ...]) -> None:
    """Number the rows of each lane by step and the study's own number."""
    chosen = np.flatnonzero(rows)
    if not len(chosen):
        return
    keys = np.stack([part[chosen].astype(np.int64) for part in lane])
    _, which = np.unique(keys, axis=1, return_inverse=True)
    which = which.reshape(-1)
    order = np.lexsort(
        (units.numbers("start_ns")[chosen], units.numbers("seq")[chosen], units.numbers("step")[chosen], which)
    )
    ranked = which[order]
    first = np.flatnonzero(np.diff(ranked, prepend=-1))
    position = np.arange(len(ranked)) - np.repeat(first, np.diff([*first.tolist(), len(ranked)]))
    seq[chosen[order]] = position


class _Places:
    """Where ranks are in the job: data-parallel index and stage."""

    def __init__(self, units: Units) -> None:
        ranks, first = np.unique(units.rank, return_index=True)
        dp, stage = units.numbers("group_id")[first].astype(np.int64), units.numbers("stage")[first].astype(np.int64)
        self._place = {int(r): (int(d), int(s)) for r, d, s in zip(ranks, dp, stage, strict=True)}
        self._num_stages = int(stage.max()) + 1 if len(stage) else 0
        self._at = {place: rank for rank, place in self._place.items()}
        self._groups: dict[tuple[str, int], ProcessGroup] = {}

    def neighbour(self, rank: int, step: int) -> int:
        """The rank of the next or previous stage, around the end; absent where it was not traced."""
        dp, stage = self._place[rank]
        return self._at.get((dp, (stage + step) % self._num_stages), ABSENT)

    def group(self, kind: str, rank: int) -> int:
        """The id of the group of a kind that a rank is in."""
        dp, stage = self._place[rank]
        key = {"dp": stage, "self": rank}.get(kind, dp)
        if (kind, key) not in self._groups:
            self._groups[kind, key] = ProcessGroup(
                len(self._groups) + 1, f"{kind}-{key}", _ABOUT[kind], "", self._ranks(kind, key)
            )
        return self._groups[kind, key].group_id

    def _ranks(self, kind: str, key: int) -> tuple[int, ...]:
        if kind == "self":
            return (key,)
        if kind == "dp":
            return tuple(sorted(rank for rank, (_, stage) in self._place.items() if stage == key))
        stages = (0, self._num_stages - 1)
        return tuple(
            sorted(rank for rank, (dp, stage) in self._place.items() if dp == key and (kind == "pp" or stage in stages))
        )

    def groups(self) -> list[ProcessGroup]:
        """All groups that were asked for."""
        return list(self._groups.values())


_ABOUT: Final = {
    "dp": "data parallel: ranks of one stage",
    "pp": "pipeline: stages of one data-parallel index",
    "embedding": "first and last stage of one data-parallel index",
    "self": "tensor parallel: one traced rank",
}
