"""Recordings, calibrations and sweeps on a Ray cluster of several machines, some of which are killed."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from prism_sdk.cli.main import run
from prism_sdk.errors import UsageError
from prism_sdk.runtime.config import LaunchConfig, LaunchMode
from prism_sdk.runtime.engines import RayEngine, SliceTask, kept_slices
from prism_sdk.runtime.host import RankHost
from prism_sdk.runtime.servants import REFUSED, Servant
from prism_sdk.testing.launches import Launches
from prismtrace import GraphKind, TraceReader, TraceWriter
from tests.runtime.role_jobs import structure_differences

SCRIPT = """
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
folder = Path(sys.argv[1])
with (folder / f"ran-{rank}").open("a") as file:
    file.write("x")
weight = torch.ones(30_000, requires_grad=True)
optimizer = torch.optim.SGD([weight], lr=0.1)
for step in range(3):
    weight.sum().backward()
    dist.all_reduce(weight.grad)
    assert weight.grad.unique().tolist() == [3.0]
    optimizer.step()
    optimizer.zero_grad()
    (folder / f"began-{rank}-{step}").touch()
    time.sleep(float(sys.argv[2]) if sys.argv[2:] else 0.2)
dist.destroy_process_group()
"""


class Machines:
    """A Ray cluster: a head without CPUs, and machines of one CPU that can be taken away."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        self._settings = {"object_store_memory": 80 << 20, "include_dashboard": False}
        self.cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **self._settings})
        self.nodes = [self.add(), self.add()]

    def add(self) -> Any:
        return self.cluster.add_node(num_cpus=1, **self._settings)

    def start(self, verb: str, *words: str | Path) -> subprocess.Popen[str]:
        """A command on the cluster."""
        command = [sys.executable, "-m", "prism_sdk.cli.main", verb, "--engine", "ray", "--address",
                   self.cluster.address, *map(str, words)]  # fmt: skip
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def run(self, verb: str, *words: str | Path, lose_once: Callable[[], bool] | None = None) -> tuple[str, str]:
        """A command on the cluster, which must end well; a machine goes away once `lose_once`. What it printed."""
        process = self.start(verb, *words)
        until = time.monotonic() + 100
        while lose_once is not None and process.poll() is None and time.monotonic() < until:
            if lose_once():
                self.cluster.remove_node(self.nodes.pop(0), allow_graceful=False)
                break
            time.sleep(0.05)
        out, said = process.communicate(timeout=200)
        assert process.returncode == 0, said
        return out, said


@pytest.fixture
def machines() -> Iterator[Machines]:
    pytest.importorskip("ray", reason="Ray is an optional extra")
    machines = Machines()
    yield machines
    machines.cluster.shutdown()


