"""A what-if scenario: changes in words, as the command line takes them, and the job that comes of them.

It prints nothing; each change is made elsewhere (``changes``, ``restructure``, ``replicas``, ``transfers``).
"""

from __future__ import annotations

import math
import os
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np

from prism_sdk.bounds import MAX_QUANTITY, MAX_RANKS, MAX_TIME_NS
from prism_sdk.errors import UsageError
from prism_sdk.simulate.changes import (
    Distribution,
    Equal,
    ExpertSkew,
    Scale,
    Slow,
    Straggle,
    Throttle,
    with_prompt_sends,
)  # fmt: skip
from prism_sdk.simulate.job import SimJob
from prism_sdk.simulate.loading import RankColumns, load
from prism_sdk.simulate.replicas import DataParallel
from prism_sdk.simulate.restructure import Microbatches, Remove, combined
from prism_sdk.simulate.selection import Selection
from prism_sdk.simulate.simulation import Timeline, simulate
from prism_sdk.wording import counted
from prismtrace import TraceReader

if TYPE_CHECKING:
    from prism_sdk.cluster.profile import Cluster

__all__ = ["Scenario", "parse_slow", "parse_straggle", "with_links"]

_UNITS = {"ns": 1, "us": 10**3, "ms": 10**6, "s": 10**9}


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """What is changed. Texts are those of the options of ``prism simulate``; an empty scenario changes nothing."""

    slow: tuple[str, ...] = ()
    scale: tuple[str, ...] = ()
    remove: tuple[str, ...] = ()
    straggle: tuple[str, ...] = ()
    equal: tuple[str, ...] = ()
    link: tuple[str, ...] = ()
    no_gaps: bool = False
    moe_skew: float | None = None
    moe_seed: int = 0
    microbatches: int | None = None
    schedule: Literal["1f1b", "gpipe"] | None = None
    dp: int | None = None
    dp_groups: tuple[str, ...] = ()
    cluster: str | None = None
    transfers: Literal["all", "missing"] = "all"
    #: Whether transfers that overlap share links; by default where the cluster gives all of them, because measured
    #: transfers already have what they lost to each other.
    link_sharing: bool | None = None

    @property
    def is_empty(self) -> bool:
        """Whether nothing is changed beside where transfers come from."""
        return self == self.unchanged

    @property
    def unchanged(self) -> Scenario:
        """The job as it is, with transfers from the same place."""
        return Scenario(cluster=self.cluster, transfers=self.transfers, link_sharing=self.link_sharing)

    @property
    def _moves_ranks(self) -> bool:
        """Whether ranks come to their messages at other times, one before the other, than in the trace."""
        return self._is_reordered or bool(self.slow or self.straggle or self.equal)

    @property
    def _is_reordered(self) -> bool:
        """Whether the passes of a pipeline are others, or in another order."""
        return self.microbatches is not None or self.schedule is not None

    def job(
        self, source: str | os.PathLike[str], *, steps: range | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> SimJob:  # fmt: skip
        """Read the trace and make all changes. Raises UsageError for what cannot be understood or does not fit.

        ``progress`` is told how many ranks of how many are read.
        """
        self._check()
        has_cluster = self.cluster is not None
        plain = self.is_empty and not has_cluster
        removals = self._removals(source)
        unchanged = None
        if self._is_reordered:
            unchanged = load(source, steps=steps, with_sizes=False, transfers_needed=False)
        job = load(source, steps=steps, change=self._restructure(unchanged, removals), with_sizes=not plain,
                   transfers_needed=not has_cluster, unchanged=unchanged, progress=progress)  # fmt: skip
        for removal in removals:
            if not sum(removal.found):
                raise UsageError(f"no unit of {job.source} is {removal.where.text}",
                                 hint="`prism cat` shows kinds, phases, operations")  # fmt: skip
        if self._is_reordered:
            job = replace(job, notes=(*job.notes, _note_on_memory(job)))
        if self._moves_ranks and int(job.stage.max(initial=-1)) > 0:
            job = with_prompt_sends(job)
        if self.dp is not None:
            job = DataParallel(self.dp, frozenset(self.dp_groups)).apply(job)
        job = self._transfers(job)
        if self.no_gaps:
            job = replace(job, side=np.minimum(job.side, 0))
        for text in self.equal:
            where, _, but = text.partition(":but:")
            job = Equal(Selection.parse(where), Selection.parse(but) if but else None).apply(job)
        for text in self.scale:
            where, factor = _factor(text)
            job = Scale(Selection.parse(where), factor).apply(job)
        for text in self.slow:
            job = parse_slow(text).apply(job)
        for text in self.straggle:
            job = parse_straggle(text).apply(job)
        if self.moe_skew is not None:
            if self.moe_skew < 1:
                raise UsageError(f"a skew of {self.moe_skew:g} is below 1, the mean")
            job = ExpertSkew(self.moe_skew, self.moe_seed).apply(job)
        return job

    def run(
        self, source: str | os.PathLike[str], *, steps: range | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> Timeline:  # fmt: skip
        """The timeline of the changed job; ``progress`` as in ``job``."""
        return simulate(self.job(source, steps=steps, progress=progress))

    def _check(self) -> None:
        """What has a meaning only beside something else is not left without effect."""
        without = self.cluster is None
        for wrong, message in (
            (without and self.link, "--link changes a cluster profile: give one with --cluster"),
            (without and self.link_sharing is not None,
             "--link-sharing needs to know the links: give a profile with --cluster"),
            (without and self.transfers != "all", "--transfers says what --cluster replaces: give a profile"),
            (self.dp is None and self.dp_groups, "--dp-groups says what --dp replicates: give a number with --dp"),
            (self.moe_skew is None and self.moe_seed, "--moe-seed says how --moe-skew is drawn: give a skew with it"),
        ):  # fmt: skip
            if wrong:
                raise UsageError(message)

    def _removals(self, source: str | os.PathLike[str]) -> list[Remove]:
        found: list[Remove] = []
        for text in self.remove:
            where = Selection.parse(text)
            group_ids = None
            if where.groups is not None:
                with TraceReader(os.fspath(source), allow_unfinished=True) as reader:
                    group_ids = frozenset(g for g, group in reader.groups.items() if group.name in where.groups)
            found.append(Remove(where, group_ids))
        return found

    def _restructure(
        self, unchanged: SimJob | None, removals: list[Remove]
    ) -> Callable[[int, RankColumns], RankColumns] | None:
        found: list[Callable[[int, RankColumns], RankColumns]] = [*removals]
        if unchanged is not None:
            stages = int(unchanged.stage.max())
            if stages < 0:
                raise UsageError("the trace names no stages: its schedule is not known",
                                 hint="record the job with an adapter that names microbatches and stages")  # fmt: skip
            found.append(Microbatches(stages + 1, self.microbatches, self.schedule))
        return combined(found) if found else None

    def _transfers(self, job: SimJob) -> SimJob:
        if self.cluster is None:
            return job
        from prism_sdk.cluster.profile import load_cluster  # of use here only: starting takes time
        from prism_sdk.simulate.links import shared_links
        from prism_sdk.simulate.transfers import with_cluster

        cluster = load_cluster(self.cluster)
        job = with_cluster(job, cluster, which=self.transfers)
        if self.link:
            # measured tables know nothing of other links: times change as the model says
            bare = replace(cluster, tables=())
            cluster = with_links(bare, self.link)
            job = with_cluster(job, cluster, relative_to=bare)
        if self.link_sharing or (self.link_sharing is None and self.transfers == "all"):
            job = replace(job, links=shared_links(job, cluster))
        return job


def _note_on_memory(job: SimJob) -> str:
    known = int((job.memory_bytes >= 0).sum())
    if not known:
        return "memory is not predicted: the trace does not show what a microbatch in flight takes"
    of = "" if known == job.num_ranks else f" of {known:,} of {counted(job.num_ranks, 'rank', separator=',')}"
    return f"memory{of} is predicted from the microbatches in flight and what one of them takes in the trace"


def with_links(cluster: Cluster, links: tuple[str, ...]) -> Cluster:
    """The profile with changed links: ``network.bandwidth_gb_per_s=25`` or ``network.nics_per_node=x0.5``."""
    from prism_sdk.cluster import format_cluster, parse_cluster

    for text in links:
        key, equals, value = text.partition("=")
        section, _, name = key.partition(".")
        parts: dict[str, Any] = {"network": cluster.network, "nvlink": cluster.nvlink}
        item: Any = parts.get(section)
        old = getattr(item, name, None)
        if not equals or not isinstance(old, int | float) or isinstance(old, bool):
            lacks = item is not None and name in vars(item) and old is None
            what = f": the profile gives no {key}" if lacks else " is not network.KEY=VALUE or nvlink.KEY=VALUE"
            raise UsageError(f"--link {text!r}{what}", hint="docs/cluster.md has the keys; theirs are numbers")
        try:
            number = float(value.removeprefix("x"))
        except ValueError:
            raise UsageError(f"--link {text!r}: {value!r} is not a number, or x and a factor") from None
        new = old * number if value.startswith("x") else number
        if not new > 0 or not math.isfinite(new):
            raise UsageError(f"--link {text!r} gives {new:g}: it must be above 0")
        if new > (MAX_RANKS if isinstance(old, int) else MAX_QUANTITY):
            raise UsageError(f"--link {text!r} gives {new:g}: this is more than any link has")
        if isinstance(old, int) and new != int(new):
            raise UsageError(f"--link {text!r} gives {new:g}: {key} is a whole number")
        value_of: Any = int(new) if isinstance(old, int) else new
        changed: Any = {section: replace(item, **{name: value_of})}
        cluster = replace(cluster, **changed)
        parse_cluster(tomllib.loads(format_cluster(cluster)), file=f"--link {text!r}")  # as a profile is checked
    return cluster


_LARGEST_FACTOR = 1_000_000


def _factor(text: str) -> tuple[str, float]:
    where, colon, factor = text.rpartition(":")
    try:
        number = float(factor)
    except ValueError:
        number = -1.0
    if not colon or not 0 <= number <= _LARGEST_FACTOR:
        raise UsageError(f"{text!r} is not WHERE:FACTOR, with a factor from 0 to {_LARGEST_FACTOR:,}",
                         hint="for instance rank=17:1.3 or op=all_reduce:0.5")  # fmt: skip
    return where, number


def _time(text: str, whole: str) -> int:
    for unit in ("ns", "us", "ms", "s"):
        number = text.removesuffix(unit)
        if number != text:
            try:
                time_ns = float(number) * _UNITS[unit]
            except ValueError:
                break
            if not 0 <= time_ns < MAX_TIME_NS:
                raise UsageError(f"{text!r} in {whole!r} is no time from 0 to a hundred years")
            return round(time_ns)
    raise UsageError(f"{text!r} in {whole!r} is not a time", hint="write 1.5s, 200ms, 10us or 5ns")


def parse_slow(text: str) -> Slow | Throttle:
    """``WHERE:FACTOR``, or ``WHERE:FACTOR@FROM-TO`` in simulated time (``rank=3:1.4@2s-5s``; TO may be left out)."""
    body, at, window = text.partition("@")
    where, factor = _factor(body)
    selection = Selection.parse(where)
    if factor == 0:
        raise UsageError(f"{text!r}: computing cannot take no time; use --scale")
    if not at:
        return Slow(selection, factor)
    if not selection.is_of_ranks_only:
        raise UsageError(f"{text!r}: a window of time is for whole ranks or stages")
    begin, dash, end = window.partition("-")
    to_ns = _time(end, text) if dash and end else None
    from_ns = _time(begin, text)
    if to_ns is not None and to_ns <= from_ns:
        raise UsageError(f"{text!r}: the window ends before it begins")
    return Throttle(selection, factor, from_ns, to_ns)


def parse_straggle(text: str) -> Straggle:
    """``DISTRIBUTION:SPREAD[:seed=N][:per=unit][:WHERE]``."""
    parts = text.split(":")
    if len(parts) < 2 or parts[0] not in get_args(Distribution):
        known = ", ".join(get_args(Distribution))
        raise UsageError(f"{text!r} is not DISTRIBUTION:SPREAD", hint=f"there are {known}")
    try:
        spread = float(parts[1])
        seed = next((int(part.removeprefix("seed=")) for part in parts[2:] if part.startswith("seed=")), 0)
    except ValueError:
        raise UsageError(f"{text!r}: spread and seed are numbers") from None
    if not spread >= 0 or not math.isfinite(spread) or seed < 0:
        raise UsageError(f"{text!r}: spread and seed are 0 or more")
    per = next((part.removeprefix("per=") for part in parts[2:] if part.startswith("per=")), "rank")
    if per not in ("rank", "unit"):
        raise UsageError(f"{text!r}: per is rank or unit")
    where = [part for part in parts[2:] if not part.startswith(("seed=", "per="))]
    selection = Selection.parse(where[0]) if where else Selection("all")
    distribution: Distribution = parts[0]  # type: ignore[assignment]
    return Straggle(distribution, spread, seed, selection, "unit" if per == "unit" else "rank")
