"""What a launch wants of the library that serves device memory, and what it may do with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from prism_sdk.errors import UnsupportedError, UsageError
from prism_sdk.runtime.config import LaunchConfig, LaunchMode
from prism_sdk.runtime.oncuda.paging import setup
from prism_sdk.runtime.oncuda.paging.ahead import AHEAD_BYTES
from prism_sdk.runtime.oncuda.residence import MoveOptions
from prismtrace import GraphKind, TraceWriter


def test_a_launch_plans_what_it_needs_and_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []

    def plan(devices: int, environ: dict[str, str] | None = None, **more: Any) -> setup.PagingPlan:
        monkeypatch.setattr(setup.glob, "glob", lambda _pattern: ["/dev/nvidia0"] * devices)
        words = {"mode": LaunchMode.RECORD, "target": "train.py", "output": tmp_path / "o.prism", **more}
        return setup.plan_paging(LaunchConfig(**words), num_ranks=2, environ=environ or {}, report=said.append)

    monkeypatch.setattr(setup, "compiled_library", lambda: tmp_path / "pages.so")
    assert plan(0) == setup.PagingPlan()  # no GPU, nothing asked for
    assert plan(2, device="cpu") == setup.PagingPlan()
    assert plan(2, parked_memory_bytes=0) == setup.PagingPlan()
    found = plan(2, {"CUDA_VISIBLE_DEVICES": "1"}, parked_memory_bytes=5 << 20)
    assert found.spec and found.spec.moves and not found.spec.is_alone and found.library is not None
    assert found.moves == MoveOptions(can_move=True, host_bytes=5 << 20, ahead_bytes=AHEAD_BYTES, visible_devices="1")
    assert found.spec.pool_fd == found.moves.pool.fd >= 0
    found.moves.pool.close()
    found = plan(2, mode=LaunchMode.OBSERVE, device_memory_bytes=80 << 30)
    assert found.spec is not None and (found.spec.limit_bytes, found.spec.moves) == (80 << 30, False)
    assert found.spec.is_alone and not found.moves.can_move
    graph = {"known": tmp_path / "known.prism", "unknown": tmp_path / "unknown.prism"}
    for name, path in graph.items():
        metadata = {"rank.1.device_other_bytes": "5"} if name == "known" else {}
        with TraceWriter(path, graph_kind=GraphKind.CALIBRATED, world_size=2, metadata=metadata) as writer:
            writer.add_units(1, {"kind": [1], "start_ns": [0], "end_ns": [1]})
    found = plan(2, mode=LaunchMode.EMULATE, device_memory_bytes=9, graph=graph["known"])
    assert found.spec is not None and found.spec.others_bytes == {1: 5} and not said
    found = plan(2, mode=LaunchMode.EMULATE, device_memory_bytes=9, graph=graph["unknown"])
    assert found.spec is not None and found.spec.others_bytes == {} and "what NCCL takes" in said.pop()
    with pytest.raises(UsageError, match="limits GPUs"):
        plan(2, device="cpu", device_memory_bytes=1)
    for size in (0, 1 << 63):
        with pytest.raises(UsageError, match="no GPU has that much"):
            plan(2, device_memory_bytes=size)
    with pytest.raises(UsageError, match="no such folder"):
        plan(2, parked_disk=tmp_path / "nowhere")
    assert not said

    def cannot() -> Path:
        raise UnsupportedError("moving device memory without a C compiler")

    monkeypatch.setattr(setup, "compiled_library", cannot)
    assert plan(2) == setup.PagingPlan() and "stays on the GPU" in said[0]
    found = plan(2, mode=LaunchMode.EMULATE, device_memory_bytes=1 << 30)
    assert found.spec is not None and not found.spec.has_library and found.library is None
    plan(0, mode=LaunchMode.EMULATE, device_memory_bytes=1 << 30)
    assert "this machine shows none" in said[-2]
