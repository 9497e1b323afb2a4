"""A framework adapter that a stranger wrote names the units of a real run."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from prismtrace import Phase, TraceReader, UnitKind

ADAPTER = """
import contextlib
import prism_sdk
from prism_sdk.abc import AdapterHook, FrameworkAdapter


class Tiny(FrameworkAdapter):
    name = "tiny"
    description = "names the stretches of a toy trainer"

    def hooks(self):
        return [AdapterHook(module="torch.nn", attribute="Linear.forward", required=True)]

    @contextlib.contextmanager
    def activate(self, namer):
        import torch

        original = torch.nn.Linear.forward

        def forward(module, x):
            namer.enter("forward", microbatch=3, stage=1, label="linear")
            try:
                return original(module, x)
            finally:
                namer.leave()

        torch.nn.Linear.forward = forward
        try:
            yield
        finally:
            torch.nn.Linear.forward = original


@prism_sdk.hookimpl
def prism_register_adapters():
    return [Tiny()]
"""

SCRIPT = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(256, 256))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    model(torch.ones(64, 256)).sum().backward()
    optimizer.step()
"""


def observe(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    (folder / "tiny_adapter.py").write_text(textwrap.dedent(ADAPTER))
    (folder / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "prism_sdk.cli.main", "observe", "-q", "--nproc-per-node", "2", "-o", "run.prism"]
    return subprocess.run(
        [*command, *options, "--", "train.py"], cwd=folder, capture_output=True, text=True, timeout=90
    )  # fmt: skip


@pytest.mark.timeout(240)
def test_an_adapter_names_units(tmp_path: Path) -> None:
    done = observe(tmp_path, "--plugin", "./tiny_adapter.py", "--adapter", "tiny")
    assert done.returncode == 0, done.stderr
    with TraceReader(tmp_path / "run.prism") as reader:
        units = reader.units(0)
    named = [row for row, label in enumerate(units.labels()) if label == "linear"]
    assert len(named) == 2
    assert all(units.kind[row] == UnitKind.COMPUTE and units.phase[row] == Phase.FORWARD for row in named)
    assert units.microbatch[named].tolist() == [3, 3]
    assert units.stage[named].tolist() == [1, 1]


@pytest.mark.timeout(240)
def test_an_unknown_adapter_is_an_error_before_anything_starts(tmp_path: Path) -> None:
    done = observe(tmp_path, "--adapter", "nonsense")
    assert done.returncode == 2
    assert "nonsense" in done.stderr
    assert not (tmp_path / "run.prism").exists()
