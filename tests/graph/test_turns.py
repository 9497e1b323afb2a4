"""Which kinds of steps are found to take turns, and where nothing says that there are several."""

from __future__ import annotations

import numpy as np
import pytest

from prism_sdk.graph.job import JobGraph
from prism_sdk.graph.turns import turns_of
from tests.graph.jobs import Program


def _graph(lengths: dict[int, list[int]]) -> JobGraph:
    p = Program(len(lengths), {1: tuple(lengths)})
    for step in range(len(lengths[0])):
        p.step = step
        for rank, of_rank in lengths.items():
            p.compute(rank, of_rank[step])
        for rank, unit in p.collective(1, lambda _: 50).items():
            p.wait(rank, unit)
    return p.graph()


@pytest.mark.parametrize(
    ("kinds", "turns"), [("ab", 2), ("aab", 3), ("abc", 3), ("aaaab", 5), ("abab", 2), ("a", 1), ("aa", 1)]
)
def test_turns_are_found_when_each_kind_was_shown_twice(kinds: str, turns: int) -> None:
    length = {"a": 1000, "b": 1700, "c": 1300}
    for num_steps in range(1, 16):
        lengths = [length[kinds[step % len(kinds)]] for step in range(num_steps)]
        lengths[0] += 5000  # the warm-up
        found = turns_of([_graph({0: lengths, 1: lengths})])
        assert found == (turns if num_steps - 1 >= 2 * turns else 1), num_steps


def test_turns_of_one_rank_alone_are_found() -> None:
    lengths = {rank: (1000 + np.random.default_rng(rank).integers(-10, 10, 13)).tolist() for rank in range(8)}
    assert turns_of([_graph(lengths)]) == 1
    lengths[3] = [2000 if step % 4 == 3 else 1000 for step in range(13)]  # writes a checkpoint
    assert turns_of([_graph(lengths)]) == 4


def test_one_disturbed_run_of_three_hides_no_turns() -> None:
    runs = [_graph({0: [1000, 2000] * 5}) for _ in range(3)]
    assert turns_of(runs) == 2
    runs[1] = _graph({0: [1000, 2000, 1000, 9000, 5000, 2000, 1000, 2000, 1000, 2000]})
    assert turns_of(runs) == 2


@pytest.mark.parametrize("seed", range(40))
def test_variation_alone_is_no_turns(seed: int) -> None:
    rng = np.random.default_rng(seed)
    lengths = {rank: (1000 * np.exp(rng.normal(0, 0.3, 12))).astype(int).tolist() for rank in range(4)}
    assert turns_of([_graph(lengths)]) == 1


def test_no_graph_and_runs_that_share_no_step_have_no_turns() -> None:
    assert turns_of([]) == 1
    assert turns_of([_graph({0: [1000, 2000] * 4}), _graph({0: [1000, 2000]})]) == 1
