"""The profiler under real NCCL: all checks of benchmarks/nccl_profiler_device.py, on machines with two GPUs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.gpu
@pytest.mark.slow
def test_records_of_real_nccl_agree() -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.device_count() < 2 or not torch.distributed.is_nccl_available():
        pytest.skip("needs two CUDA devices and NCCL")
    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "nccl_profiler_device.py", "--parts", "check,joined"],
        capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    checked = json.loads(done.stdout)["check"]
    assert checked["problems"] == []
    assert json.loads(done.stdout)["joined"]["problems"] == []
    assert checked["num_operations"] > 200
    assert all(fit["num_violations"] == 0 for fit in checked["clocks"].values())
