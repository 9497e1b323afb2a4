"""Joins trace files into one by copying their chunks byte for byte.

Does not decode columns, unless clocks are to be aligned.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from prismtrace import container, entries, limits, metas
from prismtrace.align import Alignment, apply_clocks, estimate_clocks
from prismtrace.container import RecordKind
from prismtrace.errors import TraceDataError, TraceUsageError, already_exists
from prismtrace.joining import read_index, true_of_all
from prismtrace.model import BASE_VERSION, ROLE_RANK, GraphKind, ProcessGroup, TableKind
from prismtrace.recordfile import RecordFile
from prismtrace.rewriting import atomic_output
from prismtrace.source import PathSource
from prismtrace.writer import WRITER_NAME, append_footer

_COPY_BYTES: Final = 1 << 23


@dataclass(frozen=True)
class InputPart:
    """The records of one input that go into the result."""

    path: str
    header: metas.HeaderMeta
    chunks: NDArray[Any]
    payloads: NDArray[Any]
    ranges: NDArray[Any]


def merge(
    paths: Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    *,
    metadata: Mapping[str, str] | None = None,
    graph_kind: GraphKind | None = None,
    allow_unfinished: bool = False,
    overwrite: bool = False,
    align: str | None = None,
    drift: bool = False,
) -> Alignment | None:
    """Writes the contents of all `paths` to `out`, which appears only when it is complete.

    Where two inputs hold the same table of the same rank, or the same metadata key, the later input wins (`overlaps`
    says where); metadata `slice.*` and `clock.*` that is not true of all rows goes; a payload is kept once. One input
    is open at a time. With `align` all times are brought onto the clock of the first rank: the chunks are then decoded
    and written again, and metadata `clock.*` says what was done.

    Args:
        paths: finished trace files of one job.
        out: the file to create; may be one of the inputs when `overwrite` is set.
        metadata: entries added last.
        graph_kind: kind of the result; by default that of the last input.
        allow_unfinished: also takes the whole records of files without an index.
        overwrite: replaces a file that exists.
        align: "file" when each input has a clock of its own, "rank" when each rank has.
        drift: the clocks may also run at different speeds.

    Returns:
        The corrections and their residual; None without `align`.

    Raises:
        TraceUsageError: no inputs, or one clock only where clocks are to be aligned.
        TraceDataError: two inputs disagree about the world size or the ranks of a group.
        TraceResultError: clocks cannot be aligned.
        TraceFormatError: an input is broken.
        TraceWriteError: the result cannot be written, or exists.
    """
    if not paths:
        raise TraceUsageError("nothing to merge: no input files")
    target = os.fspath(out)
    for key, value in (metadata or {}).items():
        limits.check_entry(key, value)
    if os.path.lexists(target) and not overwrite:
        raise already_exists(target)
    inputs, groups, pairs = _survey([os.fspath(path) for path in paths], allow_unfinished=allow_unfinished)
    pairs.update(metadata or {})
    header = _merged_header(inputs, graph_kind)
    if align is None:
        write_merged(target, header, inputs, groups, pairs, overwrite=overwrite)
        return None
    alignment = estimate_clocks(paths, clocks=align, drift=drift, allow_unfinished=allow_unfinished)
    with atomic_output(target, overwrite=overwrite) as temporary:
        joined = f"{temporary}.joined"
        try:
            write_merged(joined, header, inputs, groups, pairs, overwrite=True)
            apply_clocks(joined, temporary, alignment)
        finally:
            if os.path.lexists(joined):
                os.unlink(joined)
    return alignment


def write_merged(
    target: str,
    header: metas.HeaderMeta,
    inputs: Sequence[InputPart],
    groups: Mapping[int, ProcessGroup],
    pairs: Mapping[str, str],
    *,
    overwrite: bool,
) -> None:
    """Writes a finished file of copied records under a temporary name, and gives it its name at the end."""
    if os.path.lexists(target) and not overwrite:
        raise already_exists(target)
    file = RecordFile(target, overwrite=overwrite, atomic=True)
    try:
        _write(file, header, inputs, groups, pairs)
        file.publish()
    finally:
        file.close()


def _survey(
    paths: list[str], *, allow_unfinished: bool
) -> tuple[list[InputPart], dict[int, ProcessGroup], dict[str, str]]:
    inputs: list[InputPart] = []
    groups: dict[int, ProcessGroup] = {}
    pairs: dict[str, str] = {}
    owner: dict[tuple[int, int], int] = {}
    roles: dict[tuple[int, ...], tuple[int, ...]] = {}
    seen: set[bytes] = set()
    facts: list[tuple[Mapping[str, str], set[int]]] = []
    for number, path in enumerate(paths):
        index = read_index(path, allow_unfinished=allow_unfinished)
        for group in index.groups.values():
            groups[group.group_id] = _same_group(groups.get(group.group_id), group, path)
        pairs.update(index.metadata)
        owned = index.owned
        owner.update((key, number) for key in owned)
        facts.append((index.metadata, {rank for _, rank in owned}))
        fresh = [digest not in seen for digest in index.payloads]
        seen.update(index.payloads)
        kept = index.payload_entries[list(index.payloads.values())][np.array(fresh, np.bool_)]
        chunks = _new_roles(index.chunk_entries, roles, path)
        inputs.append(InputPart(path, index.header, chunks, kept, index.ranges))
    for number, item in enumerate(inputs):
        inputs[number] = _owned(item, owner, number)
    world_size = max((item.header.world_size for item in inputs), default=0)
    of_units = {rank: facts[number][0] for (table, rank), number in owner.items() if table == TableKind.UNITS}
    return inputs, groups, true_of_all(pairs, facts, of_units=of_units, world_size=world_size)


def _new_roles(chunks: NDArray[Any], known: dict[tuple[int, ...], tuple[int, ...]], path: str) -> NDArray[Any]:
    """The chunks without those of roles that an earlier input has; two inputs must agree about a role."""
    kept = np.ones(len(chunks), np.bool_)
    for place in np.flatnonzero(chunks["rank"] == ROLE_RANK).tolist():
        entry = chunks[place]
        key = (int(entry["role"]), int(entry["table"]), int(entry["first_row"]))
        what = (int(entry["num_rows"]), int(entry["length"]), int(entry["meta_crc"]), int(entry["data_crc"]))
        kept[place] = key not in known
        if known.setdefault(key, what) != what:
            message = f"role {key[0]} differs from that of an earlier file; derive role ids from contents (`compact`)"
            raise TraceDataError(message, path=path, offset=int(entry["offset"]))
    return chunks[kept]


def _owned(item: InputPart, owner: Mapping[tuple[int, int], int], number: int) -> InputPart:
    """The input with the chunks, and the ranks of chunks of several, that no later input replaces."""
    chunks = item.chunks.copy()
    ranges: list[entries.RankRange] = []
    mine = np.ones(len(chunks), np.bool_)
    tables, ranks = chunks["table"].tolist(), chunks["rank"].tolist()
    several = chunks["num_ranges"] > 0
    for place, key in enumerate(zip(tables, ranks, strict=True)):
        if several[place]:
            first, count = int(chunks["first_range"][place]), int(chunks["num_ranges"][place])
            every = entries.ranks_of(entries.RankRange(*row) for row in item.ranges[first : first + count].tolist())
            left = entries.ranges_of([rank for rank in every.tolist() if owner[tables[place], rank] == number])
            mine[place] = bool(left)
            chunks["rank"][place] = left[0].first if left else 0
            chunks["first_range"][place], chunks["num_ranges"][place] = len(ranges), len(left)
            ranges.extend(left)
        elif key[1] != ROLE_RANK:
            mine[place] = owner[key] == number
    return replace(item, chunks=chunks[mine], ranges=np.array(ranges, entries.RANK_RANGE))


def _same_group(known: ProcessGroup | None, group: ProcessGroup, path: str) -> ProcessGroup:
    if known is None:
        return group
    if known.ranks != group.ranks:
        message = f"group {group.group_id} has ranks {group.ranks}, an earlier file says {known.ranks}"
        raise TraceDataError(message, path=path)
    return ProcessGroup(
        group.group_id,
        group.name or known.name,
        group.description or known.description,
        group.backend or known.backend,
        group.ranks,
    )


def _merged_header(inputs: list[InputPart], graph_kind: GraphKind | None) -> metas.HeaderMeta:
    sizes = {item.header.world_size: item.path for item in inputs if item.header.world_size}
    if len(sizes) > 1:
        text = ", ".join(f"{size} ({path})" for size, path in sizes.items())
        raise TraceDataError(f"the world sizes differ: {text}", path=inputs[-1].path)
    kind = inputs[-1].header.graph_kind if graph_kind is None else int(graph_kind)
    required = 0
    for item in inputs:
        required |= item.header.required_features
    version = max([BASE_VERSION, *(item.header.version for item in inputs)])
    return metas.HeaderMeta(version, required, 0, kind, next(iter(sizes), 0), WRITER_NAME)


def _write(
    file: RecordFile,
    header: metas.HeaderMeta,
    inputs: Sequence[InputPart],
    groups: Mapping[int, ProcessGroup],
    pairs: Mapping[str, str],
) -> None:
    file.append([container.MAGIC, *container.pack_record(RecordKind.HEADER, metas.pack_header(header))[1]])
    if pairs:
        file.append(container.pack_record(RecordKind.METADATA, metas.pack_metadata(pairs))[1])
    if groups:
        file.append(container.pack_record(RecordKind.GROUP, metas.pack_groups(groups.values()))[1])
    chunks, payloads, ranges, num_ranges = [], [], [], 0
    for item in inputs:
        if len(item.chunks) or len(item.payloads):
            moved = _copy(file, item)
            moved[0]["first_range"][moved[0]["num_ranges"] > 0] += num_ranges
            chunks.append(moved[0])
            payloads.append(moved[1])
            ranges.append(item.ranges)
            num_ranges += len(item.ranges)
    footer = metas.FooterMeta(
        header.required_features,
        np.concatenate(chunks) if chunks else np.zeros(0, entries.CHUNK_ENTRY),
        np.concatenate(payloads) if payloads else np.zeros(0, entries.PAYLOAD_ENTRY),
        tuple(groups.values()),
        dict(pairs),
        np.concatenate(ranges) if ranges else np.zeros(0, entries.RANK_RANGE),
    )
    append_footer(file, footer)


def _copy(file: RecordFile, item: InputPart) -> tuple[NDArray[Any], NDArray[Any]]:
    """Copies the records of one input and returns their index entries at the new place."""
    chunks, payloads = item.chunks.copy(), item.payloads.copy()
    ends = payloads["data_offset"] + (payloads["stored_length"] + np.uint64(7) & ~np.uint64(7))
    offsets = np.concatenate([chunks["offset"], payloads["offset"]])
    lengths = np.concatenate([chunks["length"], ends - payloads["offset"]])
    moved = np.zeros_like(offsets)
    source = PathSource(item.path)
    try:
        order = np.argsort(offsets, kind="stable").tolist()
        runs: list[list[int]] = []
        position = file.offset
        for number in order:
            offset, length = int(offsets[number]), int(lengths[number])
            moved[number] = position
            position += length
            if runs and runs[-1][1] == offset:
                runs[-1][1] = offset + length
            else:
                runs.append([offset, offset + length])
        for start, end in runs:
            for offset in range(start, end, _COPY_BYTES):
                file.append([source.read_at(offset, min(_COPY_BYTES, end - offset))])
    finally:
        source.close()
    chunks["offset"] = moved[: len(chunks)]
    payloads["data_offset"] += moved[len(chunks) :] - payloads["offset"]
    payloads["offset"] = moved[len(chunks) :]
    return chunks, payloads
