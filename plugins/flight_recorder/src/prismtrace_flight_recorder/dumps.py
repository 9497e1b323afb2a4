"""Reads one flight-recorder dump, pickle or JSON, into checked entries. It compares no ranks and writes nothing.

Structure of versions 1.x to 2.10: a dict with `version`, `entries`, `pg_config`, `pg_status`, and more. Entries that
lack a field have it absent; entries that contradict themselves are left out and counted.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, Final

from prism_sdk.interop.sources import ForeignFileError
from prismtrace import DType, Op, TraceFormatError
from prismtrace_flight_recorder import safe_pickle

_MAX_ENTRIES: Final = 1 << 22
_MAX_TENSORS: Final = 1 << 16
_MAX_ELEMENTS: Final = 1 << 62
_NUMBER: Final = re.compile(r"\d+")
_RANKS: Final = re.compile(r"[\[(]?\s*(?:\d{1,9}\s*(?:,\s*\d{1,9}\s*)*,?)?\s*[\])]?", re.ASCII)
_TIMES: Final = ("time_created_ns", "time_discovered_started_ns", "time_discovered_completed_ns", "duration_ms")
_P2P: Final = re.compile(r"(send|recv)\s+(\d+)\s*(->|<-)\s*(\d+)")
_OPS: Final = (
    ("allreduce", Op.ALL_REDUCE),
    ("reducescatter", Op.REDUCE_SCATTER),
    ("allgather", Op.ALL_GATHER),
    ("alltoall", Op.ALL_TO_ALL),
    ("broadcast", Op.BROADCAST),
    ("reduce", Op.REDUCE),
    ("gather", Op.GATHER),
    ("scatter", Op.SCATTER),
    ("barrier", Op.BARRIER),
    ("send", Op.SEND),
    ("recv", Op.RECV),
)
_WITH_EVENTS: Final = ("nccl", "ncclx", "rccl", "rcclx")
_END: Final = re.compile(r"coalesced|[A-Z_]+_coalesced")
_DTYPES: Final = {
    "float": DType.FLOAT32,
    "double": DType.FLOAT64,
    "half": DType.FLOAT16,
    "bfloat16": DType.BFLOAT16,
    "float8_e4m3fn": DType.FLOAT8_E4M3FN,
    "float8_e5m2": DType.FLOAT8_E5M2,
    "long": DType.INT64,
    "int": DType.INT32,
    "short": DType.INT16,
    "char": DType.INT8,
    "byte": DType.UINT8,
    "bool": DType.BOOL,
    "complexfloat": DType.COMPLEX64,
    "complexdouble": DType.COMPLEX128,
}


@dataclass
class Entry:
    """One operation as the recorder noted it. Times are ns of the host's clock, absent when it never came so far.

    `is_end` marks the entry that closes a batch of coalesced operations: it is no operation itself.
    `source` and `target` are ranks as the entry writes them: inside the group.
    """

    record_id: int
    backend: str
    group: str
    description: str
    seq: int | None
    p2p_seq: int | None
    op_id: int | None
    name: str
    op: Op
    is_p2p: bool
    is_end: bool
    state: str
    retired: bool
    created_ns: int | None
    started_ns: int | None
    completed_ns: int | None
    duration_ms: float | None
    timeout_ms: int | None
    dtype: DType
    num_in: int | None
    num_out: int | None
    source: int | None
    target: int | None
    frame: str | None
    raw: dict[str, Any]

    @property
    def is_done(self) -> bool:
        """Whether the operation is known to be complete.

        A retired NCCL operation that is not complete has timed out; other backends never say more than retired.
        """
        if self.state == "completed" or self.completed_ns is not None:
            return True
        return self.retired and self.backend not in _WITH_EVENTS


@dataclass
class Dump:
    """What one rank left behind. `group_ranks` are members by group name, empty where the dump does not say."""

    path: str
    version: str
    entries: list[Entry]
    group_ranks: dict[str, tuple[int, ...]]
    group_descriptions: dict[str, str]
    status: dict[str, dict[str, int]]
    stated_rank: int | None
    library: str
    notes: list[str] = field(default_factory=list)

    @property
    def lost_entries(self) -> int:
        """How many entries the ring buffer had dropped before the first that is left."""
        return self.entries[0].record_id if self.entries else 0


def read(data: bytes, *, path: str) -> Dump:
    """Read a dump.

    Raises:
        TraceFormatError: it is neither JSON nor a pickle of plain data, or no dump.
    """
    if data.lstrip()[:1] == b"{":
        document = _json(data, path)
    elif data[:1] in (b"\x80", b"}", b"(", b"c"):
        document = safe_pickle.loads(data, path=path)
    else:
        raise ForeignFileError("is neither a pickle nor a JSON object", path=path)
    if not isinstance(document, dict) or "entries" not in document or "version" not in document:
        raise ForeignFileError("has no version and entries: this is no flight-recorder dump", path=path)
    listed = document["entries"]
    if not isinstance(listed, list | tuple) or len(listed) > _MAX_ENTRIES:
        raise TraceFormatError("entries is no list, or a very long one", path=path)
    notes: list[str] = []
    ranks, descriptions = _groups(document.get("pg_config"), notes)
    notes[:] = [f"{path}: {note}" for note in notes]
    entries = [entry for entry in map(_entry, listed) if entry is not None]
    if len(entries) < len(listed):
        notes.append(f"{path}: {len(listed) - len(entries)} of {len(listed)} entries are damaged and were left out")
    unusable = sum(_is_unusable(item.get(name), name) for item in listed if isinstance(item, dict) for name in _TIMES)
    if unusable:
        notes.append(f"{path}: {unusable} times are no numbers, or negative, and are left out")
    entries.sort(key=lambda entry: entry.record_id)
    if doubles := len(entries) - len({entry.record_id for entry in entries}):
        notes.append(f"{path}: {doubles} records have the number of another one")
    if entries and (holes := entries[-1].record_id - entries[0].record_id + 1 - len(entries)) > 0:
        notes.append(f"{path}: {holes} records inside the dump are missing (only active ones were dumped, or a reset)")
    version = str(document["version"])
    if not re.fullmatch(r"[12]\.\d{1,3}", version):
        notes.append(f"{path}: version {version[:20]!r} is not one that is known (1.x, 2.x)")
    stated = _integer(document.get("rank", document.get("global_rank")))
    library = str(document.get("comm_lib_version") or document.get("nccl_version") or "")[:256]
    return Dump(path, version, entries, ranks, descriptions, _status(document.get("pg_status")), stated, library, notes)


def _json(data: bytes, path: str) -> Any:
    import orjson

    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise TraceFormatError(f"is no JSON: {error}", path=path) from error


def _integer(value: Any, *, low: int = 0, high: int = _MAX_ELEMENTS) -> int | None:
    return value if type(value) is int and low <= value <= high else None


def _time(value: Any) -> int | None:
    """A time in ns; JSON dumps write 0 for one that is absent."""
    return _integer(value, low=1)


def _is_unusable(value: Any, name: str) -> bool:
    """Whether a time is neither absent (None, or 0) nor one that can be kept."""
    numbers = (int, float) if name == "duration_ms" else (int,)
    return value is not None and not (type(value) in numbers and 0 <= value <= _MAX_ELEMENTS)


def _text(value: Any, limit: int = 1024) -> str:
    return value[:limit].encode("utf-8", "backslashreplace").decode() if isinstance(value, str) else ""


def _sizes(value: Any) -> int | None:
    """Elements of all tensors together; absent when there is none."""
    if not isinstance(value, list | tuple) or not value or len(value) > _MAX_TENSORS:
        return None
    shapes = value if isinstance(value[0], list | tuple) else [value]
    total = 0
    for shape in shapes:
        if not isinstance(shape, list | tuple) or len(shape) > 64:
            return None
        amount = 1
        for size in shape:
            if _integer(size) is None:
                return None
            amount = min(amount * size, 2 * _MAX_ELEMENTS)  # too many for any tensor: the number is not known then
        total = min(total + amount, 2 * _MAX_ELEMENTS)
    return total if total <= _MAX_ELEMENTS else None


def _entry(item: Any) -> Entry | None:
    if not isinstance(item, dict):
        return None
    number, name = _integer(item.get("record_id")), item.get("profiling_name")
    if number is None or not isinstance(name, str):
        return None
    name = _text(name)
    group = item.get("process_group")
    if isinstance(group, list | tuple) and group and isinstance(group[0], str):
        group_name, description = _text(group[0]), _text(group[1] if len(group) > 1 else "")
    else:
        number_of_group = _integer(item.get("pg_id", 0))
        if number_of_group is None:
            return None
        group_name, description = str(number_of_group), ""
    backend, _, verb = name.partition(":")
    verb = verb or backend
    plain = verb.lower().replace("_", "").replace(" ", "")
    op = next((op for start, op in _OPS if plain.startswith(start)), Op.UNSPECIFIED)
    source = target = None
    if found := _P2P.match(verb):
        first, second = int(found[2]), int(found[4])
        source, target = (first, second) if found[3] == "->" else (second, first)
    types = item.get("input_dtypes") or item.get("output_dtypes")
    dtype_name = types[0] if isinstance(types, list | tuple) and types else types
    duration = item.get("duration_ms")
    return Entry(
        record_id=number,
        backend=backend.lower(),
        group=group_name,
        description=description,
        seq=_integer(item.get("collective_seq_id", item.get("seq_id"))),
        p2p_seq=_integer(item.get("p2p_seq_id")),
        op_id=_integer(item.get("op_id")),
        name=name,
        op=op,
        is_p2p=item["is_p2p"] is True if "is_p2p" in item else op in (Op.SEND, Op.RECV),
        is_end=_END.fullmatch(verb) is not None,
        state=_text(item.get("state"), 64),
        retired=item.get("retired") is True,
        created_ns=_time(item.get("time_created_ns", item.get("time_created_us", 0) * 1000 if _has_us(item) else None)),
        started_ns=_time(item.get("time_discovered_started_ns")),
        completed_ns=_time(item.get("time_discovered_completed_ns")),
        duration_ms=float(duration) if isinstance(duration, int | float) and 0 <= duration < 1e15 else None,
        timeout_ms=_integer(item.get("timeout_ms")),
        dtype=_DTYPES.get(_text(dtype_name).lower(), DType.UNSPECIFIED),
        num_in=_sizes(item.get("input_sizes")),
        num_out=_sizes(item.get("output_sizes")),
        source=source,
        target=target,
        frame=_frame(item.get("frames")),
        raw=item,
    )


def _has_us(item: dict[str, Any]) -> bool:
    return _integer(item.get("time_created_us"), high=1 << 52) is not None


def _frame(value: Any) -> str | None:
    """Where the program called: the innermost frame that is not PyTorch's own."""
    if not isinstance(value, list | tuple):
        return None
    for item in value[:256]:
        if not isinstance(item, dict):
            continue
        file = _text(item.get("filename"))
        if file and "/torch/" not in file:
            return f"{_text(item.get('name'), 200)} at {file}:{_integer(item.get('line')) or 0}"
    return None


