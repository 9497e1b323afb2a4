"""Reads a trace file into a ``SimJob``, one rank at a time, so that memory holds each role only once.

It gives no times and explains no faults of a graph: where ranks do not fit together, ``prism_sdk.graph`` says how.
"""

from __future__ import annotations

import gc
import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from prism_sdk.errors import UsageError
from prism_sdk.graph.errors import GraphError, MissingTimingError
from prism_sdk.graph.job import JobGraph
from prism_sdk.simulate import kernel
from prism_sdk.simulate.compiling import call
from prism_sdk.simulate.job import Programs, SimJob
from prism_sdk.simulate.lanes import LaneTable
from prism_sdk.simulate.memory import UNKNOWN_BYTES
from prism_sdk.simulate.weights import calibrated_weights, observed_weights
from prism_sdk.wording import counted
from prismtrace import ABSENT, ABSENT32, DType, GraphKind, Op, Phase, TableKind, TraceReader
from prismtrace.model import COLUMNS as MODEL_COLUMNS

__all__ = ["COLUMNS", "RankColumns", "load"]

Int64Array = npt.NDArray[np.int64]
#: The columns of one rank, as they are simulated.
RankColumns: TypeAlias = dict[str, npt.NDArray[Any]]
#: Changes the columns of a rank before they are taken up: (rank, columns) -> columns.
Change: TypeAlias = Callable[[int, RankColumns], RankColumns]

#: What is read of each unit.
COLUMNS: dict[str, type[np.generic]] = {
    "kind": np.uint8, "phase": np.uint8, "op": np.uint8, "dtype": np.uint8, "step": np.int32, "start_ns": np.int64,
    "end_ns": np.int64, "group_id": np.int64, "seq": np.int64, "peer": np.int64, "tag": np.int64, "awaits": np.int64,
    "transfer_ns": np.int64, "gap_ns": np.int64, "microbatch": np.int32, "stage": np.int32, "memory_bytes": np.int64,
    "num_elements_in": np.int64, "num_elements_out": np.int64,
}  # fmt: skip
PROVENANCE = "prism.provenance"
LEAD = "prism.lead_ns"
_TYPES: dict[str, type[np.generic]] = {**COLUMNS, PROVENANCE: np.uint8, LEAD: np.int64}
_NAMES = tuple(_TYPES)
_SIZES = ("dtype", "num_elements_in", "num_elements_out", "microbatch")
_OF_RECORDING = "computing takes what it took in the recording, where ranks ran by turns: it is not calibrated"
_DETAILS = ("microbatch", "label", "num_bytes")
_ABSENT = {spec.name: spec.default for spec in MODEL_COLUMNS[TableKind.UNITS] if spec.name in COLUMNS}
_ITEM_BYTES = np.zeros(256, dtype=np.int64)
for _dtype in DType:
    _ITEM_BYTES[int(_dtype)] = _dtype.itemsize_bytes
_RECEIVED = np.isin(np.arange(256), [Op.BROADCAST, Op.SCATTER, Op.RECV])


