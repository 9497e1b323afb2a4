"""Programs that cannot go on under `prism record`: every rank's place is named within seconds."""

from __future__ import annotations

import time
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(90)

START = """
    import torch, torch.distributed as dist
    dist.init_process_group("gloo")
    rank = dist.get_rank()
"""


def test_a_collective_that_one_rank_skips_is_named_with_places_and_who_is_missing(bench: Any) -> None:
    script = bench.script(
        START
        + """
    def exchange():
        dist.all_reduce(torch.ones(3))
    if rank != 1:
        exchange()
    """
    )
    began = time.monotonic()
    ended = bench.run("record", script, "--nproc-per-node", "3", "--slots", "1")
    assert time.monotonic() - began < 20
    assert ended.code == 1
    assert "deadlocked: 2 ranks wait" in ended.err
    assert "rank 0: all_reduce in group" in ended.err and "seq 0, missing ranks 1" in ended.err
    assert "ended already: rank 1" in ended.err
    assert f"{script}:7 in exchange" in ended.err
    assert bench.metadata()["job.status"] == "aborted"
    assert "deadlocked" in bench.metadata()["job.error"]
    bench.assert_nothing_left()


def test_two_ranks_that_receive_from_each_other(bench: Any) -> None:
    script = bench.script(
        START
        + """
    dist.recv(torch.zeros(3), src=1 - rank, tag=7)
    """
    )
    ended = bench.run("record", script, "--nproc-per-node", "2", "--slots", "2")
    assert ended.code == 1
    assert "rank 0: recv tag 7" in ended.err and "rank 1: recv tag 7" in ended.err


MISMATCHES = [
    ("dist.all_reduce(torch.ones(3)) if rank else dist.broadcast(torch.ones(3), 0)", "operation",
     ("broadcast", "all_reduce")),
    ("dist.all_reduce(torch.ones(3, dtype=torch.float64 if rank else torch.float32))", "dtype",
     ("float32", "float64")),
    ("dist.all_reduce(torch.ones(3 + rank))", "element count", ("3", "4")),
    ("dist.broadcast(torch.ones(3), rank)", "root", ("0", "1")),
]  # fmt: skip


def test_mismatched_collectives_are_named_with_both_places(bench: Any) -> None:
    running = []
    for number, (call, _, _) in enumerate(MISMATCHES):
        script = bench.script(START + f"""
    {call}
    """, name=f"train{number}.py")  # fmt: skip
        output = str(bench.folder / f"{number}.prism")
        running.append((script, bench.prism("record", script, "--nproc-per-node", "2", "-o", output)))
    for (script, process), (_, field, values) in zip(running, MISMATCHES, strict=True):
        ended = bench.finish(process)
        assert ended.code == 1
        assert f"the {field} differs" in ended.err
        assert f"rank 0: {values[0]} at {script}:6" in ended.err
        assert f"rank 1: {values[1]} at {script}:6" in ended.err


def test_a_rank_that_waits_for_another_outside_torch_lends_its_slot(bench: Any) -> None:
    """The script's own TCPStore: with one slot, rank 0 waits in C++ for a key that rank 1 has yet to set."""
    script = bench.script(
        START
        + """
    import datetime, socket
    holder = [0]
    if rank == 0:
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0)); holder[0] = s.getsockname()[1]
    dist.broadcast_object_list(holder, 0)
    store = dist.TCPStore("127.0.0.1", holder[0], 2, rank == 0, timeout=datetime.timedelta(seconds=30))
    store.set(f"from {rank}", "x")
    store.wait([f"from {1 - rank}"])
    dist.all_reduce(torch.ones(1))
    print("passed", rank, flush=True)
    dist.barrier()
    """
    )
    ended = bench.run("record", script, "--nproc-per-node", "2", "--slots", "1")
    assert ended.code == 0, ended.err
    assert "passed 0" in ended.out and "passed 1" in ended.out
