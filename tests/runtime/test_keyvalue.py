"""The launcher's key-value store against torch's HashStore, which holds the same contract."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prism_sdk.runtime.keyvalue import KeyValues

dist = pytest.importorskip("torch.distributed")

KEYS = st.sampled_from(["a", "b", "c"])
VALUES = st.sampled_from([b"1", b"22", b"x"])
OPERATIONS = st.one_of(
    st.tuples(st.just("set"), KEYS, VALUES),
    st.tuples(st.just("get"), KEYS),
    st.tuples(st.just("append"), KEYS, VALUES),
    st.tuples(st.just("compare_set"), KEYS, st.one_of(VALUES, st.just(b"")), VALUES),
    st.tuples(st.just("delete_key"), KEYS),
    st.tuples(st.just("check"), st.lists(KEYS, min_size=1, unique=True)),
    st.tuples(st.just("add"), st.just("n"), st.integers(-5, 5)),
    st.tuples(st.just("num_keys")),
    st.tuples(st.just("multi_set"), st.just(["a", "b"]), st.tuples(VALUES, VALUES).map(list)),
)


def ask(store: KeyValues, *request: Any, timeout_s: float = 300.0) -> Any:
    """The result; `...` when the request must wait."""
    reply = store.run(("store", *request, timeout_s))
    if reply is None:
        return ...
    assert reply[0] == "store"
    assert reply[2] is None
    return reply[1]


@settings(max_examples=200, deadline=None)
@given(st.lists(OPERATIONS, max_size=20))
def test_answers_as_a_store_of_torch(requests: list[tuple[Any, ...]]) -> None:
    ours, theirs = KeyValues(), dist.HashStore()
    theirs.set_timeout(timedelta(milliseconds=1))
    for operation, *arguments in requests:
        found = ask(ours, operation, *arguments)
        if operation == "get" and not theirs.check(arguments):
            assert found is ...  # torch would wait as well
        elif operation == "compare_set":
            key, expected, desired = arguments
            assert found == theirs.compare_set(key, expected.decode(), desired.decode())
        else:
            wanted = getattr(theirs, operation)(*arguments)
            if operation != "append" or wanted is not None:
                assert found == wanted


def test_waits_until_all_keys_are_there() -> None:
    store = KeyValues()
    assert ask(store, "wait", ["a", "b"]) is ...
    ask(store, "set", "a", b"1")
    assert ask(store, "wait", ["a", "b"]) is ...
    assert ask(store, "multi_get", ["a", "b"]) is ...
    ask(store, "set", "b", b"2")
    assert ask(store, "wait", ["a", "b"]) is True
    assert ask(store, "multi_get", ["a", "b"]) == [b"1", b"2"]


def test_only_short_waits_run_out() -> None:
    store = KeyValues()
    assert store.expire(("store", "wait", ["a"], 300.0)) is None
    kind, result, error = store.expire(("store", "wait", ["a"], 0.2)) or ("", None, "")
    assert (kind, result) == ("store", None)
    assert "200ms" in error
    assert "'a'" in error
