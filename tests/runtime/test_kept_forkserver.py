"""Launches that follow each other share the process that has loaded torch, and nothing else."""

from __future__ import annotations

import fcntl
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from prism_sdk.errors import RankFailedError, RunError
from prism_sdk.runtime.calibrating import SliceContext
from prism_sdk.runtime.config import LaunchConfig, LaunchMode
from prism_sdk.runtime.forkserver import descendants_of
from prism_sdk.runtime.launcher import launch
from prism_sdk.runtime.processes import KeptForkServer, Preparation
from prism_sdk.runtime.progress import Progress
from prism_sdk.workfolders import work_folder
from prismtrace import TraceReader

pytestmark = pytest.mark.timeout(90)

SCRIPT = """
import json, os, random, re, sys, time
from pathlib import Path

import torch
import torch.distributed as dist

folder = Path(__file__).parent
dist.init_process_group("gloo")
rank = dist.get_rank()
server = os.getppid()
seen = {
    "loader": int(Path(f"/proc/{server}/stat").read_text().rpartition(")")[2].split()[1]),
    "open": {link.name: re.sub("[0-9]+", "", os.readlink(link).split("/")[-1])
             for link in Path("/proc/self/fd").iterdir() if link.is_symlink()},
    "environment": dict(os.environ), "random": random.random(), "hash": hash("text"), "torch": torch.initial_seed(),
    "cpus": sorted(os.sched_getaffinity(0)), "threads": torch.get_num_threads(),
    "signals": re.findall("Sig(?:Ign|Cgt|Blk):.*", Path("/proc/self/status").read_text()),
    "compiler": "torch._inductor.compile_fx" in sys.modules,
}
torch.compile(torch.sin)  # imports it
(folder / f"seen-{rank}").write_text(json.dumps(seen))
if (folder / "trouble").exists():
    Path(f"/dev/shm/torch_{os.getpid()}_123_0").touch()
    if (folder / "trouble").read_text() == "fail":
        raise ValueError("on purpose")
    os.kill(server, 9)
    time.sleep(300)
for _ in range(3):
    dist.all_reduce(torch.ones(5))
"""

# one slice, and then nothing for a while
STRATEGY = """
import time
from pathlib import Path
from prism_sdk.abc import CalibrationStrategy
from prism_sdk.errors import PrismError
from prism_sdk.hookspecs import hookimpl

class Halting(CalibrationStrategy):
    name = "halting"
    description = "halts between slices"

    def calibrate(self, context):
        try:
            context.run_slice([0], graph_path=context.graph_path, label="one")
        except PrismError as error:
            Path("halted").write_text(str(error))
        time.sleep(60)

@hookimpl
def prism_register_strategies():
    return [Halting()]
"""


