"""The vectors that are read and contradict themselves: a validator must find fault with them.

Does not write them.
"""

from __future__ import annotations

from typing import Any

from building import trace, units, written

from prismtrace import ProcessGroup, TraceWriter


def contradictory_vectors() -> dict[str, tuple[list[str], str, bytes]]:
    """Name -> the findings, why, and the bytes of a file that is read but contradicts itself."""
    collective = {"kind": [2], "group_id": [5], "op": [1], "seq": [0]}

    def job(rank_0: dict[str, Any], rank_1: dict[str, Any] | None = None, group: bool = True) -> bytes:
        def fill(writer: TraceWriter) -> None:
            if group:
                writer.add_group(ProcessGroup(group_id=5, ranks=(0, 1)))
            writer.add_units(0, rank_0)
            writer.add_units(1, rank_1 or rank_0)

        return written(fill, world_size=2)

    def events(columns: dict[str, Any]) -> bytes:
        def fill(writer: TraceWriter) -> None:
            writer.add_units(0, {"kind": [1]})
            writer.add_tracks(0, {"name": ["main"]})
            writer.add_events(0, columns)

        return written(fill)

    def crossed(first: int, second: int) -> dict[str, Any]:
        """Two collectives of one group, each waited for at once, in an order that differs by rank."""
        return {"kind": [2, 5, 2, 5], "group_id": [5, 0, 5, 0], "op": [1, 0, 1, 0], "seq": [first, None, second, None],
                "awaits": [None, 0, None, 2]}  # fmt: skip

    rows, data = units({"kind": [1, 1], "step": [3, 4], "start_ns": [5, 20], "end_ns": [10, 30]})
    role = rows._replace(rank=-1, role=7), data
    return {
        "steps_outside": (["PT006"], "a chunk whose rows have steps that it does not name", trace(
            (rows._replace(last_step=3), data))),
        "times_outside": (["PT006"], "a chunk whose rows end after the last time that it names", trace(
            (rows._replace(last_ns=29), data))),
        "role_steps_outside": (["PT006"], "the same in a chunk of a role", trace(
            (role[0]._replace(first_step=4), data), (rows._replace(role=7), data))),
        "group_0": (["PT015"], "a group with the id that stands for none", trace(
            (rows, data), groups=(ProcessGroup(0, ranks=(0, 1)),))),
        "dangling_group": (["PT012"], "a group that nobody defined", job(collective, group=False)),
        "duplicate_seq": (["PT030"], "one seq twice", job({**{k: v * 2 for k, v in collective.items()}})),
        "different_operations": (["PT031"], "all_reduce meets broadcast", job(collective, collective | {"op": [2]})),
        "missing_member": (["PT032"], "a collective that rank 1 lacks", job(collective, {"kind": [1]})),
        "lonely_send": (["PT033"], "a send that nobody receives", job(
            {"kind": [3], "group_id": [5], "op": [10], "seq": [0], "peer": [1]}, {"kind": [1]})),
        "awaits_itself": (["PT023"], "a wait that waits for itself", job({"kind": [5], "awaits": [0]})),
        "awaits_later": (["PT023"], "a wait for a unit that comes later", job(
            {k: [*({"kind": [5], "op": [0], "group_id": [0]}.get(k, [None])), *v] for k, v in collective.items()}
            | {"awaits": [1, None]})),
        "wait_cycle": (["PT034"], "two ranks wait for each other in a circle", job(crossed(0, 1), crossed(1, 0))),
        "stranger": (["PT013"], "a rank in a group that it is no member of", written(
            lambda w: [w.add_group(ProcessGroup(5, ranks=(1, 2))), w.add_units(0, collective),
                       w.add_units(1, collective), w.add_units(2, {"kind": [1]})], world_size=3)),
        "negative_duration": (["PT020"], "an end before its start", job(
            {"kind": [1], "start_ns": [5], "end_ns": [4]})),
        "outside_world": (["PT010"], "rank 2 in a world of 2", written(
            lambda w: w.add_units(2, {"kind": [1]}), world_size=2)),
        "event_backwards": (["PT041"], "an event that ends before it starts", events({"start_ns": [5], "end_ns": [4]})),
        "event_without_track": (["PT042"], "an event on a strange track", events({"name": ["a"], "track": [1]})),
        "event_without_unit": (["PT043"], "an event of a unit that is not there", events({"name": ["a"], "unit": [1]})),
        "attachment_missing": (["PT051"], "an attachment that the file lacks", written(
            lambda w: w.set_metadata("attachment.log", "00" * 16))),
    }  # fmt: skip
