"""The backend `gloo` against real runs of the same program: values, losses, traffic, and what it does not create."""

from __future__ import annotations

import json
import re
import textwrap
from pathlib import Path
from typing import Any

import pytest

from prismtrace import TraceReader
from tests.runtime.laboratory import DDP, Laboratory, made_up_times, metadata

pytest.importorskip("torch")
pytestmark = [pytest.mark.timeout(240), pytest.mark.slow]

NUM_RANKS = 8
SANDBOX = (2, 3, 6)  # two gaps in the ring

# Every reduction and dtype, every collective. Ranks in the list of the third argument contribute something else.
EVERYTHING = """
    import json, pathlib, sys
    import torch, torch.distributed as dist
    folder, changed = pathlib.Path(sys.argv[1]), json.loads(sys.argv[2])
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    assert size == 8
    some, none = dist.new_group([1, 3, 6, 7]), dist.new_group([0, 1, 4])
    got, extra = {}, 3 if rank in changed else 0
    base = torch.arange(21) % 4 + 1 + rank % 3 + extra
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.int32):
        for op in ("SUM", "AVG", "MIN", "MAX", "PRODUCT", "BAND", "BOR", "BXOR"):
            floats = dtype.is_floating_point
            if (op.startswith("B") and floats) or (op == "AVG" and not floats):
                continue
            tensor = (base % 3 + 1 if op == "PRODUCT" else base.clone()).to(dtype)
            dist.all_reduce(tensor, getattr(dist.ReduceOp, op))
            got[f"all-reduce {op} {dtype}"] = tensor.tolist()
    small = torch.ones(1) + extra  # fewer elements than members
    dist.all_reduce(small)
    got["small"] = small.tolist()
    part = torch.empty(3)
    dist.reduce_scatter_tensor(part, torch.arange(24.0) * (rank + 1 + extra))
    got["reduce-scatter"] = part.tolist()
    for root in (0, 1, 2, 3, 6, 7):
        tensor = base.clone()
        dist.reduce(tensor, root)
        if rank == root:
            got[f"reduce to {root}"] = tensor.tolist()
        tensor = base.clone()
        dist.broadcast(tensor, root)
        got[f"broadcast of {root}"] = tensor.tolist()
        out = torch.empty(2, dtype=torch.long)
        dist.scatter(out, [base[:2] * i for i in range(size)] if rank == root else None, src=root)
        got[f"scatter of {root}"] = out.tolist()
        parts = [torch.empty_like(base) for _ in range(size)] if rank == root else None
        dist.gather(base, parts, dst=root)
        got[f"gather to {root}"] = [t.tolist() for t in parts or ()]
    outputs = [torch.empty(size * 21, dtype=torch.long) for _ in range(2)]
    works = [dist.all_gather_into_tensor(out, base + i, async_op=True) for i, out in enumerate(outputs)]
    for work in reversed(works):
        work.wait()
    got["all-gather"] = [t.tolist() for t in outputs]
    sends = [(rank + other) % 3 for other in range(size)]  # some are empty
    out = torch.empty(sum(sends), dtype=torch.long)
    dist.all_to_all_single(out, torch.arange(sum(sends)) + 50 * rank + extra, sends, sends)
    got["all-to-all"] = out.tolist()
    objects = [None] * size
    dist.all_gather_object(objects, {"rank": rank, "text": "x" * (rank + 20 * extra)})
    got["objects"] = objects
    for group, ranks in ((some, [1, 3, 6, 7]), (none, [0, 1, 4])):
        if rank in ranks:
            tensor = base.clone()
            dist.all_reduce(tensor, group=group)
            got[f"in {ranks}"] = tensor.tolist()
    tensor, left, right = torch.empty_like(base), (rank - 1) % size, (rank + 1) % size
    work = dist.irecv(tensor, left, tag=1)
    dist.send(base, right, tag=1)
    work.wait()
    got["ring"] = tensor.tolist()
    dist.barrier()
    dist.destroy_process_group()
    (folder / f"{rank}.json").write_text(json.dumps(got))
"""


