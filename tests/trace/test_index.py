"""The index finds chunks by table, rank and role, and refuses what cannot be, in little memory."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prismtrace import TraceDataError, TraceLimitError
from prismtrace.entries import CHUNK_ENTRY, PAYLOAD_ENTRY, RANK_RANGE
from prismtrace.index import Collected, Index
from prismtrace.metas import HeaderMeta
from prismtrace.model import FORMAT_VERSION, ROLE_RANK, TableKind


def test_an_index_that_names_a_million_ranks_needs_little_memory() -> None:
    entry = np.zeros(1, CHUNK_ENTRY)
    entry["table"], entry["num_rows"], entry["num_ranges"] = int(TableKind.UNITS), 1, 1
    ranges = np.array([(0, 1_000_000, 1)], RANK_RANGE)
    header = HeaderMeta(FORMAT_VERSION, 0, 0, 0, 0, "")
    tracemalloc.start()
    try:
        index = Index(header, entry, np.zeros(0, PAYLOAD_ENTRY), {}, {}, ranges=ranges)
        index.check()
        assert index.num_rows(TableKind.UNITS, 999_999) == 1
        assert index.num_rows(TableKind.UNITS, 1_000_000) == 0
        assert (index.total_rows(TableKind.UNITS), index.total_rows(TableKind.STEPS)) == (1_000_000, 0)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 128 << 20


@given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 12), st.integers(0, 4)), max_size=8))
def test_rows_are_twice_only_where_two_chunks_have_them(chunks: list[tuple[int, int, int]]) -> None:
    entries = np.zeros(len(chunks), CHUNK_ENTRY)
    entries["table"] = int(TableKind.UNITS)
    for entry, (rank, first, num) in zip(entries, chunks, strict=True):
        entry["rank"], entry["first_row"], entry["num_rows"] = rank, first, num
    rows = [(rank, row) for rank, first, num in chunks for row in range(first, first + num)]
    header = HeaderMeta(FORMAT_VERSION, 0, 0, 0, 0, "")
    index = Index(header, entries, np.zeros(0, PAYLOAD_ENTRY), {}, {})
    if len(rows) == len(set(rows)):
        index.check()
    else:
        with pytest.raises(TraceDataError, match="same rows"):
            index.check()
    collected = Collected(chunks=[tuple(entry) for entry in entries.tolist()])
    collected.drop_repeated_rows("f")
    Index(header, *collected.arrays()[:2], {}, {}).check()
    left = {(e[7], row) for e in collected.chunks for row in range(e[2], e[2] + e[6])}
    assert left <= set(rows) and (left == set(rows) or len(rows) != len(set(rows)))


def test_a_chunk_of_more_ranks_than_may_be_is_refused_before_they_are_listed() -> None:
    entry = np.zeros(1, CHUNK_ENTRY)
    entry["table"], entry["num_rows"], entry["num_ranges"] = int(TableKind.UNITS), 1, 1
    ranges = np.array([(0, (1 << 20) + 1, 1)], RANK_RANGE)
    header = HeaderMeta(FORMAT_VERSION, 0, 0, 0, 0, "")
    with pytest.raises(TraceLimitError, match="1048577 ranks"):
        Index(header, entry, np.zeros(0, PAYLOAD_ENTRY), {}, {}, ranges=ranges).check()


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 5)), min_size=1, max_size=40), st.integers(0, 2**64 - 1))
def test_chunks_are_found_by_table_rank_and_role(owners: list[tuple[int, int]], role: int) -> None:
    role = role or 1
    entries = np.zeros(len(owners) + 2, CHUNK_ENTRY)
    for number, (table, rank) in enumerate(owners):
        entries[number]["table"], entries[number]["rank"] = table, rank
        entries[number]["first_row"], entries[number]["num_rows"] = 10 * number, 10
    for number, value in ((len(owners), role), (len(owners) + 1, role - 1 or 2)):  # neighbours beyond 2^53 too
        entries[number]["table"], entries[number]["rank"], entries[number]["role"] = 1, ROLE_RANK, value
        entries[number]["num_rows"] = 1
        entries[number]["first_row"] = number
    index = Index(HeaderMeta(FORMAT_VERSION, 0, 0, 0, 0, ""), entries, np.zeros(0, PAYLOAD_ENTRY), {}, {})
    for table in range(7):
        for rank in (*range(7), 1 << 40, -(1 << 70)):
            wanted = [10 * number for number, owner in enumerate(owners) if owner == (table, rank)]
            assert index.entries(table, rank)["first_row"].tolist() == wanted
    assert index.entries(1, ROLE_RANK, role=role)["role"].tolist() == [role]
    roles = {(1, ROLE_RANK, int(entry["role"])) for entry in entries[-2:]}
    assert sorted(index.owners()) == sorted({(table, rank, 0) for table, rank in owners} | roles)
