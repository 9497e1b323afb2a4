"""Every kind of operation, emulated: a sandbox rank gets what it got in the recording, and what it changes is kept."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.runtime.laboratory import Laboratory, metadata

pytest.importorskip("torch")
pytestmark = [pytest.mark.timeout(240), pytest.mark.slow]

# Every kind of operation once; what each rank gets goes into a file. "extra" is added to what rank 0 contributes.
EVERYTHING = """
    import json, pathlib, sys, time
    import torch, torch.distributed as dist
    folder, extra = pathlib.Path(sys.argv[1]), float(sys.argv[2])
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    pair = dist.new_group([0, 2])
    got = {}
    base = torch.arange(6.0) + 10 * rank
    mine = base + (extra if rank == 0 else 0)

    def reduced(name, op, tensor, group=None):
        dist.all_reduce(tensor, op, group=group)
        got[name] = tensor.tolist()

    reduced("sum", dist.ReduceOp.SUM, mine.clone())
    reduced("sum-int", dist.ReduceOp.SUM, mine.long())
    reduced("max", dist.ReduceOp.MAX, mine.clone())
    reduced("min", dist.ReduceOp.MIN, mine.clone())
    reduced("product-again", dist.ReduceOp.PRODUCT, base[:2] + 1)
    if rank in (0, 2):
        reduced("pair", dist.ReduceOp.SUM, mine.clone(), pair)
    strided = torch.zeros(3, 4)
    strided[:, ::2] = mine.view(3, 2)
    reduced("strided", dist.ReduceOp.SUM, strided[:, ::2])
    some = [mine.clone(), -base[:3]]
    with dist._coalescing_manager(async_ops=False):
        for tensor in some:
            dist.all_reduce(tensor)
    got["coalesced"] = [t.tolist() for t in some]
    part = torch.empty(2)
    dist.reduce_scatter_tensor(part, torch.cat([mine, base[:2]]))
    got["reduce-scatter"] = part.tolist()
    tensor = mine.clone()
    dist.reduce(tensor, 0)
    if rank == 0:
        got["reduce"] = tensor.tolist()

    for root in (0, 3):
        tensor = base.clone()
        dist.broadcast(tensor, root)
        got[f"broadcast-{root}"] = tensor.tolist()
        out = torch.empty(2)
        dist.scatter(out, [base[:2] + i for i in range(size)] if rank == root else None, src=root)
        got[f"scatter-{root}"] = out.tolist()
        parts = [torch.empty(6) for _ in range(size)] if rank == root else None
        dist.gather(base, parts, dst=root)
        got[f"gather-{root}"] = [t.tolist() for t in parts or ()]

    outputs = [torch.empty(size * 6) for _ in range(3)]  # waited for in another order than issued
    works = [dist.all_gather_into_tensor(out, base + 100 * i, async_op=True) for i, out in enumerate(outputs)]
    reduced("between", dist.ReduceOp.SUM, base.clone())
    for i in (2, 0, 1):
        works[i].wait()
    got["gathered"] = [t.tolist() for t in outputs]

    sends = [(rank + other) % 3 for other in range(size)]  # some are empty
    out = torch.empty(sum(sends), 2)
    dist.all_to_all_single(out, torch.arange(2.0 * sum(sends)).view(-1, 2) + 50 * rank, sends, sends)
    got["all-to-all"] = out.tolist()
    objects = [None] * size
    dist.all_gather_object(objects, {"rank": rank, "text": "x" * rank})
    got["objects"] = objects

    left, right = (rank - 1) % size, (rank + 1) % size
    tensor = torch.empty(6)
    work = dist.irecv(tensor, left, tag=1)
    if rank == 0:
        got["early"] = work.is_completed()  # what it waits for begins with this rank's own message
        dist.send(base, right, tag=1)
    work.wait()
    got["ring"] = tensor.tolist()
    if rank:
        dist.send(tensor + 1, right, tag=1)
    tensor = torch.empty(3)
    if rank == 1:
        got["any"] = dist.recv(tensor, None, tag=2)
        got["from-any"] = tensor.tolist()
    elif rank == 2:
        dist.send(base[:3], 1, tag=2)
    posted = [torch.zeros(6) for _ in range(2)]
    receives = [dist.irecv(one, left, tag=3 + i) for i, one in enumerate(posted)]
    dist.isend(base, right, tag=4)
    dist.barrier()
    got["posted"] = [one.tolist() for one in posted]  # the second was sent before the barrier, the first is to come
    dist.send(base + 1, right, tag=3)
    receives[0].wait()
    got["waited"] = posted[0].tolist()
    unwaited, kept, late = base.clone(), torch.zeros(6 * size), mine.clone()
    dist.all_reduce(unwaited, async_op=True)
    handle = dist.all_gather_into_tensor(kept, base, async_op=True)
    dist.barrier()
    got["unwaited"] = [unwaited.tolist(), kept.tolist()]  # the backend's thread has written them by now
    got["refused"] = []
    for refused in (
        lambda: dist.all_to_all_single(torch.zeros(size, 2), torch.ones(2, size).t()),
        lambda: dist.all_gather([torch.zeros(6 - min(i, 1)) for i in range(size)], base),
        lambda: dist.all_reduce(torch.ones(2).short()),
        lambda: dist.all_reduce(torch.ones(2).long(), dist.ReduceOp.AVG),
        lambda: dist.reduce_scatter_tensor(torch.zeros(3).double(), torch.zeros(3 * size)),
    ):
        try:
            refused()
        except Exception as error:
            got["refused"].append(type(error).__name__)
    dist.barrier()
    dist.all_reduce(late, async_op=True)
    dist.destroy_process_group()
    got["late"] = late.tolist()
    (folder / f"{rank}.json").write_text(json.dumps(got))
