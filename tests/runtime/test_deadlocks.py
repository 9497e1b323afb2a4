"""Programs that cannot go on under `prism record`: every rank's place is named within seconds."""

from __future__ import annotations

import time
from typing import Any

import pytest

from prism_sdk.cli.main import run
from prismtrace import TraceReader

pytestmark = pytest.mark.timeout(240)

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
        open(__file__ + ".begun", "w").close()
        exchange()
    """
    )
    ended = bench.run_shared("record", script, "--nproc-per-node", "3", "--slots", "1")
    assert time.time() - (bench.folder / "train.py.begun").stat().st_mtime < 20  # without what starting took
    assert ended.code == 1
    assert "deadlocked: 2 ranks wait" in ended.err
    assert "rank 0: all_reduce in group" in ended.err and "seq 0, missing ranks 1" in ended.err
    assert "ended already: rank 1" in ended.err
    assert f"{script}:7 in exchange" in ended.err
    assert bench.metadata()["job.status"] == "aborted"
    assert "deadlocked" in bench.metadata()["job.error"]


def test_two_ranks_that_receive_from_each_other(bench: Any) -> None:
    script = bench.script(
        START
        + """
    dist.recv(torch.zeros(3), src=1 - rank, tag=7)
    """
    )
    ended = bench.run_shared("record", script, "--nproc-per-node", "2", "--slots", "2")
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
    for call, field, values in MISMATCHES:
        script = bench.script(START + f"\n    {call}\n")
        ended = bench.run_shared("record", script, "--nproc-per-node", "2")
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
    print(" ".join(map(str, ["passed", rank])) + "\\n", end="", flush=True)
    dist.barrier()
    """
    )
    ended = bench.run_shared("record", script, "--nproc-per-node", "2", "--slots", "1")
    assert ended.code == 0, ended.err
    assert "passed 0" in ended.out and "passed 1" in ended.out


NO_DEADLOCKS = [
    # a future asked for before the others can come to the collective
    """
    x = torch.ones(2)
    if rank == 0:
        future = dist.all_reduce(x, async_op=True).get_future().then(lambda f: f.value()[0] * 2)
        both = torch.futures.collect_all([future, dist.irecv(torch.zeros(1), 1).get_future()])
        dist.send(torch.ones(1), 1)
        print(" ".join(map(str, [future.wait()[0].item(), len(both.wait())])) + "\\n", end="")
    else:
        dist.recv(torch.ones(1), 0)
        dist.send(torch.ones(1), 0)
        dist.all_reduce(x)
        print(" ".join(map(str, [4.0, 2])) + "\\n", end="")
    """,
    # threads that communicate in a group each, in an order of their own on each rank
    """
    import threading, time
    side = dist.new_group([0, 1])
    x, y = torch.ones(1), torch.ones(1)
    def beside():
        for _ in range(3):
            dist.all_reduce(y, group=side)
    thread = threading.Thread(target=beside)
    if rank == 0:
        thread.start()
        time.sleep(0.5)
        dist.all_reduce(x)
    else:
        dist.all_reduce(x)
        thread.start()
    thread.join()
    print(" ".join(map(str, [x.item() * 2, int(y.item()) // 4])) + "\\n", end="")
    """,
    # looking into the store without ever sleeping, on the only slot
    """
    store = dist.distributed_c10d._get_default_store()
    if rank == 0:
        while not store.check(["go"]):
            pass
    else:
        store.set("go", "1")
    dist.barrier()
    print(" ".join(map(str, [4.0, 2])) + "\\n", end="")
    """,
]


@pytest.mark.parametrize("body", NO_DEADLOCKS, ids=("future", "threads", "store"))
def test_a_program_that_can_go_on_is_not_called_deadlocked(bench: Any, body: str) -> None:
    ended = bench.run_shared("record", bench.script(START + body), "--nproc-per-node", "2", "--slots", "1")
    assert ended.code == 0, ended.err
    assert ended.out.split() == ["4.0", "2", "4.0", "2"]
    assert run(["validate", str(bench.output)]) == 0
    with TraceReader(bench.output) as reader:  # a group that the program does not describe has no description
        assert {group.description for group in reader.groups.values()} <= {"default_pg", ""}


def test_threads_that_wait_for_each_other_for_ever_are_named(bench: Any) -> None:
    script = bench.script(
        START
        + """
    import threading
    side = dist.new_group([0, 1])
    if rank == 0:
        threading.Thread(target=lambda: dist.all_reduce(torch.ones(1), group=side)).start()
    dist.recv(torch.zeros(1), 1 - rank)
    """
    )
    ended = bench.run_shared("record", script, "--nproc-per-node", "2", "--slots", "1")
    assert ended.code == 1
    assert "deadlocked: 2 ranks wait" in ended.err


def test_polling_until_completed_puts_the_result_in_place(bench: Any) -> None:
    script = bench.script(
        START
        + """
    x = torch.ones(1)
    if rank == 0:
        work = dist.irecv(x, 1)
    else:
        work = dist.isend(torch.full((1,), 5.0), 0)
    while not work.is_completed():
        pass
    work = dist.all_reduce(x, async_op=True)
    while not work.is_completed():
        pass
    print(f"{x.item()}\\n", end="")  # one write: the other rank writes to the same pipe
    """
    )
    ended = bench.run_shared("record", script, "--nproc-per-node", "2", "--slots", "2")
    assert ended.out.split() == ["6.0", "6.0"]


def test_splits_of_an_all_to_all_that_do_not_fit_are_named(bench: Any) -> None:
    script = bench.script(
        START
        + """
    dist.all_to_all_single(torch.ones(4), torch.ones(4), [1, 3], [1, 3])
    """
    )
    ended = bench.run_shared("record", script, "--nproc-per-node", "2", "--slots", "2")
    assert ended.code == 1
    assert "the byte count differs" in ended.err
    assert "expects 4 bytes" in ended.err or "expects 12 bytes" in ended.err


def test_a_message_that_is_not_contiguous_is_refused_as_by_gloo(bench: Any) -> None:
    script = bench.script(
        START
        + """
    tensor = torch.ones(2, 3).t()
    for call in (dist.send, dist.recv):
        try:
            call(tensor, 1 - rank)
        except RuntimeError as error:
            print(str("contiguous" in str(error)) + "\\n", end="")  # in one piece: ranks share the pipe
    """
    )
    ended = bench.run_shared("record", script, "--nproc-per-node", "2", "--slots", "2")
    assert ended.code == 0, ended.err
    assert ended.out.split() == ["True"] * 4


def test_a_program_without_steps_is_calibrated_and_emulated(bench: Any) -> None:
    script = bench.script(
        START
        + """
    x = torch.ones(3) + rank
    for _ in range(5):
        dist.all_reduce(x)
    print(" ".join(map(str, [x.tolist()])) + "\\n", end="")
    """
    )
    bare, graph = str(bench.folder / "bare.prism"), str(bench.folder / "graph.prism")
    assert bench.run_shared("record", script, "--nproc-per-node", "2", "-o", bare).code == 0
    ended = bench.run_shared("calibrate", script, "--graph", bare, "--slots", "1", "-O", "passes=1", "-o", graph)
    assert ended.code == 0, ended.err
    ended = bench.run_shared("emulate", script, "--graph", graph)
    assert ended.code == 0, ended.err
    assert ended.out.split() == ["[48.0,", "48.0,", "48.0]"]
    assert "not reached" not in ended.err
    ended = bench.run_shared("emulate", bench.script("print('something else')", "other.py"), "--graph", graph)
    assert ended.code == 1 and "the graph has 5 operations, the program did none of them" in ended.err
