"""Ctrl-C, SIGTERM, SIGKILL: no process, no shared memory, no temporary file stays."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from prismtrace import TraceReader

pytestmark = pytest.mark.timeout(240)

# trains for ever, with data loader workers and a child of its own in a session of its own
SCRIPT = """
    import pathlib, subprocess, sys, torch, torch.distributed as dist
    from torch.utils.data import DataLoader

    def main():
        dist.init_process_group("gloo")
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"], start_new_session=True)
        loader = iter(DataLoader(torch.zeros(1_000_000, 4), num_workers=1))
        step = 0
        while True:
            next(loader)
            dist.all_reduce(torch.ones(20_000))
            step += 1
            if step == 20:
                pathlib.Path(f"ready-{dist.get_rank()}").touch()

    if __name__ == "__main__":
        main()
"""


def _shared_memory() -> set[str]:
    return set(os.listdir("/dev/shm"))


def _assert_no_shared_memory_left(bench: Any, before: set[str]) -> None:
    """What others on this machine have there, such as locks of multiprocessing, comes and goes: ours would stay."""
    bench.wait_for(lambda: _shared_memory() <= before, within_s=15.0)


def _start(bench: Any, mode: str) -> Any:
    script = bench.script(SCRIPT)
    process = bench.prism(mode, script, "--nproc-per-node", "2", start_new_session=True)
    bench.wait_for(lambda: len(list(Path(bench.folder).glob("ready-*"))) == 2)
    return process


@pytest.mark.parametrize(
    ("mode", "number", "whole_group"),
    [
        ("record", signal.SIGINT, False),
        ("record", signal.SIGINT, True),
        ("observe", signal.SIGTERM, True),
        ("observe", signal.SIGHUP, False),
    ],
)
def test_an_interrupt_ends_everything_and_keeps_what_was_recorded(
    bench: Any, mode: str, number: signal.Signals, whole_group: bool
) -> None:
    before = _shared_memory()
    process = _start(bench, mode)
    (os.killpg if whole_group else os.kill)(process.pid, number)
    ended = bench.finish(process)
    assert ended.code == 128 + number
    assert f"interrupted by {number.name}" in ended.err
    assert "Traceback" not in ended.err
    bench.assert_nothing_left()
    _assert_no_shared_memory_left(bench, before)
    assert not list(bench.folder.glob("*.parts"))
    with TraceReader(bench.output) as reader:
        assert reader.metadata["job.status"] == "aborted"
        assert reader.num_units(0) > 20 and reader.num_units(1) > 20


# workers that are killed between opening a file of shared memory and unlinking it, and files that are none of theirs
LEAVES_SHARED_MEMORY = """
    import multiprocessing, os, pathlib, subprocess, sys, time

    def work(context):
        if context == "fork" or "wait" in sys.argv:
            pathlib.Path(f"/dev/shm/torch_{os.getpid()}_123_0").touch()
        if context == "fork":
            pathlib.Path(f"/dev/shm/torch_{PARENT}_123_{os.getpid()}").touch()
        pathlib.Path(f"worker-{context}-{os.getpid()}").touch()
        time.sleep(300)

    if __name__ == "__main__":
        PARENT = os.environ["A_STRANGER"]
        for context in ("fork", "spawn"):
            lock = multiprocessing.get_context(context).Lock()
            worker = multiprocessing.get_context(context).Process(target=work, args=(context,))
            worker.start()
        dead = multiprocessing.get_context("fork").Process(target=work, args=("fork",))
        dead.start()
        while len(list(pathlib.Path().glob("worker-*"))) < 3:
            time.sleep(0.02)
        dead.kill()
        dead.join()
        pathlib.Path("ready-0").touch()
        while "wait" in sys.argv:
            time.sleep(1)
        for worker in multiprocessing.active_children():
            worker.kill()
