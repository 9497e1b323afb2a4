"""Decides for one launch whether and how device memory is served by the library, from what the user asked for.

Responsible for values only: the library is compiled here where it is needed, and loaded in the ranks.
"""

from __future__ import annotations

import glob
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from prism_sdk.errors import UnsupportedError, UsageError
from prism_sdk.runtime.config import LaunchConfig, LaunchMode
from prism_sdk.runtime.gauges import host_memory
from prism_sdk.runtime.oncuda.paging.ahead import AHEAD_BYTES
from prism_sdk.runtime.oncuda.paging.build import compiled_library
from prism_sdk.runtime.oncuda.paging.hostpool import HostPool
from prism_sdk.runtime.oncuda.residence import MoveOptions
from prism_sdk.runtime.oncuda.usage import others_of
from prism_sdk.runtime.ranks import PagingSpec

__all__ = ["PagingPlan", "plan_paging"]

_UNKNOWN_BYTES = 1 << 40  # where the host does not tell how much it has
_MOST_BYTES = 1 << 50  # of a GPU
_RESERVE_BYTES = 3 << 29  # left free for what is allocated past the library: contexts, kernels, workspaces


@dataclass(frozen=True)
class PagingPlan:
    """What ranks are told, the library they need, and what the coordinator may do."""

    spec: PagingSpec | None = None
    library: Path | None = None
    moves: MoveOptions = field(default_factory=MoveOptions)


def plan_paging(
    config: LaunchConfig, *, num_ranks: int, environ: Mapping[str, str], report: Callable[[str], None]
) -> PagingPlan:
    """
    Args:
        config: the launch.
        num_ranks: ranks that run here.
        environ: where CUDA_VISIBLE_DEVICES may stand.
        report: says one line.

    Raises:
        UsageError: a limit that no GPU has, or of a job that uses none, or no such folder for parked memory.
    """
    limit = config.device_memory_bytes or 0
    if config.device_memory_bytes is not None and not 0 < limit <= _MOST_BYTES:
        raise UsageError(f"--device-memory of {limit} bytes: no GPU has that much", hint="give its size, e.g. 80GiB")
    if config.device == "cpu":
        if limit:
            raise UsageError("--device-memory limits GPUs, and with --device cpu the job uses none")
        return PagingPlan()
    disk = config.parked_disk
    if disk is not None and not disk.is_dir():
        raise UsageError(f"--parked-disk {disk}: there is no such folder")
    num_devices = _num_devices(environ)
    if limit and not num_devices:
        report("--device-memory limits GPUs, and this machine shows none")
    can_move = config.mode is LaunchMode.RECORD and not (config.parked_memory_bytes == 0 and disk is None)
    if not limit and not (can_move and num_devices):
        return PagingPlan()
    is_alone = config.mode is not LaunchMode.RECORD and num_ranks <= num_devices
    try:
        library = compiled_library()
    except UnsupportedError as error:
        what = "memory of parked ranks stays on the GPU" if can_move else "torch's allocator alone keeps the limit"
        report(f"{what}: {error.message}")
        return PagingPlan(PagingSpec(limit, has_library=False) if limit else None)
    others = others_of(config.graph) if config.mode is LaunchMode.EMULATE and config.graph is not None else None
    if others == {}:
        report("--device-memory: what NCCL takes of it is not in the graph; allow for it in the size, or calibrate "
               "with -O transfers=FILE of an observed run")  # fmt: skip
    pool = HostPool(_pool_bytes(config) if can_move else 0)
    spec = PagingSpec(
        limit, moves=can_move, pool_fd=pool.fd, is_alone=is_alone, reserve_bytes=_RESERVE_BYTES if can_move else 0,
        others_bytes=others, disk=None if disk is None else disk.absolute(),
    )  # fmt: skip
    moves = MoveOptions(
        can_move=can_move, ahead_bytes=_ahead_bytes(config), host_bytes=config.parked_memory_bytes, pool=pool,
        has_disk=disk is not None, visible_devices=environ.get("CUDA_VISIBLE_DEVICES"),
    )  # fmt: skip
    return PagingPlan(spec, library, moves)


def _ahead_bytes(config: LaunchConfig) -> int:
    return AHEAD_BYTES if config.parked_ahead_bytes is None else config.parked_ahead_bytes


def _pool_bytes(config: LaunchConfig) -> int:
    """The most that may be in use of it; how much the host has room for is looked at when it grows."""
    if config.parked_memory_bytes is not None:
        return config.parked_memory_bytes
    memory = host_memory()
    return _UNKNOWN_BYTES if memory is None else memory.total_bytes


def _num_devices(environ: Mapping[str, str]) -> int:
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    found = len(glob.glob("/dev/nvidia[0-9]*"))
    return found if visible is None else min(found, len([word for word in visible.split(",") if word.strip()]))
