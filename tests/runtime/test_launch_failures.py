"""Ranks that crash, and outputs that cannot be written: the cause is named and what was recorded stays readable."""

from __future__ import annotations

import resource
import socket
from typing import Any

import pytest

from prism_sdk.runtime.gpus import num_gpus
from prismtrace import TraceReader

pytestmark = pytest.mark.timeout(240)

START = """
    import os, signal, sys, threading, torch, torch.distributed as dist
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    for _ in range(3):
        dist.all_reduce(torch.ones(3))
    def body():
"""

ENDINGS = {
    "an exception": ("raise ValueError('a wrong turn')", ["rank 1 failed with exit code 1", "in body", "a wrong turn"]),
    "sys.exit(3)": ("sys.exit(3)", ["rank 1 failed with exit code 3", "sys.exit(3)"]),
    "SystemExit with a text": ("sys.exit('bad luck')", ["rank 1 failed with exit code 1", "bad luck"]),
    "os._exit(4)": ("os._exit(4)", ["rank 1 failed with exit code 4"]),
    "SIGKILL": ("os.kill(os.getpid(), signal.SIGKILL)", ["rank 1 was killed by SIGKILL", "memory"]),
    "SIGSEGV": ("os.kill(os.getpid(), signal.SIGSEGV)", ["rank 1 was killed by SIGSEGV", "in body"]),
    "the launcher's assertion": ("assert dist.get_world_size() == 8, 'needs 8 ranks'", ["needs 8 ranks"]),
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_rank_that_ends_badly_ends_the_recording(bench: Any, ending: str) -> None:
    statement, expected = ENDINGS[ending]
    script = bench.script(START + f"""
        if rank == 1:
            {statement}
    body()
    dist.all_reduce(torch.ones(3))
    """)  # fmt: skip
    run = bench.run if ending == "SIGKILL" else bench.run_shared
    ended = run("record", script, "--nproc-per-node", "3", "--slots", "2")
    assert ended.code == 1
    for text in expected:
        assert text in ended.err
    assert "prism_sdk" not in ended.err.partition("Traceback")[2].partition("ValueError")[0]
    with TraceReader(bench.output) as reader:
        assert reader.metadata["job.status"] == "aborted"
        assert reader.metadata["job.error"] and reader.metadata["job.error"].splitlines()[0] in ended.err
        assert reader.num_units(0) >= 6
    bench.assert_nothing_left()
    assert not list(bench.folder.glob("*.parts"))


@pytest.mark.skipif(num_gpus() > 0, reason="there is a GPU")
@pytest.mark.parametrize("verb", ["record", "observe"])
def test_a_script_for_gpus_without_one_is_told_how_to_run(bench: Any, verb: str) -> None:
    words = ["--nproc-per-node", "1"]
    ended = bench.run_shared(verb, bench.script("import torch\ntorch.ones(3).cuda()\n"), *words)
    assert ended.code == 1 and "--device cpu runs a script for GPUs on CPUs" in ended.err
    with TraceReader(bench.output) as reader:
        assert reader.metadata["job.status"] == "aborted"
    ended = bench.run_shared(verb, bench.script("raise RuntimeError('NCCL')\n"), *words, "--device", "cpu")
    assert ended.code == 1 and "RuntimeError: NCCL" in ended.err and "--device cpu" not in ended.err


@pytest.mark.parametrize("statement", ["raise ValueError('a wrong turn')", "os.kill(os.getpid(), signal.SIGKILL)"])
def test_a_rank_that_ends_badly_ends_the_observation(bench: Any, statement: str) -> None:
    """Rank 0 waits inside gloo meanwhile, for a message that never comes: what it traced is kept all the same."""
    script = bench.script(
        START
        + f"""
        if rank == 1:
            {statement}
        else:
            dist.recv(torch.zeros(1), src=2, tag=5)
    import time
    if rank == 2:
        time.sleep(40)
    body()
    """
    )
    run = bench.run if "SIGKILL" in statement else bench.run_shared
    ended = run("observe", script, "--nproc-per-node", "3")
    assert ended.code == 1
    assert ("a wrong turn" if "Value" in statement else "killed by SIGKILL") in ended.err
    with TraceReader(bench.output) as reader:
        assert reader.metadata["job.status"] == "aborted"
        assert reader.num_units(0) >= 6 and reader.num_units(2) >= 6
    bench.assert_nothing_left()


def test_an_exception_in_a_thread_is_no_failure(bench: Any) -> None:
    script = bench.script(
        START
        + """
        raise ValueError("in a thread")
    thread = threading.Thread(target=body)
    thread.start(); thread.join()
    """
    )
    ended = bench.run_shared("record", script, "--nproc-per-node", "2")
    assert ended.code == 0
    assert "in a thread" in ended.err
    assert bench.metadata()["job.status"] == "complete"


def test_a_disk_that_runs_full_while_recording_is_named(bench: Any) -> None:
    """The rank limits the size of its files, which meets it at the same place as a full disk."""
    script = bench.script("""
    import resource, torch, torch.distributed as dist
    dist.init_process_group("gloo")
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    for step in range(50):
        dist.all_reduce(torch.rand(2000))
    """)
    ended = bench.run_shared("record", script, "--nproc-per-node", "2")
    assert ended.code == 1
    assert "rank-0000" in ended.err and "File too large" in ended.err
    assert "Traceback" not in ended.err
    with TraceReader(bench.output) as reader:
        assert reader.metadata["job.status"] == "aborted"
        assert "File too large" in reader.metadata["job.error"]
        assert len(reader.groups) == 1


def test_shards_that_cannot_be_joined_stay_and_the_next_run_saves_them(bench: Any) -> None:
    script = bench.script("""
    import torch, torch.distributed as dist
    dist.init_process_group("gloo")
    for step in range(200):
        dist.all_reduce(torch.rand(20))
    """)
    assert bench.run_shared("observe", script, "--nproc-per-node", "2").code == 0
    limit = bench.output.stat().st_size * 3 // 4  # enough for each shard, not for both
    bench.output.unlink()

    def restrict() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    ended = bench.finish(bench.prism("observe", script, "--nproc-per-node", "2", prepare=restrict))
    assert ended.code == 1
    assert "cannot write" in ended.err and "out.prism" in ended.err and "prism merge" in ended.err
    assert not bench.output.exists()
    assert len(list(bench.folder.glob("out.prism.parts/rank-*.prism"))) == 2

    again = bench.run_shared("observe", bench.script("import torch", name="other.py"))
    assert again.code == 0 and "saved as" in again.err
    with TraceReader(bench.folder / "out.prism.recovered") as reader:
        assert reader.ranks == (0, 1)


def test_what_is_missing_is_named_before_anything_starts(bench: Any) -> None:
    script = bench.script("import torch")
    assert "the script 'nowhere.py' does not exist" in bench.run("record", "nowhere.py").err
    assert "the module 'no.such.module' does not exist" in bench.run("record", "no.such.module", "-m").err
    assert "there is no folder" in bench.run("record", script, "-o", str(bench.folder / "no" / "x.prism")).err
    ended = bench.run("record", script, "-o", str(bench.folder))
    assert ended.code == 2 and "is a folder" in ended.err
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        port = str(sock.getsockname()[1])
        ended = bench.run("observe", script, "--nproc-per-node", "2", "--master-port", port)
    assert ended.code == 2 and f"port {port} on 127.0.0.1 is in use" in ended.err


def test_two_runs_cannot_write_one_output(bench: Any) -> None:
    script = bench.script("""
    import pathlib, time
    pathlib.Path("started").touch()
    while not pathlib.Path("go").exists():
        time.sleep(0.02)
    """)
    first = bench.prism("observe", script)
    bench.wait_for(lambda: (bench.folder / "started").exists())
    second = bench.run("observe", script)
    (bench.folder / "go").touch()
    assert second.code == 1 and "another run is writing it now" in second.err
    assert bench.finish(first).code == 0
    assert bench.metadata()["job.status"] == "complete"
