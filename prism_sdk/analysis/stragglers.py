"""Finds ranks that make others wait, and why: slower computing, slower network, a slower host, or more work.

It runs no what-if: how much faster the job would be without a straggler is for a simulation to say.

- ``waited_ns`` of a rank: the sum over collectives of last arrival less own arrival.
- ``caused_wait_ns``: the sum over collectives at which the rank arrived last of its arrival less the one before it:
  by so much the group would have begun earlier if this rank had come with the next to last.
- ``excess``: by how much a rank's mean step spends more than the median of its peers in computing, in exposed
  communication (network), in gaps and idle time (host). *Peers* are the ranks of the same stage, or all.

A rank is a straggler if what it caused, or its excess in computing, is above ``threshold`` of its steps. Its cause is
the largest excess, or *upstream* where no excess is above half of the threshold: it was late because of what it waited
for itself. For computing the cause is *imbalance* where the work differs: the whole stage computes longer than the
median stage (forward and backward of microbatches, where units say so) by more than the rank exceeds its stage, or the
rank is not the slow one in most steps (four of five). Otherwise it is *compute*: the same work, slower, step after
step. The distinction by persistence and by stage follows
Lin et al., "Understanding Stragglers in Large Model Training Using What-if Analysis" (OSDI 2025).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from prism_sdk.analysis.breakdown import PARTS, Breakdown
from prism_sdk.analysis.frames import ResultFrames, columns_of
from prism_sdk.analysis.job import Job
from prismtrace import ABSENT, ABSENT32, UnitKind

__all__ = ["RankDelay", "Stragglers", "stragglers_of"]

Int64Array = npt.NDArray[np.int64]

#: In this share of the steps a rank must be above its peers' median to count as slow in itself.
PERSISTENT = 0.8


@dataclass(frozen=True, kw_only=True)
class RankDelay:
    """How one rank stands to its peers. Times a step are means over the steady steps."""

    rank: int
    stage: int | None
    num_collectives: int
    num_last: int
    waited_ns: int
    caused_wait_ns: int
    excess_compute_ns: float
    excess_network_ns: float
    excess_host_ns: float
    #: How much longer the rank's stage computes than the median stage; 0 without stages.
    stage_excess_ns: float
    #: Share of the steps in which the rank computes longer than its peers' median.
    persistence: float
    is_straggler: bool
    #: compute, network, host, imbalance, upstream; None where the rank is no straggler.
    cause: str | None


@dataclass(frozen=True, kw_only=True)
class Stragglers(ResultFrames):
    """All ranks: stragglers first, those with the largest excess before those that were late for others' reasons."""

    ranks: tuple[RankDelay, ...]
    threshold: float
    num_collectives: int

    def columns(self) -> dict[str, Any]:
        """One row a rank, for data frames."""
        return columns_of(self.ranks)

    @property
    def found(self) -> tuple[RankDelay, ...]:
        """The stragglers among them."""
        return tuple(rank for rank in self.ranks if rank.is_straggler)


def stragglers_of(job: Job, parts: Breakdown, *, threshold: float = 0.02) -> Stragglers:
    """How each rank stands to its peers.

    Args:
        job: the loaded trace; where communication is not joined, ranks are told by their excess alone.
        parts: its breakdown.
        threshold: the share of its steps that a rank must cost others to be a straggler.
    """
    num_ranks = len(job.ranks)
    count, last, waited, caused = (values[job.place] for values in _arrivals(job))
    ranks, means = parts.ranks_parts_ns()
    place = {rank: at for at, rank in enumerate(job.ranks)}
    at = np.array([place[rank] for rank in ranks.tolist()], dtype=np.int64)
    by_rank = np.zeros((num_ranks, len(PARTS)))
    by_rank[at] = means
    stage = _stages(job)
    index = {name: number for number, name in enumerate(PARTS)}
    compute = by_rank[:, index["compute"]]
    network = by_rank[:, index["exposed_communication"]]
    host = by_rank[:, index["launch_gap"]] + by_rank[:, index["idle"]]
    work = _microbatch_work(job, parts, compute)
    medians = [{value: float(np.median(values[stage == value])) for value in np.unique(stage).tolist()}
               for values in (work, compute, network, host)]  # fmt: skip
    middle, *medians = medians
    typical = float(np.median(list(middle.values())))
    steady = parts.windows.is_steady
    busy = np.zeros(num_ranks)
    busy[at] = np.bincount(np.searchsorted(ranks, parts.windows.rank[steady]),
                           parts.windows.length_ns[steady].astype(float), minlength=len(ranks))  # fmt: skip
    share = _persistence(parts, stage, num_ranks)
    found = []
    for position, rank in enumerate(job.ranks):
        excess = [float(values[position] - usual[int(stage[position])])
                  for values, usual in zip((compute, network, host), medians, strict=True)]  # fmt: skip
        of_stage = middle[int(stage[position])] - typical
        step = float(by_rank[position].sum())
        is_straggler = busy[position] > 0 and (
            caused[position] > threshold * busy[position] or max(excess[0], of_stage) > threshold * step
        )
        found.append(RankDelay(
            rank=rank, stage=int(stage[position]) if stage[position] != ABSENT32 else None,
            num_collectives=int(count[position]), num_last=int(last[position]), waited_ns=int(waited[position]),
            caused_wait_ns=int(caused[position]), excess_compute_ns=excess[0], excess_network_ns=excess[1],
            excess_host_ns=excess[2], stage_excess_ns=of_stage, persistence=float(share[position]),
            is_straggler=bool(is_straggler),
            cause=_cause(excess, of_stage, float(share[position]), threshold * step / 2) if is_straggler else None,
        ))  # fmt: skip
    found.sort(key=lambda r: (not r.is_straggler, r.cause == "upstream", -_largest(r), r.rank))
    return Stragglers(ranks=tuple(found), threshold=threshold, num_collectives=int(count.max(initial=0)))


