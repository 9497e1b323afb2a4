"""Rows of recorded kernels, and what compare says of them; test_gpu.py records real ones."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from prism_sdk.graph.compare import compare_traces  # noqa: E402
from prism_sdk.graph.kernels import compare_kernels, read_kernels  # noqa: E402
from prism_sdk.runtime.oncuda import kernels  # noqa: E402
from prism_sdk.runtime.tracer import open_shard  # noqa: E402
from prismtrace import EventKind, GraphKind, TraceReader, TrackKind, validate  # noqa: E402

OFFSET = 1_700_000_000_000_000_000  # the real time when the trace's clock was 0


def event(name: str, start: int, duration: int, *, stream: int = 7, device: str = "CUDA") -> Any:
    values = {"name": name, "start_ns": start + OFFSET, "duration_ns": duration, "device_type": f"DeviceType.{device}",
              "device_index": 1, "device_resource_id": stream, "correlation_id": start}  # fmt: skip
    return SimpleNamespace(**{key: lambda value=value: value for key, value in values.items()})


def trace(folder: Path, *steps: list[Any]) -> Path:
    """A trace of a rank with these events, each step's in a session of its own."""
    writer = open_shard(folder, 0, GraphKind.OBSERVED, 1, {})
    recorder = kernels.KernelRecorder.__new__(kernels.KernelRecorder)
    recorder._rank, recorder._session = 0, None
    recorder._done = [(n + 3, OFFSET, SimpleNamespace(events=lambda e=events: e)) for n, events in enumerate(steps)]
    writer.add_steps(0, {"step": [0, 1], "start_ns": [0, 10], "end_ns": [10, 20]})
    assert recorder.write(writer) == sum(len(kernels.device_events(events)) for events in steps)
    assert recorder.write(writer) == 0
    writer.close()
    path = folder / "rank-00000.prism"
    assert validate(path) == []
    return path


def test_kernels_are_events_on_tracks_of_streams(tmp_path: Path) -> None:
    path = trace(tmp_path, [
        event("gemm", 1000, 50), event("cudaLaunchKernel", 900, 5, device="CPU"), event("Memset (Device)", 1100, 5),
        event("Memcpy HtoD (Pinned -> Device)", 1200, 30, stream=20),
    ])  # fmt: skip
    with TraceReader(path) as reader:
        events, tracks = reader.events(0), reader.tracks(0)
        assert list(events.name) == ["gemm", "Memset (Device)", "Memcpy HtoD (Pinned -> Device)"]
        assert list(events.category) == ["kernel", "gpu_memset", "gpu_memcpy"]
        assert events.start_ns.tolist() == [1000, 1100, 1200] and events.end_ns.tolist() == [1050, 1105, 1230]
        assert set(events.kind.tolist()) == {EventKind.SPAN} and events.track.tolist() == [0, 0, 1]
        assert events.columns()[kernels.STEP_COLUMN].tolist() == [3, 3, 3]
        assert tracks.stream.tolist() == [7, 20] and tracks.device.tolist() == [1, 1]
        assert set(tracks.kind.tolist()) == {TrackKind.DEVICE_STREAM}


def test_kernels_of_one_name_are_compared_in_order_beside_the_real_runs_spread(tmp_path: Path) -> None:
    def run(name: str, *, gemm: int, shift: int, more: int = 0) -> Path:
        step = [event("first", 0, 10), event("gemm", 100 + shift, gemm), event("gemm", 500 + shift, gemm)]
        return trace(tmp_path / name, *[[*step, *[event("copy", 700 + i, 5) for i in range(1 + more)]]] * 2)

    real = [run("a", gemm=100, shift=0), run("b", gemm=104, shift=4)]
    result = compare_traces(real, [run("c", gemm=105, shift=10, more=1)])
    (rank,) = result.ranks
    gemm, first, copy = (next(k for k in rank.kernels if k.name == n) for n in ("gemm", "first", "copy"))
    assert rank.kernels[0] is gemm
    assert (gemm.num_real, gemm.num_other, gemm.real_ns, gemm.other_ns) == (4, 4, 204, 210)
    assert gemm.error_percent == pytest.approx(100 * 6 / 204)
    assert gemm.real_spread_percent == pytest.approx(100 * 8 / 204)
    assert (gemm.start_difference_ns, gemm.real_start_spread_ns) == (8, 4)
    assert (first.error_percent, first.start_difference_ns) == (0, 0)
    assert (copy.num_real, copy.num_other, copy.start_difference_ns) == (2, 4, None)
    assert copy.error_percent == pytest.approx(100)
    assert "kernels of rank 0" in result.format_table() and "gemm" in result.format_table()
    assert json.loads(json.dumps(result.to_dict(), allow_nan=False))["ranks"][0]["kernels"][0]["name"] == "gemm"


def test_traces_without_kernels_are_named(tmp_path: Path) -> None:
    with_kernels, without = trace(tmp_path / "a", [event("gemm", 0, 10)]), trace(tmp_path / "b")
    with TraceReader(without) as reader:
        assert read_kernels(reader, 0) == {}
    result = compare_traces([with_kernels], [without])
    assert result.ranks[0].kernels == ()
    assert any("no recorded kernels in" in line for line in result.missing)
    ones = (np.zeros(1, np.int64), np.ones(1, np.int64))
    assert compare_kernels([{3: {"gemm": ones}}], [{4: {"gemm": ones}}]) == ()


def test_without_a_gpu_there_are_no_kernels_to_record() -> None:
    from prism_sdk.errors import UnsupportedError
    from prism_sdk.runtime.config import StepRange

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(UnsupportedError, match="--kernels without a GPU"):
        kernels.KernelRecorder(0, StepRange(1, 2))
