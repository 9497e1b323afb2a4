"""How the program that plays NCCL is built and run; conftest.py makes fixtures of it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
SOURCES = HERE.parent / "src"
COMMON = ["-std=c11", "-D_GNU_SOURCE", "-g", "-Wall", "-Wextra", "-Werror"]
SANITIZERS = {
    "plain": ["-O2"],
    "address": ["-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer"],
    "thread": ["-O1", "-fsanitize=thread"],
}


@dataclass(frozen=True)
class Build:
    """The library and the host program, compiled alike."""

    library: Path
    host: Path


@dataclass(frozen=True)
class Played:
    """How a run of the host program ended, and the files that it left."""

    exit_code: int
    report: dict[str, Any]
    stderr: str
    files: list[Path]


def compiler() -> str:
    for name in (os.environ.get("CC", ""), "cc", "gcc", "clang"):
        if name and shutil.which(name):
            return name
    pytest.skip("no C compiler")


CRASHES = {"crash": -signal.SIGSEGV, "abort": -signal.SIGABRT, "kill": -signal.SIGKILL}


def make_build(kind: str, folder: Path) -> Build:
    """Compile the library and the host program, plain or under a sanitizer."""
    made = Build(folder / "libprism.so", folder / "host")
    sources = [str(path) for path in sorted(SOURCES.glob("*.c"))]
    link = ["-fPIC", "-shared", "-fvisibility=hidden", "-Wl,-z,nodelete", "-ldl", "-lpthread"]
    if kind == "plain":
        link.append("-Wl,-z,defs")
    flags = [compiler(), *COMMON, *SANITIZERS[kind]]
    tests = [str(HERE / name) for name in ("host.c", "plays_nccl.c")]
    for command in (
        [*flags, *sources, "-o", str(made.library), *link],
        [*flags, *tests, "-o", str(made.host), "-ldl", "-lpthread"],
    ):
        compiled = subprocess.run(command, capture_output=True, text=True)
        if kind != "plain" and "cannot find" in compiled.stderr:
            pytest.skip(f"the compiler has no {kind} sanitizer")
        assert compiled.returncode == 0, compiled.stderr
    return made


def run_host(
    made: Build, folder: Path, version: int, scenario: str, num: int, *more: object,
    environ: Mapping[str, str] | None = None, timeout_s: float = 250,
) -> Played:  # fmt: skip
    """Run one scenario; record files go to `folder`."""
    settings = {name: value for name, value in os.environ.items() if not name.startswith(("PRISM_", "NCCL_"))}
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        settings.pop(name, None)
    settings |= {"PRISM_NCCL_OUTPUT": f"{folder}/", "PRISM_NCCL_EVENTS": "all", "PRISM_NCCL_RING_KIB": "32768"}
    settings |= {"ASAN_OPTIONS": "detect_leaks=0:handle_segv=0:handle_abort=0", **(environ or {})}
    command = [str(made.host), str(made.library), str(version), scenario, str(num), *map(str, more)]
    done = subprocess.run(command, capture_output=True, text=True, env=settings, timeout=timeout_s)
    if "unexpected memory mapping" in done.stderr:
        pytest.skip("this kernel lays memory out in a way that the thread sanitizer does not know")
    report = json.loads(done.stdout.splitlines()[-1]) if done.stdout.strip() else {}
    assert "Sanitizer" not in done.stderr, done.stderr[-4000:]
    return Played(done.returncode, report, done.stderr, sorted(folder.glob("*.ncclrec*")))
