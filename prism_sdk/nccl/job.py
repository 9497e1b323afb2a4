"""The record files of one job together: which rank each belongs to, GPU clocks fitted over all of them, what was lost.

It knows no trace; `join` brings one in.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from prism_sdk.errors import UnreadableError, UsageError
from prism_sdk.nccl.clock import ClockFit
from prism_sdk.nccl.records import RecordFile, read_records
from prism_sdk.nccl.stamps import Ceiling, StampCheck, make_ceiling, own_stamps
from prism_sdk.nccl.tasks import Tasks, collect_tasks, device_of, fit_clocks, heard_stamps, place_on_host_clock
from prism_sdk.wording import counted

__all__ = ["NcclJob", "RankRecords", "load_job"]


@dataclass(frozen=True)
class RankRecords:
    """One process: its file and its tasks; `rank` is the global rank, None where nothing says it."""

    file: RecordFile
    tasks: Tasks
    rank: int | None
    clocks: Mapping[str, ClockFit]
    stamps: StampCheck


@dataclass(frozen=True)
class NcclJob:
    """What NCCL did in all processes of a job that left a file."""

    ranks: tuple[RankRecords, ...]
    clocks: Mapping[str, ClockFit]

    @property
    def num_tasks(self) -> int:
        """Collectives and messages, over all ranks."""
        return sum(len(one.tasks) for one in self.ranks)

    def findings(self) -> list[str]:
        """What is missing or contradictory, one sentence each."""
        return [text for one in self.ranks for text in _findings(one.file)] + [
            f"GPU {device[:40]}: {fit.num_violations} of {fit.num_lower + fit.num_upper} kernel "
            "times lie outside of what the host saw by more than 1 us: its clock is not steady"
            for device, fit in self.clocks.items()
            if fit.num_violations
        ]


    def notes(self) -> list[str]:
        """What was put right, or left out for a reason that is known; one sentence each."""
        num = {name: sum(getattr(one.stamps, name) for one in self.ranks)
               for name in ("num_kernels", "num_moved", "num_dropped")}  # fmt: skip
        texts = []
        if num["num_moved"]:
            texts.append(
                f"{num['num_moved']} of {num['num_kernels']} kernel times stood under later operations (NCCL does not "
                "count messages to oneself on the host) and were put back"
            )
        if num["num_dropped"]:
            texts.append(
                f"{num['num_dropped']} of {num['num_kernels']} kernel times were those of earlier kernels, from before "
                "the launch, and are left out"
            )
        return texts


def load_job(
    paths: Sequence[str | os.PathLike[str]], *, progress: Callable[[str], None] | None = None
) -> NcclJob:
    """Read the record files of one job; files of processes without a communicator are left out.

    Raises:
        UnreadableError: a file is no record file, or all were cut off before their first communicator.
        UsageError: no file holds a communicator.
    """
    loaded: list[tuple[RecordFile, Tasks]] = []
    damaged: list[str] = []
    for number, path in enumerate(paths):
        file = read_records(path)
        damaged += [text for text in _findings(file) if file.lost_bytes]
        if file.comms:
            loaded.append((file, collect_tasks(file)))
        if progress is not None:
            progress(f"{number + 1} of {len(paths)} files read")
    if not loaded and damaged:
        raise UnreadableError(os.fspath(paths[0]), reason="no file holds a communicator", hint="\n  ".join(damaged[:4]))
    if not loaded:
        raise UsageError("no file holds a communicator", hint="did the job use NCCL, with NCCL_PROFILER_PLUGIN set?")
    heard = heard_stamps(loaded)
    ceilings = {device: make_ceiling(*told) for device, told in heard.items()}
    checked = _with_own_stamps(loaded, ceilings)
    clocks = fit_clocks([(file, tasks) for file, tasks, _ in checked], heard)
    ranks = [
        RankRecords(file, place_on_host_clock(file, tasks, clocks), _rank_of(file), clocks, stamps)
        for file, tasks, stamps in checked
    ]
    return NcclJob(tuple(sorted(ranks, key=lambda one: (one.rank is None, one.rank or 0, one.file.path))), clocks)


def _with_own_stamps(
    loaded: Sequence[tuple[RecordFile, Tasks]], ceilings: Mapping[str, Ceiling]
) -> list[tuple[RecordFile, Tasks, StampCheck]]:
    """Each file with stamps that are its kernels' own. Whether this NCCL miscounts is judged over all files."""
    of_comm = [
        {comm: ceilings[device] for comm in file.comms if (device := device_of(file, comm)) in ceilings}
        for file, _ in loaded
    ]

    def tried(*, is_shifted: bool) -> tuple[int, list[tuple[RecordFile, StampCheck]]]:
        found = [own_stamps(*one, of, is_shifted=is_shifted) for one, of in zip(loaded, of_comm, strict=True)]
        return sum(check.num_wrong for _, check in found), found

    num_wrong, best = tried(is_shifted=False)
    if num_wrong:
        fewer_wrong, found = tried(is_shifted=True)
        best = found if fewer_wrong < num_wrong else best
    return [
        (mended, collect_tasks(mended) if check.num_moved or check.num_dropped else tasks, check)
        for (_, tasks), (mended, check) in zip(loaded, best, strict=True)
    ]


def _rank_of(file: RecordFile) -> int | None:
    """The rank that the environment gave; else that in the communicator that spans the world."""
    if file.rank is not None:
        return file.rank
    largest = max(file.comms.values(), key=lambda comm: comm.num_ranks or 0)
    spans_world = file.world_size is None or largest.num_ranks == file.world_size
    return largest.rank if largest.num_ranks and spans_world else None


def _findings(file: RecordFile) -> list[str]:
    texts = []
    if file.lost_bytes:
        lost = counted(file.lost_bytes, "byte")
        texts.append(f"{file.path}: {lost} from byte {file.first_damage} on are damaged or cut off")
    elif not file.is_complete:
        texts.append(f"{file.path}: the process ended without a word (it was killed): its last events may be missing")
    if file.num_lost_events or file.num_lost_stops:
        texts.append(
            f"{file.path}: {file.num_lost_events} events and {file.num_lost_stops} ends found no room: "
            "raise PRISM_NCCL_RING_KIB"
        )
    if file.num_extra_stops:
        texts.append(f"{file.path}: {file.num_extra_stops} ends belong to no event, or are second ends")
    return texts