@pytest.mark.slow
def test_machines_that_die_lose_nothing_that_was_finished(
    machines: Machines, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:  # fmt: skip
    """A job is recorded, calibrated and simulated on two machines, and in the first two one of them is killed."""
    script, ran = tmp_path / "job.py", tmp_path / "ran"
    script.write_text(SCRIPT)
    ran.mkdir()
    bare, calibrated = tmp_path / "bare.prism", tmp_path / "out.prism"

    out, said = machines.run("record", "--world-size", "3", "-o", bare, "--", script, ran,
                             lose_once=(ran / "began-0-0").exists)  # fmt: skip
    assert "2 slots over 2 machines" in said and "the job begins again on the 1 machine that is left" in said
    assert [len((ran / f"ran-{rank}").read_text()) for rank in range(3)] == [2, 2, 2]
    assert out == ""  # nothing of Ray's own
    here = Launches(tmp_path, shared=False).record(script, [str(ran)], num_ranks=3).trace
    assert structure_differences(here, bare) == []
    with TraceReader(here) as one, TraceReader(bare) as reader:
        assert reader.metadata["job.status"] == "complete" and reader.ranks == (0, 1, 2)
        for rank in one.ranks:
            for column in ("payload_in", "payload_out"):
                assert list(getattr(one.units(rank), column)) == list(getattr(reader.units(rank), column))

    machines.nodes.append(machines.add())
    for path in ran.iterdir():
        path.unlink()
    kept = tmp_path / "out.prism.slices"
    _, said = machines.run("calibrate", "--graph", bare, "--slots", "1", "-O", "passes=1", "-o", calibrated, "--",
                           script, ran, lose_once=lambda: bool(list(kept.glob("pass1-slice*.prism"))))  # fmt: skip
    assert "3 slices over 2 machines" in said
    with TraceReader(calibrated) as reader:
        assert reader.graph_kind is GraphKind.CALIBRATED and reader.ranks == (0, 1, 2)
    times_run = [len((ran / f"ran-{rank}").read_text()) for rank in range(3)]
    assert sum(times_run) in (3, 4), times_run  # at most the slice that was on the machine ran again
    assert not kept.exists()

    words = (calibrated, "--variant", "--slow rank=1:{1.5,2}", "--variant", "--no-gaps", "--json")
    reports = tmp_path / "out.prism.sweep"
    process = machines.start("sweep", *words)
    while not (finished := list(reports.glob("*.json"))) and process.poll() is None:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130 and "interrupted" in said
    for path in finished:
        path.write_text(json.dumps({**json.loads(path.read_text()), "kept": True}))
    out, _ = machines.run("sweep", *words)
    there = json.loads(out)
    assert there[0]["report"].pop("kept")  # the job as it is ran once
    there = [{**row, "report": {k: v for k, v in row["report"].items() if k != "kept"}} for row in there]
    assert not reports.exists()
    assert [row["variant"] for row in there] == ["as it is", "slow rank=1:1.5", "slow rank=1:2", "no-gaps"]
    capsys.readouterr()
    assert run(["sweep", *map(str, words)]) == 0
    assert json.loads(capsys.readouterr().out) == there
    words = (calibrated, "--variant", "--slow rank=99:2", "--variant", "--no-gaps", "--json")
    process = machines.start("sweep", *words)
    out, said = process.communicate(timeout=100)
    assert process.returncode == run(["sweep", *map(str, words)]) == 2, said
    assert json.loads(capsys.readouterr().out) == json.loads(out)  # a variant that cannot be stops no other
    _interrupt_a_recording(machines, tmp_path, script, ran)


def _interrupt_a_recording(machines: Machines, folder: Path, script: Path, ran: Path) -> None:
    (ran / "began-0-0").unlink()
    process = machines.start("record", "--world-size", "3", "-o", folder / "cut.prism", "--", script, ran, "60")
    until = time.monotonic() + 100
    while not (ran / "began-0-0").exists() and process.poll() is None and time.monotonic() < until:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130 and "interrupted" in said, said
    with TraceReader(folder / "cut.prism") as reader:
        assert reader.metadata["job.status"] == "aborted" and 0 in reader.ranks
    while (left := _running(folder)) and time.monotonic() < until:
        time.sleep(0.1)
    assert not left, "no rank outlives the command, on any machine"


def _running(folder: Path) -> list[str]:
    """Processes that name the folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            found.append(path.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
    return [line for line in found if str(folder) in line]


@dataclass(frozen=True)
class _Work:
    """A task: it notes which process did it."""

    output: Path
    how: str = "well"

    @property
    def label(self) -> str:
        return self.how

    @property
    def is_finished(self) -> bool:
        return self.output.exists()

    def run(self, make_host: Callable[..., RankHost]) -> None:
        if self.how == "refused":
            raise UsageError("this cannot be")
        if self.how == "broken":
            raise ValueError("a defect")
        if self.how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        self.output.write_text(str(os.getpid()))


def test_one_process_does_task_after_task_until_one_fails(tmp_path: Path) -> None:
    """A kept process has torch loaded for all slices of a machine; Ray keeps its own process, which keeps this one."""
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}

    def do(servant: Servant, *works: _Work) -> list[tuple[int, str]]:
        for work in works:
            work.output.with_suffix(".task").write_bytes(pickle.dumps(work))
        return [servant.do(str(work.output.with_suffix(".task"))) for work in works]

    servant = Servant(str(tmp_path), environ)
    works = [_Work(tmp_path / "one"), _Work(tmp_path / "no", "refused"), _Work(tmp_path / "two")]
    (first, _), (refused, said), (second, silence) = do(servant, *works)
    assert (first, refused, second, silence) == (0, REFUSED, 0, "") and said == "this cannot be\n"
    assert works[0].output.read_text() == works[2].output.read_text() and not servant.has_ended
    ((broken, said),) = do(servant, _Work(tmp_path / "three", "broken"))
    assert broken == 1 and "ValueError: a defect" in said and servant.has_ended
    ((killed, said),) = do(Servant(str(tmp_path), environ), _Work(tmp_path / "four", "killed"))
    assert (killed, said) == (-signal.SIGKILL, "")


@pytest.mark.parametrize("where", ["", "ray://"])
def test_a_cluster_at_whose_address_nobody_listens_is_refused_at_once(where: str) -> None:
    pytest.importorskip("ray", reason="Ray is an optional extra")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, not listening
        address = f"{where}127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(UsageError, match="cannot be used: Connection refused"):
            RayEngine(address)


def _config(folder: Path) -> LaunchConfig:
    graph = folder / "graph.prism"
    graph.write_bytes(b"x")
    return LaunchConfig(LaunchMode.CALIBRATE, "train.py", folder / "out.prism", graph=graph)


def test_finished_slices_are_kept_for_the_same_calibration_only(tmp_path: Path) -> None:
    config = _config(tmp_path)
    folder = kept_slices(config)
    (folder / "pass1-slice0.prism").write_bytes(b"finished")
    assert [path.name for path in kept_slices(config).glob("*.prism")] == ["pass1-slice0.prism"]
    assert list(kept_slices(replace(config, arguments=("--lr", "2"))).glob("*.prism")) == []


def test_a_slice_is_finished_when_its_trace_is_whole(tmp_path: Path) -> None:
    config = _config(tmp_path)
    task = SliceTask(config, config.output, (0,), config.output, tmp_path / "slice.prism")
    assert not task.is_finished
    task.output.write_bytes(b"PRISM")
    assert not task.is_finished
    for status, expected in (("aborted", False), ("complete", True)):
        with TraceWriter(task.output, world_size=1, metadata={"job.status": status}, overwrite=True):
            pass
        assert task.is_finished is expected


def test_without_ray_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from prism_sdk.errors import UsageError
    from prism_sdk.runtime.engines import RayEngine

    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UsageError, match="needs Ray") as error:
        RayEngine(None)
    assert "prismtrace[ray]" in str(error.value.hint)
