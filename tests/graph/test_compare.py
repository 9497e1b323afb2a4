from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prism_sdk.graph.compare import Comparison, compare_traces
from prism_sdk.graph.errors import GraphError
from prismtrace import ABSENT, GraphKind, TraceWriter
from tests.graph.jobs import Program


def _trace(
    path: Path, *, step_ns: list[int], ranks: tuple[int, ...] = (0, 1), losses: list[float] | None = None,
    memory: int | None = None, compute_ns: int = 100, group_name: str = "g1", change: dict[str, Any] | None = None,
    units: bool = True,
) -> Path:  # fmt: skip
    p = Program(2, {1: (0, 1)})
    for step in range(len(step_ns)):
        p.step = step
        for rank in (0, 1):
            p.compute(rank, compute_ns, phase=1)
        for rank, unit in p.collective(1, lambda _: 5).items():
            p.wait(rank, unit)
    if change:
        p.rows[0][4] |= change
    n = len(step_ns)
    with TraceWriter(path, graph_kind=GraphKind.OBSERVED, world_size=2) as writer:
        for group in p.groups.values():
            writer.add_group(type(group)(group_id=1, name=group_name, description="", backend="gloo", ranks=(0, 1)))
        for rank in ranks:
            if units:
                writer.add_units(rank, p.columns()[rank])
            ends = np.cumsum(step_ns)
            columns: dict[str, Any] = {"step": np.arange(n), "end_ns": ends, "start_ns": [ABSENT, *ends[:-1]]}
            if losses is not None:
                columns |= {"loss": losses, "num_losses": [1] * n}
            if memory is not None:
                columns["memory_peak_bytes"] = [memory - n + step for step in range(n)]
            writer.add_steps(rank, columns)
    return path


def _json(comparison: Comparison) -> Any:
    return json.loads(json.dumps(comparison.to_dict(), allow_nan=False))


def test_everything_side_by_side(tmp_path: Path) -> None:
    loss = [3.0, 2.5, 2.25, 2.0]
    real = [
        _trace(tmp_path / "a", step_ns=[900, 100, 102, 98], losses=loss, memory=1000),
        _trace(tmp_path / "b", step_ns=[800, 104, 104, 104], losses=[3.0, 2.5, 2.25, 2.125], memory=1000),
    ]
    other = _trace(tmp_path / "c", step_ns=[500, 103, 103, 103, 500], ranks=(1,), losses=[*loss, 9.0], memory=1001,
                   compute_ns=110)  # fmt: skip
    result = compare_traces(real, [other])
    (rank,) = result.ranks
    assert rank.rank == 1 and rank.step_time is not None and rank.loss is not None and rank.memory is not None
    t = rank.step_time
    assert (t.num_steps, t.real_mean_ns, t.other_mean_ns, t.real_median_ns) == (3, 102.0, 103.0, 103.0)
    assert t.error_percent == pytest.approx(100 / 102) and t.real_spread_percent == pytest.approx(400 / 102)
    assert t.is_within_real_range and t.other_spread_percent is None
    assert result.mean_abs_error_percent == t.error_percent == result.worst_abs_error_percent
    assert rank.loss.is_bit_equal and rank.loss.max_abs_difference == 0.0
    assert rank.loss.steps == (0, 1, 2, 3) and rank.loss.real_max_abs_difference == 0.125
    assert rank.memory.real_peak_bytes == (999, 999) and rank.memory.other_peak_bytes == (999,)
    units = {u.kind: u for u in rank.units}
    assert (units["compute"].real_median_ns, units["compute"].other_median_ns) == (100.0, 110.0)
    assert units["compute"].error_percent == pytest.approx(10.0) and units["compute"].phase == "forward"
    assert units["collective"].op == "all_reduce" and units["collective"].real_median_ns is None
    assert "rank 1: no timed collective all_reduce units of phase unspecified in real and other" in result.missing
    assert rank.order is not None and rank.order.is_equal and rank.order.num_compared == 4
    assert _json(result)["ranks"][0]["loss"]["real"] == loss
    table = result.format_table()
    for words in ("+0.98 %", "3.92 %", "equal to the bit", "rank 1: equal (4 operations)", "forward", "missing"):
        assert words in table


@pytest.mark.parametrize(
    ("change", "words"),
    [({"num_elements_in": 16, "num_elements_out": 16}, "16 elements in"), ({"dtype": 2}, "float64"),
     ({"op": 2}, "broadcast")],
)  # fmt: skip
def test_first_difference_of_order(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    real = _trace(tmp_path / "a", step_ns=[9, 10, 11])
    other = _trace(tmp_path / "b", step_ns=[9, 10, 11], change=change)
    result = compare_traces([real], [other])
    order = result.ranks[0].order
    assert order is not None and not order.is_equal and order.first_difference_index == 1
    assert order.real is not None and order.other is not None
    assert "rank 0, unit 4 (step 1): all_reduce in g1 [0, 1] seq 1, float32, 8 elements in, 8 out" in order.real
    assert words in order.other and result.is_order_equal is False
    assert result.ranks[1].order is not None and result.ranks[1].order.is_equal
    assert "differs at operation 1" in result.format_table()


def test_groups_are_compared_by_name_and_ranks(tmp_path: Path) -> None:
    real, other = (_trace(tmp_path / n, step_ns=[9, 10], group_name=n) for n in "ab")
    order = compare_traces([real], [other]).ranks[0].order
    assert order is not None and order.first_difference_index == 0 and "in b [0, 1]" in (order.other or "")


def test_what_is_missing_is_named_and_never_a_number(tmp_path: Path) -> None:
    real = _trace(tmp_path / "a", step_ns=[9, 10, 11], ranks=(0,), losses=[1.0, float("nan"), 3.0])
    other = _trace(tmp_path / "b", step_ns=[9, 10, 11], losses=[1.0, 2.0, 3.5], memory=5, units=False)
    result = compare_traces([real], [other])
    (rank,) = result.ranks
    assert rank.memory is None and rank.units == () and rank.order is None and result.is_order_equal is None
    assert rank.loss is not None and rank.loss.steps == (0, 2) and rank.loss.max_abs_difference == 0.5
    assert not rank.loss.is_bit_equal
    assert f"rank 1: not in {real}" in result.missing
    assert f"rank 0: no memory peak in {real}" in result.missing
    assert f"rank 0: no units in {other}" in result.missing
    assert "rank 0: only 2 of 3 common steps have a loss in all traces" in result.missing
    short = _trace(tmp_path / "c", step_ns=[9], ranks=(0,))
    result = compare_traces([real], [short])
    assert result.ranks[0].step_time is None and result.mean_abs_error_percent is None
    assert "rank 0: no step after the first that all traces timed" in result.missing
    assert "error" not in _json(result)["ranks"][0] and "missing" in result.format_table()


def test_nothing_to_compare_is_an_error(tmp_path: Path) -> None:
    a, b = (_trace(tmp_path / n, step_ns=[9], ranks=(r,)) for n, r in (("a", 0), ("b", 1)))
    with pytest.raises(GraphError, match="none of the ranks"):
        compare_traces([a], [b])
    with pytest.raises(GraphError, match="at least one"):
        compare_traces([], [b])
