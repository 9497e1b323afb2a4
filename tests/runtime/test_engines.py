"""Slices of a calibration on a Ray cluster of several machines: here several raylets, one of which is killed."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from prism_sdk.runtime.config import LaunchConfig, LaunchMode
from prism_sdk.runtime.engines import SliceTask, kept_folder
from prism_sdk.testing.launches import Launches
from prismtrace import GraphKind, TraceReader, TraceWriter

SCRIPT = """
import sys
import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
with open(f"{sys.argv[1]}/ran-{rank}", "a") as file:
    file.write("x")
weight = torch.ones(4, requires_grad=True)
optimizer = torch.optim.SGD([weight], lr=0.1)
for step in range(3):
    weight.sum().backward()
    dist.all_reduce(weight.grad)
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(float(sys.argv[2]))
dist.destroy_process_group()
"""


@pytest.fixture
def cluster() -> Iterator[Any]:
    pytest.importorskip("ray", reason="Ray is an optional extra")
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False,
                                                            "object_store_memory": 80 << 20})  # fmt: skip
    yield cluster
    cluster.shutdown()


@pytest.mark.slow
def test_a_machine_that_dies_loses_nothing_that_was_finished(cluster: Any, tmp_path: Path) -> None:
    jobs = Launches(tmp_path)
    script, ran = tmp_path / "job.py", tmp_path / "ran"
    script.write_text(SCRIPT)
    ran.mkdir()
    graph = jobs.must("record", script, (str(tmp_path), "0"), options=["--world-size", "4"]).trace
    nodes = [cluster.add_node(num_cpus=1, object_store_memory=80 << 20) for _ in range(2)]
    command = [sys.executable, "-m", "prism_sdk.cli.main", "calibrate", "--graph", str(graph), "--slots", "1",
               "-O", "passes=1", "-o", str(tmp_path / "out.prism"), "--engine", "ray", "--address", cluster.address,
               "--", str(script), str(ran), "1.0"]  # fmt: skip
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=dict(os.environ))
    killer = threading.Thread(target=_kill_after_one, args=(cluster, nodes[0], tmp_path / "out.prism.slices"))
    killer.start()
    _, said = process.communicate(timeout=200)
    killer.join()
    assert process.returncode == 0, said
    assert "4 slices over 2 machines" in said
    with TraceReader(tmp_path / "out.prism") as reader:
        assert reader.graph_kind is GraphKind.CALIBRATED
        assert reader.ranks == (0, 1, 2, 3)
    times_run = [len((ran / f"ran-{rank}").read_text()) for rank in range(4)]
    assert sum(times_run) in (4, 5), times_run  # at most the slice that was on the machine ran again
    assert not (tmp_path / "out.prism.slices").exists()


def _kill_after_one(cluster: Any, node: Any, folder: Path) -> None:
    """Take a machine away as soon as one slice is finished."""
    until = time.monotonic() + 150
    while time.monotonic() < until and not list(folder.glob("pass1-slice*.prism")):
        time.sleep(0.1)
    cluster.remove_node(node, allow_graceful=False)


def _config(folder: Path) -> LaunchConfig:
    graph = folder / "graph.prism"
    graph.write_bytes(b"x")
    return LaunchConfig(LaunchMode.CALIBRATE, "train.py", folder / "out.prism", graph=graph)


def test_finished_slices_are_kept_for_the_same_calibration_only(tmp_path: Path) -> None:
    config = _config(tmp_path)
    folder = kept_folder(config)
    (folder / "pass1-slice0.prism").write_bytes(b"finished")
    assert [path.name for path in kept_folder(config).glob("*.prism")] == ["pass1-slice0.prism"]
    assert list(kept_folder(replace(config, arguments=("--lr", "2"))).glob("*.prism")) == []


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
