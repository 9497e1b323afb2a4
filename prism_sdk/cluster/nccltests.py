"""Reads what nccl-tests prints: one run after the other, as a terminal, ``mpirun --tag-output`` or ``srun -l`` keep it.

It makes samples; tables and profiles are made of them elsewhere.

A run is a list of ranks, the line that names the columns, and rows. Times are the out-of-place ones. Where the ranks
were split into several communicators (``Group``), a time is that of one of them, and all must have the same shape.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from prism_sdk.cluster.measurements import Sample, checked_sample, text_of
from prism_sdk.cluster.profile import Shape
from prism_sdk.errors import UnreadableError, UsageError
from prism_sdk.wording import counted
from prismtrace import Op

__all__ = ["read_nccl_tests"]

_NCCL_TESTS = {
    "all_reduce": Op.ALL_REDUCE, "allreduce": Op.ALL_REDUCE, "all_gather": Op.ALL_GATHER, "allgather": Op.ALL_GATHER,
    "reduce_scatter": Op.REDUCE_SCATTER, "reducescatter": Op.REDUCE_SCATTER, "alltoall": Op.ALL_TO_ALL,
    "all_to_all": Op.ALL_TO_ALL, "broadcast": Op.BROADCAST, "reduce": Op.REDUCE, "sendrecv": Op.SEND, "send": Op.SEND,
    "gather": Op.GATHER, "scatter": Op.SCATTER,
}  # fmt: skip
_BINARY = re.compile(r"\b([a-z_]+?)_perf(?:_mpi)?\b")
# the task that printed a line, in front of it
_TAG = re.compile(r"^\s*(?:\[[\d,]+\]<std\w+>:|\d+:(?=\s))")
_RANK = re.compile(r"^#\s*Rank\s+(\d+)\s+(?:Group\s+(\d+)\s+)?Pid\s+\d+\s+on\s+(\S+)\s+device")
_NUMBER = re.compile(r"\d+(?:\.\d*)?")
_OUT_OF_PLACE = 4  # columns: time, algbw, busbw, wrong
_LEAST_ROW = 8


@dataclass(kw_only=True)
class _Run:
    """One run of a test program."""

    words: list[str] = field(default_factory=list)
    #: By rank: its group and host.
    ranks: dict[int, tuple[int, str]] = field(default_factory=dict)
    columns: list[str] = field(default_factory=list)
    #: Size in bytes and time in us.
    rows: list[tuple[int, float]] = field(default_factory=list)
    num_wrong: int = 0
    #: Ranks that were listed before: each program was alone, and they all printed.
    num_twice: int = 0


def read_nccl_tests(
    path: str | os.PathLike[str], *, op: str | None = None, report: Callable[[str], None] = lambda _: None
) -> list[Sample]:
    """The out-of-place times of a log of nccl-tests, of all runs in it.

    Args:
        path: the log.
        op: the operation, where the log does not name the binary.
        report: is told what was left out, one sentence each.

    Raises:
        UnreadableError: the file cannot be opened, or is no log of nccl-tests.
        UsageError: it has no times, nothing says which operation they are of, or its groups differ.
    """
    name = os.fspath(path)
    if op is not None and op not in _NCCL_TESTS:
        raise UsageError(f"--op {op!r} is no test of nccl-tests", hint=f"there are {', '.join(_NCCL_TESTS)}")
    runs = list(_runs(text_of(name)))
    if not any(run.ranks for run in runs):
        reason = "no line '#  Rank  0 Pid ... on HOST device ...': it is no log of nccl-tests"
        raise UnreadableError(name, reason=reason, hint="give the whole output, with its header")
    timed = [run for run in runs if run.rows]
    if not timed:
        wrong = sum(run.num_wrong for run in runs)
        hint = f"{counted(wrong, 'row')} had wrong results" if wrong else "did the run end early?"
        raise UsageError(f"{name}: the log of nccl-tests has no rows with times", hint=hint)
    samples = []
    for number, run in enumerate(timed, start=1):
        where = name if len(timed) == 1 else f"{name}, run {number}"
        if run.num_wrong:
            report(f"{where}: {counted(run.num_wrong, 'row')} with wrong results left out")
        chosen, shape = _op_of(run, where, name, op), _shape_of(run, where)
        try:
            samples += [checked_sample(op=chosen, size=size, ranks=shape.ranks, nodes=shape.nodes, time_us=time)
                        for size, time in run.rows]  # fmt: skip
        except ValueError as error:
            raise UsageError(f"{where}: {error}") from error
    return samples


def _op_of(run: _Run, where: str, name: str, given: str | None) -> Op:
    word = given or (run.words[0] if run.words else Path(name).name.split("_perf")[0])
    if word not in _NCCL_TESTS:
        raise UsageError(
            f"{where}: which operation is it?", hint="add --op all_reduce, or keep the command line in the log"
        )
    return _NCCL_TESTS[word]


def _shape_of(run: _Run, where: str) -> Shape:
    missing = sorted(set(range(max(run.ranks, default=-1) + 1)) - set(run.ranks))
    if run.num_twice:
        raise UsageError(f"{where}: {counted(run.num_twice, 'rank')} listed twice: programs that knew nothing of each "
                         "other printed into it", hint="build nccl-tests with MPI=1, or keep one log each")  # fmt: skip
    if missing:
        raise UsageError(f"{where}: the line of rank {missing[0]} is missing", hint="give the whole output")
    hosts: dict[int, list[str]] = defaultdict(list)
    for group, host in run.ranks.values():
        hosts[group].append(host)
    shapes = sorted({Shape(ranks=len(members), nodes=len(set(members))) for members in hosts.values()})
    if not shapes:
        raise UsageError(f"{where}: rows without the lines of ranks before them", hint="give the whole output")
    if len(shapes) > 1:
        words = ", ".join(f"{one.ranks} ranks on {one.nodes} nodes" for one in shapes)
        raise UsageError(f"{where}: its groups have several shapes ({words}), and the log has one time for all of them")
    return shapes[0]


def _runs(text: str) -> Iterator[_Run]:
    run = _Run()
    for tagged in text.splitlines():
        line = _TAG.sub("", tagged).strip()
        rank = _RANK.match(line)
        if rank:
            if run.rows:
                yield run
                run = _Run()
            run.num_twice += int(rank[1]) in run.ranks
            run.ranks[int(rank[1])] = int(rank[2] or 0), rank[3]
            continue
        words = [word for word in _BINARY.findall(line) if word in _NCCL_TESTS]
        if words and not line.startswith("# Collective test concluded"):
            if run.rows:  # the command line of the next run, or its first line
                yield run
                run = _Run()
            run.words += words
        elif line.startswith("#") and "algbw" in line:
            run.columns = line[1:].split()
        else:
            _take_row(run, line)
    yield run


def _take_row(run: _Run, line: str) -> None:
    tokens = line.split()
    if len(tokens) < _LEAST_ROW or not tokens[0].isdecimal() or not tokens[1].isdecimal() or tokens[2][0].isdigit():
        return
    at = 5  # size, count, type, redop, root
    if "time" in run.columns and "root" not in run.columns:  # before 2.10; all_gather then has no redop either
        at = len(tokens) - (len(run.columns) - run.columns.index("time"))
    figures = tokens[at : at + _OUT_OF_PLACE]
    if at < 3 or len(figures) < _OUT_OF_PLACE - 1 or not all(_NUMBER.fullmatch(text) for text in figures[:3]):
        return
    wrong = figures[3] if len(figures) == _OUT_OF_PLACE else "N/A"
    if wrong.isdecimal() and int(wrong) > 0:
        run.num_wrong += 1
    elif float(figures[0]) > 0 and int(tokens[0]) > 0:
        run.rows.append((int(tokens[0]), float(figures[0])))
