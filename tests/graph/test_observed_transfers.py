from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prism_sdk.graph.calibrate import measure, merge_slices
from prism_sdk.graph.errors import GraphError
from prism_sdk.graph.observed_transfers import observed_transfers
from prism_sdk.graph.timing import schedule
from prismtrace import ABSENT, UnitKind
from tests.graph.jobs import Program, random_program
from tests.graph.test_calibrate import _observed


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32))
def test_transfers_are_means_over_steps_with_the_same_communications(seed: int) -> None:
    graph = random_program(seed).graph()
    run = _observed(schedule(graph))
    transfer = measure(run).transfer_ns
    names = ("kind", "op", "group_id", "peer", "tag", "num_elements_in", "num_elements_out")
    steps: dict[tuple[int, int], list[int]] = {}  # rank and step -> rows that communicate
    for row in np.flatnonzero(graph.event_of_row >= 0).tolist():
        steps.setdefault((int(graph.rank_of_row[row]), int(graph.columns["step"][row])), []).append(row)
    alike: dict[tuple[object, ...], list[list[int]]] = {}
    for (rank, step), rows in steps.items():
        if step:  # behind the warm-up
            alike.setdefault((rank, *(int(graph.columns[n][r]) for r in rows for n in names)), []).append(rows)
    found = observed_transfers(graph, run, warmup_steps=1)
    assert (found[graph.event_of_row < 0] == ABSENT).all()
    for (rank, _), rows in steps.items():
        others = alike.get((rank, *(int(graph.columns[n][r]) for r in rows for n in names)))
        if others:
            for at, row in enumerate(rows):
                assert found[row] == pytest.approx(np.mean([transfer[one[at]] for one in others]), abs=1)


def _pipeline(*, rows_between: bool, transfer: int = 40) -> Program:
    """Two messages a step that are waited for by one handle, or by one after the other with computing between."""
    p = Program(2, {1: (0, 1)})
    for step in range(4):
        p.step = step
        for rank in (0, 1):
            p.compute(rank, 100)
        sent = [p.send(1, 0, 1, tag, transfer) for tag in (0, 1)]
        received = [p.recv(1, 0, 1, tag, transfer + 10 * tag) for tag in (0, 1)]
        for rank, units in ((0, sent), (1, received)):
            for at, unit in enumerate(units):
                if at and rows_between:
                    p.compute(rank, 1)
                p.wait(rank, unit)
    return p


def test_a_run_that_waits_otherwise_gives_its_transfers_too() -> None:
    recorded = _pipeline(rows_between=True).graph()
    run = _observed(schedule(_pipeline(rows_between=False).graph()))
    with pytest.raises(GraphError, match="no slice shows any step"):
        merge_slices(recorded, [run])
    found = observed_transfers(recorded, run)
    kind = recorded.columns["kind"]
    assert found[kind == UnitKind.SEND].tolist() == [40] * 8
    assert found[kind == UnitKind.RECV].tolist() == [40, 50] * 4


def test_a_run_of_another_job_is_refused() -> None:
    recorded = _pipeline(rows_between=True).graph()
    other = Program(2, {1: (0, 1)})
    other.collective(1, lambda rank: 5)
    with pytest.raises(GraphError, match="no step of it has the communications") as error:
        observed_transfers(recorded, _observed(schedule(other.graph())))
    assert "same script" in str(error.value.hint)
