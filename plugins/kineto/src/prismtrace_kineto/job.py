"""The options of an import, what is collected over its documents, and what is told of each. Writes no tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from prism_sdk.errors import UsageError
from prismtrace import TraceFormatError, TraceWriter
from prismtrace_kineto import communication, sources
from prismtrace_kineto.scanner import TraceScanner, decode


@dataclass(frozen=True)
class Options:
    """What the user asked for by ``-O``."""

    lossless: bool = False
    rank: int | None = None
    python: bool = False
    events: bool = True

    @classmethod
    def of(cls, options: Mapping[str, str]) -> Options:
        """Checks names and values; raises UsageError."""
        known = {"lossless", "rank", "python", "events"}
        for name in options:
            if name not in known:
                raise UsageError(
                    f"-O {name}=...: the importer kineto has no such option", hint=f"it has {', '.join(sorted(known))}"
                )
        whole = _flag(options, "lossless", False)
        rank = options.get("rank")
        if rank is not None and (not rank.isdecimal() or int(rank) >= 1 << 31):
            raise UsageError(f"-O rank={rank} is not a rank", hint="give a whole number from 0 on")
        return cls(
            whole,
            None if rank is None else int(rank),
            _flag(options, "python", False),
            _flag(options, "events", not whole),
        )


def _flag(options: Mapping[str, str], name: str, default: bool) -> bool:
    value = options.get(name, str(default)).lower()
    if value not in ("true", "false"):
        raise UsageError(f"-O {name}={options[name]} is neither true nor false")
    return value == "true"


@dataclass
class ReadDocument:
    """One document that was read: what stands around its events."""

    name: str
    rank: int
    prefix: str
    suffix: str
    top: dict[str, Any]
    base_ns: int


@dataclass
class Job:
    """What is collected over all documents."""

    writer: TraceWriter
    options: Options
    report: Callable[[str], None]
    notes: list[str] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    by_rank: dict[str, dict[int, int]] = field(default_factory=dict)
    groups: communication.Groups = field(default_factory=communication.Groups)
    ranks: dict[int, str] = field(default_factory=dict)
    world_size: int = 0
    num_blocks: int = 0
    bases: set[int] = field(default_factory=set)

    def count(self, what: str, number: int) -> None:
        """Adds to a count of the report."""
        if number:
            self.counts[what] = self.counts.get(what, 0) + number

    def tell(self, rank: int, what: str, number: int) -> None:
        """Notes something that was found `number` times on a rank."""
        self.by_rank.setdefault(what, {})
        self.by_rank[what][rank] = self.by_rank[what].get(rank, 0) + number


def understood(job: Job, document: sources.Document, scanner: TraceScanner) -> ReadDocument:
    """What stands around the events of a document that was scanned to its end; tells what was wrong."""
    found = scanner.report
    closed = scanner.suffix or ("]}" if found.has_events else "")
    try:
        top = decode(scanner.prefix + closed) if scanner.prefix != "[" else {}
    except ValueError:
        top = {}
        job.notes.append(f"{document.name}: what stands around the events is no JSON; it is kept as text only")
    top = top if isinstance(top, dict) else {}
    if not found.has_events:
        cut = " before the place where the text is cut off or damaged" if found.truncated else ""
        raise TraceFormatError(f"there is no array traceEvents{cut}", path=document.name, offset=0)
    damage = document.gzip.damage if document.gzip else found.read_error
    if found.truncated or damage:
        lost = (
            f"{found.num_lost_characters:,} characters of an unfinished event are lost"
            if found.num_lost_characters
            else "no event was cut"
        )
        reason = f" ({damage})" if damage else ""
        job.notes.append(
            f"{document.name}: the file is cut off{reason}; all {found.num_events:,} whole events are kept, "
            f"{lost}, what followed is unknown"
        )
    if found.num_damaged:
        job.notes.append(
            f"{document.name}: {found.num_damaged} stretches are no JSON and were left out, "
            f"the first at character {found.first_damage:,}"
        )
    if found.num_trailing:
        job.notes.append(f"{document.name}: {found.num_trailing:,} characters behind the end of the JSON were left out")
    rank = _rank(job, document, top)
    if found.num_duplicate_keys:
        job.tell(rank, "keys come twice in one object: the last value is kept", found.num_duplicate_keys)
    base = top.get("baseTimeNanoseconds", 0)
    if type(base) is not int or abs(base) >= 1 << 61:
        job.tell(rank, "baseTimeNanoseconds is no usable number and counts as 0", 1)
        base = 0
    job.bases.add(base)
    job.count("events", found.num_events)
    return ReadDocument(document.name, rank, scanner.prefix, scanner.suffix, top, base)


def _rank(job: Job, document: sources.Document, top: Mapping[str, Any]) -> int:
    distributed = top.get("distributedInfo")
    distributed = distributed if isinstance(distributed, dict) else {}
    told = distributed.get("rank")
    if job.options.rank is not None:
        rank = job.options.rank
        if type(told) is int and told != rank:
            job.notes.append(f"{document.name}: -O rank={rank} counts; the trace itself says rank {told}")
    elif type(told) is int and 0 <= told < 1 << 31:
        rank = told
    else:
        hint = document.rank_hint()
        if hint is None:
            raise UsageError(
                f"{document.name}: the trace does not say its rank (no distributedInfo.rank), nor does its name",
                hint="import one file with -O rank=N, or rename the files to rank0.json, rank1.json, ...",
            )
        rank = hint
        job.notes.append(f"{document.name}: the trace does not say its rank; {rank} is taken from its name")
    if rank in job.ranks:
        raise UsageError(
            f"{document.name} and {job.ranks[rank]} are both of rank {rank}",
            hint="import traces of one run and one step range at a time, or name one file with -O rank=N",
        )
    job.ranks[rank] = document.name
    world_size = distributed.get("world_size")
    if type(world_size) is int and 0 < world_size < 1 << 31:
        if world_size <= rank:
            job.notes.append(f"{document.name}: rank {rank} lies outside its world_size {world_size}")
        job.world_size = max(job.world_size, world_size)
    return rank
