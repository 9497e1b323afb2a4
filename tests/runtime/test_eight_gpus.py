"""The script for a machine of eight GPUs, over runs that are played: what it runs, in which order, and what it keeps.

On CPUs the whole of it runs with `--device cpu --tiny`, which takes minutes.
"""

from __future__ import annotations

import json
import sys
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prismtrace import GraphKind, TraceReader, TraceWriter, UnitKind

ROOT = Path(__file__).parents[2]
PLAYED = """
import json, os, shutil, sys, time
mode, output, source = sys.argv[1:4]
kind, rank = sys.argv[-3 if sys.argv[-1] == "--small" else -2], int(os.environ["PLAYED_RANK"])
while not os.path.exists(os.environ["GATE"]):
    time.sleep(0.01)
if kind == "tp" and mode == "calibrate":
    sys.exit("calibration broke")
shutil.copy(source, output)
if mode in ("observe", "emulate", "record"):
    ms = [100.0] * 12 if mode == "observe" else [100.4] * 12
    for at in (0, rank):
        print("STEPS", json.dumps({"rank": at, "ms": ms}))
        print("LOSS", json.dumps({"rank": at, "losses": [1.5] * 5}))
        print("MEMORY", json.dumps({"rank": at, "parts": [[1, 2, 3 + (mode == "emulate" and kind == "ddp")]] * 12}))
"""


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.setattr(sys, "argv", ["eight_gpus.py"])
    import eight_gpus  # type: ignore[import-not-found]

    return eight_gpus


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source.prism"
    with TraceWriter(path, graph_kind=GraphKind.OBSERVED, world_size=8) as writer:
        writer.set_metadata("calibration.step_ns", "101000000")
        for rank in range(8):
            start = np.arange(4) * 100_000_000
            writer.add_units(rank, {"kind": np.full(4, int(UnitKind.COMPUTE)), "step": np.arange(4),
                                    "start_ns": start, "end_ns": start + 90_000_000})  # fmt: skip
            writer.add_steps(rank, {"step": np.arange(4), "start_ns": start, "end_ns": start + 100_000_000,
                                    "memory_peak_bytes": np.full(4, 7)})  # fmt: skip
    return path


def test_all_parts_run_and_what_breaks_or_has_no_time_is_named(
    script: Any, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    player = tmp_path / "played.py"
    player.write_text(PLAYED)
    asked: list[tuple[str, str, dict[str, str]]] = []

    def played(
        mode: str, output: Path, kind: str, steps: int, *options: str, gate: Path, ranks: int, **more: str
    ) -> Any:
        asked.append((mode, kind, more))
        command = [sys.executable, "-S", str(player), mode, str(output), str(source), *options, kind, str(steps)]
        return script.Run(f"{mode} {kind}", [(command, {**more, "PLAYED_RANK": "3"})], gate)

    monkeypatch.setattr(script, "prism", played)
    monkeypatch.setattr(script, "_command", lambda *words: Path(words[words.index("-o") + 1]).write_text("profile"))
    monkeypatch.setattr(script, "with_transfers", lambda source, output, transfer_ns: output)
    monkeypatch.setenv("OUT", str(tmp_path))
    code = script.main(["--gpus", "8", "--jobs", "dense,1f1b,tp,ddp", "--turns", "2", "--seconds", "3000"])
    facts = json.loads((tmp_path / "eight_gpus.json").read_text())
    assert code == 1 and [line.partition(":")[0] for line in facts["cut"]] == ["tp", "tp", "alone", "tp"]
    assert "calibration broke" in facts["cut"][0]
    jobs = facts["jobs"]
    for job in ("dense", "1f1b"):
        assert jobs[job]["steps_ms"] == {"real": [100.0] * 2, "one GPU": [100.4] * 2, "two GPUs": [100.4] * 2}
        assert (jobs[job]["one GPU"]["error_percent"], jobs[job]["one GPU"]["worst_bytes"]) == (0.4, 0)
        assert jobs[job]["one GPU"]["traces"]["units"][0][:5] == ["compute", "", "unspecified", 6, 6]
        assert jobs[job]["losses"]["apart_from_real"] == 0
        assert jobs[job]["predicted from one GPU"] == {"step_ms": 101.0, "error_percent": 1.0}
    assert jobs["ddp"]["two GPUs"]["worst_bytes"] == 1 and not jobs["ddp"]["one GPU"]["bytes_as_real"]
    assert jobs["dense"]["out of memory"]["is_same"] is False  # nobody was refused anything
    assert (
        "| dense | 100.0 | 0.0 | +0.40, +0.40 | +0.40, +0.40 | 0 | +1.00 |" in (tmp_path / "eight_gpus.md").read_text()
    )
    with tarfile.open(tmp_path / "traces.tar") as kept:
        assert {"dense-real.prism", "1f1b-one-GPU.prism", "ddp-two-GPUs.prism"} <= set(kept.getnames())
        kept.extract("1f1b-real.prism", tmp_path, filter="data")
    with TraceReader(tmp_path / "1f1b-real.prism") as reader:
        assert list(reader.ranks) == [3]  # the first replica's last stage, which has the loss
    assert {more.get("CUDA_VISIBLE_DEVICES") for mode, _, more in asked if mode == "emulate"} == {"0", "0,1", None}
    assert {more.get("CUDA_VISIBLE_DEVICES") for mode, kind, more in asked if mode == "observe"} == \
        {None, "0,1", "2,3", "4,5"}  # fmt: skip


def test_nothing_begins_for_which_there_is_no_time(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUT", str(tmp_path))
    assert script.main(["--gpus", "8", "--jobs", "ddp", "--seconds", "0"]) == 0
    facts = json.loads((tmp_path / "eight_gpus.json").read_text())
    assert len(facts["cut"]) == 9 and facts["cut"][0].startswith("record: it takes about 25 s")
    with pytest.raises(SystemExit):
        script.main(["--gpus", "3"])
