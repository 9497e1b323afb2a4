"""Which of the last steps stand for later ones."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prism_sdk.graph.rounds import steps_per_round


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        ("", 1),
        ("A", 1),
        ("AAAA", 1),
        ("ABAB", 2),
        ("AAB", 1),  # a round that was there once may be anything
        ("AABA", 1),
        ("XABAB", 2),
        ("XYAAA", 1),  # warming up
        ("AABAAB", 3),
        ("AAAAABAAAA", 1),  # the second evaluation is not there
        ("AAAABAAAABAAA", 5),
        ("XAAAABAAAABAA", 5),
        ("ABABAA", 1),  # what was regular is no more
        ("ABCABCABC", 3),
    ],
)
def test_the_round_that_explains_most_of_the_end(kinds: str, expected: int) -> None:
    assert steps_per_round(kinds) == expected


@given(st.lists(st.integers(0, 2), min_size=1, max_size=7), st.integers(2, 4), st.integers(0, 6))
def test_a_round_that_came_twice_is_found(kinds: list[int], times: int, more: int) -> None:
    """Whatever the steps of a round are, and where in it the recording ends: the steps that follow are foretold."""
    num = len(kinds)
    job = [kinds[step % num] for step in range(times * num + more % num)]
    found = steps_per_round(job)
    assert found <= num
    foretold = [job[len(job) - found + step % found] for step in range(3 * num)]
    assert foretold == [kinds[(len(job) + step) % num] for step in range(3 * num)]


@given(st.lists(st.integers(0, 3), max_size=24))
def test_a_round_was_there_twice(kinds: list[int]) -> None:
    found = steps_per_round(kinds)
    assert found == 1 or kinds[-found:] == kinds[-2 * found : -found]


@pytest.mark.parametrize(
    ("kinds", "turns", "expected"), [("AAAA", 2, 2), ("AAA", 2, 1), ("XAAA", 2, 1), ("ABAB", 3, 2)]
)
def test_turns_count_among_steps_that_do_the_same(kinds: str, turns: int, expected: int) -> None:
    assert steps_per_round(kinds, turns=turns) == expected