def _groups(value: Any, notes: list[str]) -> tuple[dict[str, tuple[int, ...]], dict[str, str]]:
    ranks: dict[str, tuple[int, ...]] = {}
    descriptions: dict[str, str] = {}
    for name, item in value.items() if isinstance(value, dict) else ():
        if not isinstance(name, str) or not isinstance(item, dict):
            continue
        given = item.get("ranks")
        if isinstance(given, str):
            listed = [int(each) for each in _NUMBER.findall(given)] if _RANKS.fullmatch(given) else [-1]
        elif isinstance(given, list | tuple):
            listed = [each if _integer(each, high=(1 << 31) - 1) is not None else -1 for each in given]
        else:
            listed = [] if given is None else [-1]
        if listed and min(listed) >= 0 and len(set(listed)) == len(listed):
            ranks[name] = tuple(listed)
        elif listed:
            notes.append(f"the members of group {name[:64]!r} are no list of ranks and are not used")
        descriptions[name] = _text(item.get("desc"))
    return ranks, descriptions


def _status(value: Any) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = {}
    for name, item in value.items() if isinstance(value, dict) else ():
        if isinstance(item, dict):
            numbers = {str(key)[:64]: number for key, each in item.items() if (number := _signed(each)) is not None}
            found[str(name)[:64]] = numbers
    return found


def _signed(value: Any) -> int | None:
    if isinstance(value, str) and re.fullmatch(r"-?\d{1,18}", value):
        return int(value)
    return _integer(value, low=-1)


__all__ = ["Dump", "Entry", "read"]
