"""What one ``prism observe|record|calibrate|emulate`` is asked to do, and what it answers.

It holds values only: parsing the command line is the work of ``prism_sdk.cli``, running it that of the launcher.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType

__all__ = [
    "DEFAULT_BACKEND",
    "DEFAULT_SAMPLES",
    "DEFAULT_STRATEGY",
    "LaunchConfig",
    "LaunchMode",
    "LaunchResult",
    "PayloadMode",
    "RUNTIME_OPTIONS",
    "StepRange",
]

DEFAULT_STRATEGY, DEFAULT_BACKEND = "slices", "local"
DEFAULT_SAMPLES = 3
DEFAULT_MAX_ROLES = 64
"""How many roles are found at most where they are not stated; each is a process that runs the program."""
RUNTIME_OPTIONS = ("prefetch_bytes",)
"""Keys of ``-O`` that the runtime reads where ranks are replayed; others are the strategy's and the backend's."""


def _no_options() -> Mapping[str, str]:
    return MappingProxyType({})


class LaunchMode(StrEnum):
    """The verb."""

    OBSERVE = "observe"
    RECORD = "record"
    CALIBRATE = "calibrate"
    EMULATE = "emulate"


class PayloadMode(StrEnum):
    """Which values of communications go into the trace.

    ``FULL``: every rank's contribution, so that any rank can be emulated. ``RESULTS``: what each operation
    returned. ``NONE``: no value; the graph serves timing questions only.
    """

    FULL = "full"
    RESULTS = "results"
    NONE = "none"


@dataclass(frozen=True)
class StepRange:
    """The steps from ``first`` up to, not including, ``stop``; ``stop`` absent: to the end."""

    first: int = 0
    stop: int | None = None

    @classmethod
    def parse(cls, text: str) -> StepRange:
        """``A:B`` -> steps from A up to, not including, B; either may be left out. ValueError says what is wrong."""
        ends = [part.strip() for part in text.split(":")]
        if len(ends) != 2:
            raise ValueError(f"{text!r} is not A:B, the steps from A up to, not including, B")
        for part in ends:
            if part and not (part.isascii() and part.isdigit()):
                raise ValueError(f"{part!r} in {text!r} is not a step number")
        first, stop = int(ends[0] or 0), int(ends[1]) if ends[1] else None
        if stop is not None and stop <= first:
            raise ValueError(f"{text!r} holds no step: {stop} is not above {first}")
        return cls(first, stop)

    @property
    def is_all(self) -> bool:
        """Whether no step is outside."""
        return self.first == 0 and self.stop is None

    def as_range(self) -> range:
        """The steps as a range; an open one includes every step that a trace can hold."""
        return range(self.first, 1 << 31 if self.stop is None else self.stop)

    def __contains__(self, step: object) -> bool:
        return isinstance(step, int) and step >= self.first and (self.stop is None or step < self.stop)

    def __str__(self) -> str:
        return f"{self.first}:{'' if self.stop is None else self.stop}"


@dataclass(frozen=True)
class LaunchConfig:
    """One launch. Absent (``None``) means that the user said nothing and the runtime chooses."""

    mode: LaunchMode
    target: str
    """The script's path as given, or the module's dotted name when ``is_module``."""
    output: Path
    is_module: bool = False
    arguments: tuple[str, ...] = ()
    graph: Path | None = None
    """The bare graph (calibrate) or the calibrated graph (emulate)."""

    nproc_per_node: int = 1
    """For calibrate and emulate: the world size of the graph."""
    num_nodes: int = 1
    node_rank: int = 0
    master_addr: str | None = None
    master_port: int | None = None
    rdzv_backend: str | None = None
    rdzv_endpoint: str | None = None
    rdzv_id: str | None = None
    standalone: bool = False
    local_ranks_filter: tuple[int, ...] | None = None
    """Local ranks whose output reaches the console; absent: all."""

    steps: StepRange | None = None
    num_slots: int | None = None
    roles: str | None = None
    """Record: one real rank a role; ``auto``, a layout, or a file. Absent: all ranks run."""
    num_samples: int = DEFAULT_SAMPLES
    """With ``roles``: how many ranks more run, to verify that ranks of one role do the same."""
    max_roles: int = DEFAULT_MAX_ROLES
    """With ``roles`` ``auto``: how many processes may tell ranks apart."""
    sample_ranks: tuple[int, ...] = ()
    """With ``roles``: ranks that run too, with those whom they meet, so that their own data is recorded."""
    sandbox: tuple[int, ...] = ()
    """Emulate: the ranks that run for real, ascending; empty: the runtime chooses."""
    strategy: str | None = None
    backend: str | None = None
    adapters: tuple[str, ...] | None = None
    """Absent: every installed adapter; given: only these."""
    plugins: tuple[str, ...] = ()
    payloads: PayloadMode | None = None
    device: str | None = None
    """``cpu``: programs that say cuda run on CPUs; absent: as the graph was recorded, else as the program says."""
    moe_skew: float | None = None
    """Expert e gets (e + 1) ** -skew times the tokens; absent: as the graph was recorded, else as the router says."""
    engine: str | None = None
    """Record, calibrate: what spreads ranks or slices over machines (``ray``); absent: they run here."""
    address: str | None = None
    """Of the engine's cluster; absent: one on this machine."""
    pin: bool = True
    device_memory_bytes: int | None = None
    """What each GPU is to have, less than it has; absent: what it has."""
    parked_memory_bytes: int | None = None
    """Record: host memory for the device memory of parked ranks; absent: all but a twentieth. 0: none."""
    parked_ahead_bytes: int | None = None
    """Record: what of that memory may be taken before anything moves; absent: paging/ahead.py's. 0: none."""
    parked_disk: Path | None = None
    """Record: a folder for what host memory has no room for."""
    nccl_profiler: bool = False
    """Observe: NCCL loads the profiler, and what it recorded is joined to the trace."""
    kernels: StepRange | None = None
    """Observe and emulate: the steps whose kernels are recorded; absent: none."""
    options: Mapping[str, str] = field(default_factory=_no_options)
    quiet: bool = False
    json: bool = False

    @property
    def world_size(self) -> int:
        """The number of ranks of the job, over all nodes."""
        return self.nproc_per_node * self.num_nodes


@dataclass(frozen=True)
class LaunchResult:
    """How a launch ended. ``exit_code`` 0 means that every real rank ended well.

    ``wall_ns`` counts from the start of the launch, as what it shows while it runs does: planning, merging and all.
    """

    exit_code: int
    output: Path | None
    world_size: int
    wall_ns: int
    summary: Mapping[str, object] = field(default_factory=dict)