class Loader:
    """Takes up ranks one after the other; ``finish`` gives the job."""

    def __init__(
        self, *, source: str, graph_kind: GraphKind, is_measured: bool, transfers_needed: bool, total_units: int,
        with_sizes: bool,
    ) -> None:  # fmt: skip
        self._source = source
        self._graph_kind = graph_kind
        self._is_measured = is_measured
        self._total_units = total_units
        self._with_sizes = with_sizes
        self._nothing = np.zeros(0, dtype=np.int64)
        self._transfers_needed = transfers_needed
        self._programs: dict[bytes, int] = {}
        self._parts: list[dict[str, Any]] = []
        self._weights: dict[bytes, int] = {}
        self._main: list[Int64Array] = []
        self._side: list[Int64Array] = []
        self._provenance: list[npt.NDArray[np.uint8]] = []
        self._num_weights = 0
        self._times: list[tuple[Int64Array, Int64Array]] = []
        self._ranks: list[int] = []
        self._by_rank: list[tuple[int, int, int, int, int]] = []
        self._lanes = LaneTable()
        self._size = 0
        self._work: dict[str, npt.NDArray[Any]] = {}
        self.labels: dict[str, int] = {}

    def _room(self, size: int) -> dict[str, npt.NDArray[Any]]:
        """Arrays to work in, at least so long; made anew only for a longer rank."""
        if size > self._size or not self._work:
            self._size = max(size, 2 * self._size, 1)
            work: dict[str, npt.NDArray[Any]] = {
                name: np.zeros(self._size, dtype=np.int64)
                for name in ("last_wait", "free", "lane_row", "lane_count", "lane_check")
            }
            for name in ("lane_of", "ordinal", "awaited", "hold"):
                work[name] = np.zeros(self._size, dtype=np.int32)
            self._work = work
            self._nothing = np.full(self._size, -1, dtype=np.int64)
        return self._work

    def add(self, rank: int, c: RankColumns, *, first_index: int, memory_peak_bytes: int) -> None:
        """Take up the units of one rank."""
        size = len(c["kind"])
        work = self._room(size)
        outputs = {name: array[:size] for name, array in work.items()}
        table = np.full(256, -1, dtype=np.int64)
        while True:
            num_lanes, num_holds, wrong = call(
                kernel.localise, c["kind"], c["group_id"], c["peer"], c["tag"], c["seq"], c["awaits"], first_index,
                outputs["lane_of"], outputs["ordinal"], outputs["awaited"], outputs["hold"], outputs["last_wait"],
                outputs["free"], outputs["lane_row"], outputs["lane_count"], outputs["lane_check"], table,
                num_units=self._total_units,
            )  # fmt: skip
            if num_lanes >= 0:
                break
            table = np.full(4 * len(table), -1, dtype=np.int64)
        if wrong >= 0:
            raise GraphError(f"{self._source}: rank {rank} unit {first_index + wrong} waits for unit "
                             f"{c['awaits'][wrong]}, which is no communication unit before it",
                             hint="the trace is damaged: record it again")  # fmt: skip
        self._lanes.add(rank, c, outputs, num_lanes)
        program = self._program(c, outputs, num_holds)
        base = self._weigh(rank, c, first_index)
        stages = c["stage"][c["stage"] != ABSENT32]
        is_unknown = bool((c["memory_bytes"] == UNKNOWN_BYTES).any())
        memory = -1 if is_unknown else max(int(c["memory_bytes"].max(initial=-1)), memory_peak_bytes)
        origin = 0
        if self._is_measured:
            known = c["start_ns"][c["start_ns"] != ABSENT]
            origin = int(known[0]) if len(known) else 0
        self._ranks.append(rank)
        self._by_rank.append((program, base, origin, int(stages[0]) if len(stages) else -1, memory))

    def _program(self, c: RankColumns, made: Mapping[str, npt.NDArray[Any]], num_holds: int) -> int:
        if self._with_sizes:
            count = np.where(_RECEIVED[c["op"]], c["num_elements_out"], c["num_elements_in"])
            num_bytes = np.where(count == ABSENT, -1, np.maximum(count, 0) * _ITEM_BYTES[c["dtype"]])
        else:
            num_bytes = self._nothing[: len(c["kind"])]
        part: dict[str, Any] = {name: c[name] for name in ("kind", "phase", "op", "step", "microbatch", "label")}
        part.update({name: made[name] for name in ("lane_of", "ordinal", "awaited", "hold")}, num_bytes=num_bytes)
        digest = hashlib.blake2b(digest_size=16)
        for name, values in part.items():
            # ordinal and hold follow from the others, and what was not read is the same everywhere
            if name not in ("ordinal", "hold") and (self._with_sizes or name not in _DETAILS):
                digest.update(values.data)
        key = digest.digest()
        if key not in self._programs:
            self._programs[key] = len(self._programs)
            kept = {name: values.copy() for name, values in part.items()}
            kept["num_holds"] = num_holds
            kept["bounds"], kept["bound_step"], kept["bound_is_whole"] = step_bounds(c["step"], c["phase"])
            del kept["step"]
            self._parts.append(kept)
        return self._programs[key]

    def _weigh(self, rank: int, c: RankColumns, first_index: int) -> int:
        size = len(c["kind"])
        if self._is_measured:
            self._times.append((c["start_ns"].copy(), c["end_ns"].copy()))
            self._num_weights += size
            return self._num_weights - size
        main, side = calibrated_weights(
            c, rank=rank, first_index=first_index, source=self._source, transfers_needed=self._transfers_needed
        )
        provenance = c[PROVENANCE]
        digest = hashlib.blake2b(main.data, digest_size=16)
        digest.update(side.data)
        digest.update(provenance.data)
        key = digest.digest()
        if key not in self._weights:
            self._weights[key] = self._num_weights
            self._num_weights += size
            self._main.append(main)
            self._side.append(side)
            self._provenance.append(provenance.copy())
        return self._weights[key]

    def finish(self, reader: TraceReader) -> SimJob:
        """Match the operations of all ranks, and find the weights of measured traces."""
        ranks = np.array(self._ranks, dtype=np.int64)
        lanes = self._lanes.match(ranks, reader.groups, source=self._source)
        by_rank = np.array(self._by_rank, dtype=np.int64).reshape(-1, 5).T.copy()
        job = SimJob(
            source=self._source, graph_kind=self._graph_kind, world_size=reader.world_size,
            groups=dict(reader.groups), metadata=dict(reader.metadata), ranks=ranks, lanes=lanes,
            programs=_joined(self._parts, tuple(self.labels)), program=by_rank[0], weight_base=by_rank[1],
            origin_ns=by_rank[2], stage=by_rank[3],
            memory_bytes=by_rank[4], main=_concatenated(self._main), side=_concatenated(self._side),
            chained=np.ones(max(lanes.num_collectives, 1), dtype=np.uint8),
            provenance=_concatenated(self._provenance, np.uint8), scale=np.ones(len(ranks), dtype=np.float64),
        )  # fmt: skip
        if not self._is_measured:
            return job
        has_streams = any(reader.metadata.get(f"rank.{rank}.times") == "device" for rank in self._ranks)
        return observed_weights(job, self._times, has_streams=has_streams)


