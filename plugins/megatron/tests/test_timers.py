"""Megatron's own timers against the sums of Prism's units, in one run: both saw the same machine and load."""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("megatron.core", exc_type=ImportError)
from prism_sdk.testing import Launches
from prismtrace import TraceReader, UnitKind

JOB = Path(__file__).parent / "megatron_job.py"
STEPS = 3
COMMON = ("--timers", "--steps", str(STEPS))
JOBS = (
    "--pp",
    "2",
    "--width",
    "256",
    "--sequence",
    "128",
    *COMMON,
    "then",
    "--width",
    "512",
    "--sequence",
    "32",
    *COMMON,
)
# what Megatron times -> the names of its timers
TIMED = {
    "forward": ("forward-compute",), "backward": ("backward-compute",), "optimizer": ("optimizer",),
    "schedule": ("forward-backward",),
    "messages": (
        "forward-recv", "forward-send", "backward-recv", "backward-send", "forward-send-backward-recv",
        "backward-send-forward-recv",
    ),
    "grad_sync": (
        "all-grads-sync", "conditional-embedder-grads-all-reduce", "non-tensor-parallel-grads-all-reduce",
        "embedding-grads-all-reduce",
    ),
}  # fmt: skip


def sums(trace: Path, rank: int) -> list[dict[str, int]]:
    """Nanoseconds of each phase in each step; a step ends with Megatron's optimizer, not with torch's inside it."""
    steps: list[dict[str, int]] = [defaultdict(int)]
    begin, before = 0, ""
    with TraceReader(trace) as reader:
        units = reader.units(rank)
        columns = units.columns()
        rows = zip(
            units.kind.tolist(), units.start_ns.tolist(), units.end_ns.tolist(), columns["prism.part"],
            columns["label"], strict=True,
        )  # fmt: skip
        for kind, start, end, part, label in rows:
            name = part or ("messages" if label else "")
            if kind not in (UnitKind.COMPUTE, UnitKind.WAIT) or not name:
                continue
            if before == "optimizer" != name:
                steps.append(defaultdict(int))
            if len(steps[-1]) == 0:
                begin = start
            steps[-1][name] += end - start
            if name != "optimizer":
                steps[-1]["schedule"] = end - begin
            before = name
    return steps


@pytest.mark.timeout(150)
def test_timers_of_megatron_agree_with_the_sums_of_units(tmp_path: Path) -> None:
    launches = Launches(tmp_path, plugin="prismtrace_megatron")
    done = launches.must("observe", JOB, JOBS, options=["--nproc-per-node", "2", "--device", "cpu"])
    timers = [json.loads(line.split("timers ", 1)[1]) for line in done.out.splitlines() if "timers {" in line]
    assert len(timers) == 2 * 2 * STEPS
    ratios: dict[tuple[int, str, str], list[float]] = defaultdict(list)
    for rank in range(2):
        theirs = [one for one in timers if one["rank"] == rank]
        ours = sums(done.trace, rank)
        assert len(ours) == len(theirs)
        for number, (units, seconds) in enumerate(zip(ours, theirs, strict=True)):
            job = "stages" if number < STEPS else "replicas"
            for name, names in TIMED.items():
                if name != ("messages" if job == "replicas" else "grad_sync"):  # which there are none of
                    ratios[rank, job, name].append(units[name] / 1e9 / sum(seconds.get(one, 0) for one in names))
    medians = {key: statistics.median(values) for key, values in ratios.items()}
    off = {key: value for key, value in medians.items() if abs(value - 1) > 0.03}
    assert not off and len(medians) == 2 * 2 * 5, off
