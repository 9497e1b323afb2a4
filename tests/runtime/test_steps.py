"""`--steps` and PRISM_STEPS: what is kept of a run."""

from __future__ import annotations

import socket
import sys
from typing import Any

import pytest

from prismtrace import TraceReader, has_errors, validate

SCRIPT = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(5):
    model(torch.ones(2, 3)).sum().backward()
    dist.all_reduce(model.weight.grad)
    optimizer.step()
dist.destroy_process_group()
"""


def _steps_kept(bench: Any) -> None:
    with TraceReader(bench.output) as reader:
        assert reader.ranks == (0, 1)
        for rank in reader.ranks:
            units = reader.units(rank)
            assert set(units.step.tolist()) == {2, 3} and "all_reduce" in {op.name.lower() for op in _ops(units)}
            assert reader.steps(rank).step.tolist() == [2, 3]
    assert not has_errors(validate(bench.output))


def _port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def _ops(units: Any) -> set[Any]:
    from prismtrace import Op

    return {Op(op) for op in units.op.tolist()}


@pytest.mark.parametrize("foreign", [False, True])
def test_an_observed_trace_holds_the_chosen_steps_only(bench: Any, foreign: bool) -> None:
    script = bench.script(SCRIPT)
    if foreign:
        ended = bench.finish(
            bench.start(
                sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(_port()),
                script,
                env={"PRISM_MODE": "observe", "PRISM_OUTPUT": str(bench.output), "PRISM_STEPS": "2:4"},
            )
        )  # fmt: skip
    else:
        ended = bench.run_shared("observe", script, "--nproc-per-node", "2", "--steps", "2:4")
    assert ended.code == 0, ended.err
    _steps_kept(bench)


def test_steps_that_make_no_sense_are_named_and_do_not_stop_a_run_of_another_launcher(bench: Any) -> None:
    script = bench.script(SCRIPT)
    ended = bench.run_shared("observe", script, "--nproc-per-node", "2", "--steps", "4:2")
    assert ended.code == 2 and "4:2" in ended.err
    ended = bench.finish(
        bench.start(
            sys.executable, script,
            env={
                "PRISM_MODE": "observe", "PRISM_OUTPUT": str(bench.output), "PRISM_STEPS": "x", "RANK": "0",
                "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29876",
            },
        )
    )  # fmt: skip
    assert ended.code == 0 and "PRISM_STEPS='x'" in ended.err
    assert not bench.output.exists()
