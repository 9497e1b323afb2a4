"""Puts nodes in an order that respects their dependencies, and names what is wrong with these. Never recurses.

It does not know what a node is: it sees ids, dependencies and a preference.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class GraphFacts:
    """What the dependencies of one rank look like. Rows are positions in the file.

    `order` holds every row once. `duplicates` are ids that several nodes have, `dangling` pairs (id, missing id),
    `cycles` groups of ids that depend on each other, `longest_chain` nodes on the longest path.
    """

    order: list[int]
    duplicates: tuple[int, ...]
    dangling: tuple[tuple[int, int], ...]
    cycles: tuple[tuple[int, ...], ...]
    longest_chain: int

    def notes(self, where: str) -> list[str]:
        """One sentence for each kind of defect, with the first few ids."""
        found = []
        if self.duplicates:
            found.append(f"{where}: {len(self.duplicates)} ids belong to several nodes ({_few(self.duplicates)})")
        if self.dangling:
            shown = _few([f"{missing} of node {node}" for node, missing in self.dangling])
            found.append(f"{where}: {len(self.dangling)} dependencies name nodes that the file does not have ({shown})")
        if self.cycles:
            total = sum(map(len, self.cycles))
            shown = " -> ".join(map(str, self.cycles[0][:6])) + (" ..." if len(self.cycles[0]) > 6 else "")
            found.append(
                f"{where}: {len(self.cycles)} cycles of dependencies with {total} nodes (the first: {shown}); "
                "their nodes stand in the order of their ids"
            )
        return found


def _few(items: Sequence[object]) -> str:
    return ", ".join(map(str, items[:5])) + (", ..." if len(items) > 5 else "")


def inspect(ids: Sequence[int], dependencies: Sequence[Sequence[int]], preference: Sequence[int]) -> GraphFacts:
    """Order the nodes: dependencies first, else the smaller preference, else the smaller id.

    Args:
        ids: the id of each node.
        dependencies: for each node the ids that it depends on.
        preference: for each node a number, such as its start.
    """
    rows: dict[int, int] = {}
    duplicates: dict[int, None] = {}
    for row, node in enumerate(ids):
        if rows.setdefault(node, row) != row:
            duplicates[node] = None
    followers: list[list[int]] = [[] for _ in ids]
    waiting = [0] * len(ids)
    dangling: list[tuple[int, int]] = []
    for row, needed in enumerate(dependencies):
        for other in dict.fromkeys(needed):
            before = rows.get(other)
            if before is None:
                dangling.append((ids[row], other))
            else:
                followers[before].append(row)
                waiting[row] += 1
    depth = [1] * len(ids)
    heap = [(preference[row], ids[row], row) for row, count in enumerate(waiting) if not count]
    heapq.heapify(heap)
    order: list[int] = []
    while heap:
        row = heapq.heappop(heap)[2]
        order.append(row)
        for after in followers[row]:
            depth[after] = max(depth[after], depth[row] + 1)
            waiting[after] -= 1
            if not waiting[after]:
                heapq.heappush(heap, (preference[after], ids[after], after))
    cycles: list[tuple[int, ...]] = []
    longest = max((depth[row] for row in order), default=0)
    if len(order) < len(ids):
        left = [row for row, count in enumerate(waiting) if count]
        cycles = [tuple(ids[row] for row in found) for found in _components(left, followers, waiting)]
        left.sort(key=lambda row: (preference[row], ids[row], row))
        order.extend(left)
    return GraphFacts(order, tuple(duplicates), tuple(dangling), tuple(cycles), longest)


def _components(left: list[int], followers: list[list[int]], waiting: list[int]) -> list[list[int]]:
    """Strongly connected components of more than one node, and nodes that depend on themselves (Tarjan's algorithm)."""
    index: dict[int, int] = {}
    low: dict[int, int] = {}
    on_stack: set[int] = set()
    stack: list[int] = []
    found: list[list[int]] = []
    for root in left:
        if root in index:
            continue
        work = [(root, 0)]
        while work:
            row, position = work.pop()
            if position == 0:
                index[row] = low[row] = len(index)
                stack.append(row)
                on_stack.add(row)
            deeper = False
            after = followers[row]
            while position < len(after):
                other = after[position]
                position += 1
                if not waiting[other]:
                    continue
                if other not in index:
                    work.append((row, position))
                    work.append((other, 0))
                    deeper = True
                    break
                if other in on_stack:
                    low[row] = min(low[row], index[other])
            if deeper:
                continue
            if low[row] == index[row]:
                component = []
                while True:
                    other = stack.pop()
                    on_stack.discard(other)
                    component.append(other)
                    if other == row:
                        break
                if len(component) > 1 or row in followers[row]:
                    found.append(component[::-1])
            if work:
                parent = work[-1][0]
                low[parent] = min(low[parent], low[row])
    return found
