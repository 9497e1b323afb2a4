"""Recordings with names when times are sought: names behind the last step, another adapter, a broken one, none."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

from prism_sdk.analysis import load_job
from prism_sdk.analysis.variation import step_times_ns
from prism_sdk.plugins import PluginRecord
from prism_sdk.runtime.fidelity import report_broken
from prism_sdk.testing import Launched, Launches
from prismtrace import Phase, TraceReader

FRAME = """
import time

import torch
import torch.distributed as dist

class Loop:
    def __init__(self):
        self.model = torch.nn.Linear(8, 8)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def step(self):
        self.model(torch.ones(4, 8)).square().mean().backward()
        time.sleep(0.05)
        for parameter in self.model.parameters():
            dist.all_reduce(parameter.grad)
        self.update()

    def update(self):
        self.optimizer.step()
        self.optimizer.zero_grad()
"""
TRAIN = """
import torch.distributed as dist
from frame_of_loops import Loop

dist.init_process_group("gloo")
loop = Loop()
for _ in range(3):
    loop.step()
"""
ADAPTER = """
from prism_sdk import hookimpl
from prism_sdk.abc import AdapterHook
from prism_sdk.adapting import Around, PatchingAdapter

STEP = AdapterHook("frame_of_loops", "Loop.step")
UPDATE = AdapterHook("frame_of_loops", "Loop.update")

class Adapter(PatchingAdapter):
    name, description, distribution = "loops", "for tests", "frame_of_loops"

    def hooks(self):
        return [STEP, UPDATE]

    def around(self, namer):
        return [
            Around(STEP, before=lambda loop: namer.enter(label="step")),
            Around(UPDATE, before=lambda loop: namer.enter("optimizer", part="optimizer")),
        ]

@hookimpl
def prism_register_adapters():
    return [Adapter()]
"""


class Bench:
    """A job on a framework of its own, and one recording of it at two ranks."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.adapter, self.job = folder, folder / "loops_adapter.py", folder / "train.py"
        (folder / "frame_of_loops.py").write_text(FRAME)
        self.job.write_text(TRAIN)
        self.adapter.write_text(ADAPTER)
        self.recorded = Launches(folder, plugin=str(self.adapter)).record(self.job, num_ranks=2)

    def calibrate(self, adapter: Path | None) -> Launched:
        plugin = None if adapter is None else str(adapter)
        options = ["--graph", self.recorded.trace, "--slots", "2", "-O", "passes=1"]
        return Launches(self.folder, plugin=plugin).run("calibrate", self.job, options=options)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("loops"))


def test_what_an_optimizer_does_behind_the_last_step_is_no_step(bench: Bench) -> None:
    done = bench.calibrate(bench.adapter)
    assert done.code == 0, done.err
    with TraceReader(done.trace) as reader:
        assert reader.metadata["rank.0.fidelity"] == "full"
        units, steps = reader.units(0), reader.steps(0)
        calibrated_ns = int(reader.metadata["calibration.step_ns"])
    behind = units.step == 3
    assert steps.step.tolist() == [0, 1, 2] and behind.any()
    assert Phase.OPTIMIZER in units.phase[behind], "the stretch around the optimizer goes on behind its step"
    _, times_ns = step_times_ns(load_job(done.trace))
    assert len(times_ns) == 2 and min(times_ns.min(), calibrated_ns) > 50_000_000


def test_a_graph_whose_adapter_is_not_there_is_refused_before_anything_runs(bench: Bench) -> None:
    done = bench.calibrate(None)
    assert done.code == 2 and "no adapter is called 'loops'" in done.err
    assert f"units of {bench.recorded.trace} have names of that adapter" in done.err and "--plugin" in done.err
    assert "slice" not in done.err


def test_an_adapter_that_cuts_otherwise_is_told_from_a_program_that_does(bench: Bench) -> None:
    other = bench.folder / "other_adapter.py"
    other.write_text(ADAPTER.replace('namer.enter("optimizer", part="optimizer")', "None"))
    done = bench.calibrate(other)
    assert done.code == 1
    assert "rank 0 communicates as recorded, and its computing or waiting is cut otherwise: step 0 has " in done.err
    assert f"no slice shows any step of {bench.recorded.trace}" in done.err and "its adapters" in done.err


def test_broken_plugins_are_named_where_a_run_goes_without_their_names(capsys: pytest.CaptureFixture[str]) -> None:
    def record(name: str, status: str) -> PluginRecord:
        return PluginRecord(
            name=name, origin="installed", module=name, distribution=name, version="1", status=status, reason="no torch"
        )

    report_broken([record("fine", "ok"), record("off", "disabled")])
    assert capsys.readouterr().err == ""
    report_broken([record("fine", "ok"), record("one", "broken")])
    assert "left out, with any adapters of theirs: one (no torch); `prism plugins`" in capsys.readouterr().err
    report_broken([record("one", "broken"), record("two", "broken")])
    assert capsys.readouterr().err.count("one, two; ") == 1
