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
PLAYED = Path(__file__).parent / "played_gpu.py"
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
    sizes = [1 + member % 3 for member in range(size)]
    part = torch.empty(sizes[rank])
    dist.reduce_scatter(part, [torch.arange(1.0, n + 1) * (rank + 1 + extra) for n in sizes])
    got["uneven reduce-scatter"] = part.tolist()
    part, nothing = torch.empty(2), torch.empty(0)
    with dist._coalescing_manager(async_ops=False):
        dist.reduce_scatter_tensor(nothing, torch.empty(0))
        dist.reduce_scatter_tensor(part, torch.arange(16.0) * (rank + 1 + extra))
    got["coalesced reduce-scatter"] = part.tolist()
    lone = (base[:2] + rank)[::2]  # contiguous, with a stride
    dist.broadcast(lone, 2)
    got["lone element"] = lone.tolist()
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
    tags, rooms = (1, 65537), [torch.empty_like(base) for _ in range(2)]
    works = [dist.irecv(room, left, tag=tag) for room, tag in zip(rooms, reversed(tags))]
    works += [dist.isend(base * tag, right, tag=tag) for tag in tags]
    for work in works:
        work.wait()
    got["tags"] = [room.tolist() for room in rooms]
    dist.barrier()
    dist.destroy_process_group()
    (folder / f"{rank}.json").write_text(json.dumps(got))
"""


def got(folder: Path, rank: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / f"{rank}.json").read_text())
    return found


class Eight:
    """The program with eight ranks: recorded, and run for real with the sandbox ranks contributing something else."""

    def __init__(self, lab: Laboratory) -> None:
        self._lab, self._place = lab, lab.room("gloo")
        self._script = self._place / "everything.py"
        self._script.write_text(textwrap.dedent(EVERYTHING))
        size = ("--nproc-per-node", str(NUM_RANKS))
        recorded, as_recorded = self._program("recorded", ())
        ended = lab.run("record", bare := lab.path("bare"), as_recorded, *size)
        assert ended.code == 0, ended.err
        real, changed = self._program("real", SANDBOX)
        ended = lab.run("observe", lab.path("observed"), changed, *size)
        assert ended.code == 0, ended.err
        self._folders, self._graph = (recorded, real), made_up_times(bare, lab.path("graph"))

    def _program(self, name: str, changed: tuple[int, ...]) -> tuple[Path, tuple[str, ...]]:
        (self._place / name).mkdir()
        return self._place / name, (str(self._script), str(self._place / name), json.dumps(changed))

    def check(self, name: str, *options: str, without: str = "none") -> tuple[str, Path]:
        """Emulated sandbox ranks must get what real ones do (but for names that begin with `without`).

        Returns what was said, and the trace.
        """
        folder, changed = self._program(name, SANDBOX)
        ended, output = self._lab.emulate(self._graph, changed, ",".join(map(str, SANDBOX)), *options)
        assert ended.code == 0, ended.err
        for rank in SANDBOX:
            now, before, expected = (
                {what: value for what, value in got(place, rank).items() if not what.startswith(without)}
                for place in (folder, *self._folders)
            )
            assert now == expected
            assert sum(expected[what] != before[what] for what in expected) > 25
        return ended.err, output


@pytest.fixture(scope="module")
def eight(lab: Laboratory) -> Eight:
    return Eight(lab)


def test_sandbox_ranks_get_what_eight_real_ranks_get(eight: Eight) -> None:
    """The sandbox ranks contribute something else than recorded: what all get of it must be what a real run gives."""
    said, output = eight.check("emulated", "--backend", "gloo")
    facts = metadata(output)
    for rank in SANDBOX:
        assert facts[f"rank.{rank}.operations_not_carried"] == "0"
        assert_full_traffic(facts, rank)
    # of the groups [0-7], [1, 3, 6, 7] and [0, 1, 4] the last one has no sandbox rank
    assert " 2 reduced communicators" in said
    with TraceReader(output) as reader:
        assert {group.ranks for group in reader.groups.values()} >= {tuple(range(8)), (1, 3, 6, 7)}


def test_reduced_calls_on_streams_give_what_eight_real_ranks_get(eight: Eight) -> None:
    """Backend nccl on a GPU that is played, with gloo in the place of NCCL."""
    options = ("--plugin", str(PLAYED), "--backend", "played-nccl")
    said, output = eight.check("played", *options, without="all-reduce B")  # NCCL has no bitwise reductions
    assert re.search(r"virtual neighbours on GPU 1 \(ranks share GPUs .*\): \d+ calls in 6 reduced communicators", said)
    facts = metadata(output)
    for rank in SANDBOX:
        of_rank = {name.removeprefix(f"rank.{rank}."): value for name, value in facts.items()}
        assert int(of_rank["carried_operations"]) == int(of_rank["held_operations"]) > 50
        assert of_rank["operations_not_carried"] == of_rank["held_on_host"] == "0"
        assert int(of_rank["operations_live"]) > 40
        # each message is rounded up by an element, and these are small
        full, sent = int(of_rank["scheduled_sent_bytes"]), int(of_rank["sent_bytes"])
        assert full <= sent < 1.02 * full


def test_nccl_without_gpus_says_what_to_do(lab: Laboratory) -> None:
    graph = lab.graph(DDP)
    ended, _ = lab.emulate(graph, DDP, "0", "--backend", "nccl", "--device", "cpu")
    assert ended.code == 2 and "backend nccl needs ranks on GPUs" in ended.err and "--backend local" in ended.err


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
