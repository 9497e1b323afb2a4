"""Compiles the profiler library when a wheel is built or installed; nothing but a C compiler is needed."""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FLAGS = ["-std=c11", "-D_GNU_SOURCE", "-O2", "-g", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", "-shared"]
# NCCL closes the library with its last communicator, and calls it afterwards: it must stay where it is
FLAGS += ["-Wl,-z,nodelete", "-Wl,-z,defs"]
LIBRARIES = ["-ldl", "-lpthread"]
MACHINES = {62: "x86_64", 183: "aarch64"}


def compiler() -> list[str]:
    """The command of the C compiler: $CC, or the first one found."""
    chosen = os.environ.get("CC")
    if chosen:
        return shlex.split(chosen)
    for name in ("cc", "gcc", "clang"):
        found = shutil.which(name)
        if found:
            return [found]
    raise RuntimeError("prismtrace-nccl-profiler needs a C compiler: install gcc or clang, or name one with CC=")


def wheel_platform(library: Path) -> str:
    """The platform of a wheel's name: that of the library, which a cross compiler may have made for another machine.

    $PRISM_WHEEL_PLATFORM may name a stricter one of the same machine, such as manylinux_2_28_aarch64.
    """
    number = int.from_bytes(library.read_bytes()[18:20], "little")  # e_machine of the ELF header
    if number not in MACHINES:
        raise RuntimeError(f"{library} is for machine {number}: only {', '.join(MACHINES.values())} are supported")
    chosen = os.environ.get("PRISM_WHEEL_PLATFORM") or f"linux_{MACHINES[number]}"
    if not chosen.endswith(f"_{MACHINES[number]}"):
        raise RuntimeError(f"PRISM_WHEEL_PLATFORM={chosen}, but the compiler made a library for {MACHINES[number]}")
    return chosen


class CompileHook(BuildHookInterface):  # type: ignore[type-arg]
    """Puts the library into the package, and the platform into the wheel's name."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if not sys.platform.startswith("linux") or platform.architecture()[0] != "64bit":
            raise RuntimeError("prismtrace-nccl-profiler is for 64-bit Linux, as NCCL is")
        root = Path(self.root)
        target = root / "python" / "prismtrace_nccl_profiler" / "libprism_nccl_profiler.so"
        sources = sorted(str(path) for path in (root / "src").glob("*.c"))
        command = [*compiler(), *FLAGS, *sources, "-o", str(target), *LIBRARIES]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{shlex.join(command)} failed:\n{done.stdout}{done.stderr}")
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{wheel_platform(target)}"