def got(folder: Path, rank: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / f"{rank}.json").read_text())
    return found


def test_sandbox_ranks_get_what_eight_real_ranks_get(lab: Laboratory) -> None:
    """The sandbox ranks contribute something else than recorded: what all get of it must be what a real run gives."""
    place = lab.room("gloo")
    script = place / "everything.py"
    script.write_text(textwrap.dedent(EVERYTHING))

    def program(name: str, changed: tuple[int, ...]) -> tuple[Path, tuple[str, ...]]:
        (place / name).mkdir()
        return place / name, (str(script), str(place / name), json.dumps(changed))

    size = ("--nproc-per-node", str(NUM_RANKS))
    recorded, as_recorded = program("recorded", ())
    bare, observed = lab.path("bare"), lab.path("observed")
    ended = lab.run("record", bare, as_recorded, *size)
    assert ended.code == 0, ended.err
    real, changed = program("real", SANDBOX)
    ended = lab.run("observe", observed, changed, *size)
    assert ended.code == 0, ended.err
    graph = made_up_times(bare, lab.path("graph"))
    emulated, changed = program("emulated", SANDBOX)
    ended, output = lab.emulate(graph, changed, ",".join(map(str, SANDBOX)), "--backend", "gloo")
    assert ended.code == 0, ended.err
    facts = metadata(output)
    for rank in SANDBOX:
        expected, before = got(real, rank), got(recorded, rank)
        assert got(emulated, rank) == expected
        assert sum(expected[name] != before[name] for name in expected) > 30
        assert facts[f"rank.{rank}.operations_not_carried"] == "0"
        assert_full_traffic(facts, rank)
    # of the groups [0-7], [1, 3, 6, 7] and [0, 1, 4] the last one has no sandbox rank
    assert " 2 reduced communicators" in ended.err
    with TraceReader(output) as reader:
        assert {group.ranks for group in reader.groups.values()} >= {tuple(range(8)), (1, 3, 6, 7)}


def assert_full_traffic(facts: Any, rank: int) -> None:
    for counted, full in (
        ("messages_sent", "scheduled_messages_sent"), ("messages_received", "scheduled_messages_received"),
        ("sent_bytes", "scheduled_sent_bytes"), ("received_bytes", "scheduled_received_bytes"),
    ):  # fmt: skip
        assert int(facts[f"rank.{rank}.{counted}"]) == int(facts[f"rank.{rank}.{full}"]) > 0


LOSS = re.compile(r"step (\d+) loss (\S+)")


def losses(text: str) -> list[float]:
    return [float(loss) for _, loss in LOSS.findall(text)]


def test_losses_of_ddp_are_those_of_the_real_run(lab: Laboratory) -> None:
    """Two of four ranks; beyond the recorded steps the virtual ranks repeat their last one, sandbox ranks are live."""
    graph = lab.graph(DDP)
    ended, output = lab.emulate(graph, (*DDP, "--steps", "5"), "0,1", "--backend", "gloo")
    assert ended.code == 0, ended.err
    real = lab.run("observe", lab.path("real"), DDP, "--nproc-per-node", "4")
    assert real.code == 0, real.err
    found, expected = losses(ended.out), losses(real.out)
    assert (len(found), len(expected)) == (5, 3)
    assert found[:3] == pytest.approx(expected, rel=1e-6)
    facts = metadata(output)
    num_elements = sum(w * h + h for w, h in ((32, 32), (32, 32), (32, 10))) + 2 * 64
    for rank in (0, 1):
        assert_full_traffic(facts, rank)
        # at the least the gradients of each step: 2 (n - 1) / n of their bytes
        assert int(facts[f"rank.{rank}.sent_bytes"]) > 5 * 4 * num_elements * 2 * 3 / 4
    assert facts["rank.0.steps_beyond_recorded"] == "2"
    assert int(facts["rank.0.reductions_live"]) > 0
