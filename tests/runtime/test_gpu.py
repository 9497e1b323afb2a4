"""Jobs on real GPUs over NCCL and under Prism: all checks of benchmarks/gpu_{checks,hold,calibrate,alone}.py."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def _num_gpus(*, needs_nccl: bool = True) -> int:
    """How many there are; without any, or without NCCL, the test is skipped."""
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available() or (needs_nccl and not torch.distributed.is_nccl_available()):
        pytest.skip("needs a CUDA device and NCCL" if needs_nccl else "needs a CUDA device")
    return int(torch.cuda.device_count())


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("check", ["record", "full", "moves", "observe", "emulate", "graphs", "switch", "limit"])
def test_a_job_on_gpus(check: str) -> None:
    _num_gpus()
    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "gpu_checks.py", check], capture_output=True, text=True, timeout=500
    )
    assert json.loads(done.stdout.splitlines()[-1]) == {check: True}, done.stdout + done.stderr


@pytest.mark.gpu
@pytest.mark.slow
def test_streams_are_held_by_the_device() -> None:
    _num_gpus(needs_nccl=False)
    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "gpu_hold.py"], capture_output=True, text=True, timeout=400
    )
    results = json.loads(done.stdout.splitlines()[-1])
    assert all(results.values()) and len(results) == 5, done.stdout + done.stderr


@pytest.mark.gpu
@pytest.mark.slow
def test_jobs_are_calibrated_on_devices() -> None:
    _num_gpus()
    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "gpu_calibrate.py"], capture_output=True, text=True, timeout=900
    )
    results = json.loads(done.stdout.splitlines()[-1])
    assert all(results.values()) and len(results) >= 2, done.stdout + done.stderr


@pytest.mark.gpu
@pytest.mark.slow
def test_reduced_calls_of_nccl_with_an_assistant() -> None:
    num_gpus = _num_gpus()
    script, kinds = ROOT / "benchmarks" / "gpu_hold.py", ["operations", "fsdp2", "ddp", "overlap"]
    if num_gpus > 1:  # on one, which both share, times mean nothing
        kinds.append("chain")
    done = subprocess.run(
        [sys.executable, script, "--backend=nccl", *kinds], capture_output=True, text=True, timeout=400
    )
    assert json.loads(done.stdout.splitlines()[-1]) == dict.fromkeys(kinds, True), done.stdout + done.stderr


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("part", ["eight", "bytes", "limit"])
def test_a_single_gpu(part: str) -> None:
    _num_gpus()
    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "gpu_alone.py", part], capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stdout + done.stderr