"""


@pytest.mark.parametrize("end", ["interrupt", "kill the launcher", "well"])
def test_shared_memory_of_killed_workers_does_not_stay_and_that_of_strangers_does(bench: Any, end: str) -> None:
    stranger = bench.start("true")
    stranger.wait()
    before = _shared_memory()
    script = bench.script(LEAVES_SHARED_MEMORY)
    arguments = () if end == "well" else ("wait",)
    process = bench.prism("observe", script, arguments=arguments, env={"A_STRANGER": str(stranger.pid)})
    try:
        bench.wait_for(lambda: (bench.folder / "ready-0").exists())
        if end == "interrupt":
            assert len(_shared_memory() - before) >= 5
            process.send_signal(signal.SIGTERM)
        elif end == "kill the launcher":
            process.kill()
        process.communicate()
        bench.assert_nothing_left(within_s=5.0)
        of_stranger = {name for name in _shared_memory() if name.startswith(f"torch_{stranger.pid}_123_")}
        assert len(of_stranger) == 2
        _assert_no_shared_memory_left(bench, before | of_stranger)
    finally:
        for path in Path("/dev/shm").glob(f"torch_{stranger.pid}_123_*"):
            path.unlink()


def test_a_second_ctrl_c_does_not_wait_for_a_rank_that_takes_its_time(bench: Any) -> None:
    script = bench.script("""
    import pathlib, signal, time
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    pathlib.Path("ready").touch()
    while True:
        time.sleep(1)
    """)
    process = bench.prism("observe", script)
    bench.wait_for(lambda: (bench.folder / "ready").exists())
    process.send_signal(signal.SIGINT)
    with pytest.raises(TimeoutError):
        _wait(process, 1.0)
    process.send_signal(signal.SIGINT)
    _wait(process, 2.5)  # less than the time that the first one gives
    assert bench.finish(process).code == 130
    bench.assert_nothing_left()


def _wait(process: Any, seconds: float) -> None:
    import subprocess

    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        raise TimeoutError from None


def test_a_killed_launcher_takes_everything_along_and_the_next_run_saves_its_shards(bench: Any) -> None:
    before = _shared_memory()
    process = _start(bench, "record")
    process.kill()
    process.communicate()
    bench.assert_nothing_left(within_s=5.0)
    _assert_no_shared_memory_left(bench, before)
    assert list(bench.folder.glob("out.prism.parts/rank-*.prism"))

    ended = bench.run("record", bench.script("import torch", name="other.py"))
    assert ended.code == 0
    assert "a killed run had left shards" in ended.err
    assert bench.metadata(bench.folder / "out.prism.recovered")["job.status"] == "aborted"
    assert not list(bench.folder.glob("*.parts*"))


SHORT = """
    import pathlib, time, torch.distributed as dist
    dist.init_process_group("gloo")
    dist.barrier()
    pathlib.Path(f"ready-{dist.get_rank()}").touch()
    while True:
        time.sleep(1)
"""


def test_a_killed_fork_server_is_named(bench: Any) -> None:
    script = bench.script(SHORT)
    process = bench.prism("observe", script, start_new_session=True)
    bench.wait_for(lambda: (bench.folder / "ready-0").exists())
    (server,) = (
        int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        if "forkserver" in Path(f"/proc/{pid}/cmdline").read_text()
    )  # fmt: skip
    os.kill(server, signal.SIGKILL)
    ended = bench.finish(process)
    assert ended.code == 1
    assert "ended unexpectedly (killed by SIGKILL)" in ended.err and "exit status None" not in ended.err


def test_shards_without_units_are_called_so(tmp_path: Path) -> None:
    from prism_sdk.runtime.launcher import _parts
    from prismtrace import GraphKind, TraceWriter

    output, said = tmp_path / "out.prism", []
    parts = tmp_path / "out.prism.parts"
    for shard in ("empty", "unreadable"):
        parts.mkdir()
        if shard == "empty":
            with TraceWriter(parts / "rank-0.prism", graph_kind=GraphKind.OBSERVED, world_size=1):
                pass
        else:
            (parts / "rank-0.prism").touch()
        with _parts(output, said.append):
            pass
    assert said == [
        f"a killed run had left shards of {output}: saved as {output}.recovered "
        "(0 units: it was killed before the first of them were written)",
        f"a killed run had left shards of {output} that hold nothing that can be read: removed",
    ]
    assert not list(tmp_path.glob("*.parts*"))
