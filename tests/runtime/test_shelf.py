"""Tensors of operations live as long as over NCCL: the bytes are those of ranks of torch 2.11 on an H200."""

from __future__ import annotations

import json
import threading
import weakref
from pathlib import Path

import pytest
import torch

from prism_sdk.runtime.calls import Call, GroupState
from prism_sdk.runtime.oncuda import shelf
from prismtrace import Op
from tests.runtime.conftest import Bench
from tests.runtime.laboratory import made_up_times

JOB = Path(__file__).with_name("shelf_job.py")
ONE = 1 << 20
GROUP = GroupState("g", (0, 1), 0, "nccl", "", 7)
AS_NCCL = {
    "synchronous": [0, 0, 0, 0],
    "its handle is waited for": [0, 0, 0, 0],
    "its future is waited for": [ONE, ONE, ONE, 0],
    "nothing is waited for": [ONE, ONE, ONE, 0],
    "then one of another group": [ONE, ONE, ONE, ONE],
    "gathered, its future": [2 * ONE, 2 * ONE, 2 * ONE, 0],
    "several as one, the handle": [0, 0, 0, 0],
    "several as one, the future": [2 * ONE, 2 * ONE, 2 * ONE, 0],
    "functional": [0, 0, 0, 0],
    "sent, nobody waits": [0, 0, 0, 0],  # by torch's source; not measured
}


def held(text: str) -> dict[str, list[int]]:
    said = [json.loads(line.partition(" ")[2]) for line in text.splitlines() if line.startswith("HELD ")]
    return {one["case"]: one["bytes"] for one in said if one["rank"] == 0}


def test_tensors_that_were_not_waited_for_by_their_handle_stay_as_over_nccl(bench: Bench) -> None:
    job = bench.script(f"""
    import os, runpy
    os.environ["SHELF_LATER"] = "0.12"
    runpy.run_path({str(JOB)!r}, run_name="__main__")
    """)
    recorded = bench.run_shared("record", job, "--nproc-per-node", "2", "--slots", "2")
    assert recorded.code == 0, recorded.err
    assert held(recorded.out) == AS_NCCL

    graph = made_up_times(bench.output, bench.folder / "graph.prism")
    emulated = bench.run_shared("emulate", job, "--graph", str(graph), "-o", str(bench.folder / "emulated.prism"))
    assert emulated.code == 0, emulated.err
    assert held(emulated.out) == AS_NCCL


def test_what_ends_with_a_tensor_may_communicate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shelf, "DEVICE_TYPE", "cpu")
    kept, found = shelf.Shelf(), list[int]()

    def ask(tensor: torch.Tensor | None = None) -> None:
        given = [] if tensor is None else [tensor]
        call = Call(Op.ALL_REDUCE, GROUP, lambda: None, contribution=given)
        found.append(len(kept.add(call, ended=lambda: kept.now() - 2 * shelf.SEEN_NS)))

    def program() -> None:
        tensor = torch.ones(3)
        weakref.finalize(tensor, ask)
        ask(tensor)
        del tensor
        ask()

    thread = threading.Thread(target=program, daemon=True)
    thread.start()
    thread.join(20)
    assert found == [1, 0, 0]


def test_a_destroyed_group_lets_go_of_what_is_done_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shelf, "DEVICE_TYPE", "cpu")
    place = shelf.Shelf()
    done, running = (torch.ones(4) for _ in range(2))
    just_now = place.now()
    place.add(Call(Op.ALL_REDUCE, GROUP, lambda: None, contribution=[done]), ended=lambda: just_now)
    (under_way,) = place.add(Call(Op.ALL_REDUCE, GROUP, lambda: None, contribution=[running]), ended=lambda: None)
    gone, stays = weakref.ref(done), weakref.ref(running)
    del done, running
    place.forget(GROUP.group_id)
    assert gone() is None and stays() is not None
    under_way.drop()
    assert stays() is None