def _concatenated(parts: list[Any], dtype: type[np.generic] = np.int64) -> npt.NDArray[Any]:
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


def step_bounds(
    step: npt.NDArray[np.int32], phase: npt.NDArray[np.uint8]
) -> tuple[Int64Array, npt.NDArray[np.int32], npt.NDArray[np.bool_]]:
    """Where steps end (the row behind the last one), which they are, and which are whole: those with an optimizer."""
    if not len(step):
        return np.zeros(0, np.int64), np.zeros(0, np.int32), np.zeros(0, np.bool_)
    running = np.maximum.accumulate(step)
    ends = np.append(np.flatnonzero(running[1:] != running[:-1]) + 1, len(step)).astype(np.int64)
    optimizes = np.concatenate([[0], np.cumsum(phase == Phase.OPTIMIZER)])
    has_optimizer = np.diff(optimizes[ends], prepend=0) > 0
    # without any optimizer every step counts
    return ends, running[ends - 1], has_optimizer if has_optimizer.any() else np.ones(len(ends), dtype=np.bool_)


@contextmanager
def _no_collector() -> Iterator[None]:
    """Many small objects without cycles are made here: looking for cycles costs a tenth of the time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _take(
    reader: TraceReader, rank: int, loader: Loader, *, steps: range | None, change: Change | None, with_sizes: bool
) -> None:
    names = [name for name in _NAMES if with_sizes or name not in _SIZES]
    if with_sizes:
        names.append("label")
    table = reader.units(rank, steps=steps, columns=names)
    present = set(table.column_names)
    columns: RankColumns = {
        name: np.array(table[name], dtype=dtype)
        if name in present
        else np.full(len(table), _ABSENT.get(name, 0), dtype=dtype)
        for name, dtype in _TYPES.items()
    }
    columns["label"] = np.full(len(table), -1, dtype=np.int32)
    if with_sizes and "label" in present:
        codes = [loader.labels.setdefault(text, len(loader.labels)) for text in table.label.values]
        columns["label"] = np.array([*codes, -1], dtype=np.int32)[table.label.codes]
    peak = -1
    if reader.num_steps(rank):
        peak = int(reader.steps(rank, columns=["memory_peak_bytes"]).memory_peak_bytes.max(initial=-1))
    first_index = table.first_index
    if change is not None:
        awaits = columns["awaits"]
        columns["awaits"] = np.where(awaits >= first_index, awaits - first_index, ABSENT)
        first_index = 0
        before = int(columns["memory_bytes"].max(initial=-1))
        columns = change(rank, columns)
        after = int(columns["memory_bytes"].max(initial=-1))
        if peak >= 0 and before >= 0 and after >= 0:  # of steps: it changes by as much as that of units
            peak += after - before
    loader.add(rank, columns, first_index=first_index, memory_peak_bytes=peak)


def load(
    source: str | os.PathLike[str] | TraceReader,
    *,
    ranks: Sequence[int] | None = None,
    steps: range | None = None,
    change: Change | None = None,
    with_sizes: bool = True,
    transfers_needed: bool = True,
) -> SimJob:
    """Read a trace for simulation.

    Weights of a calibrated graph are its own; those of an observed or emulated one are taken from its times, so that
    the simulation of what did not change gives these times again.

    Args:
        source: the path of a trace, or an open reader.
        ranks: only these; operations are then joined over them alone, as if the others were never late.
        steps: only these steps.
        change: changes the columns of each rank before they are taken up.
        with_sizes: also read sizes, microbatches and labels, which what-if changes and cluster profiles need.
        transfers_needed: False where a cluster profile will give the transfers that the graph lacks.

    Raises:
        MissingTimingError: a bare graph whose transfers nothing gives, or a duration is absent.
        GraphError: or a subclass: ranks do not fit together.
    """
    if not isinstance(source, TraceReader):
        with TraceReader(os.fspath(source), allow_unfinished=True) as reader:
            return load(reader, ranks=ranks, steps=steps, change=change, with_sizes=with_sizes,
                        transfers_needed=transfers_needed)  # fmt: skip
    reader = source
    is_bare = reader.graph_kind is GraphKind.BARE
    if is_bare and transfers_needed:
        raise MissingTimingError(f"{reader.path} is a bare graph: its times mean nothing",
                                 hint="calibrate it first (prism calibrate), or observe it; with a cluster profile "
                                      "(--cluster) computing takes what it took in the recording")  # fmt: skip
    chosen = tuple(reader.ranks) if ranks is None else tuple(sorted(set(ranks)))
    unknown = sorted(set(chosen) - set(reader.ranks))
    if unknown:
        raise UsageError(f"{reader.path} has no rank {unknown[0]}", hint="`prism info` lists the ranks")
    loader = Loader(source=reader.path, graph_kind=reader.graph_kind, transfers_needed=transfers_needed,
                    is_measured=reader.graph_kind is not GraphKind.CALIBRATED and not is_bare,
                    with_sizes=with_sizes, total_units=sum(reader.num_units(rank) for rank in chosen))  # fmt: skip
    with _no_collector():
        for rank in chosen:
            _take(reader, rank, loader, steps=steps, change=change, with_sizes=with_sizes)
    if chosen and not loader._num_weights and steps is not None:
        raise UsageError(f"{reader.path} has no units in steps {steps.start}:{steps.stop}",
                         hint="`prism info` says which steps there are")  # fmt: skip
    if not chosen or not loader._num_weights:
        raise GraphError(f"{reader.path} has no units at all: there is nothing to simulate")
    try:
        job = loader.finish(reader)
    except GraphError as error:
        if reader.unfinished:
            error.hint = "the file is unfinished: --steps A:B takes the steps that all ranks have as a whole"
            raise
        # the general matching names each fault, rank by rank; it needs more memory, so it is asked only now
        if change is None:
            JobGraph.load(reader, ranks=ranks, steps=steps)
        raise
    notes = ["the file is unfinished: what was written before the end is simulated"] if reader.unfinished else []
    if reader.world_size > len(chosen):
        world = counted(reader.world_size, "rank", separator=",")
        notes.append(f"{len(chosen):,} of {world} are simulated, as if they never waited for the others: the figures "
                     "are not those of the whole job")  # fmt: skip
    return replace(job, notes=(*job.notes, *notes, *((_OF_RECORDING,) if is_bare else ())))
