"""What a rank process is told when it starts.

Values only; they travel from the launcher through the fork server by pickle.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from prism_sdk.abc import Assistance
from prism_sdk.runtime.config import LaunchMode, PayloadMode, StepRange
from prism_sdk.runtime.roles.layout import RolePlan


@dataclass(frozen=True)
class EmulateSpec:
    """Where a sandbox rank finds the graph it meets (see emulate.py)."""

    graph: Path
    plan: Path
    sandbox: tuple[int, ...]
    backend: str
    ring_fds: tuple[int, ...]  # the prefetch pool of each sandbox rank
    board_fd: int  # posts of the sandbox ranks; -1 with only one
    hold_fds: tuple[int, ...] = ()  # of each sandbox rank, where there is a GPU: what it shares with its releaser
    by_roles: bool = False  # of the graph's ranks most did not run when it was recorded
    needs_mesh: bool = False  # sandbox ranks send messages in groups that have virtual members too
    options: Mapping[str, str] = field(default_factory=dict)
    is_slice: bool = False  # of a calibration on GPUs: times are wanted, values only as far as they steer the program
    times: Path | None = None  # the graph with the job's times, if that is another one
    assistance: Assistance = field(default_factory=Assistance)  # what the backend has started in the launcher


@dataclass(frozen=True)
class PagingSpec:
    """How a rank's device memory is served (see oncuda/paging)."""

    limit_bytes: int = 0
    """What the device is to have; 0: what it has."""
    moves: bool = False  # the launcher may ask for moves
    is_alone: bool = False  # no other rank uses the device
    others_bytes: Mapping[int, int] | None = None
    """By rank what a real run has on the device beside the program's allocations; absent: what is there counts."""
    reserve_bytes: int = 0
    pool_fd: int = -1  # of the host memory that ranks move to
    disk: Path | None = None
    has_library: bool = True  # else there is no compiler: torch keeps the limit


@dataclass(frozen=True)
class RankSpec:
    """Everything one rank process needs to know."""

    mode: LaunchMode
    rank: int
    world_size: int
    local_rank: int
    target: str
    is_module: bool
    arguments: tuple[str, ...]
    parts_dir: Path
    token: str
    environment: Mapping[str, str] = field(default_factory=dict)
    unset: tuple[str, ...] = ()  # variables that the fork server has and the program must not see
    metadata: Mapping[str, str] = field(default_factory=dict)
    cpus: tuple[int, ...] | None = None
    payloads: PayloadMode = PayloadMode.NONE
    steps: StepRange = field(default_factory=StepRange)
    kernels: StepRange | None = None  # the steps whose kernels are recorded
    arena_fd: int = -1
    step_board: tuple[int, int] = (-1, 0)  # its descriptor, and the place of this rank on it
    emulate: EmulateSpec | None = None
    plugins: tuple[str, ...] = ()
    adapters: tuple[str, ...] | None = None
    imports: tuple[str, ...] = ()  # slow ones that its program makes, and that can be made before it is forked
    stdout_to_stderr: bool = False
    silent: bool = False
    device: str | None = None
    adapter_options: Mapping[str, str] = field(default_factory=dict)
    num_devices: int = 1  # on this machine, in place of GPUs
    paging: PagingSpec | None = None
    by_roles: bool = False  # of the ranks of the job only some run
    plan: RolePlan | None = None  # which ones; unknown to the first rank when it starts
