"""The script that runs all checks on GPUs: what fails or hangs is over in time, and the rest is run."""

from __future__ import annotations

import importlib.util
import json
import time
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    import sys

    spec = importlib.util.spec_from_file_location("gpu_all", ROOT / "benchmarks" / "gpu_all.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpu_all"] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


def test_it_goes_on_after_failures_and_leaves_nothing_behind(script: ModuleType, tmp_path: Path) -> None:
    child = f"import time; time.sleep(4); open({str(tmp_path / 'x')!r}, 'w')"
    start = f"import subprocess, sys, time\nsubprocess.Popen([sys.executable, '-c', {child!r}])\n"
    files = {
        "hangs": start + "print('begun', flush=True)\ntime.sleep(60)\n",
        "fails": "print('so far')\nraise SystemExit(3)\n",
        "works": "print('result 7')\n",
    }
    chosen = []
    for name, text in files.items():
        path = tmp_path / f"{name}.py"
        path.write_text(text)
        chosen.append(script.Section(name, (str(path),), 1, 2 if name == "hangs" else 30))
    chosen.append(script.Section("long", (str(path),), 1000, 1000))
    started = time.monotonic()
    results = script.run_all(chosen, tmp_path, seconds=60)
    verdicts = {name: one["verdict"] for name, one in results.items()}
    assert verdicts.pop("hangs").startswith("ended after ")
    assert verdicts == {"fails": "BAD (exit 3)", "works": "good", "long": "not run: no time is left"}
    assert json.loads((tmp_path / "all.json").read_text()) == results
    assert (tmp_path / "works.txt").read_text() == "result 7\n" and "begun" in (tmp_path / "hangs.txt").read_text()
    time.sleep(max(started + 5 - time.monotonic(), 0))
    assert not (tmp_path / "x").exists()  # what it had started was ended with it


def test_sections_follow_the_number_of_gpus(script: ModuleType) -> None:
    one, two = (script.sections([], num_devices=number) for number in (1, 2))
    assert "hold" in {section.name for section in one} and "nccl" in {section.name for section in two}
    for section in (*one, *two, *script.ON_DEMAND):
        assert (ROOT / "benchmarks" / section.words[0]).exists() and section.estimate_s <= section.limit_s
    with pytest.raises(KeyError):
        script.sections(["nothing"], num_devices=1)
