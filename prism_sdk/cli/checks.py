"""The checks of ``prism doctor``: the interpreter, torch, the machine, plugins, and who owns our import names.

It changes nothing on the machine. torch is imported in a child process only, so that a broken one shows as a check.
"""

from __future__ import annotations

import glob
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prism_sdk.cli.output import format_bytes
from prism_sdk.runtime.config import DEFAULT_BACKEND, DEFAULT_STRATEGY
from prism_sdk.runtime.gauges import available_bytes
from prism_sdk.settings import Settings

__all__ = ["Check", "run_checks"]

_MIN_TORCH = (2, 9)
_MIN_SHM_BYTES = 256 << 20
_MIN_MEMORY_BYTES = 2 << 30
_TORCH_TIMEOUT_S = 180
_OWN_DISTRIBUTION = "prismtrace"

# Forks after the import, as the fork server of `prism record` does, and computes something in the child.
_TORCH_PROBE = """
import json, os, time, warnings
warnings.simplefilter("ignore")
import torch
import torch.distributed as dist
found = {"version": torch.__version__, "distributed": dist.is_available()}
if dist.is_available():
    found["gloo"] = dist.is_gloo_available()
    found["nccl"] = dist.is_nccl_available()
found["num_gpus"] = torch.cuda.device_count()
child = os.fork()
if child == 0:
    os._exit(0 if float(torch.ones(8).sum()) == 8.0 else 9)
deadline = time.monotonic() + 20
while True:
    pid, status = os.waitpid(child, os.WNOHANG)
    if pid:
        found["fork"] = status == 0
        break
    if time.monotonic() > deadline:
        os.kill(child, 9)
        os.waitpid(child, 0)
        found["fork"] = False
        break
    time.sleep(0.01)
print("PRISM-PROBE " + json.dumps(found))
"""


@dataclass(frozen=True)
class Check:
    """One line of ``prism doctor``. ``status`` is ok, warning or problem."""

    name: str
    status: str
    detail: str
    hint: str | None = None


def run_checks() -> Iterator[Check]:
    """Run every check, in the order in which a user would mend things."""
    yield _python()
    yield _system()
    yield from _torch()
    yield _cores()
    yield _memory()
    yield _shared_memory()
    yield _compiler()
    yield from _owners()
    yield from _plugins()


def _python() -> Check:
    return Check("python", "ok", f"{platform.python_version()} ({sys.executable})")


def _system() -> Check:
    if not sys.platform.startswith("linux"):
        return Check("system", "problem", platform.platform(), "running jobs needs Linux; reading traces does not")
    return Check("system", "ok", platform.platform())


def _torch() -> Iterator[Check]:
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        yield Check("torch", "problem", "not installed", "install PyTorch into this environment to run jobs")
        return
    found, error = _probe_torch()
    if found is None:
        yield Check("torch", "problem", f"{version} does not import: {error}", "reinstall PyTorch")
        return
    number = tuple(int(part) for part in found["version"].split("+")[0].split(".")[:2] if part.isdigit())
    if number < _MIN_TORCH:
        least = ".".join(map(str, _MIN_TORCH))
        yield Check("torch", "problem", found["version"], f"Prism needs torch {least} or later")
    else:
        yield Check("torch", "ok", found["version"])
    if not found["distributed"]:
        yield Check("torch.distributed", "problem", "not built in", "install a build of torch with distributed")
        return
    names = [name for name in ("gloo", "nccl") if found[name]]
    gloo = "ok" if found["gloo"] else "problem"
    yield Check(
        "torch.distributed",
        gloo,
        f"backends: {', '.join(names) or 'none'}",
        None if found["gloo"] else "gloo is needed",
    )
    if found["num_gpus"] and not found["nccl"]:
        yield Check("gpus", "warning", f"{found['num_gpus']}, and no nccl", "install a CUDA build of torch")
    elif glob.glob("/dev/nvidia[0-9]*") and not found["num_gpus"]:
        yield Check("gpus", "warning", "the machine has some, torch sees none", "install a CUDA build of torch")
    else:
        yield Check("gpus", "ok", str(found["num_gpus"]) if found["num_gpus"] else "none; ranks run on cores")
    if found["fork"]:
        yield Check("fork server", "ok", "a child forked after `import torch` computes")
    else:
        hint = "something that torch loads starts threads: try OMP_NUM_THREADS=1, or another build of torch"
        yield Check("fork server", "problem", "a child forked after `import torch` hangs or fails", hint)


