"""Takes up ranks for simulation one after the other, and holds once what many of them have in common.

It reads no file (``loading`` does); what the weights of rows are is found in ``weights``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from prism_sdk.bounds import MAX_BYTES
from prism_sdk.graph.errors import GraphError
from prism_sdk.graph.timing import step_bounds
from prism_sdk.simulate import kernel
from prism_sdk.simulate.compiling import call
from prism_sdk.simulate.job import ALONE, Programs, SimJob
from prism_sdk.simulate.lanes import LaneTable, RankLanes
from prism_sdk.simulate.memory import UNKNOWN_BYTES
from prism_sdk.simulate.recalled import Recalled, fixed
from prism_sdk.simulate.weights import (
    CALIBRATED_COLUMNS,
    FREE_OF,
    MEASURED,
    PROVENANCE,
    FreeOf,
    begin_of,
    calibrated_weights,
    events_of,
    observed_weights,
)  # fmt: skip
from prism_sdk.wording import counted
from prismtrace import ABSENT, ABSENT32, DType, GraphKind, Op, Phase, ProcessGroup, TraceReader, UnitKind

__all__ = ["Loader", "RankColumns"]

Array = npt.NDArray[Any]
Int64Array = npt.NDArray[np.int64]
#: The columns of one rank, as they are simulated.
RankColumns: TypeAlias = dict[str, Array]

#: What a program consists of, beside how its lanes follow from groups and peers.
_STRUCTURE = ("kind", "phase", "op", "step", "seq", "tag", "awaits", "microbatch", "label", "dtype", "num_elements_in",
              "num_elements_out")  # fmt: skip
_ALONE = 2**61
"""Numbers of groups of one rank begin here."""
_KINDS = [kind for kind in UnitKind if kind is not UnitKind.UNSPECIFIED]
_PHASES, _OPS = list(Phase), list(Op)
_MAX_ELEMENTS = MAX_BYTES // max(dtype.itemsize_bytes for dtype in DType)
_ITEM_BYTES = np.zeros(256, dtype=np.int64)
for _dtype in DType:
    _ITEM_BYTES[int(_dtype)] = _dtype.itemsize_bytes
_RECEIVED = np.isin(np.arange(256), [Op.BROADCAST, Op.SCATTER, Op.RECV])


@dataclass(frozen=True, kw_only=True)
class _Structure:
    """What ranks with the same columns of ``_STRUCTURE`` do, as long as groups and peers make the same lanes."""

    program: int
    lanes: RankLanes
    #: Rows of communication, and for each the first row of its lane; the same of messages alone.
    rows: Int64Array
    heads: Int64Array
    messages: Int64Array
    message_heads: Int64Array

    def fits(self, group: Array, peer: Array) -> bool:
        """Whether rows of one lane are of one lane here, too, and those of two lanes are of two."""
        return (
            bool((group[self.rows] == group[self.heads]).all())
            and bool((peer[self.messages] == peer[self.message_heads]).all())
            and self.lanes.are_distinct(group, peer)
        )


class Loader:
    """Takes up ranks one after the other; ``finish`` gives the job."""

    def __init__(
        self, *, source: str, graph_kind: GraphKind, is_measured: bool, transfers_needed: bool, total_units: int,
        with_sizes: bool,
    ) -> None:  # fmt: skip
        self._source = source
        self._graph_kind = graph_kind
        self.is_measured = is_measured
        """Whether weights follow from times."""
        self._total_units = total_units
        self._with_sizes = with_sizes
        self._transfers_needed = transfers_needed
        self._programs: dict[bytes, int] = {}
        self._parts: list[dict[str, Any]] = []
        self._weights: dict[tuple[int, ...], tuple[int, int]] = {}
        self._main: list[Int64Array] = []
        self._side: list[Int64Array] = []
        self._provenance: list[npt.NDArray[np.uint8]] = []
        self._num_weights = 0
        self._times: list[tuple[Int64Array, Int64Array]] = []
        self._ranks: list[int] = []
        self._by_rank: list[tuple[int, int, int, int, int]] = []
        self._lanes = LaneTable()
        self._recalled = Recalled()
        self._alone: dict[int, ProcessGroup] = {}
        self._num_alone = 0
        self._unchained: dict[int, Int64Array] = {}
        self._size = 0
        self._work: dict[str, Array] = {}

    @property
    def has_units(self) -> bool:
        """Whether any rank had a unit."""
        return self._num_weights > 0

    def _room(self, size: int) -> dict[str, Array]:
        """Arrays to work in, at least so long; made anew only for a longer rank."""
        if size > self._size or not self._work:
            self._size = max(size, 2 * self._size, 1)
            work: dict[str, Array] = {
                name: np.zeros(self._size, dtype=np.int64)
                for name in ("last_wait", "free", "lane_row", "lane_count", "lane_check")
            }
            for name in ("lane_of", "ordinal", "awaited", "hold"):
                work[name] = np.zeros(self._size, dtype=np.int32)
            self._work = work
        return {name: array[:size] for name, array in self._work.items()}

    def add(
        self, rank: int, c: RankColumns, *, first_index: int, memory_peak_bytes: int, begins_ns: int = 0,
        weights: tuple[Int64Array, Int64Array] | None = None,
    ) -> None:  # fmt: skip
        """Take up the units of one rank; columns are as ``recalled.fixed`` gives them.

        ``begins_ns``: its host clock at the start, where times do not show it. ``weights``: main and side of its rows,
        of all ranks or of none; absent: those that the columns show.
        """
        c = self._keyed(rank, c)
        if len(unchained := self._recalled.of(_rows_unchained, c["kind"], c[FREE_OF])):
            self._unchained[len(self._ranks)] = unchained
        arrays = [c[name] for name in _STRUCTURE]
        structure: _Structure | None = self._recalled.get(first_index, arrays)
        if structure is None or not structure.fits(c["group_id"], c["peer"]):
            structure = self._recalled.put(first_index, arrays, self._structure(rank, c, first_index))
        self._lanes.add(rank, structure.lanes, c["group_id"], c["peer"])
        base = self._weigh(rank, c, first_index) if weights is None else self._keep(weights)
        memory = self._recalled.of(_memory_of, c["memory_bytes"])
        origin = begin_of(c["kind"], c["start_ns"]) if self.is_measured else begins_ns
        self._ranks.append(rank)
        stage = self._recalled.of(_first_stage, c["stage"])
        memory = -1 if memory == UNKNOWN_BYTES else max(memory, memory_peak_bytes)
        self._by_rank.append((structure.program, base, origin, stage, memory))

    def _keyed(self, rank: int, c: RankColumns) -> RankColumns:
        """Communication that does not say what it meets, as imported traces have it, meets nobody.

        It becomes a sequence of its own, in a group of one rank, and takes what its times show. In a calibrated graph
        it must say that it waits for nobody.
        """
        if not self.is_measured and not self._recalled.of(_has_any, c[FREE_OF]):
            return c
        kind, seq = c["kind"], c["seq"]
        is_message = (kind == UnitKind.SEND) | (kind == UnitKind.RECV)
        lacks = ((kind == UnitKind.COLLECTIVE) | is_message) & (seq == ABSENT) | is_message & (c["peer"] == ABSENT32)
        if not self.is_measured:
            lacks &= (c[FREE_OF] & FreeOf.OTHERS) > 0
        if not lacks.any():
            return c
        alone = ProcessGroup(group_id=_ALONE + rank, name="", description="", backend=ALONE, ranks=(rank,))
        self._alone[alone.group_id] = alone
        self._num_alone += int(lacks.sum())
        changed: dict[str, Any] = {"kind": UnitKind.COLLECTIVE, "group_id": alone.group_id, "seq": np.cumsum(lacks) - 1,
                   "peer": ABSENT32, "num_elements_in": ABSENT, "num_elements_out": ABSENT,
                   FREE_OF: FreeOf.BEFORE}  # fmt: skip
        return {**c, **{name: fixed(np.where(lacks, value, c[name]), c[name].dtype.type)
                        for name, value in changed.items()}}  # fmt: skip

    def _structure(self, rank: int, c: RankColumns, first_index: int) -> _Structure:
        if (unknown := ~np.isin(c["kind"], _KINDS)).any():
            row = int(unknown.argmax())
            raise GraphError(f"{self._source}: rank {rank} unit {first_index + row} is of kind {c['kind'][row]}, which "
                             "is not known", hint="the trace is damaged, or of a newer version")  # fmt: skip
        made = self._room(len(c["kind"]))
        table = np.full(256, -1, dtype=np.int64)
        while True:
            num_lanes, num_holds, wrong = call(
                kernel.localise, c["kind"], c["group_id"], c["peer"], c["tag"], c["seq"], c["awaits"], first_index,
                made["lane_of"], made["ordinal"], made["awaited"], made["hold"], made["last_wait"],
                made["free"], made["lane_row"], made["lane_count"], made["lane_check"], table,
                num_units=self._total_units,
            )  # fmt: skip
            if num_lanes >= 0:
                break
            table = np.full(4 * len(table), -1, dtype=np.int64)
        if wrong >= 0:
            raise GraphError(f"{self._source}: rank {rank} unit {first_index + wrong} waits for unit "
                             f"{c['awaits'][wrong]}, which is no communication unit before it",
                             hint="the trace is damaged: record it again")  # fmt: skip
        rows = np.flatnonzero(made["lane_of"] >= 0)
        heads = made["lane_row"][made["lane_of"][rows]]
        is_message = c["kind"][rows] != UnitKind.COLLECTIVE
        return _Structure(
            program=self._program(rank, c, made, num_holds, first_index), rows=rows, heads=heads,
            lanes=RankLanes.of(rank, c, made, num_lanes), messages=rows[is_message], message_heads=heads[is_message],
        )  # fmt: skip

    def _program(
        self, rank: int, c: RankColumns, made: Mapping[str, Array], num_holds: int, first_index: int
    ) -> int:  # fmt: skip
        if self._with_sizes:
            count = np.where(_RECEIVED[c["op"]], c["num_elements_out"], c["num_elements_in"])
            if (wrong := (count != ABSENT) & ((count < 0) | (count > _MAX_ELEMENTS)) & (made["lane_of"] >= 0)).any():
                row = int(wrong.argmax())
                raise GraphError(f"{self._source}: rank {rank} unit {first_index + row} moves {count[row]} elements",
                                 hint="the trace is damaged: record it again")  # fmt: skip
            item = _ITEM_BYTES[c["dtype"]]
            is_unknown = (count == ABSENT) | ((item == 0) & (count > 0))
            num_bytes = np.where(is_unknown, -1, np.where(is_unknown, 0, count) * item)
        else:
            num_bytes = np.full(len(c["kind"]), -1, dtype=np.int64)
        part: dict[str, Any] = {name: c[name] for name in ("kind", "phase", "op", "step", "microbatch", "label")}
        for name, known in (("phase", _PHASES), ("op", _OPS)):  # they are places in tables, and names
            part[name] = np.where(np.isin(c[name], known), c[name], 0).astype(np.uint8)
        part.update({name: made[name] for name in ("lane_of", "ordinal", "awaited", "hold")}, num_bytes=num_bytes)
        digest = hashlib.blake2b(digest_size=16)
        for name, values in part.items():
            if name not in ("ordinal", "hold"):  # they follow from the others
                digest.update(values.data)
        key = digest.digest()
        if key not in self._programs:
            self._programs[key] = len(self._programs)
            kept = {name: values.copy() for name, values in part.items()}
            kept["num_holds"] = num_holds
            _, which, kept["bounds"], kept["bound_is_whole"] = step_bounds(
                c["step"], c["phase"], np.array([0, len(c["kind"])])
            )
            kept["bound_step"] = which.astype(np.int32)
            del kept["step"]
            self._parts.append(kept)
        return self._programs[key]

    def _keep(self, weights: tuple[Int64Array, Int64Array]) -> int:
        main, side = weights
        self._main.append(main)
        self._side.append(side)
        self._provenance.append(np.full(len(main), MEASURED, dtype=np.uint8))
        self._num_weights += len(main)
        return self._num_weights - len(main)

    def _weigh(self, rank: int, c: RankColumns, first_index: int) -> int:
        size = len(c["kind"])
        if self.is_measured:
            self._times.append((c["start_ns"], c["end_ns"]))
            self._num_weights += size
            return self._num_weights - size
        arrays = [c[name] for name in CALIBRATED_COLUMNS]
        known: int | None = self._recalled.get("weights", arrays)
        if known is not None:
            return known
        main, side = calibrated_weights(
            c, rank=rank, first_index=first_index, source=self._source, transfers_needed=self._transfers_needed,
            recalled=self._recalled,
        )  # fmt: skip
        provenance = c[PROVENANCE]
        # equal weights are kept once: looked for by two sums, compared whole
        key = (size, int(main.sum()), int(side.sum()), int(main[::3].sum()))
        like = self._weights.get(key)
        if like is not None:
            base, at = like
            is_same = np.array_equal(main, self._main[at]) and np.array_equal(side, self._side[at])
            if is_same and np.array_equal(provenance, self._provenance[at]):
                return self._recalled.put("weights", arrays, base)
        base = self._num_weights
        self._weights[key] = base, len(self._main)
        self._num_weights += size
        self._main.append(main)
        self._side.append(side)
        self._provenance.append(provenance)
        return base

    def finish(self, reader: TraceReader, *, labels: tuple[str, ...]) -> SimJob:
        """Match the operations of all ranks, and find the weights of measured traces."""
        ranks = np.array(self._ranks, dtype=np.int64)
        groups = {**reader.groups, **self._alone}
        lanes = self._lanes.match(ranks, groups, source=self._source)
        by_rank = np.array(self._by_rank, dtype=np.int64).reshape(-1, 5).T.copy()
        job = SimJob(
            source=self._source, graph_kind=self._graph_kind, world_size=reader.world_size,
            groups=groups, metadata=dict(reader.metadata), ranks=ranks, lanes=lanes,
            programs=_joined(self._parts, labels), program=by_rank[0], weight_base=by_rank[1],
            origin_ns=by_rank[2] - by_rank[2].min(), stage=by_rank[3],
            memory_bytes=by_rank[4], main=_concatenated(self._main), side=_concatenated(self._side),
            chained=np.ones(max(lanes.num_collectives, 1), dtype=np.uint8),
            provenance=_concatenated(self._provenance, np.uint8), scale=np.ones(len(ranks), dtype=np.float64),
        )  # fmt: skip
        for at, rows in self._unchained.items():
            event, row = events_of(job, at)
            job.chained[event[np.isin(row, rows)]] = 0
        if self._num_alone:
            what = counted(self._num_alone, "communication unit", separator=",")
            job = replace(job, notes=(*job.notes, f"{what} without a peer or a sequence number: they wait for nobody"))
        if not self._times:  # weights are there
            return job
        has_streams = any(reader.metadata.get(f"rank.{rank}.times") == "device" for rank in self._ranks)
        return observed_weights(job, self._times, has_streams=has_streams)


def _memory_of(memory: Int64Array) -> int:
    """The most that a unit of a rank had; ``UNKNOWN_BYTES`` where it is not known any more, -1 where nobody looked."""
    return UNKNOWN_BYTES if bool((memory == UNKNOWN_BYTES).any()) else max(int(memory.max(initial=-1)), -1)


def _has_any(column: npt.NDArray[np.uint8]) -> bool:
    return bool(column.any())


def _rows_unchained(kind: npt.NDArray[np.uint8], free_of: npt.NDArray[np.uint8]) -> Int64Array:
    return np.flatnonzero((kind == UnitKind.COLLECTIVE) & ((free_of & FreeOf.BEFORE) > 0))


def _first_stage(stage: npt.NDArray[np.int32]) -> int:
    named = stage[stage != ABSENT32]
    return int(named[0]) if len(named) else -1


def _concatenated(parts: list[Any], dtype: type[np.generic] = np.int64) -> Array:
    joined = np.concatenate(parts) if parts else np.zeros(0, dtype=dtype)
    parts.clear()
    return joined


def _joined(parts: list[dict[str, Any]], labels: tuple[str, ...]) -> Programs:
    def offsets(name: str) -> Int64Array:
        return np.concatenate([[0], np.cumsum([len(part[name]) for part in parts])]).astype(np.int64)

    names = ("kind", "phase", "op", "lane_of", "ordinal", "awaited", "hold", "microbatch", "label", "num_bytes",
             "bounds", "bound_step", "bound_is_whole")  # fmt: skip
    row_offsets, bound_offsets = offsets("kind"), offsets("bounds")
    num_holds = np.array([part["num_holds"] for part in parts], dtype=np.int64)
    columns = {name: np.concatenate([part.pop(name) for part in parts]) for name in names}
    return Programs(offsets=row_offsets, bound_offsets=bound_offsets, num_holds=num_holds, labels=labels, **columns)
