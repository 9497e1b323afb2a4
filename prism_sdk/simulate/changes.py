"""What-if changes of weights: slow ranks, scaled or equal units, random stragglers, skewed experts.

They leave the structure of a job as it is (``restructure`` and ``replicas`` change that). Each is a frozen value with
``apply(job) -> job``, so changes can be combined in any order and number.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from prism_sdk.bounds import MAX_TIME_NS
from prism_sdk.errors import UsageError
from prism_sdk.simulate.job import SimJob, Slowdown
from prism_sdk.simulate.selection import Selection
from prism_sdk.simulate.variants import VariantWeights
from prism_sdk.simulate.weights import events_of, find_rows
from prismtrace import Op, UnitKind

__all__ = ["Change", "Equal", "ExpertSkew", "Scale", "Slow", "Straggle", "Throttle", "with_prompt_sends"]

Int64Array = npt.NDArray[np.int64]


class Change(Protocol):
    """One what-if change."""

    def apply(self, job: SimJob) -> SimJob:
        """The job with the change."""


def _scaled(values: Int64Array, factor: float | npt.NDArray[np.float64]) -> Int64Array:
    # detached members count from -1 downwards: what is scaled is their time after the post
    own = values < 0
    time = np.where(own, -1 - values, values)
    longer = np.floor(time * factor + 0.5)
    if not np.all(longer < MAX_TIME_NS):
        raise UsageError("a change makes units take more than a hundred years", hint="take a smaller factor or spread")
    scaled = longer.astype(np.int64)
    return np.where(own, -1 - scaled, scaled)


def with_prompt_sends(job: SimJob) -> SimJob:
    """The job, whose sends take no longer than their receives.

    How long a send lasted in a trace is until the program asked for its end, or until the receiver had come: neither
    stays when ranks come at other times. A receive lasts from when both were there.
    """
    p, lanes = job.programs, job.lanes
    received = np.full(lanes.total_events + 1, np.iinfo(np.int64).max)
    places = []
    for at in range(job.num_ranks):
        rows, own = find_rows(job, at)
        event, row = events_of(job, at)
        kind, main = p.kind[rows][row], job.main[own][row]
        is_known = (kind == UnitKind.RECV) & (main >= 0)
        np.minimum.at(received, event[is_known], main[is_known])
        is_send = kind == UnitKind.SEND
        places.append((own.start + row[is_send], event[is_send]))
    main = job.main.copy()
    for place, event in places:
        main[place] = np.minimum(main[place], received[event])
    return replace(job, main=main)


def _computes(job: SimJob, position: int) -> npt.NDArray[np.bool_]:
    mask: npt.NDArray[np.bool_] = job.programs.kind[find_rows(job, position)[0]] == UnitKind.COMPUTE
    return mask


def _positions(job: SimJob, where: Selection) -> list[int]:
    """The ranks meant, by position; where there is none, nothing would be changed, which nobody asks for."""
    found = [at for at in range(job.num_ranks) if where.rank_key(job, at)]
    if not found:
        raise UsageError(f"no rank of {job.source} is {where.text}", hint="`prism info` lists the ranks")
    return found


def _no_unit(job: SimJob, where: Selection) -> UsageError:
    hint = "`prism cat` shows kinds, phases, operations"
    return UsageError(f"no unit of {job.source} is {where.text}", hint=hint)


@dataclass(frozen=True)
class Slow:
    """Computing of the selected units takes ``factor`` times as long: a slow rank, a slow stage, some steps of them."""

    where: Selection
    factor: float

    def apply(self, job: SimJob) -> SimJob:
        """Scale computing; whole ranks cost nothing."""
        positions = _positions(job, self.where)
        if self.where.is_of_ranks_only:
            scale = job.scale.copy()
            scale[positions] *= self.factor
            return replace(job, scale=scale)
        return _rescale(job, self.where, self.factor, only_compute=True)


@dataclass(frozen=True)
class Throttle:
    """Computing of ranks takes ``factor`` times as long from some simulated time to another (thermal throttling)."""

    where: Selection
    factor: float
    from_ns: int
    to_ns: int | None = None

    def apply(self, job: SimJob) -> SimJob:
        """Add the window to those that a rank has; windows of one rank must not overlap."""
        slowdowns = dict(job.slowdowns)
        for at in _positions(job, self.where):
            rank = int(job.ranks[at])
            old = slowdowns.get(rank, Slowdown(from_ns=(), factor=()))
            times, factors = list(old.from_ns), list(old.factor)
            if times and times[-1] > self.from_ns:
                raise UsageError(f"slow times of rank {rank} overlap or are not in order")
            if times and times[-1] == self.from_ns:
                times.pop()
                factors.pop()
            times.append(self.from_ns)
            factors.append(self.factor)
            if self.to_ns is not None:
                times.append(self.to_ns)
                factors.append(1.0)
            slowdowns[rank] = Slowdown(from_ns=tuple(times), factor=tuple(factors))
        return replace(job, slowdowns=slowdowns)


@dataclass(frozen=True)
class Scale:
    """The selected units take ``factor`` times as long: durations, transfers, least waits; 0 removes their time."""

    where: Selection
    factor: float

    def apply(self, job: SimJob) -> SimJob:
        """Scale the main weights."""
        return _rescale(job, self.where, self.factor, only_compute=False)


def _rescale(job: SimJob, where: Selection, factor: float, *, only_compute: bool) -> SimJob:
    out = VariantWeights(job)
    num = 0
    for at in range(job.num_ranks):
        key = (where.rank_key(job, at), _lane_key(job, at) if where.groups is not None else ())
        if not key[0]:
            continue
        if out.known(at, key):
            continue
        mask = where.mask(job, at)
        if only_compute:
            mask &= _computes(job, at)
        if not mask.any():
            continue
        num += int(mask.sum())
        _, weights = find_rows(job, at)
        main = job.main[weights].copy()
        main[mask] = _scaled(main[mask], factor)
        out.put(at, key, main, job.side[weights], job.provenance[weights])
    if not num:
        raise _no_unit(job, where)
    return out.finish()


def _lane_key(job: SimJob, position: int) -> tuple[int, ...]:
    lanes = job.lanes.lane[job.lanes.offsets[position] : job.lanes.offsets[position + 1]]
    return tuple(job.lanes.group_id[lanes].tolist())


@dataclass(frozen=True)
class Equal:
    """The selected units take equally long: the mean of all units of the same label (of communication the median).

    This is the ideal timeline of the straggler study: no unit is slower than its like. Units without a label are alike
    if kind, phase and operation are equal. ``but`` keeps some of them as they are.
    """

    where: Selection
    but: Selection | None = None
    #: Operations that are communication although they are computing units (a clipping that synchronises, say).
    median_labels: frozenset[str] = frozenset()

    def apply(self, job: SimJob) -> SimJob:
        """Give each kind of unit one weight over all ranks and steps; gaps and idle least waits stay."""
        keys: list[Int64Array] = []
        chosen: list[npt.NDArray[np.bool_]] = []
        for at in range(job.num_ranks):
            rows, _ = find_rows(job, at)
            p = job.programs
            code = (p.label[rows].astype(np.int64) + 1) << 24 | p.kind[rows].astype(np.int64) << 16
            code |= np.where(p.label[rows] < 0, p.phase[rows].astype(np.int64) << 8 | p.op[rows], 0)
            keys.append(code)
            chosen.append(self.where.mask(job, at) & (p.kind[rows] != UnitKind.WAIT))
        everything = np.concatenate(keys)
        values = np.concatenate([job.main[find_rows(job, at)[1]] for at in range(job.num_ranks)])
        new = values.copy()
        kinds = np.concatenate([job.programs.kind[find_rows(job, at)[0]] for at in range(job.num_ranks)])
        labels = np.concatenate([job.programs.label[find_rows(job, at)[0]] for at in range(job.num_ranks)])
        picked = np.concatenate(chosen)
        if not picked.any():
            raise _no_unit(job, self.where)
        if self.but is not None and not any(self.but.mask(job, at).any() for at in range(job.num_ranks)):
            raise _no_unit(job, self.but)
        medians = {code for code, name in enumerate(job.programs.labels) if name in self.median_labels}
        for code in np.unique(everything[picked]).tolist():
            rows_of = np.flatnonzero((everything == code) & (values >= 0))
            if not len(rows_of):
                continue
            is_median = kinds[rows_of[0]] != UnitKind.COMPUTE or int(labels[rows_of[0]]) in medians
            new[rows_of] = round(float(np.median(values[rows_of]) if is_median else values[rows_of].mean()))
        new = np.where(picked, new, values)
        out = VariantWeights(job)
        offset = 0
        for at in range(job.num_ranks):
            _, weights = find_rows(job, at)
            size = weights.stop - weights.start
            main = new[offset : offset + size]
            if self.but is not None:
                main = np.where(self.but.mask(job, at), job.main[weights], main)
            out.put(at, at, main, job.side[weights], job.provenance[weights])
            offset += size
        return out.finish()


_ALL = Selection("all")
Distribution = Literal["lognormal", "normal", "pareto", "uniform"]


@dataclass(frozen=True)
class Straggle:
    """Computing of each rank (or of each unit) takes a random factor longer; the same seed gives the same factors.

    lognormal(0, spread); normal(1, spread), at least 0.05; pareto: 1 + spread * Pareto(3), few are much slower; uniform
    between 1 and 1 + spread.
    """

    distribution: Distribution
    spread: float
    seed: int = 0
    where: Selection = _ALL
    per: Literal["rank", "unit"] = "rank"

    def _draw(self, key: int, size: int) -> npt.NDArray[np.float64]:
        rng = np.random.default_rng([self.seed, key])
        if self.distribution == "lognormal":
            return rng.lognormal(0.0, self.spread, size)
        if self.distribution == "normal":
            return np.maximum(rng.normal(1.0, self.spread, size), 0.05)
        if self.distribution == "pareto":
            return 1.0 + self.spread * rng.pareto(3.0, size)
        return rng.uniform(1.0, 1.0 + self.spread, size)

    def apply(self, job: SimJob) -> SimJob:
        """Scale computing by drawn factors."""
        if self.per == "rank" and self.where.is_of_ranks_only:
            scale = job.scale.copy()
            for at in _positions(job, self.where):
                scale[at] *= float(self._draw(int(job.ranks[at]), 1)[0])
            return replace(job, scale=scale)
        out, found = VariantWeights(job), False
        for at in range(job.num_ranks):
            mask = self.where.mask(job, at) & _computes(job, at)
            if not mask.any():
                continue
            found = True
            _, weights = find_rows(job, at)
            factors = self._draw(int(job.ranks[at]), int(mask.sum()) if self.per == "unit" else 1)
            main = job.main[weights].copy()
            main[mask] = _scaled(main[mask], factors)
            out.put(at, at, main, job.side[weights], job.provenance[weights])
        if not found:
            raise _no_unit(job, self.where)
        return out.finish()


@dataclass(frozen=True)
class ExpertSkew:
    """Unequal routing of a mixture of experts: the busiest rank of each group gets ``skew`` times the mean.

    Expert computing is what a rank computes between an all-to-all and the next one of the same group, taken in pairs
    (dispatch, combine); it is scaled by the rank's load. An all-to-all takes ``skew`` times as long.
    """

    skew: float
    seed: int = 0

    def loads(self, group_id: int, size: int) -> npt.NDArray[np.float64]:
        """The load of each member: mean 1, largest ``skew``, none below 0."""
        drawn = np.random.default_rng([self.seed, group_id % 2**32]).exponential(size=size)
        centred = drawn - drawn.mean()
        top = float(centred.max())
        if top <= 0:
            return np.ones(size)
        loads = np.maximum(1.0 + (self.skew - 1.0) * centred / top, 0.0)
        others = loads.sum() - loads.max()
        room = size - self.skew
        # clipping at 0 moves the mean: give the others what the busiest one leaves
        return np.where(loads == loads.max(), self.skew, loads * (room / others if others > 0 and room > 0 else 0.0))

    def apply(self, job: SimJob) -> SimJob:
        """Scale experts and their all-to-alls; raises UsageError where the job has none."""
        out = VariantWeights(job)
        found = False
        p = job.programs
        for at in range(job.num_ranks):
            rows, weights = find_rows(job, at)
            kind, op, lane_of = p.kind[rows], p.op[rows], p.lane_of[rows]
            exchanges = np.flatnonzero((kind == UnitKind.COLLECTIVE) & (op == Op.ALL_TO_ALL))
            if not len(exchanges):
                continue
            main = job.main[weights].copy()
            lanes = job.lanes.lane[job.lanes.offsets[at] : job.lanes.offsets[at + 1]]
            for local in np.unique(lane_of[exchanges]).tolist():
                group_id = int(job.lanes.group_id[lanes[local]])
                members = job.groups[group_id].ranks
                if len(members) < 2:
                    continue
                found = True
                load = float(self.loads(group_id, len(members))[list(members).index(int(job.ranks[at]))])
                mine = exchanges[lane_of[exchanges] == local]
                main[mine] = _scaled(main[mine], self.skew)
                for first, second in zip(mine[0::2].tolist(), mine[1::2].tolist(), strict=False):
                    inside = np.flatnonzero(kind[first:second] == UnitKind.COMPUTE) + first
                    main[inside] = _scaled(main[inside], load)
            out.put(at, at, main, job.side[weights], job.provenance[weights])
        if not found:
            raise UsageError(f"{job.source} has no all-to-all: there are no experts to skew")
        return out.finish()
