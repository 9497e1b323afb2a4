"""Modelled transfers: what the table between two ranks says, and how it extends to groups that do not fit here."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prism_sdk.builtin.slices import Options, partition
from prism_sdk.builtin.transfer_model import TransferModel, modelled_transfers, plausible_transfers
from prism_sdk.errors import UsageError
from prism_sdk.graph.job import JobGraph
from prismtrace import ABSENT, DType, GraphKind, Op, ProcessGroup, UnitKind

MEASURED = (Op.ALL_REDUCE, Op.ALL_GATHER, Op.REDUCE_SCATTER, Op.ALL_TO_ALL, Op.BROADCAST, Op.REDUCE, Op.RECV)
LINEAR = dict.fromkeys(MEASURED, ((0.0, 1000.0, 3000.0), (100.0, 1100.0, 3100.0)))
MODEL = TransferModel(LINEAR)  # T_2(S) = 100 + S for every operation
COLLECTIVES = [Op.ALL_REDUCE, Op.ALL_GATHER, Op.REDUCE_SCATTER, Op.ALL_TO_ALL, Op.BROADCAST, Op.REDUCE, Op.GATHER,
               Op.SCATTER]  # fmt: skip


def job(world_size: int, rows: list[tuple[Op, int, int, int, int]], *, groups: dict[int, tuple[int, ...]]) -> JobGraph:
    """Collectives of (op, group, elements in and out, transfer), one each ms; a negative transfer: no end is known."""
    columns = {}
    described = {
        g: ProcessGroup(group_id=g, name=f"g{g}", description="", backend="gloo", ranks=ranks)
        for g, ranks in groups.items()
    }
    for rank in range(world_size):
        mine = [(i, row) for i, row in enumerate(rows) if rank in groups[row[1]]]
        seqs: dict[int, int] = {}
        names = ("kind", "op", "group_id", "seq", "dtype", "num_elements_in", "num_elements_out", "start_ns", "end_ns")
        table: dict[str, list[int]] = {name: [] for name in names}
        for number, (op, group, count_in, count_out, transfer) in mine:
            seq = seqs.get(group, 0)
            seqs[group] = seq + 1
            start = (number + 1) * 10**6 + rank
            last = (number + 1) * 10**6 + max(groups[group])
            end = ABSENT if transfer < 0 else last + transfer
            values = (UnitKind.COLLECTIVE, op, group, seq, DType.FLOAT32, count_in, count_out, start, end)
            for name, value in zip(names, values, strict=True):
                table[name].append(int(value))
        table |= {"step": [0] * len(mine), "peer": [int(np.iinfo(np.int32).min)] * len(mine)}
        table |= {name: [ABSENT] * len(mine) for name in ("gap_ns", "transfer_ns", "awaits", "tag")}
        table |= {name: [0] * len(mine) for name in ("phase", "reduce_op")}
        columns[rank] = table
    return JobGraph.from_columns(columns, world_size=world_size, groups=described, graph_kind=GraphKind.OBSERVED)


def test_fit_takes_means_by_operation_and_size_without_the_first_of_each() -> None:
    rows = [(Op.ALL_REDUCE, 1, 8, 8, t) for t in (90_000, 500, 700)] + [(Op.ALL_REDUCE, 1, 64, 64, 900)]
    rows += [(Op.BROADCAST, 1, 0, 16, 40)]  # what is received counts: non-roots contribute nothing
    model = TransferModel.fit(job(2, rows, groups={1: (0, 1)}))
    assert model.tables[Op.ALL_REDUCE] == ((32.0, 256.0), (600.0, 900.0))
    assert model.tables[Op.BROADCAST] == ((64.0,), (40.0,))
    assert set(model.tables) == {Op.ALL_REDUCE, Op.BROADCAST}
    assert model.transfer_ns(Op.ALL_REDUCE, num_bytes=32, group_size=2) == 600


def test_what_a_call_costs_alone_counts_once() -> None:
    rows = [(Op.ALL_GATHER, 2, 8, 8, 300), (Op.ALL_GATHER, 3, 8, 8, 300), (Op.ALL_GATHER, 1, 8, 8, 1000)]
    model = TransferModel.fit(job(2, rows, groups={1: (0, 1), 2: (0,), 3: (1,)}))
    assert model.alone == {Op.ALL_GATHER: ((32.0,), (300.0,))}
    assert [model.transfer_ns(Op.ALL_GATHER, num_bytes=32, group_size=n) for n in (2, 3, 16)] == [1000, 1700, 10_800]


@pytest.mark.parametrize(
    ("op", "group_size", "expected"),
    [
        (Op.ALL_REDUCE, 4, 3 * (100 + 2000 / 4)),  # 2(n-1) ring steps of S/n against 2 of S/2
        (Op.REDUCE_SCATTER, 4, 3 * (100 + 2000 / 4)),
        (Op.ALL_TO_ALL, 8, 7 * (100 + 2000 / 8)),
        (Op.ALL_GATHER, 4, 3 * (100 + 1000)),
        (Op.GATHER, 4, 3 * (100 + 1000)),  # from the table of broadcast
        (Op.SCATTER, 4, 3 * (100 + 1000)),
        (Op.BROADCAST, 8, 3 * (100 + 1000)),
        (Op.REDUCE, 5, 3 * (100 + 1000)),
        (Op.RECV, 64, 100 + 1000),
        (Op.SEND, 2, 0),
        (Op.BARRIER, 4, 2 * 50_000),  # nothing measured: the fixed fallback
    ],
)
def test_extended_to_a_larger_group(op: Op, group_size: int, expected: float) -> None:
    assert MODEL.transfer_ns(op, num_bytes=1000, group_size=group_size) == round(expected)


@given(op=st.sampled_from([*COLLECTIVES, Op.RECV]), num_bytes=st.integers(0, 10**9))
def test_two_ranks_are_what_was_measured_and_one_rank_is_free(op: Op, num_bytes: int) -> None:
    assert MODEL.transfer_ns(op, num_bytes=num_bytes, group_size=1) == 0
    assert MODEL.transfer_ns(op, num_bytes=num_bytes, group_size=2) == pytest.approx(100 + num_bytes, abs=1)


@given(op=st.sampled_from(COLLECTIVES), num_bytes=st.integers(0, 10**8), group_size=st.integers(2, 512))
def test_more_bytes_and_more_ranks_never_take_less(op: Op, num_bytes: int, group_size: int) -> None:
    here = MODEL.transfer_ns(op, num_bytes=num_bytes, group_size=group_size)
    assert MODEL.transfer_ns(op, num_bytes=num_bytes + 1000, group_size=group_size) >= here
    assert MODEL.transfer_ns(op, num_bytes=num_bytes, group_size=group_size + 1) >= here


def test_tables_of_one_size_and_falling_ends_stay_finite() -> None:
    model = TransferModel({Op.ALL_REDUCE: ((8.0,), (500.0,)), Op.ALL_GATHER: ((8.0, 16.0), (500.0, 300.0))})
    assert model.transfer_ns(Op.ALL_REDUCE, num_bytes=10**9, group_size=2) == 500
    assert model.transfer_ns(Op.ALL_GATHER, num_bytes=10**9, group_size=2) == 300  # never below what was measured


def test_modelled_for_communication_rows_only() -> None:
    groups = {1: (0, 1, 2, 3), 2: (0, 1)}
    graph = job(4, [(Op.ALL_REDUCE, 1, 500, 500, -1), (Op.ALL_GATHER, 2, 250, 500, -1)], groups=groups)
    transfers = modelled_transfers(graph, MODEL)
    assert transfers.dtype == np.int64
    assert transfers[graph.rows(3)].tolist() == [3 * (100 + 1000)]
    assert transfers[graph.rows(0)].tolist() == [3 * (100 + 1000), 100 + 1000]


def test_plausible_takes_the_like_then_the_nearest_then_the_fallback() -> None:
    groups = {1: (0, 1), 2: (0, 1)}
    shown = [(Op.ALL_REDUCE, 1, 8, 8, 500), (Op.ALL_REDUCE, 1, 8, 8, 700), (Op.ALL_REDUCE, 1, 800, 800, 9000)]
    measured = job(2, shown, groups=groups)
    wanted = job(2, [(Op.ALL_REDUCE, 1, 8, 8, -1), (Op.ALL_REDUCE, 1, 700, 700, -1), (Op.ALL_REDUCE, 2, 8, 8, -1),
                     (Op.ALL_GATHER, 1, 8, 16, -1)], groups=groups)  # fmt: skip
    found = plausible_transfers(wanted, [measured])
    assert found[wanted.rows(0)].tolist() == [600, 9000, 50_000, 50_000]
    assert found[wanted.rows(1)].tolist() == found[wanted.rows(0)].tolist()
    assert plausible_transfers(wanted, []).tolist() == [50_000] * len(wanted)


@given(world_size=st.integers(1, 200), num_slots=st.integers(1, 200))
def test_every_rank_is_in_one_slice(world_size: int, num_slots: int) -> None:
    slices = partition(range(world_size), num_slots)
    assert [rank for ranks in slices for rank in ranks] == list(range(world_size))
    assert len(slices) == math.ceil(world_size / num_slots)
    assert max(map(len, slices)) <= num_slots


def test_options_that_are_no_numbers_are_refused_by_name() -> None:
    assert Options.parse({"passes": "2", "transfers": "x.prism"}) == Options(passes=2, transfers="x.prism")
    for key, value, why in (
        ("passes", "many", "many is not a whole number"), ("passes", "0", "at least 1"),
        ("warmup_steps", "-1", "at least 0"),
    ):  # fmt: skip
        with pytest.raises(UsageError, match=why):
            Options.parse({key: value})
