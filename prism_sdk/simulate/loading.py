"""Reads a trace file into a ``SimJob``, one rank at a time, so that memory holds each role only once.

It gives no times and explains no faults of a graph: where ranks do not fit together, ``prism_sdk.graph`` says how.
"""

from __future__ import annotations

import gc
import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from prism_sdk.errors import UsageError
from prism_sdk.graph.errors import BareGraphError, GraphError
from prism_sdk.graph.job import JobGraph, note_on_steps
from prism_sdk.simulate.job import SimJob, SourceRows
from prism_sdk.simulate.loader import Loader, RankColumns
from prism_sdk.simulate.recalled import Recalled, fixed
from prism_sdk.simulate.weights import FREE_OF, LEAD, PROVENANCE, find_rows
from prism_sdk.wording import counted
from prismtrace import ABSENT, GraphKind, TableKind, TraceReader
from prismtrace.model import BEGINS_KEY
from prismtrace.model import COLUMNS as MODEL_COLUMNS
from prismtrace.tables import UnitTable

__all__ = ["COLUMNS", "RankColumns", "load"]

#: Changes the columns of a rank before they are taken up: (rank, columns) -> columns.
Change: TypeAlias = Callable[[int, RankColumns], RankColumns]

#: What is read of each unit.
COLUMNS: dict[str, type[np.generic]] = {
    "kind": np.uint8, "phase": np.uint8, "op": np.uint8, "dtype": np.uint8, "step": np.int32, "start_ns": np.int64,
    "end_ns": np.int64, "group_id": np.int64, "seq": np.int64, "peer": np.int64, "tag": np.int64, "awaits": np.int64,
    "transfer_ns": np.int64, "gap_ns": np.int64, "microbatch": np.int32, "stage": np.int32, "memory_bytes": np.int64,
    "num_elements_in": np.int64, "num_elements_out": np.int64,
}  # fmt: skip
_NAMES = (*COLUMNS, PROVENANCE, LEAD, FREE_OF)
_TYPES: dict[str, type[np.generic]] = {
    **COLUMNS, PROVENANCE: np.uint8, LEAD: np.int64, FREE_OF: np.uint8, "label": np.int32,
}  # fmt: skip
_SIZES = ("dtype", "num_elements_in", "num_elements_out", "microbatch")
_MAIN, _SIDE, _ROW = "main", "side", "row"  # columns that a change moves along with the others
_OF_RECORDING = "computing takes what it took in the recording, where ranks ran by turns: it is not calibrated"
_ABSENT = {spec.name: spec.default for spec in MODEL_COLUMNS[TableKind.UNITS] if spec.name in COLUMNS}
_MOST_DEFAULTS = 512
_MOST_DIGITS = 18  # of 64 bits


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


class _Taker:
    """Reads the columns of one rank after the other, and gives the same arrays for what ranks have in common."""

    def __init__(
        self, reader: TraceReader, *, steps: range | None, change: Change | None, with_sizes: bool,
        unchanged: SimJob | None,
    ) -> None:  # fmt: skip
        """``unchanged``: the job without the change, where weights follow from when all ranks did what."""
        self._reader, self._steps, self._change, self._with_sizes = reader, steps, change, with_sizes
        self._unchanged = unchanged
        self._names = [name for name in _NAMES if with_sizes or name not in _SIZES]
        if with_sizes:
            self._names.append("label")
        self._defaults: dict[tuple[str, int], npt.NDArray[Any]] = {}
        self._recalled = Recalled()
        self.labels: dict[str, int] = {}
        self.rows: list[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]] = []
        """By rank that was changed: where its units come from, and their memory (``SourceRows``)."""
        self._known_rows: dict[bytes, tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]] = {}

    def take(self, rank: int, loader: Loader) -> None:
        """Read a rank, change it, and hand it to the loader."""
        table = self._reader.units(rank, steps=self._steps, columns=self._names)
        columns, first_index = self._columns(table), table.first_index
        weights, peak = None, -1
        if self._reader.num_steps(rank):
            peaks = self._reader.steps(rank, columns=["memory_peak_bytes"]).memory_peak_bytes
            peak = int(peaks.max(initial=-1))
        if self._change is not None:
            columns = {name: column.copy() for name, column in columns.items()}
            awaits = columns["awaits"]
            columns["awaits"] = np.where(awaits >= first_index, awaits - first_index, ABSENT)
            first_index = 0
            before = int(columns["memory_bytes"].max(initial=-1))
            if self._unchanged is not None:
                _, own = find_rows(self._unchanged, int(np.searchsorted(self._unchanged.ranks, rank)))
                columns |= {_MAIN: self._unchanged.main[own], _SIDE: self._unchanged.side[own]}
            columns = self._change(rank, columns | {_ROW: np.arange(len(table))})
            self._keep_rows(columns.pop(_ROW), columns["memory_bytes"])
            if self._unchanged is not None:
                weights = columns.pop(_MAIN), columns.pop(_SIDE)
            after = int(columns["memory_bytes"].max(initial=-1))
            if peak >= 0 and before >= 0 and after >= 0:  # of steps: it changes by as much as that of units
                peak += after - before
            columns = {name: fixed(column, _TYPES[name]) for name, column in columns.items()}
        begins = self._reader.metadata.get(BEGINS_KEY.format(rank), "") if table.first_index == 0 else ""
        loader.add(rank, columns, first_index=first_index, memory_peak_bytes=peak, weights=weights,
                   begins_ns=int(begins) if begins.isdecimal() and len(begins) < _MOST_DIGITS else 0)  # fmt: skip

    def _keep_rows(self, rows: npt.NDArray[np.int64], memory: npt.NDArray[np.int64]) -> None:
        """Kept once for all ranks that have the same."""
        digest = hashlib.blake2b(rows.tobytes() + memory.tobytes(), digest_size=16).digest()
        self.rows.append(self._known_rows.setdefault(digest, (rows, memory)))

    def _columns(self, table: UnitTable) -> RankColumns:
        size = len(table)
        present = table.columns()
        columns: RankColumns = {}
        for name, dtype in _TYPES.items():
            column = present.get(name)
            if column is None:
                columns[name] = self._default(name, size)
            elif isinstance(column, np.ndarray):
                columns[name] = fixed(column, dtype) if column.dtype == dtype else self._cast(column, dtype)
            else:
                columns[name] = self._label(column)
        return columns

    def _cast(self, column: npt.NDArray[Any], dtype: type[np.generic]) -> npt.NDArray[Any]:
        known: npt.NDArray[Any] | None = self._recalled.get(dtype, (column,))
        return self._recalled.put(dtype, (column,), fixed(column, dtype)) if known is None else known

    def _default(self, name: str, size: int) -> npt.NDArray[Any]:
        """The column that says nothing."""
        if (name, size) not in self._defaults:
            if len(self._defaults) >= _MOST_DEFAULTS:
                self._defaults.clear()
            value = -1 if name == "label" else _ABSENT.get(name, 0)
            self._defaults[name, size] = fixed(np.full(size, value, dtype=_TYPES[name]), _TYPES[name])
        return self._defaults[name, size]

    def _label(self, column: Any) -> npt.NDArray[Any]:
        """Labels by their number in ``labels``; what is remembered holds the texts, so that their identity stays."""
        what = ("label", id(column.values))
        known: tuple[npt.NDArray[Any], Any] | None = self._recalled.get(what, (column.codes,))
        if known is None:
            codes = [self.labels.setdefault(text, len(self.labels)) for text in column.values]
            found = fixed(np.array([*codes, -1], dtype=np.int32)[column.codes], np.int32)
            known = self._recalled.put(what, (column.codes,), (found, column.values))
        return known[0]


