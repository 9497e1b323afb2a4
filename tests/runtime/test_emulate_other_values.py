"""Programs that do what was recorded with values of other sizes, and programs that go on in another way."""

from __future__ import annotations

import json
import re
import textwrap
from pathlib import Path
from typing import Any

import pytest

from prismtrace import Op, TraceReader
from tests.runtime.laboratory import Laboratory

pytest.importorskip("torch")
pytestmark = [pytest.mark.timeout(240), pytest.mark.slow]

OBJECTS = """
    import json, pathlib, sys
    import torch, torch.distributed as dist
    folder, texts = pathlib.Path(sys.argv[1]), sys.argv[2].split(",")
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    mine = texts[rank] * 50
    got = {}
    everything = [None] * size
    dist.all_gather_object(everything, mine)
    got["all"] = everything
    for root in (0, 1):
        gathered = [None] * size if rank == root else None
        dist.gather_object(mine, gathered, dst=root)
        got[f"gathered-{root}"] = gathered
        several = [mine, rank]
        dist.broadcast_object_list(several, src=root)
        got[f"broadcast-{root}"] = several
        piece = [None]
        dist.scatter_object_list(piece, [mine + str(i) for i in range(size)] if rank == root else None, src=root)
        got[f"scattered-{root}"] = piece
    other = rank ^ 1
    for sender in (0, 1):
        box = [mine]
        if rank % 2 == sender:
            dist.send_object_list(box, other)
        else:
            dist.recv_object_list(box, other)
        got[f"box-{sender}"] = box
    everything = [None] * size
    dist.all_gather_object(everything, rank)
    got["end"] = everything
    (folder / f"{rank}.json").write_text(json.dumps(got))
    dist.destroy_process_group()
"""

CHECKPOINTS = """
    import sys, torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
    dist.init_process_group("gloo")
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(2):
        model(torch.ones(2, 4)).sum().backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        dcp.save({"model": model.state_dict()}, checkpoint_id=f"{sys.argv[1]}/{step}")
    dist.destroy_process_group()
"""

EVALUATES = """
    import sys, torch, torch.distributed as dist
    steps, every = int(sys.argv[1]), int(sys.argv[2])
    dist.init_process_group("gloo")
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(steps):
        model(torch.ones(2, 4)).sum().backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        if every and step % every == every - 1:
            dist.all_gather([torch.zeros(3) for _ in range(dist.get_world_size())], torch.ones(3))
    dist.barrier()
    if len(sys.argv) > 3:
        dist.all_reduce(torch.ones(16))
    dist.destroy_process_group()
"""


def program(lab: Laboratory, text: str, *arguments: str) -> tuple[str, ...]:
    path = lab.room("values") / f"script{abs(hash(text))}.py"
    path.write_text(textwrap.dedent(text))
    return (str(path), *arguments)


def objects(lab: Laboratory, name: str, texts: str) -> tuple[Path, tuple[str, ...]]:
    folder = lab.room("values") / name
    folder.mkdir(exist_ok=True)
    return folder, program(lab, OBJECTS, str(folder), texts)


def got(folder: Path, rank: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / f"{rank}.json").read_text())
    return found


@pytest.mark.parametrize(
    ("sandbox", "texts"), [("0", "looooong,bbb,cc,d"), ("1", "aaaa,b,cc,d"), ("0,1", "looooong,b,cc,d")]
)
def test_objects_of_another_size_than_recorded(lab: Laboratory, sandbox: str, texts: str) -> None:
    recorded, first = objects(lab, "recorded", "aaaa,bbb,cc,d")
    folder, second = objects(lab, f"emulated-{sandbox}", texts)
    ended, output = lab.emulate(lab.graph(first), second, sandbox)
    assert ended.code == 0, ended.err
    for rank in map(int, sandbox.split(",")):
        before, after = got(recorded, rank), got(folder, rank)
        mine = texts.split(",")[rank] * 50
        assert after["all"] == [mine if other == rank else text for other, text in enumerate(before["all"])]
        for root in (0, 1):
            if rank == root:
                assert after[f"gathered-{root}"] == after["all"]
                assert after[f"broadcast-{root}"] == [mine, rank]
                assert after[f"scattered-{root}"] == [f"{mine}{rank}"]
            else:
                assert after[f"broadcast-{root}"] == before[f"broadcast-{root}"]
                assert after[f"scattered-{root}"] == before[f"scattered-{root}"]
        from_a_sandbox_rank = str(rank ^ 1) in sandbox  # its messages carry what it sends now
        theirs = texts.split(",")[rank ^ 1] * 50 if from_a_sandbox_rank else before[f"box-{(rank + 1) % 2}"][0]
        assert after[f"box-{(rank + 1) % 2}"] == [theirs]
        assert after["end"] == [0, 1, 2, 3]
    with TraceReader(output) as reader:
        assert reader.metadata["job.status"] == "complete"


