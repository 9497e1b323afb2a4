"""Holds a job as the simulator needs it: the structure of each role once, weights, and how operations meet.

It reads no file (``loading``) and gives no times (``simulation``).

- A *program* is what ranks of one role do: the rows of ``UnitTable`` without group ids, peers and times. Equal programs
  are kept once, however many ranks have them.
- A *lane* is what counts one sequence: the collectives of a group, or the messages from one rank to another with one
  tag. The k-th operation of a lane is one *event*: number ``lane_event + k``. Events of collectives come first.
- Each row has two *weights*, int64 ns. Equal sets of weights are kept once, too.

  | row | main | side |
  |---|---|---|
  | COMPUTE | duration | gap before it |
  | WAIT | the least time that it takes | from the completion to the host running again |
  | COLLECTIVE, SEND, RECV | transfer; below 0: *detached*, complete -1 - main after its post | gap before the post |

The model is that of ``prism_sdk.graph.timing``, with two additions that measured traces need: the gap before a post,
and detached members, which were complete before the last arrival (the root of a broadcast, say): they wait for nobody.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from prism_sdk.graph.timing import job_steps_ns
from prismtrace import GraphKind, ProcessGroup

__all__ = ["ALONE", "Lanes", "Links", "Programs", "SimJob", "Slowdown", "SourceRows"]

Int64Array = npt.NDArray[np.int64]
Int32Array = npt.NDArray[np.int32]
UInt8Array = npt.NDArray[np.uint8]
#: The backend of groups of one rank that stand for communication that does not say what it meets.
ALONE = "prism.alone"


@dataclass(frozen=True, kw_only=True)
class Programs:
    """The rows of all programs one after the other; program p has rows ``offsets[p]:offsets[p + 1]``."""

    offsets: Int64Array
    kind: UInt8Array
    phase: UInt8Array
    op: UInt8Array
    #: The lane of a communication row among those of its rank, else -1; and its place in that lane.
    lane_of: Int32Array
    ordinal: Int32Array
    #: The row, counted in the program, that a WAIT row awaits, else -1.
    awaited: Int32Array
    #: Where the completion of a row that is awaited is kept, else -1.
    hold: Int32Array
    num_holds: Int64Array
    microbatch: Int32Array
    #: An index into ``labels``, -1 without a label.
    label: Int32Array
    #: Bytes that a communication row moves (those it contributes, or receives), -1 where unknown.
    num_bytes: Int64Array
    #: Ends of the steps of program p, as rows of the program: ``bounds[bound_offsets[p]:bound_offsets[p + 1]]``.
    bound_offsets: Int64Array
    bounds: Int64Array
    bound_step: Int32Array
    #: Whether the step has an optimizer, so that its time counts.
    bound_is_whole: npt.NDArray[np.bool_]
    labels: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def rows(self, program: int) -> slice:
        """The rows of a program."""
        return slice(int(self.offsets[program]), int(self.offsets[program + 1]))

    def bounds_of(self, program: int) -> slice:
        """The places of a program in the arrays of step bounds."""
        return slice(int(self.bound_offsets[program]), int(self.bound_offsets[program + 1]))


@dataclass(frozen=True, kw_only=True)
class Lanes:
    """How ranks meet. Rank position p has its lanes at ``offsets[p]:offsets[p + 1]`` of the arrays by rank and lane."""

    offsets: Int64Array
    #: By rank and lane: which lane of the job, and the event of its first operation.
    lane: Int64Array
    event: Int64Array
    #: By lane of the job: group, source and destination rank (-1 for collectives), tag, members, operations.
    group_id: npt.NDArray[np.uint64]
    source: Int64Array
    destination: Int64Array
    tag: Int64Array
    num_members: Int64Array
    num_events: Int64Array
    first_event: Int64Array
    first_seq: Int64Array

    @property
    def num_collectives(self) -> int:
        """How many events are collectives; they have the smallest numbers."""
        return int(self.num_events[self.source < 0].sum())

    @property
    def total_events(self) -> int:
        """How many events the job has."""
        return int(self.num_events.sum())


@dataclass(frozen=True, kw_only=True)
class Links:
    """The links that lanes use; ``prism_sdk.simulate.links`` says what sharing them means.

    Lane l uses ``links[first_link[l]:first_link[l + 1]]``, from ``first_network[l]`` on those of the network.
    """

    links: Int64Array
    first_link: Int64Array
    first_network: Int64Array
    #: By lane, a row of ``per_byte``: kinds of groups by operation, ns that a byte of a unit keeps a link of NVLink
    #: and one of the network busy.
    lane_kind: Int64Array
    per_byte: npt.NDArray[np.float64]
    #: The lanes that use link i, ``users[first_user[i]:first_user[i + 1]]``: twice the lane, plus 1 for the network.
    first_user: Int64Array
    users: Int64Array


@dataclass(frozen=True, kw_only=True)
class Slowdown:
    """Factors on the computing of a rank over simulated time: from ``from_ns[i]`` on it takes ``factor[i]`` as long."""

    from_ns: tuple[int, ...]
    factor: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class SourceRows:
    """Which units of the trace those of a job are."""

    #: The steps that were read; None: all.
    steps: range | None = None
    #: By rank position, the rank of the trace.
    rank: Int64Array
    #: By rank position, where units were left out, reordered or repeated: their places among those that were read, and
    #: their memory (``memory.UNKNOWN_BYTES`` where it is not known any more).
    rows: tuple[tuple[Int64Array, Int64Array], ...] | None = field(default=None, repr=False)
    #: Whether ranks were copied or left out, so that ranks and groups have other numbers, and groups other sizes.
    is_copied: bool = False

    @property
    def are_others(self) -> bool:
        """Whether ranks do something else than in the trace, or are others."""
        return self.rows is not None or self.is_copied

    def copied(self, positions: Int64Array) -> SourceRows:
        """Those of a job with the ranks at these positions."""
        rows = None if self.rows is None else tuple(self.rows[at] for at in positions.tolist())
        return replace(self, rank=self.rank[positions], rows=rows, is_copied=True)


@dataclass(frozen=True, kw_only=True)
class SimJob:
    """A job that can be simulated. Arrays are not to be written to; ``dataclasses.replace`` makes variants."""

    source: str
    graph_kind: GraphKind
    world_size: int
    groups: Mapping[int, ProcessGroup]
    metadata: Mapping[str, str] = field(repr=False)
    ranks: Int64Array
    programs: Programs
    lanes: Lanes
    #: By rank position: program, first weight, clock at the start; stage and memory peak (-1: unknown).
    program: Int64Array
    weight_base: Int64Array
    origin_ns: Int64Array
    stage: Int64Array
    memory_bytes: Int64Array
    main: Int64Array
    side: Int64Array
    #: By collective: whether it waits for the one before it in its group.
    chained: UInt8Array
    #: By weight: where it comes from (the enumeration Provenance of the registry).
    provenance: UInt8Array
    #: By rank position: factor on computing, and factors over time.
    scale: npt.NDArray[np.float64]
    slowdowns: Mapping[int, Slowdown] = field(default_factory=dict)
    #: The links that transfers share; None: every transfer is as if it were alone.
    links: Links | None = field(default=None, repr=False)
    source_rows: SourceRows | None = field(default=None, repr=False)
    #: Mean step time that the trace itself shows, where its times were measured.
    recorded_step_ns: float | None = None
    num_detached: int = 0
    notes: tuple[str, ...] = ()

    @property
    def num_ranks(self) -> int:
        """How many ranks are loaded."""
        return len(self.ranks)

    @property
    def sizes(self) -> Int64Array:
        """Units by rank position."""
        sizes: Int64Array = np.diff(self.programs.offsets)[self.program]
        return sizes

    def steps_ns(self, end_ns: Int64Array) -> Int64Array:
        """The times of the job's whole steps but the first; ``end_ns``: when each step of each rank ended, in order."""
        p = self.programs
        bounds = [p.bounds_of(int(program)) for program in self.program]
        return job_steps_ns(np.concatenate([p.bound_step[one] for one in bounds]), end_ns,
                            np.concatenate([p.bound_is_whole[one] for one in bounds]))[1]  # fmt: skip

    @cached_property
    def alone_ids(self) -> npt.NDArray[np.uint64]:
        """The groups of communication that does not say what it meets: no trace has them."""
        return np.array([one for one, group in self.groups.items() if group.backend == ALONE], dtype=np.uint64)

    def __len__(self) -> int:
        return int(self.sizes.sum())

    def position(self, rank: int) -> int:
        """The position of a rank; -1 where it is not loaded."""
        at = int(np.searchsorted(self.ranks, rank))
        return at if at < len(self.ranks) and self.ranks[at] == rank else -1
