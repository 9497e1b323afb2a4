"""A slow scheduler, independent of the fast one: dictionaries and a loop over ranks until nothing moves any more.

It holds no tests. Rows are dictionaries of registry columns; weights are those of a calibrated graph.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from prism_sdk.simulate import Timeline
from prismtrace import ABSENT, GraphKind, ProcessGroup, TraceWriter, UnitKind

Rows = Mapping[int, list[dict[str, Any]]]


def write(path: Path, rows: Rows, groups: Mapping[int, ProcessGroup], *, kind: GraphKind, **metadata: str) -> Path:
    """Write the rows of each rank as a trace; absent columns stay absent."""
    names = sorted({name for mine in rows.values() for row in mine for name in row} - {"label"})
    zero = {"kind", "phase", "op", "dtype", "group_id", "reduce_op"}
    with TraceWriter(path, graph_kind=kind, world_size=len(rows), metadata=metadata, overwrite=True) as writer:
        for group in groups.values():
            writer.add_group(group)
        for rank, mine in rows.items():
            narrow = {"peer", "step", "microbatch", "stage", "model_chunk"}
            empty = {n: 0 if n in zero else -(2**31) if n in narrow else ABSENT for n in names}
            columns: dict[str, Any] = {name: [row.get(name, empty[name]) for row in mine] for name in names}
            if any("label" in row for row in mine):
                columns["label"] = [row.get("label") for row in mine]
            if mine:
                writer.add_units(rank, columns)
    return path


def rows_of(timeline: Timeline) -> dict[tuple[int, int], tuple[int, int]]:
    """Start and end of every unit of a timeline, by rank and index: what `reference` gives."""
    found = {}
    for position, rank in enumerate(timeline.job.ranks.tolist()):
        times = timeline.times(position)
        for index, pair in enumerate(zip(times.start_ns.tolist(), times.end_ns.tolist(), strict=True)):
            found[rank, index] = pair
    return found


def reference(
    rows: Rows, groups: Mapping[int, ProcessGroup], *, compute: Callable[[int, int, int, int], int] | None = None
) -> dict[tuple[int, int], tuple[int, int]]:
    """Start and end of row i of rank r, by (r, i). ``compute(rank, index, start, work)`` may change a duration."""

    def known(row: Mapping[str, Any], name: str) -> int:
        value = row.get(name, ABSENT)
        return 0 if value == ABSENT else int(value)

    cursor, clock = dict.fromkeys(rows, 0), dict.fromkeys(rows, 0)
    out: dict[tuple[int, int], tuple[int, int]] = {}
    posts: dict[Any, dict[int, int]] = {}
    complete: dict[tuple[int, int], int] = {}
    waiting: dict[Any, list[tuple[int, int]]] = {}

    def key_of(rank: int, row: Mapping[str, Any]) -> Any:
        if row["kind"] == UnitKind.COLLECTIVE:
            return ("c", row["group_id"], row["seq"])
        ends = (rank, row["peer"]) if row["kind"] == UnitKind.SEND else (row["peer"], rank)
        return ("m", row["group_id"], *ends, row["tag"], row["seq"])

    def settle(key: Any) -> bool:
        """Give completions to the members of an event if all of them, and the one before it, are there."""
        needed = len(groups[key[1]].ranks) if key[0] == "c" else 2
        if len(posts.get(key, {})) < needed:
            return False
        ready = max(posts[key].values())
        before = ("c", key[1], key[2] - 1) if key[0] == "c" else None
        if before is not None and before in waiting:
            if any(place not in complete for place in waiting[before]):
                return False
            ready = max([ready, *(complete[place] for place in waiting[before])])
        for rank, index in waiting[key]:
            if rows[rank][index]["kind"] != UnitKind.SEND:
                complete[rank, index] = ready + known(rows[rank][index], "transfer_ns")
        return True

    open_events: list[Any] = []
    moved = True
    while moved:
        moved = False
        for rank, mine in rows.items():
            while cursor[rank] < len(mine):
                index = cursor[rank]
                row = mine[index]
                now = clock[rank]
                if row["kind"] == UnitKind.COMPUTE:
                    start = now + known(row, "gap_ns")
                    work = row["end_ns"] - row["start_ns"]
                    end = start + (work if compute is None else compute(rank, index, start, work))
                    out[rank, index], clock[rank] = (start, end), end
                elif row["kind"] == UnitKind.WAIT:
                    end = now + known(row, "transfer_ns")
                    awaited = row.get("awaits", ABSENT)
                    if awaited != ABSENT:
                        if (rank, awaited) not in complete:
                            break
                        end = max(end, complete[rank, awaited] + known(row, "gap_ns"))
                    out[rank, index], clock[rank] = (now, end), end
                else:
                    key = key_of(rank, row)
                    posts.setdefault(key, {})[(rank, int(row["kind"]))] = now  # type: ignore[index]
                    waiting.setdefault(key, []).append((rank, index))
                    if row["kind"] == UnitKind.SEND:
                        complete[rank, index] = now + known(row, "transfer_ns")
                    if len(waiting[key]) == 1:
                        open_events.append(key)
                    out[rank, index] = (now, -1)
                cursor[rank] += 1
                moved = True
        left = [key for key in open_events if not settle(key)]
        moved |= len(left) < len(open_events)
        open_events = left
    assert all(cursor[rank] == len(mine) for rank, mine in rows.items()), "the reference is stuck"
    return {place: (start, complete[place] if end == -1 else end) for place, (start, end) in out.items()}