def test_checkpoints_under_another_path_calibrate(lab: Laboratory) -> None:
    """torch.distributed.checkpoint sends pickled plans that hold the path."""
    recorded = lab.record(program(lab, CHECKPOINTS, "kept"))
    again = program(lab, CHECKPOINTS, "kept-under-a-longer-path")
    options = ("--graph", recorded, "--slots", "2", "-O", "passes=1")
    ended = lab.run("calibrate", lab.path("calibrated"), again, *options)
    assert ended.code == 0, ended.err


def test_an_evaluation_in_a_step_beyond_the_recording_is_named(lab: Laboratory) -> None:
    graph = lab.graph(program(lab, EVALUATES, "2", "0"))
    ended, _ = lab.emulate(graph, program(lab, EVALUATES, "8", "5"), "1")
    assert ended.code == 1
    assert "step 4 of rank 1 is not in the graph" in ended.err
    assert "which ends with step 1; steps beyond the recording repeat the last recorded one" in ended.err
    found = re.search(r"step 1 has (.*), unit (\d+) of the graph, the program did (.*)", ended.err)
    assert found is not None, ended.err
    assert found[1].startswith("all_reduce sum of 16 to 16 elements") and "at the job's end, barrier" in found[1]
    assert found[3].startswith("all_gather of 3 to 12 elements")
    with TraceReader(graph) as reader:
        assert reader.units(1).num_elements_in[int(found[2])] == 16
    assert "--steps" in ended.err and "evaluation" in ended.err
    assert "use the graph of this job" not in ended.err


def test_a_step_beyond_the_recording_that_differs_in_the_middle_is_named(lab: Laboratory) -> None:
    graph = lab.graph(program(lab, EVALUATES, "4", "2"))
    ended, _ = lab.emulate(graph, program(lab, EVALUATES, "8", "2"), "0")
    assert ended.code == 1
    assert "steps beyond the recording repeat the last recorded one" in ended.err, ended.err


@pytest.mark.parametrize(
    ("recorded", "steps", "sandbox", "backend"),
    [
        (6, 12, "0", "local"),  # an evaluation ends the job, as it ended the recorded one
        (6, 9, "1", "local"),  # none does
        (6, 9, "0,2", "local"),
        (6, 12, "0,2", "gloo"),
        (7, 10, "1", "gloo"),  # one does, which looks like the beginning of a step that does not come
        (7, 10, "0,2", "local"),
    ],
)
def test_evaluations_that_come_regularly_go_on_beyond_the_recording(
    lab: Laboratory, recorded: int, steps: int, sandbox: str, backend: str
) -> None:
    graph = lab.graph(program(lab, EVALUATES, str(recorded), "2"))
    ended, output = lab.emulate(graph, program(lab, EVALUATES, str(steps), "2"), sandbox, "--backend", backend)
    assert ended.code == 0, ended.err
    assert "repeat the last 2 ones" in ended.err and "ended before the graph does" not in ended.err
    with TraceReader(output) as reader:
        assert len(reader.steps(int(sandbox[0]))) == steps
        table = reader.units(int(sandbox[0]))
        assert (table.op == Op.ALL_GATHER).sum() == steps // 2


@pytest.mark.parametrize("steps", [1, 2, 5])
@pytest.mark.parametrize(("sandbox", "backend"), [("0", "local"), ("1,2", "local"), ("0", "gloo")])
def test_a_program_of_fewer_steps_ends_as_the_recorded_job_did(
    lab: Laboratory, steps: int, sandbox: str, backend: str
) -> None:
    graph = lab.graph(program(lab, EVALUATES, "6", "2"))
    ended, output = lab.emulate(graph, program(lab, EVALUATES, str(steps), "2"), sandbox, "--backend", backend)
    assert ended.code == 0, ended.err
    num_left = 16 - 2 * steps - steps // 2 - 1
    assert f"{num_left} of its 16 recorded operations were not reached" in ended.err, ended.err
    with TraceReader(output) as reader:
        assert (reader.units(int(sandbox[0])).op == Op.BARRIER).sum() == 1


def test_a_program_that_goes_on_had_not_ended(lab: Laboratory) -> None:
    """Fewer steps than recorded, and something behind the barrier that ended the job."""
    graph = lab.graph(program(lab, EVALUATES, "6", "2"))
    ended, _ = lab.emulate(graph, program(lab, EVALUATES, "3", "2", "more"), "0")
    assert ended.code == 1
    found = re.search(r"first difference at rank 0, unit (\d+): the graph has (.*), the program did barrier", ended.err)
    assert found is not None and found[2].startswith("all_reduce sum of 16 to 16 elements"), ended.err
    with TraceReader(graph) as reader:
        assert reader.units(0).step[int(found[1])] == 3