def _largest(rank: RankDelay) -> float:
    return max(rank.excess_compute_ns, rank.stage_excess_ns, rank.excess_network_ns, rank.excess_host_ns)


def _microbatch_work(job: Job, parts: Breakdown, compute: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """(R,) mean time a step in units of microbatches; what optimizers do, and wait for inside, differs by stage."""
    c = job.graph.columns
    steady = np.unique(parts.windows.step[parts.windows.is_steady])
    rows = np.flatnonzero(job.is_timed & (c["kind"] == UnitKind.COMPUTE) & (c["microbatch"] != ABSENT32)
                          & np.isin(c["step"], steady))  # fmt: skip
    position = np.searchsorted(job.graph.offsets, rows, side="right") - 1
    of_place = np.zeros(len(job.graph.ranks))
    np.add.at(of_place, position, (c["end_ns"] - c["start_ns"])[rows])
    total = of_place[job.place]
    return np.where(total > 0, total / max(len(steady), 1), compute)


def _cause(excess: list[float], of_stage: float, persistence: float, least: float) -> str:
    compute, network, host = excess
    largest = max(compute, of_stage, network, host)
    if largest <= least:
        return "upstream"
    if largest in (network, host) and largest > max(compute, of_stage):
        return "network" if network >= host else "host"
    if of_stage > compute:
        return "imbalance"
    return "compute" if persistence >= PERSISTENT else "imbalance"


def _arrivals(job: Job) -> tuple[Int64Array, Int64Array, Int64Array, Int64Array]:
    """For each rank of the graph: collectives, how often last, time waited, waiting caused.

    Whole events of known posts count.
    """
    graph = job.graph
    num_ranks = len(graph.ranks)
    count, last, waited, caused = (np.zeros(num_ranks, dtype=np.int64) for _ in range(4))
    if not graph.num_events:
        return count, last, waited, caused
    rows, begins, sizes = graph.event_rows, graph.event_offsets[:-1], np.diff(graph.event_offsets)
    posts = graph.columns["start_ns"][rows]
    num_alike = np.ones(len(rows), dtype=np.int64)
    if job.fold is not None:
        num_alike = job.fold.num_alike[job.fold.pair_of_row[rows]]
    known = np.logical_and.reduceat(posts != ABSENT, begins) & graph.event_is_whole
    known &= np.add.reduceat(num_alike, begins) > 1
    known &= graph.columns["kind"][rows[begins]] == UnitKind.COLLECTIVE
    event = np.repeat(np.arange(len(begins)), sizes)
    inside = known[event]
    rows, posts, event, num_alike = rows[inside], posts[inside], event[inside], num_alike[inside]
    position = np.searchsorted(graph.offsets, rows, side="right") - 1
    order = np.lexsort((posts, event))
    posts, event, position, num_alike = posts[order], event[order], position[order], num_alike[order]
    ends = np.flatnonzero(np.append(event[1:] != event[:-1], True)) if len(event) else np.zeros(0, dtype=np.int64)
    latest = np.zeros(len(begins), dtype=np.int64)
    latest[event[ends]] = posts[ends]
    np.add.at(count, position, 1)
    np.add.at(waited, position, latest[event] - posts)
    # of several that are alike none is last alone
    margin = np.where(num_alike[ends] > 1, 0, posts[ends] - posts[ends - 1])
    np.add.at(last, position[ends], margin > 0)
    np.add.at(caused, position[ends], margin)
    return count, last, waited, caused


def _stages(job: Job) -> Int64Array:
    """(R,) the stage of each rank: the smallest that it has; ABSENT32 without."""
    graph = job.graph
    stage = graph.columns["stage"].astype(np.int64)
    found = np.full(len(graph.ranks), np.iinfo(np.int64).max)
    rows = np.flatnonzero(stage != ABSENT32)
    np.minimum.at(found, np.searchsorted(graph.offsets, rows, side="right") - 1, stage[rows])
    return np.where(found == np.iinfo(np.int64).max, ABSENT32, found)[job.place]


def _persistence(parts: Breakdown, stage: Int64Array, num_ranks: int) -> npt.NDArray[np.float64]:
    """(R,) the share of steady steps in which a rank computes longer than the median of its stage."""
    steady = parts.windows.is_steady
    position, step = parts.windows.position[steady], parts.windows.step[steady]
    compute = parts.parts_ns[steady, 0]
    above, total = np.zeros(num_ranks), np.zeros(num_ranks)
    order = np.lexsort((step, stage[position]))
    position, step, compute = position[order], step[order], compute[order]
    keys = np.stack([stage[position], step], axis=1)
    changed = np.flatnonzero(np.append(True, (keys[1:] != keys[:-1]).any(axis=1)))[: len(keys)].tolist()
    for begin, end in zip(changed, [*changed[1:], len(keys)], strict=True):
        mine = position[begin:end]
        above[mine] += compute[begin:end] > np.median(compute[begin:end])
        total[mine] += 1
    result: npt.NDArray[np.float64] = above / np.maximum(total, 1)
    return result
