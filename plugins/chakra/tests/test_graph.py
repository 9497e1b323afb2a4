"""Dependencies: order, duplicates, dangling ids, cycles and long chains."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from prismtrace_chakra.graph import inspect


def test_a_chain_of_many_thousand_nodes() -> None:
    size = 50_000
    facts = inspect(range(size), [[] if k == 0 else [k - 1] for k in range(size)], [0] * size)
    assert facts.longest_chain == size
    assert facts.order == list(range(size))


def test_a_cycle_of_many_thousand_nodes() -> None:
    size = 20_000
    facts = inspect(range(size), [[(k - 1) % size] for k in range(size)], [0] * size)
    assert [len(cycle) for cycle in facts.cycles] == [size]
    assert sorted(facts.order) == list(range(size))


def test_defects_are_named_and_counted() -> None:
    ids = [1, 2, 3, 3, 4, 5, 6, 7]
    deps = [[], [1], [2, 99], [], [5], [4], [6], [5]]
    facts = inspect(ids, deps, [0] * 8)
    assert facts.duplicates == (3,)
    assert facts.dangling == ((3, 99),)
    assert sorted(map(sorted, facts.cycles)) == [[4, 5], [6]]
    notes = facts.notes("file.et")
    assert notes[0] == "file.et: 1 ids belong to several nodes (3)"
    assert "99 of node 3" in notes[1]
    assert "2 cycles of dependencies with 3 nodes" in notes[2]
    assert facts.order[:4] == [0, 1, 2, 3]


@given(st.lists(st.tuples(st.integers(0, 12), st.lists(st.integers(0, 14), max_size=3)), max_size=14))
def test_every_row_once_and_dependencies_first(nodes: list[tuple[int, list[int]]]) -> None:
    ids, deps = [node for node, _ in nodes], [needed for _, needed in nodes]
    facts = inspect(ids, deps, [0] * len(ids))
    assert sorted(facts.order) == list(range(len(ids)))
    if not facts.cycles:
        place = {row: position for position, row in enumerate(facts.order)}
        for row, needed in enumerate(deps):
            for other in needed:
                if other in ids:
                    assert place[ids.index(other)] < place[row]


@given(st.lists(st.lists(st.integers(0, 9), max_size=3), min_size=1, max_size=10))
def test_cycles_are_those_of_a_second_algorithm(deps: list[list[int]]) -> None:
    size = len(deps)
    reach = [{other for other in needed if other < size} for needed in deps]
    for middle in range(size):
        for row in range(size):
            if middle in reach[row]:
                reach[row] |= reach[middle]
    in_cycles = {row for row in range(size) if row in reach[row]}
    facts = inspect(range(size), deps, [0] * size)
    assert {node for cycle in facts.cycles for node in cycle} == in_cycles