class Job:
    """A recorded job of two ranks, and slices of it, one after the other."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.others = folder, set(descendants_of(os.getpid()))
        self.script, self.bare = folder / "train.py", folder / "bare.prism"
        self.script.write_text(SCRIPT)
        record = LaunchConfig(LaunchMode.RECORD, str(self.script), self.bare, nproc_per_node=2, quiet=True)
        with pytest.MonkeyPatch.context() as patch:
            patch.delenv("PYTEST_CURRENT_TEST")  # it changes, and with it the environment of ranks
            launch(record)
        self.when_recorded = self.seen(0)
        config = LaunchConfig(
            LaunchMode.CALIBRATE, str(self.script), folder / "out.prism", graph=self.bare, nproc_per_node=2, quiet=True
        )
        self.context = SliceContext(
            config, self.bare, folder, 2, Progress(LaunchMode.CALIBRATE, quiet=True, environ=os.environ)
        )

    def loader(self) -> int:
        """The only process that a child of this one keeps for slices; others may be kept for other tests."""
        (loader,) = set(descendants_of(os.getpid())) - self.others
        return loader

    def seen(self, rank: int) -> dict[str, Any]:
        return dict(json.loads((self.folder / f"seen-{rank}").read_text()))

    def run(self, *ranks: int) -> dict[str, Any]:
        """Run a slice; returns what its first rank saw."""
        with pytest.MonkeyPatch.context() as patch:
            patch.delenv("PYTEST_CURRENT_TEST")
            trace = self.context.run_slice(ranks, graph_path=self.bare, label="slice")
        with TraceReader(trace) as reader:
            assert reader.metadata["job.status"] == "complete" and list(reader.ranks) == list(ranks)
        return self.seen(ranks[0])

    def run_module(self) -> None:
        """Run a module beside the job, as a calibration does that measures the machine."""
        with pytest.MonkeyPatch.context() as patch:
            patch.delenv("PYTEST_CURRENT_TEST")
            self.context.run_module("platform", (), num_ranks=2, label="module")


def touched() -> set[str]:
    """What ranks of `SCRIPT` have left in /dev/shm; jobs beside this one have files there too."""
    return {name for name in os.listdir("/dev/shm") if name.startswith("torch_") and name.endswith("_123_0")}


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    others = set(descendants_of(os.getpid()))
    job = Job(tmp_path_factory.mktemp("kept"))
    with job.context:
        yield job
    assert set(descendants_of(os.getpid())) <= others
    assert touched() == set()


def test_slices_share_the_imports_and_see_what_they_saw_without_that(job: Job) -> None:
    first, _, again = job.run(0), job.run(0, 1), job.run(0)
    assert first["loader"] == again["loader"] != os.getpid() == job.when_recorded["loader"]
    assert first.pop("torch") != again.pop("torch")  # torch draws a seed when it is imported
    for seen in (first, again, job.when_recorded):
        del seen["environment"]["MASTER_PORT"]
    assert first == again
    assert "memfd:prism-prefetch (deleted)" in first["open"].values()
    for key in ("environment", "random", "hash", "threads", "signals"):
        assert first[key] == job.when_recorded[key]


def test_what_the_recorded_program_imported_slowly_is_there_before_ranks_of_a_slice(job: Job) -> None:
    before = job.run(0)
    assert (job.when_recorded["compiler"], before["compiler"]) == (False, True)
    job.run_module()  # a launch between slices that the same process serves
    assert job.run(0)["loader"] == before["loader"]


def test_trouble_in_one_slice_is_named_and_gone_in_the_next(job: Job) -> None:
    trouble = job.folder / "trouble"
    try:
        trouble.write_text("fail")
        with pytest.raises(RankFailedError, match="on purpose"):
            job.run(0)
        assert touched() == set()
        trouble.write_text("kill")
        with pytest.raises(RunError, match=r"the fork server.* ended unexpectedly \(killed by SIGKILL\)"):
            job.run(0)
    finally:
        trouble.unlink()
        for left in touched():  # of a server that could not clean up
            Path("/dev/shm", left).unlink()
    assert job.run(1)["loader"] == job.loader()


@pytest.fixture
def without_torch(tmp_path: Path) -> dict[str, str]:
    """An environment in which a fork server is prepared quickly, and says that it has failed."""
    (tmp_path / "torch.py").write_text("raise ImportError('no torch here')")
    return {**os.environ, "PYTHONPATH": str(tmp_path)}


def test_it_is_replaced_when_it_does_not_fit_or_is_dead(without_torch: dict[str, str]) -> None:
    kept, others = KeptForkServer(), set(descendants_of(os.getpid()))

    def start(*descriptors: int, **environment: str) -> int:
        server, channel = kept.start({**without_torch, **environment}, descriptors, Preparation())
        assert channel.receive() == ("failed", "ImportError: no torch here")
        assert server.wait(10.0) == 1
        channel.close()
        return server.pid

    high = fcntl.fcntl(2, fcntl.F_DUPFD, 400)
    try:
        first = start()
        assert start(2) == first
        other = start(A_VARIABLE="new")
        assert other != first
        os.kill(other, signal.SIGKILL)
        os.waitid(os.P_PID, other, os.WEXITED | os.WNOWAIT)
        third = start(A_VARIABLE="new")
        assert third not in (first, other)
        assert start(high, A_VARIABLE="new") != third
        assert len(set(descendants_of(os.getpid())) - others) == 1
    finally:
        kept.close()
        os.close(high)
    assert set(descendants_of(os.getpid())) == others


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_launcher_that_ends_between_slices_leaves_nothing(
    bench: Any, job: Job, without_torch: dict[str, str], number: signal.Signals
) -> None:
    files = {"halting.py", "halted", "torch.py"}
    plugin = bench.script(STRATEGY, name="halting.py")
    options = ("--device", "cpu", "--graph", str(job.bare), "--plugin", str(plugin), "--strategy", "halting")
    process = bench.prism("calibrate", job.script, *options, env={"PYTHONPATH": without_torch["PYTHONPATH"]})
    bench.wait_for(lambda: (bench.folder / "halted").exists())
    assert "no torch here" in (bench.folder / "halted").read_text()
    assert sum("forkserver" in line for line in bench.alive().values()) == 1
    process.send_signal(number)
    ended = bench.finish(process)
    bench.assert_nothing_left()
    if number is signal.SIGTERM:
        assert ended.code == 143 and "interrupted by SIGTERM" in ended.err
        assert {path.name for path in bench.folder.iterdir()} - {"__pycache__"} == files
    else:
        assert ended.code == -number
        (left,) = bench.folder.glob("prism-calibrate-*")
        with work_folder("prism-calibrate-", beside=bench.output):  # as the next calibration does
            assert not left.exists()