"""


class Operations:
    """The program that does everything once, recorded; and what its ranks got."""

    def __init__(self, lab: Laboratory) -> None:
        self.lab = lab
        self.place = lab.room("operations")
        self.script = self.place / "everything.py"
        self.script.write_text(textwrap.dedent(EVERYTHING))
        self.recorded, program = self.program("recorded", 0)
        self.graph = lab.graph(program)

    def program(self, name: str, extra: float) -> tuple[Path, tuple[str, ...]]:
        folder = self.place / name
        folder.mkdir()
        return folder, (str(self.script), str(folder), str(extra))

    def emulate(self, sandbox: str, *options: str, extra: float = 0) -> tuple[dict[int, Any], Mapping[str, str]]:
        folder, program = self.program(f"emulated-{sandbox}-{extra}", extra)
        ended, output = self.lab.emulate(self.graph, program, sandbox, *options)
        assert ended.code == 0, ended.err
        return {int(rank): got(folder, int(rank)) for rank in sandbox.split(",")}, metadata(output)


def got(folder: Path, rank: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / f"{rank}.json").read_text())
    return found


@pytest.fixture(scope="module")
def operations(lab: Laboratory) -> Operations:
    return Operations(lab)


@pytest.mark.parametrize("sandbox", ["0", "3", "1,2"])
def test_every_operation_returns_what_it_returned_in_the_recording(operations: Operations, sandbox: str) -> None:
    found, facts = operations.emulate(sandbox, "-O", "prefetch_bytes=100000")
    got_sum = [60.0 + 4 * i for i in range(6)]
    for rank, values in found.items():
        recorded = got(operations.recorded, rank)
        if (rank - 1) % 4 in found:  # both are sandbox ranks: gloo's thread writes it, at a time of its own
            del values["posted"], recorded["posted"]
        assert values == recorded
        assert values["unwaited"] == [got_sum, [10.0 * other + i for other in range(4) for i in range(6)]]
        assert values["late"] == got_sum
        of_left = [10.0 * ((rank - 1) % 4) + i for i in range(6)]
        assert values.get("posted", [[0.0] * 6, of_left]) == [[0.0] * 6, of_left]
        assert values["waited"] == [value + 1 for value in of_left]
        assert values["refused"] == ["ValueError", *["RuntimeError"] * 4]
        assert facts[f"rank.{rank}.reductions_compensated"] == "0"
        assert facts[f"rank.{rank}.operations_without_values"] == "0"
    assert found.get(0, {}).get("early", False) is False


def test_what_a_rank_changes_is_made_up_for_and_not_overwritten(operations: Operations) -> None:
    extra = 100.0
    values, facts = operations.emulate("0", extra=extra)
    before, after = got(operations.recorded, 0), values[0]

    def more(name: str, by: float = extra) -> Any:
        return (np.array(before[name]) + by).tolist()

    added = {"sum", "sum-int", "pair", "strided", "reduce", "late"}
    for name in added:
        assert after[name] == more(name), name
    assert after["reduce-scatter"] == more("reduce-scatter")
    assert after["max"] == [100.0 + i for i in range(6)]
    assert after["min"] == before["min"]  # still the lowest that anybody is known to have given
    assert after["coalesced"] == [(np.array(before["coalesced"][0]) + extra).tolist(), before["coalesced"][1]]
    for name in before.keys() - added - {"reduce-scatter", "max", "coalesced"}:
        assert after[name] == before[name], name
    assert int(facts["rank.0.reductions_compensated"]) == 10
