"""Learns from NCCL's flight recorder how long each collective took on its own stream.

Responsible for matching the recorder's entries with the rank's units; torch keeps the recorder, with times by CUDA
events where TORCH_NCCL_ENABLE_TIMING is set, and its watchdog reads them without holding up anything.
"""

from __future__ import annotations

import pickle
from collections import defaultdict, deque
from itertools import islice
from typing import Any

from prismtrace.model import Op

ENVIRONMENT = {  # both names of the size: it was renamed
    "TORCH_NCCL_ENABLE_TIMING": "1", "TORCH_FR_BUFFER_SIZE": "1024",  # asking for 8,192 entries took 0.2 s
}  # fmt: skip

_NAMES = {
    Op.ALL_REDUCE: ("all_reduce", "allreduce"),
    Op.ALL_GATHER: ("all_gather", "_all_gather", "allgather", "_allgather", "_broadcast_oop"),
    Op.REDUCE_SCATTER: ("reduce_scatter", "_reduce_scatter", "_reduce_oop"), Op.BROADCAST: ("broadcast", "_broadcast"),
    Op.REDUCE: ("reduce", "_reduce"), Op.ALL_TO_ALL: ("all_to_all", "alltoall"), Op.GATHER: ("gather",),
    Op.SCATTER: ("scatter",), Op.BARRIER: ("all_reduce", "barrier"), Op.SEND: ("send",), Op.RECV: ("recv",),
}  # fmt: skip
_MOST_NEW = 512  # calls before the recorder is asked: it has these, and those before, whose times may have been open
_AHEAD = 16  # so many units may turn out to have no entry
_KEPT = 100_000  # units without an entry, before the oldest are given up


class Durations:
    """The units of one rank that NCCL runs, and their durations as they become known."""

    def __init__(self) -> None:
        # group name -> (unit, operation, whether it is part of a block) of the entries to come, in order
        self._expected: dict[str, deque[tuple[int, Op, bool]]] = defaultdict(deque)
        self._open: dict[int, list[int]] = {}  # record -> units that it stands for, without a duration so far
        self._seen = -1  # the last record that was matched
        self._num_new = 0  # entries expected since the recorder was last asked
        self._is_lost = False  # what the recorder has got since is unknown, and nobody wanted it
        self._block: dict[str, list[int]] = defaultdict(list)  # units of a coalesced block that is not closed
        self.known: dict[int, int] = {}  # unit -> ns

    def expect(
        self, unit: int, group_name: str, op: Op, *, num_entries: int = 1, in_block: bool = False, wanted: bool = True
    ) -> None:
        """NCCL was asked for this unit's operation: as so many calls, which are coalesced if they are in a block.

        `wanted`: some unit has no other source of its end. Where none is for long, the recorder is not asked at all.
        """
        if wanted:
            if self._is_lost:
                self._find_again(num_entries)
        elif self._is_lost or self._num_new >= _MOST_NEW:
            self._is_lost = True
            self._expected.clear()
            self._block.clear()
            return
        self._expected[group_name].extend([(unit, op, in_block or num_entries > 1)] * num_entries)
        self._num_new += num_entries
        if wanted and self._num_new >= _MOST_NEW:
            self.collect()

    def _find_again(self, num_entries: int) -> None:
        """The last entries are those of the call that was just made."""
        self._is_lost, self._num_new = False, 0
        last = max((int(entry["record_id"]) for entry in _entries()), default=-1)
        self._seen = max(self._seen, last - num_entries)

    def collect(self) -> None:
        """Take what the recorder has by now."""
        self._num_new = 0
        if self._is_lost or (not self._open and not any(self._expected.values())):
            return
        for entry in _entries():
            record, duration = int(entry["record_id"]), entry.get("duration_ms")
            if record > self._seen:
                self._seen = record
                self._match(record, str(entry["process_group"][0]), str(entry["profiling_name"]).removeprefix("nccl:"))
            if duration is not None and record in self._open:
                self.known |= dict.fromkeys(self._open.pop(record), round(float(duration) * 1e6))
        for stale in list(self._open)[: max(len(self._open) - _KEPT, 0)]:
            del self._open[stale]

    def _match(self, record: int, group: str, name: str) -> None:
        if name == "coalesced":  # it alone has the times of what was coalesced
            self._open[record] = self._block.pop(group, [])
            return
        expected = self._expected[group]
        for position, (unit, op, in_block) in enumerate(islice(expected, _AHEAD)):
            if not name.startswith(_NAMES.get(op, ())):
                continue  # an entry that nobody asked for, or units that have none
            for _ in range(position + 1):
                expected.popleft()
            if in_block:
                self._block[group].append(unit)
            else:
                self._open[record] = [unit]
            return


def _entries() -> list[dict[str, Any]]:
    """The recorder's entries, oldest first; none where torch has no such recorder."""
    from torch._C import _distributed_c10d as c10d

    dump = getattr(c10d, "_dump_nccl_trace", None)
    if dump is None:
        return []
    entries: list[dict[str, Any]] = pickle.loads(dump(True, False, False)).get("entries", [])
    return sorted(entries, key=lambda entry: int(entry["record_id"]))
