"""Reads transfers from what NCCL's profiler recorded: record files, or the JSON of ``prism nccl report``.

It makes samples; tables and profiles are made of them elsewhere.

A time is the shortest kernel time among the ranks of an operation, so it needs the records of all its ranks. Left out
are operations without it, those that shared a launch with others (one time for all), and the first one of each
communicator and operation: it also sets up.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from prism_sdk.cluster.measurements import Sample, checked_sample
from prism_sdk.cluster.profile import Shape
from prism_sdk.errors import UnreadableError, UsageError
from prism_sdk.nccl.job import NcclJob, load_job
from prism_sdk.nccl.operations import Operation, operations
from prismtrace import ABSENT, Op

__all__ = ["read_nccl", "read_nccl_report", "samples_of_job"]

_OPS = {**{op.name.lower(): op for op in Op if op is not Op.UNSPECIFIED}, "send_recv": Op.SEND}
_MAX_FINDINGS = 4
_PARTS = 4  # of an octave of sizes: a table needs no more points


def read_nccl(
    paths: Sequence[str | os.PathLike[str]], *, report: Callable[[str], None] = lambda _: None
) -> list[Sample]:
    """The transfers of record files (or folders of them) of one job; a file that ends in .json is a report.

    Args:
        paths: what to read.
        report: is told what is missing from the files, one sentence each.

    Raises:
        UsageError: nothing in them has a time of its own.
        UnreadableError: a file cannot be opened, or is no record file.
    """
    reports = [Path(path) for path in paths if Path(path).suffix == ".json"]
    files: list[Path] = []
    for path in (Path(path) for path in paths if Path(path).suffix != ".json"):
        inside = sorted(path.glob("*.ncclrec*")) if path.is_dir() else [path]
        if not inside:
            raise UsageError(f"the folder {path} holds no record files (*.ncclrec)")
        files += inside
    samples = [sample for one in reports for sample in read_nccl_report(one)]
    job = load_job(files) if files else None
    if job is not None:
        samples += samples_of_job(job)
        if samples:
            for text in job.findings():
                report(text)
    if not samples:
        raise UsageError(f"{os.fspath(paths[0])}: no operation has a time of its own{_why_not(job)}", hint=_remedy(job))
    return samples


def _why_not(job: NcclJob | None) -> str:
    """What the files themselves say is missing from them."""
    return "".join(f"\n  {text}" for text in ([] if job is None else job.findings())[:_MAX_FINDINGS])


def _remedy(job: NcclJob | None) -> str:
    """What to do, by what is missing."""
    if job is None or not job.ranks:
        return "make the report of the record files of all ranks"
    found = list(operations(job))
    if any(one.file.lost_bytes for one in job.ranks):
        return "the files were cut off or damaged: copy them again, or record again and let the job end"
    if not found:
        return "the job ended before its first operation, or its operations were lost: record more of it"
    needed = [(2 if one.name == "send_recv" else one.num_ranks, one) for one in found]
    if all(num is not None and num > one.num_members for num, one in needed):
        return "give the record files of all ranks: a time is that of the rank that waited least"
    if not any(one.time_ns for one in found):
        return "nothing says when kernels ran: NCCL 2.27 or newer does, with its profiler's events of kernel channels"
    return (
        "the first operation of each kind on a communicator does not count, because it also sets up; nor do those that "
        "lack a rank's records or share a launch: record more steps, of all ranks"
    )


def samples_of_job(job: NcclJob) -> list[Sample]:
    """The transfers of a job whose times are those of one operation; sizes within a quarter octave are one size."""
    first: dict[tuple[int, str], int] = {}
    kept: list[tuple[int, Operation, Shape]] = []
    for one in operations(job):
        launched = _launched(job, one)
        key = one.comm, one.name
        first[key] = min(first.get(key, launched), launched)
        needed = 2 if one.name == "send_recv" else one.num_ranks
        known = one.name in _OPS and one.time_ns and one.num_bytes > 0
        if known and not one.is_shared and needed is not None and needed == one.num_members:
            kept.append((launched, one, Shape(ranks=needed, nodes=one.num_nodes)))
    return _together(
        Sample(
            op=_OPS[one.name], size_bytes=one.num_bytes, shape=shape, time_ns=float(one.time_ns or 0),
            algo=one.algo.lower(), proto=one.proto.lower(),
        )
        for launched, one, shape in kept
        if launched != first[one.comm, one.name]
    )  # fmt: skip


def _launched(job: NcclJob, one: Operation) -> int:
    """When the first of its ranks called it, on the clock of the first rank that has records of it."""
    place, tasks = one.members[0]
    return int(job.ranks[place].tasks.called_ns[list(tasks)].min(initial=np.iinfo(np.int64).max)) if tasks else ABSENT


def _together(samples: Iterable[Sample]) -> list[Sample]:
    """The same samples, with one size (the median) for those of nearly equal sizes."""
    near: dict[tuple[Any, ...], list[Sample]] = defaultdict(list)
    for one in samples:
        octave = one.size_bytes.bit_length()
        part = (one.size_bytes * _PARTS * 2 >> octave) - _PARTS
        near[one.op, one.shape, one.algo, one.proto, octave, part].append(one)
    return [
        replace(one, size_bytes=sorted(other.size_bytes for other in alike)[len(alike) // 2])
        for alike in near.values()
        for one in alike
    ]


def read_nccl_report(path: str | os.PathLike[str]) -> list[Sample]:
    """The medians of ``prism nccl report --json``.

    Raises:
        UnreadableError: it cannot be opened, or is no JSON.
        UsageError: it is no such report, or one without the records of some ranks.
    """
    name = os.fspath(path)
    try:
        report = _json(name)
        if report["num_incomplete"]:
            raise UsageError(
                f"{name}: {report['num_incomplete']} operations lack the records of some ranks, and times contain "
                "waiting", hint="make the report of the files of all ranks, or give the record files themselves",
            )  # fmt: skip
        samples = [
            checked_sample(
                op=_OPS[row["name"]], size=row["num_bytes"], time_us=float(row["median_ns"]) / 1e3,
                ranks=2 if row["name"] == "send_recv" else row["num_ranks"], nodes=row["num_nodes"],
                algo=str(row["algo"]).lower(), proto=str(row["proto"]).lower(),
            )
            for row in report["rows"]
            if row["median_ns"] and row["num_bytes"] and row["num_ranks"] and row["name"] in _OPS
        ]  # fmt: skip
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UsageError(
            f"{name} is not a report of `prism nccl report --json`: {_what(error)}",
            hint="make one, or give the record files themselves",
        ) from error
    return _together(samples)


def _json(name: str) -> Any:
    try:
        return json.loads(Path(name).read_bytes())
    except OSError as error:
        raise UnreadableError(name, reason=error.strerror or str(error)) from error
    except (ValueError, RecursionError) as error:
        raise UnreadableError(name, reason=f"it is no JSON: {error}", hint="was it cut off?") from error


def _what(error: Exception) -> str:
    return f"it has no {error}" if isinstance(error, KeyError) else str(error)
