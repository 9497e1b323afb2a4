"""How operations of many ranks come together, and what is said when they do not fit."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prism_sdk.errors import CollectiveMismatchError
from prism_sdk.runtime.matching import Matcher, Post
from prismtrace.model import DType, Op, ReduceOp

GROUP = 5
ALL_REDUCE = (int(Op.ALL_REDUCE), int(ReduceOp.SUM), int(DType.FLOAT32), None, 6)


def matcher(size: int) -> Matcher:
    result = Matcher()
    result.add_group(GROUP, "dp", tuple(range(10, 10 + size)))
    return result


def post(result: Matcher, group_rank: int, *, key: Any = ("c", GROUP, 0), signature: Any = ALL_REDUCE, size: int = 2,
         contribution: Any = None, clock: int = 0) -> Any:  # fmt: skip
    entry = Post(10 + group_rank, contribution, None, f"train.py:{group_rank}", clock)
    return result.post(key, size, group_rank, signature, entry)


@given(order=st.permutations(range(5)))
def test_complete_with_the_last_member_in_any_order(order: list[int]) -> None:
    result = matcher(5)
    for count, group_rank in enumerate(order, start=1):
        operation = post(result, group_rank, size=5, contribution=(group_rank * 4096, 24))
        assert operation.complete == (count == 5)
        assert set(operation.missing(result.group_ranks(GROUP))) == {10 + r for r in order[count:]}
    for _ in range(4):
        assert result.take(("c", GROUP, 0)) == []
    freed = result.take(("c", GROUP, 0))
    assert sorted(freed) == [(10 + r, (r * 4096, 24)) for r in range(5)]
    assert result.operations == {}


@pytest.mark.parametrize(
    ("position", "value", "field", "words"),
    [
        (0, int(Op.BROADCAST), "operation", "broadcast"),
        (1, int(ReduceOp.MAX), "reduction", "max"),
        (2, int(DType.FLOAT16), "dtype", "float16"),
        (3, 1, "root", "1"),
        (4, 7, "element count", "7"),
    ],
)
def test_a_mismatch_names_the_field_and_both_places(position: int, value: int, field: str, words: str) -> None:
    result = matcher(2)
    post(result, 0)
    other = list(ALL_REDUCE)
    other[position] = value
    with pytest.raises(CollectiveMismatchError) as caught:
        post(result, 1, signature=tuple(other))
    text = str(caught.value)
    assert field in text
    assert "dp" in text
    assert "train.py:0" in text
    assert f"{words} at train.py:1" in text


def test_an_unknown_count_fits_every_count() -> None:
    result = matcher(2)
    post(result, 0, signature=(*ALL_REDUCE[:4], None))
    assert post(result, 1).complete


def message(result: Matcher, source: int, *, seq: int = 0, clock: int = 0) -> tuple[Any, ...]:
    key = ("p", GROUP, source, 10, 3, seq)
    post(result, 0, key=key, size=1, signature=(int(Op.SEND), 0, 1, None, 1), clock=clock)
    return key


def test_any_source_takes_the_earliest_then_the_lowest_source() -> None:
    result = matcher(4)
    wanted = ("a", GROUP, 10, 3, 1)
    assert result.match_any(wanted) is None
    late = message(result, 11, clock=9)
    early = message(result, 13, clock=2)
    twin = message(result, 12, clock=2)
    taken = []
    while (key := result.match_any(wanted)) is not None:
        taken.append(key)
        result.take(key)
    assert taken == [twin, early, late]


def test_any_source_does_not_overtake_within_a_source() -> None:
    result = matcher(2)
    first, second = message(result, 11, seq=0, clock=5), message(result, 11, seq=1, clock=1)
    key = result.match_any(("a", GROUP, 10, 3, 1))
    assert key == first
    result.take(key)
    assert result.match_any(("a", GROUP, 10, 3, 2)) == second


def test_other_tags_are_no_mail() -> None:
    result = matcher(2)
    message(result, 11)
    assert result.match_any(("a", GROUP, 10, 4, 1)) is None
