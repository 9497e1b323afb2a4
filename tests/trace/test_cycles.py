"""Circles of waits are found over all ranks, spelt out, and nothing else is taken for one."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
from hypothesis import HealthCheck, given, settings

from prismtrace import ABSENT, ABSENT32, Op, ProcessGroup, TraceWriter, UnitKind, validate

Call = tuple[str, int]
"""("all_reduce", group id), ("send", peer), ("recv", peer); in capitals without a wait behind it."""


def write(path: Path, programs: Sequence[Sequence[Call]]) -> Path:
    """A trace of what each rank calls, every call waited for at once unless it is in capitals."""
    world = len(programs)
    with TraceWriter(path, world_size=world, overwrite=True) as writer:
        for group_id in (1, 2, 3):
            writer.add_group(ProcessGroup(group_id=group_id, ranks=tuple(range(world))))
        for rank, program in enumerate(programs):
            rows: list[tuple[int, ...]] = []
            seqs: dict[Call, int] = {}
            for word, where in program:
                name = word.lower()
                key = (name, where)
                seq = seqs[key] = seqs.get(key, -1) + 1
                collective = name == "all_reduce"
                kind = UnitKind.COLLECTIVE if collective else UnitKind[name.upper()]
                group, peer = (where, ABSENT32) if collective else (1, where)
                rows.append((kind, Op[name.upper()], group, seq, peer, ABSENT))
                if word == name:
                    rows.append((UnitKind.WAIT, 0, 0, ABSENT, ABSENT32, len(rows) - 1))
            if rows:
                names = ("kind", "op", "group_id", "seq", "peer", "awaits")
                columns = {name: np.array([row[place] for row in rows]) for place, name in enumerate(names)}
                writer.add_units(rank, {**columns, "group_id": columns["group_id"].astype(np.uint64)})
    return path


def circles(path: Path) -> list[str]:
    return [item.message for item in validate(path) if item.code == "PT034"]


def test_two_groups_in_another_order(tmp_path: Path) -> None:
    path = write(tmp_path / "x", [[("all_reduce", 1), ("all_reduce", 2)], [("all_reduce", 2), ("all_reduce", 1)]])
    (text,) = circles(path)
    assert text == (
        "rank 0 waits at unit 1 for seq 0 of group 1, which rank 1 posts at unit 2, after its wait at unit 1; "
        "rank 1 waits at unit 1 for seq 0 of group 2, which rank 0 posts at unit 2, after its wait at unit 1"
    )


def test_asynchronous_calls_in_another_order_are_fine(tmp_path: Path) -> None:
    path = write(tmp_path / "x", [[("ALL_REDUCE", 1), ("all_reduce", 2)], [("ALL_REDUCE", 2), ("all_reduce", 1)]])
    assert circles(path) == []


def test_messages(tmp_path: Path) -> None:
    both_receive_first = [[("recv", 1), ("send", 1)], [("recv", 0), ("send", 0)]]
    (text,) = circles(write(tmp_path / "x", both_receive_first))
    assert "message 1 -> 0" in text and "message 0 -> 1" in text
    assert circles(write(tmp_path / "x", [[("send", 1), ("recv", 1)], [("send", 0), ("recv", 0)]])) == []
    ring = [[("recv", (rank - 1) % 5), ("send", (rank + 1) % 5)] for rank in range(5)]
    (text,) = circles(write(tmp_path / "x", ring))
    assert all(f"rank {rank} waits" in text for rank in range(5))


def test_a_member_that_never_comes_is_no_circle(tmp_path: Path) -> None:
    path = write(tmp_path / "x", [[("all_reduce", 1), ("all_reduce", 2)], [("all_reduce", 2)], []])
    assert circles(path) == []


def test_ranks_that_wait_for_a_circle_are_not_part_of_it(tmp_path: Path) -> None:
    last = [("recv", 0)]
    path = write(
        tmp_path / "x",
        [[("recv", 1), ("send", 1), ("send", 2)], [("recv", 0), ("send", 0)], last],
    )
    found = [item for item in validate(path) if item.code == "PT034"]
    assert [item.where for item in found] == ["2 ranks"] and found[0].spec_section == "7.3 Derived edges"


def test_a_long_chain_needs_no_deep_stack_and_little_time(tmp_path: Path) -> None:
    world = 1200
    programs: list[list[Call]] = [[("recv", (rank - 1) % world), ("send", (rank + 1) % world)] for rank in range(world)]
    begin = time.perf_counter()
    (text,) = circles(write(tmp_path / "x", programs))
    assert "and 1192 more ranks" in text
    programs[0].reverse()
    assert circles(write(tmp_path / "x", programs)) == []
    assert time.perf_counter() - begin < 18


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_agrees_with_running_the_programs(tmp_path: Path, data: st.DataObject) -> None:
    world = data.draw(st.integers(2, 4))
    calls = st.tuples(st.sampled_from(["all_reduce", "ALL_REDUCE"]), st.integers(1, 3))
    programs = [data.draw(st.lists(calls, max_size=5)) for _ in range(world)]
    assert bool(circles(write(tmp_path / "x", programs))) == deadlocks(programs)


def deadlocks(programs: list[list[Call]]) -> bool:
    """Runs the programs; whether some rank waits for a post that another rank has yet to make."""
    posts: dict[tuple[int, int], int] = {}
    todo: list[list[tuple[str, int, int]]] = []
    for program in programs:
        seqs: dict[int, int] = {}
        steps = []
        for word, group in program:
            seq = seqs[group] = seqs.get(group, -1) + 1
            posts[group, seq] = posts.get((group, seq), 0) + 1
            steps.append(("post", group, seq))
            if word == "all_reduce":
                steps.append(("wait", group, seq))
        todo.append(steps)
    moved = True
    while moved:
        moved = False
        for steps in todo:
            while steps and (steps[0][0] == "post" or posts[steps[0][1:]] == 0):
                word, *key = steps.pop(0)
                posts[key[0], key[1]] -= word == "post"
                moved = True
    return any(todo)