def _probe_torch() -> tuple[Mapping[str, Any] | None, str]:
    command = [sys.executable, "-c", _TORCH_PROBE]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=_TORCH_TIMEOUT_S,
            check=False,
            env=Settings.environ_without_prism(),
        )
    except subprocess.TimeoutExpired:
        return None, f"no answer within {_TORCH_TIMEOUT_S} s"
    for line in done.stdout.splitlines():
        if line.startswith("PRISM-PROBE "):
            found: dict[str, Any] = json.loads(line.removeprefix("PRISM-PROBE "))
            return found, ""
    last = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
    return None, last[0]


def _cores() -> Check:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _cgroup_cores()
    if quota is not None and quota < cores:
        hint = "give --slots a number at or below it, or times will not be steady"
        return Check("cores", "warning", f"{cores}, limited to {quota:g} by the container", hint)
    if cores < 2:
        return Check("cores", "warning", "1", "times of ranks that share a core are not those of a real job")
    return Check("cores", "ok", str(cores))


def _cgroup_cores() -> float | None:
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        return None


def _memory() -> Check:
    available = available_bytes()
    if available is None:
        return Check("memory", "warning", "unknown")
    if available < _MIN_MEMORY_BYTES:
        return Check("memory", "warning", f"{format_bytes(available)} available", "large jobs will not fit")
    return Check("memory", "ok", f"{format_bytes(available)} available")


def _shared_memory() -> Check:
    try:
        space = os.statvfs("/dev/shm")
    except OSError as error:
        return Check("/dev/shm", "problem", f"not usable: {error.strerror}", "ranks exchange tensors through it")
    free = space.f_bavail * space.f_frsize
    if free < _MIN_SHM_BYTES:
        hint = "ranks exchange tensors through it: start the container with --shm-size=2g"
        return Check("/dev/shm", "warning", f"{format_bytes(free)} free", hint)
    if not os.access("/dev/shm", os.W_OK):
        return Check("/dev/shm", "problem", "not writable", "ranks exchange tensors through it")
    return Check("/dev/shm", "ok", f"{format_bytes(free)} free")


def _compiler() -> Check:
    for name in ("cc", "gcc", "clang"):
        path = shutil.which(name)
        if path is not None:
            return Check("C compiler", "ok", path)
    return Check("C compiler", "warning", "none found", "torch.compile and some frameworks need one")


def _owners() -> Iterator[Check]:
    """On the public index the names prism and prism-sdk belong to others: they must not shadow ours."""
    foreign: list[str] = []
    for distribution in importlib.metadata.distributions():
        name = distribution.metadata["Name"] or "?"
        if name.lower().replace("_", "-") == _OWN_DISTRIBUTION:
            continue
        tops = {file.parts[0] for file in distribution.files or () if len(file.parts) > 1}
        for package in sorted(tops & {"prism_sdk", "prismtrace"}):
            foreign.append(f"{package} is also installed by {name}")
        for entry_point in distribution.entry_points.select(group="console_scripts", name="prism"):
            foreign.append(f"the command {entry_point.name} is also installed by {name}")
    if foreign:
        hint = "uninstall that distribution and reinstall prismtrace"
        yield Check("import names", "problem", "; ".join(foreign), hint)
    else:
        yield Check("import names", "ok", "prismtrace and prism_sdk are ours")


def _plugins() -> Iterator[Check]:
    from prism_sdk.plugins import PluginManager

    manager = PluginManager()
    records = manager.records()
    for record in records:
        if record.status == "broken":
            hint = f"fix or uninstall it, or set PRISM_DISABLE_PLUGINS={record.name}"
            yield Check(f"plugin {record.name}", "problem", record.reason or "broken", hint)
    for error in manager.duplicates():
        yield Check("plugin names", "problem", error.message, error.hint)
    usable = sum(record.status == "ok" for record in records)
    off = [record.name for record in records if record.status == "disabled"]
    detail = f"{usable} usable" + (f", {len(off)} disabled ({', '.join(off)})" if off else "")
    missing = [f"{verb} (its {kind} {name!r} is not there)"
               for verb, kind, name, known in (("calibrate", "strategy", DEFAULT_STRATEGY, manager.strategies()),
                                               ("emulate", "backend", DEFAULT_BACKEND, manager.backends()))
               if name not in known]  # fmt: skip
    if missing:
        hint = "unset PRISM_DISABLE_PLUGINS" if off else "reinstall prismtrace"
        yield Check("plugins", "problem", f"{detail}; by default these cannot run: {', '.join(missing)}", hint)
    else:
        yield Check("plugins", "ok", detail)