def load(
    source: str | os.PathLike[str] | TraceReader,
    *,
    ranks: Sequence[int] | None = None,
    steps: range | None = None,
    change: Change | None = None,
    with_sizes: bool = True,
    transfers_needed: bool = True,
    unchanged: SimJob | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> SimJob:
    """Read a trace for simulation.

    Weights of a calibrated graph are its own; those of an observed or emulated one are taken from its times, so that
    the simulation of what did not change gives these times again.

    Args:
        source: the path of a trace, or an open reader.
        ranks: only these; operations are then joined over them alone, as if the others were never late.
        steps: only these steps.
        change: changes the columns of each rank before they are taken up.
        unchanged: with `change`: the same ranks and steps without it, where they were loaded already.
        with_sizes: also read sizes, microbatches and labels, which what-if changes and cluster profiles need.
        transfers_needed: False where a cluster profile will give the transfers that the graph lacks.
        progress: is told how many ranks of how many are read.

    Raises:
        MissingTimingError: a duration is absent; `BareGraphError` of a bare graph whose transfers nothing gives.
        GraphError: or a subclass: ranks do not fit together.
    """
    if not isinstance(source, TraceReader):
        with TraceReader(os.fspath(source), allow_unfinished=True) as reader:
            return load(reader, ranks=ranks, steps=steps, change=change, with_sizes=with_sizes,
                        transfers_needed=transfers_needed, unchanged=unchanged, progress=progress)  # fmt: skip
    reader = source
    is_bare = reader.graph_kind is GraphKind.BARE
    if is_bare and transfers_needed:
        raise BareGraphError(f"{reader.path} is a bare graph: its times mean nothing",
                             hint="calibrate it first (prism calibrate), or observe it; with a cluster profile "
                                  "(--cluster) computing takes what it took in the recording")  # fmt: skip
    chosen = tuple(reader.ranks) if ranks is None else tuple(sorted(set(ranks)))
    unknown = sorted(set(chosen) - set(reader.ranks))
    if unknown:
        raise UsageError(f"{reader.path} has no rank {unknown[0]}", hint="`prism info` lists the ranks")
    loader = Loader(source=reader.path, graph_kind=reader.graph_kind, transfers_needed=transfers_needed,
                    is_measured=reader.graph_kind is not GraphKind.CALIBRATED and not is_bare,
                    with_sizes=with_sizes, total_units=sum(reader.num_units(rank) for rank in chosen))  # fmt: skip
    if change is None or not loader.is_measured:
        unchanged = None
    elif unchanged is None:  # when units ran says nothing once there are others
        unchanged = load(reader, ranks=ranks, steps=steps, with_sizes=with_sizes, transfers_needed=transfers_needed)
    taker = _Taker(reader, steps=steps, change=change, with_sizes=with_sizes, unchanged=unchanged)
    with _no_collector():
        for number, rank in enumerate(chosen):
            taker.take(rank, loader)
            if progress is not None:
                progress(number + 1, len(chosen))
    if chosen and not loader.has_units and steps is not None:
        raise UsageError(f"{reader.path} has no units in steps {steps.start}:{steps.stop}",
                         hint="`prism info` says which steps there are")  # fmt: skip
    if not chosen or not loader.has_units:
        raise GraphError(f"{reader.path} has no units at all: there is nothing to simulate")
    try:
        job = loader.finish(reader, labels=tuple(taker.labels))
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
    notes += note_on_steps(reader, ranks=chosen, phase=job.programs.phase)
    source_rows = SourceRows(steps=steps, rank=job.ranks, rows=tuple(taker.rows) if change is not None else None)
    return replace(job, source_rows=source_rows, notes=(*job.notes, *notes, *((_OF_RECORDING,) if is_bare else ())))
