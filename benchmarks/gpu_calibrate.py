"""Calibrates jobs on the GPUs at hand, and compares the predicted step with observed runs where there are two GPUs.

    python benchmarks/gpu_calibrate.py

A recording without values, a calibration of one GPU, and with two GPUs three observed runs, a calibration of both, and
one of a single GPU with the transfers of an observed run. The last line says what was good: a calibration is if every
unit that computes was measured on the device, every transfer says where it comes from, and, where there is a real run
to compare with, the step of the calibration of both GPUs is within 2 % of the mean of the real ones.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))

from gpu_runs import prism

from prismtrace import TraceReader, UnitKind

JOBS = {  # steps of more than 100 ms on an H200
    "ddp": ("ddp", "8", "2048", "8192"),
    "fsdp2": ("fsdp2", "8", "2048", "81920"),
}
TOLERANCE = 0.02


def check(name: str, folder: Path, num_devices: int) -> dict[str, bool]:
    """Everything of one job."""
    words, bare = JOBS[name], folder / f"{name}.prism"
    recorded = prism("record", bare, *words, ranks=2, options=("--payloads", "none"))
    recorded.show(f"record {name}")
    if recorded.code:
        return {f"{name}.record": False}
    good = {}
    real: list[float] = []
    runs = [folder / f"{name}-real{i}.prism" for i in range(3 if num_devices > 1 else 0)]
    for run in runs:
        seen = prism("observe", run, *words, ranks=2)
        seen.show(f"observe {name}")
        if seen.code == 0:
            real.append(_observed_step_ms(run))
    print(f"   observed steps: {np.round(real, 3).tolist()} ms", flush=True)
    variants: dict[str, tuple[tuple[str, ...], dict[str, str]]] = {
        "one GPU": (("-O", "transfers=profile"), {"CUDA_VISIBLE_DEVICES": "0"})
    }
    if real:
        variants["two GPUs"] = ((), {})
        variants["one GPU, observed transfers"] = (("-O", f"transfers={runs[0]}"), {"CUDA_VISIBLE_DEVICES": "0"})
    for number, (what, (options, environment)) in enumerate(variants.items()):
        output = folder / f"{name}-calibrated{number}.prism"
        options = ("--graph", str(bare), *options)
        done = prism("calibrate", output, *words, ranks=2, options=options, **environment)
        done.show(f"calibrate {name}, {what}")
        good[f"{name}, {what}"] = done.code == 0 and describe(output, real, is_bound=what == "two GPUs")
    return good


def _observed_step_ms(path: Path) -> float:
    with TraceReader(path) as reader:
        return float(np.mean([np.diff(reader.steps(rank).end_ns).mean() for rank in reader.ranks])) / 1e6


def describe(path: Path, real: list[float], *, is_bound: bool) -> bool:
    """Print what a calibrated graph says, and whether it is whole and, if `is_bound`, near the real runs."""
    with TraceReader(path) as reader:
        facts: Mapping[str, str] = reader.metadata
        predicted = float(facts["calibration.step_ns"]) / 1e6
        whole = True
        for rank in reader.ranks:
            units = reader.units(rank)
            steps = np.isin(units.step, reader.steps(rank).step[1:])
            provenance = np.asarray(units["prism.provenance"])
            computes = steps & (units.kind == UnitKind.COMPUTE)
            moves = steps & np.isin(units.kind, [UnitKind.COLLECTIVE, UnitKind.SEND, UnitKind.RECV])
            whole = whole and bool((provenance[computes] == 1).all()) and bool((provenance[moves] > 0).all())
    errors = [round(100 * (predicted / ms - 1), 2) for ms in real]
    print(f"   predicted {predicted:.3f} ms ({facts['calibration.interval_ns']} ns), whole: {whole}; transfers of "
          f"{facts['calibration.transfers']}; errors against the observed runs {errors} %", flush=True)  # fmt: skip
    return whole and (not is_bound or abs(predicted / float(np.mean(real)) - 1) < TOLERANCE)


def main() -> int:
    import torch

    num_devices = torch.cuda.device_count()
    print("torch", torch.__version__, "devices", num_devices, flush=True)
    results: dict[str, bool] = {}
    with tempfile.TemporaryDirectory() as text:
        for name in JOBS:
            results |= check(name, Path(text), num_devices)
    print(json.dumps(results))
    return 0 if results and all(results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
