"""Finds kernel stamps that belong to another kernel, and gives each kernel its own back where that can be told.

It fits no clock; `clock` does, with what is left here.

NCCL's kernels number their works on each channel, and write start and end into one of 64 slots by that number. The host
numbers works too, to know which slot to read, but counts some works not at all: a message to oneself is copied by the
kernel and has no event. From then on the host reads, on that channel, the slot of an earlier work, already full. Such
a stamp is proven wrong without knowing the clock: its GPU time lies before one that the host had already heard of when
it launched the kernel. How many works went uncounted follows from the messages to oneself in the records, so every
stamp can be found under a later event. What cannot be explained this way and is proven wrong is left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from prism_sdk.nccl.format import EventType
from prism_sdk.nccl.records import RecordFile
from prism_sdk.nccl.tasks import Tasks
from prismtrace import ABSENT

__all__ = ["Ceiling", "StampCheck", "make_ceiling", "own_stamps"]

_NUM_SLOTS = 64
_DRIFT_PARTS = 10_000  # two clocks that are in order run apart by less than one part in this many
_TOLERANCE_NS = 1000
_MAX_CANDIDATES = 64
_MARGIN = 2

Int64s = NDArray[np.int64]


@dataclass(frozen=True)
class StampCheck:
    """Kernel channels of one file: `num_moved` got other stamps than NCCL gave them, `num_dropped` have none now.

    `num_wrong` works had stamps that are proven wrong, after moving.
    """

    num_kernels: int
    num_moved: int
    num_dropped: int
    num_wrong: int


@dataclass(frozen=True)
class Ceiling:
    """The highest that ``host - gpu`` can be at any GPU time, from what the host heard and when.

    Each stamp was written before the host read it; between stamps the clocks run apart by less than 100 ppm.
    """

    gpu_ns: Int64s
    from_before: Int64s
    from_behind: Int64s

    def latest(self, gpu_ns: Int64s) -> Int64s:
        """The latest host times that GPU times can be."""
        place = np.searchsorted(self.gpu_ns, gpu_ns, side="right")
        before, behind = np.maximum(place - 1, 0), np.minimum(place, len(self.gpu_ns) - 1)
        # a later GPU time bounds an earlier one, and the other way round, each loosened by the drift in between
        limit = np.minimum(
            np.where(place > 0, self.from_before[before] + _drifted(gpu_ns - self.gpu_ns[before]), _HIGHEST),
            np.where(place < len(self.gpu_ns), self.from_behind[behind] + _drifted(self.gpu_ns[behind] - gpu_ns),
                     _HIGHEST),
        )  # fmt: skip
        found: Int64s = gpu_ns + limit
        return found

    def exceeded_by(self, gpu_ns: Int64s, host_ns: Int64s) -> NDArray[np.bool_]:
        """Whether GPU times cannot be at or after host times: by then the host knew of a later GPU time."""
        exceeded: NDArray[np.bool_] = host_ns > self.latest(gpu_ns) + _TOLERANCE_NS
        return exceeded


_HIGHEST = int(np.iinfo(np.int64).max // 2)


def _drifted(span_ns: Int64s) -> Int64s:
    # whole numbers throughout: floats of epoch times are 256 ns apart
    found: Int64s = -(-span_ns // _DRIFT_PARTS)
    return found


def make_ceiling(gpu_ns: Int64s, host_ns: Int64s) -> Ceiling:
    """From stamps of one GPU and the host times at which they were known."""
    order = np.argsort(gpu_ns, kind="stable")
    at, most = gpu_ns[order], (host_ns - gpu_ns)[order]
    since = _drifted(at - at[0]) if len(at) else at
    before = np.minimum.accumulate(most - since) + since
    behind = (np.minimum.accumulate((most + since)[::-1]))[::-1] - since
    return Ceiling(at, before, behind)


def own_stamps(
    file: RecordFile, tasks: Tasks, ceilings: Mapping[int, Ceiling], *, is_shifted: bool
) -> tuple[RecordFile, StampCheck]:
    """The same records with each kernel's own stamps; absent where they are another's and its own are not there.

    Args:
        file: the records of one process.
        tasks: its tasks, with the stamps that NCCL gave.
        ceilings: communicator number -> what is known of the clock of its GPU.
        is_shifted: whether this NCCL does not count messages to oneself; else stamps are only left out.
    """
    events = file.events
    kernels = events.rows_of(EventType.KERNEL_CH)
    owner = _owners(file, tasks, kernels)
    kernels, owner = kernels[owner >= 0], owner[owner >= 0]
    start, stop = events.gpu_start_ns.copy(), events.gpu_stop_ns.copy()
    if not len(kernels):
        return file, StampCheck(0, 0, 0, 0)
    # where events are missing on purpose or for want of room, the later event may not be the next one
    may_move = is_shifted and file.sample_every <= 1 and not file.num_lost_events and not file.num_lost_stops
    lanes = np.stack([events.comm[kernels].astype(np.int64), events.a[kernels].astype(np.int64)], axis=1)
    found, lane = np.unique(lanes, axis=0, return_inverse=True)
    hidden = {comm: _hidden_works(file, tasks, comm) for comm in np.unique(found[:, 0]).tolist()}
    num_wrong = 0
    by_lane = np.argsort(lane.ravel(), kind="stable")
    for mine, (comm, channel) in zip(
        np.split(by_lane, np.cumsum(np.bincount(lane.ravel(), minlength=len(found)))[:-1]), found.tolist(), strict=True
    ):
        ceiling = ceilings.get(comm)
        if ceiling is None or not len(mine):
            continue
        keys = _keys(tasks.group[owner[mine]], tasks.event[owner[mine]])
        mine, keys = mine[order := np.lexsort((kernels[mine], keys))], keys[order]
        rows = kernels[mine]
        works = _Works.of(start[rows], stop[rows], keys, tasks, owner[mine])
        found_here = _best(works, hidden[comm] if may_move else _NO_HIDDEN, channel, ceiling)
        num_wrong += found_here.num_wrong
        start[rows], stop[rows] = found_here.start[works.of_row], found_here.stop[works.of_row]
    known = events.gpu_start_ns[kernels] != ABSENT
    dropped = known & (start[kernels] == ABSENT)
    moved = known & ~dropped & (start[kernels] != events.gpu_start_ns[kernels])
    check = StampCheck(
        int(np.count_nonzero(known)), int(np.count_nonzero(moved)), int(np.count_nonzero(dropped)), num_wrong
    )
    return replace(file, events=replace(events, gpu_start_ns=start, gpu_stop_ns=stop)), check


def _owners(file: RecordFile, tasks: Tasks, kernels: Int64s) -> Int64s:
    place = np.full(len(file.events) + 1, -1, np.int64)
    place[tasks.event] = np.arange(len(tasks))
    return place[file.events.parent[kernels]]


def _keys(group: Int64s, event: Int64s) -> Int64s:
    """What says in which order tasks were numbered: their launch; the task itself where no launch is known."""
    return np.where(group >= 0, group, event)


@dataclass(frozen=True)
class _Hidden:
    """Works that the host did not count, in order, and over how many channels messages of some sizes went."""

    keys: Int64s
    sizes: Int64s
    launched: Int64s
    others: tuple[tuple[int, int], ...]
    """(bytes, channels) of messages to others."""

    def from_size(self, least: int) -> _Hidden:
        """Those of at least this size."""
        kept = self.sizes >= least
        return replace(self, keys=self.keys[kept], sizes=self.sizes[kept], launched=self.launched[kept])

    def least_size(self, channel: int) -> int:
        """From which size on a message to oneself should use a channel."""
        if channel == 0:
            return 0
        return min((size for size, num in self.others if num > channel), default=int(np.iinfo(np.int64).max))


def _hidden_works(file: RecordFile, tasks: Tasks, comm: int) -> _Hidden:
    """Messages to oneself without a kernel are what the host does not count."""
    own = file.comms[comm].rank if comm in file.comms else None
    sends = np.flatnonzero((tasks.comm == comm) & tasks.is_message & (tasks.func == "Send"))
    mine = sends[(tasks.peer[sends] == own) & (tasks.num_kernels[sends] == 0)]
    order = np.argsort(keys := _keys(tasks.group[mine], tasks.event[mine]), kind="stable")
    others = sends[tasks.num_kernels[sends] > 0]
    pairs = set(zip(tasks.num_bytes[others].tolist(), tasks.num_kernels[others].tolist(), strict=True))
    mine = mine[order]
    return _Hidden(keys[order], tasks.num_bytes[mine], tasks.launched_ns[mine], tuple(sorted(pairs)))


_NONE = np.zeros(0, np.int64)
_NO_HIDDEN = _Hidden(_NONE, _NONE, _NONE, ())


@dataclass(frozen=True)
class _Works:
    """The works of one channel of one communicator, as the host counts them; `of_row` maps kernel events to them.

    A send and a receive may be one work with two events.
    """

    start: Int64s
    stop: Int64s
    key: Int64s
    launched: Int64s
    of_row: Int64s

    @classmethod
    def of(cls, start: Int64s, stop: Int64s, keys: Int64s, tasks: Tasks, owner: Int64s) -> _Works:
        func = tasks.func[owner]
        same = np.zeros(len(start), np.bool_)
        for place in range(1, len(start)):
            same[place] = (
                not same[place - 1] and keys[place] == keys[place - 1] and start[place] == start[place - 1]
                and stop[place] == stop[place - 1] and {func[place], func[place - 1]} == {"Send", "Recv"}
            )  # fmt: skip
        first = np.flatnonzero(~same)
        return cls(start[first], stop[first], keys[first], tasks.launched_ns[owner[first]], np.cumsum(~same) - 1)

    def sources(self, shift: Int64s, launches: Int64s, ceiling: Ceiling) -> Int64s:
        """For each work the one under whose event its stamps were read; -1 where none was.

        `launches`: of all works of the channel as the GPU counts them, in order.
        """
        place = np.arange(len(self.start))
        # a slot holds the last of the works that share it: of those launched by then, and before the work's own
        rounds = np.where(shift > 0, (shift - 1) // _NUM_SLOTS, 0)
        known = np.flatnonzero((rounds > 0) & (self.start != ABSENT))
        num_launched = np.searchsorted(launches, ceiling.latest(self.start[known]), side="right")
        rounds[known] = np.minimum(rounds[known], np.maximum(num_launched - 1 - known, 0) // _NUM_SLOTS)
        held = place + _NUM_SLOTS * rounds
        order = np.argsort(held, kind="stable")
        wanted = place + shift
        source = order[np.searchsorted(held[order], wanted).clip(0, max(len(held) - 1, 0))]
        return np.where(held[source] == wanted, source, -1)

    def judged(self, hidden: _Hidden, ceiling: Ceiling) -> _Judged:
        """Start and stop of each work if `hidden` works were not counted."""
        shift = np.searchsorted(hidden.keys, self.key, side="right").astype(np.int64)
        launches = np.sort(np.concatenate([self.launched, hidden.launched]))
        source = self.sources(shift, launches, ceiling)
        start = np.where(source >= 0, self.start[source], ABSENT)
        stop = np.where(source >= 0, self.stop[source], ABSENT)
        checked = np.flatnonzero((start != ABSENT) & (self.launched != ABSENT))
        bad = checked[ceiling.exceeded_by(start[checked], self.launched[checked])]
        start[bad] = stop[bad] = ABSENT
        return _Judged(start, stop, len(bad))


@dataclass(frozen=True)
class _Judged:
    """Stamps of the works of one channel, absent where none was read or what was read is proven wrong: `num_wrong`."""

    start: Int64s
    stop: Int64s
    num_wrong: int


def _best(works: _Works, hidden: _Hidden, channel: int, ceiling: Ceiling) -> _Judged:
    """The stamps for the most likely set of works that the host did not count on this channel.

    NCCL spreads a message over the more channels the larger it is, from channel 0 on for one to oneself: so a size
    decides for a channel whether it is used. That size is taken from messages to others, unless another one leaves
    clearly fewer stamps proven wrong.
    """
    sizes = sorted(set(hidden.sizes.tolist()), reverse=True)
    sizes = sizes[:: max(1, -(-len(sizes) // _MAX_CANDIDATES))]
    best = works.judged(hidden.from_size(hidden.least_size(channel)), ceiling)
    for least in (np.iinfo(np.int64).max, *sizes):
        if not best.num_wrong:
            break
        found = works.judged(hidden.from_size(int(least)), ceiling)
        if found.num_wrong + _MARGIN < best.num_wrong:
            best = found
    return best
