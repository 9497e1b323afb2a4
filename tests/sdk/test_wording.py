"""Words of messages: one and several, lists of ranks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

import prismtrace.wording
from prism_sdk.cli.parsing import parse_ranks
from prism_sdk.wording import counted, ranks_text


@pytest.mark.parametrize("function", [counted, prismtrace.wording.counted])
def test_one_and_several(function: Callable[..., str]) -> None:
    assert [function(number, "rank") for number in (0, 1, 2)] == ["0 ranks", "1 rank", "2 ranks"]
    assert function(1, "microbatch", "microbatches") == "1 microbatch"
    assert function(3, "microbatch", "microbatches") == "3 microbatches"
    assert function(12_345, "unit", separator=",") == "12,345 units"


@given(st.sets(st.integers(0, 5000), min_size=1, max_size=12))
def test_ranks_are_shown_as_they_are_given_to_options(ranks: set[int]) -> None:
    assert parse_ranks(ranks_text(sorted(ranks), limit=1000)) == tuple(sorted(ranks))


def test_long_lists_are_cut_and_order_is_kept() -> None:
    assert ranks_text([0, 1, 2, 8, 3]) == "0-2,8,3"
    assert ranks_text(range(0, 1000, 2), limit=12) == "0,2,4,6,8..."
