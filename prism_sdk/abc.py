"""The abstract classes that a plugin implements: strategies, replay backends, framework adapters, importers, exporters.

It holds no implementation and imports no framework: what ships in the box is under ``prism_sdk.builtin``,
and the objects that the runtime hands to a plugin (the contexts) are implemented under ``prism_sdk.runtime``.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from prism_sdk.replay import (
    Assistance,
    AssistContext,
    Carriage,
    CarriedOperation,
    ReplayBackend,
    ReplayContext,
    ReplaySession,
)

__all__ = [
    "AdapterHook",
    "AssistContext",
    "Assistance",
    "CalibrationContext",
    "CalibrationPass",
    "CalibrationResult",
    "CalibrationStrategy",
    "Carriage",
    "CarriedOperation",
    "ConversionReport",
    "FrameworkAdapter",
    "ReplayBackend",
    "ReplayContext",
    "ReplaySession",
    "TraceExporter",
    "TraceImporter",
    "UnitNamer",
]


# --- calibration -----------------------------------------------------------------------------------------------


class CalibrationContext(abc.ABC):
    """What a calibration strategy may see and do. The runtime implements it."""

    @property
    @abc.abstractmethod
    def graph_path(self) -> Path:
        """The bare graph to calibrate."""

    @property
    @abc.abstractmethod
    def output(self) -> Path:
        """Where the strategy writes the calibrated graph."""

    @property
    @abc.abstractmethod
    def work_dir(self) -> Path:
        """A private folder for intermediate files; removed after the calibration."""

    @property
    @abc.abstractmethod
    def world_size(self) -> int:
        """The number of ranks in the graph."""

    @property
    @abc.abstractmethod
    def num_slots(self) -> int:
        """How many ranks the machine at hand can run for real at once."""

    @property
    def num_devices(self) -> int:
        """GPUs that the ranks of a slice run on, each on its own; 0 for a job on CPUs. Times are then the devices'."""
        return 0

    @property
    @abc.abstractmethod
    def options(self) -> Mapping[str, str]:
        """The user's ``-O key=value`` pairs."""

    @abc.abstractmethod
    def run_slice(self, ranks: Sequence[int], *, graph_path: Path, label: str) -> Path:
        """Run ``ranks`` for real with every other rank virtual, and return the emulated trace.

        Args:
            ranks: the ranks to run at once; at most ``num_slots``.
            graph_path: the graph that the virtual ranks follow (bare, or calibrated by an earlier pass).
            label: a short name for progress messages and file names.

        Returns:
            The path of a trace of graph kind EMULATED inside ``work_dir``, with data of ``ranks`` only; of kind
            OBSERVED where all ranks of the job ran on GPUs.

        Raises:
            PrismError: the ranks failed or did not follow the graph.
        """

    def run_slices(self, slices: Sequence[Sequence[int]], *, graph_path: Path, label: str) -> list[Path]:
        """Run slices that do not depend on each other, and return their traces in the same order.

        One after the other unless the runtime has several machines; otherwise as ``run_slice``.
        """
        found = []
        for position, ranks in enumerate(slices):
            doing = f"{label}, slice {position + 1} of {len(slices)}"
            shown = str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]}-{ranks[-1]}"
            self.report(f"{doing}: ranks {shown}")
            self.progress(position, len(slices), doing=doing)
            name = f"{label.replace(' ', '')}-slice{position}"
            found.append(self.run_slice(ranks, graph_path=graph_path, label=name))
        return found

    @abc.abstractmethod
    def run_module(self, module: str, arguments: Sequence[str], *, num_ranks: int, label: str) -> Path:
        """Observe a module as a job of its own, one rank a slot: its trace. For measurements beside the job."""

    @abc.abstractmethod
    def report(self, message: str) -> None:
        """Show one line of progress to the user."""

    def progress(self, done: int, total: int, *, doing: str) -> None:  # noqa: B027 - optional
        """Tell the display that ``done`` of ``total`` equal parts are over and what comes now; 0 starts a new pass."""


@dataclass(frozen=True)
class CalibrationPass:
    """One pass over all slices. ``change_percent`` is against the pass before it; absent for the first."""

    index: int
    change_percent: float | None
    predicted_step_ns: int
    step_low_ns: int
    step_high_ns: int


@dataclass(frozen=True)
class CalibrationResult:
    """What a calibration found. The interval ``step_low_ns`` to ``step_high_ns`` is a 95 % confidence interval."""

    output: Path
    passes: tuple[CalibrationPass, ...]
    predicted_step_ns: int
    step_low_ns: int
    step_high_ns: int
    converged: bool


class CalibrationStrategy(abc.ABC):
    """Finds the times of every unit of a graph by running a few ranks at a time."""

    name: str
    """What the user types after ``--strategy``."""
    description: str
    """One line for ``prism plugins``."""
    option_names: Sequence[str] | None = None  # keys of -O that it knows; None: nobody checks them for it

    def check_options(self, options: Mapping[str, str]) -> None:  # noqa: B027 - optional
        """Raise UsageError for a value of ``-O`` that has no meaning. Called before anything is read or started."""

    @abc.abstractmethod
    def calibrate(self, context: CalibrationContext) -> CalibrationResult:
        """Write the calibrated graph to ``context.output`` and say how good it is.

        Raises:
            CalibrationError: this graph cannot be calibrated by this strategy.
        """


# --- framework adapters ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AdapterHook:
    """One place in a framework that an adapter wraps: ``attribute`` is a dotted path inside ``module``.

    ``Engine._MAP[ForwardPass]`` means the value of the mapping ``Engine._MAP`` whose key is, or is called, ForwardPass.
    Versions are those of the framework's distribution, both inclusive; absent means no bound. A hook that is missing
    although the version fits lowers the declared fidelity (``required``) or nothing; it never stops the training.
    One that serves an ``option`` of adapters alone, such as ``moe_skew``, is left alone unless the user gave it.
    """

    module: str
    attribute: str
    required: bool = True
    min_version: str | None = None
    max_version: str | None = None
    option: str | None = None

    def __post_init__(self) -> None:
        for version in (self.min_version, self.max_version):
            if version is not None and not version[:1].isdecimal():
                raise ValueError(f"{self.module}.{self.attribute}: {version!r} is no version: a number first")


class UnitNamer(Protocol):
    """Where an adapter says what the rank is doing. The runtime implements it, one object for each adapter of a rank.

    Stretches nest, also over adapters. What a stretch does not say it takes from the one around it, with one exception:
    ``microbatch``, ``stage``, ``model_chunk`` and ``schedule`` come as a whole from the innermost stretch that says any
    of them, because one owner of a schedule must not be mixed with another.
    """

    def enter(
        self,
        phase: str | None = None,
        *,
        microbatch: int | None = None,
        stage: int | None = None,
        model_chunk: int | None = None,
        label: str | None = None,
        part: str | None = None,
        layer: str | None = None,
        schedule: str | None = None,
    ) -> int:
        """From now on the rank's units belong to this stretch.

        Args:
            phase: forward, backward, optimizer or other; absent: that of the stretch around it.
            microbatch: index of the microbatch in the step, from 0.
            stage: index of the pipeline stage in the job.
            model_chunk: index of the model chunk among those of the rank.
            label: free text.
            part: what is done within the phase, one of :data:`prism_sdk.adapting.PARTS`.
            layer: name of the layer or wrapped module.
            schedule: warmup, steady or cooldown.

        Returns:
            A token for ``leave``. Costs less than a microsecond; never raises.
        """

    def leave(self, token: int | None = None) -> None:
        """End the stretch of this token and all inside it; without a token the innermost. Ended ones are passed by."""

    def ends_later(self, token: int) -> None:
        """Another call will leave this stretch, as a module's hook behind its forward pass does.

        If an exception comes in its place, the next step of an optimizer ends the stretch, and the fidelity is lowered.
        """

    def assume(self, *, microbatch: int | None = None, stage: int | None = None, layer: str | None = None) -> None:
        """Names for units outside of any stretch, until the next call or step of an optimizer."""

    def next_units(self, names: Sequence[Mapping[str, int | str]]) -> None:
        """Names for the next communication units of the innermost stretch, in order; keywords as of ``enter``."""

    def note(self, column: str, value: Sequence[int] | Callable[[], Sequence[int]]) -> None:
        """Put a list of integers into the named column ``column`` (OWNER.NAME) of the next unit.

        A callable is asked when rows are written, so that a value on an accelerator costs no synchronisation now.
        """

    @property
    def is_scheduled(self) -> bool:
        """Whether an enclosing stretch says a microbatch or a stage: its owner knows better than one who counts."""

    @property
    def num_optimizer_steps(self) -> int:
        """How many steps of optimizers have ended so far: who counts microbatches begins anew when it grows."""

    @property
    def num_backward_passes(self) -> int:
        """How many backward passes have begun so far: forward passes between two of them are one microbatch."""

    def part_of_group(self, group: str, *, part: str, phase: str) -> None:
        """Collectives in the process group called ``group`` during ``phase`` that nobody named are of this ``part``.

        For communication that C++ starts, where there is no function to wrap.
        """

    def purposes(self, purposes: Mapping[str, str]) -> None:
        """What process groups are for (tp, dp, pp, ep, cp, ...), by their description or name."""

    def coordinates(self, coordinates: Mapping[str, int]) -> None:
        """Where this rank is in the job, such as ``{"pp": 1, "tp": 0}``."""

    def watch(self, *, step_ends: Callable[[], None], group_begins: Callable[[], None]) -> None:
        """Have these called at points of a run where time matters little, to look after what was wrapped.

        Args:
            step_ends: called where the optimizer of a step begins.
            group_begins: called when a process group has been made.
        """

    def option(self, name: str) -> str | None:
        """What the user asked of adapters, such as ``moe_skew``; asking says that this adapter does it."""

    def is_given(self, option: str) -> bool:
        """Whether the user asked that of adapters, which says nothing about who does it."""

    def lower(self, reason: str) -> None:
        """Declare that names are not complete; recorded in the trace and reported once."""


class FrameworkAdapter(abc.ABC):
    """Gives a framework's own names (microbatch, stage, phase) to the units of a trace. It never adds units."""

    name: str
    """What the user types after ``--adapter``."""
    description: str
    """One line for ``prism plugins``."""

    @abc.abstractmethod
    def hooks(self) -> Sequence[AdapterHook]:
        """The places in the framework that this adapter wraps. Must not import the framework."""

    @abc.abstractmethod
    def activate(self, namer: UnitNamer) -> AbstractContextManager[None]:
        """Wrap the hooks; the returned context manager restores every one of them on exit."""


# --- other formats -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ConversionReport:
    """What an import or export did. ``counts`` are facts by name, ``notes`` what was lost, repaired or guessed."""

    output: Path
    counts: Mapping[str, int]
    notes: tuple[str, ...] = ()


class TraceImporter(abc.ABC):
    """Turns files of another format into one trace."""

    name: str
    """What the user types after ``--from``."""
    description: str
    """One line for ``prism plugins``."""

    @abc.abstractmethod
    def recognises(self, source: Path, head: bytes) -> bool:
        """Whether ``source`` looks like this format, judged by its name and first 64 KiB (decompressed where gzip).

        For a folder ``head`` is empty. Must be cheap and must not raise; several importers may say yes to one file.
        """

    @abc.abstractmethod
    def import_trace(
        self,
        sources: Sequence[Path],
        *,
        output: Path,
        options: Mapping[str, str],
        report: Callable[[str], None],
    ) -> ConversionReport:
        """Read ``sources`` (files or folders, one job) and write one trace, whole or not at all.

        Args:
            sources: what the user named, in that order.
            output: the trace to write (``.prism``); replaces a file of that name once it is complete.
            options: the user's ``-O key=value`` pairs. ``lossless=true`` asks for everything that the source holds.
            report: shows one line of progress.

        Raises:
            TraceReadError: a source is damaged or not of this format; the message names file and offset.
            UsageError: an option or the choice of sources makes no sense.
        """


class TraceExporter(abc.ABC):
    """Writes a trace in another format."""

    name: str
    """What the user types after ``--to``."""
    description: str
    """One line for ``prism plugins``."""
    suffixes: tuple[str, ...]
    """Endings of output names that choose this exporter, longest first, such as ``.perfetto-trace``."""

    @abc.abstractmethod
    def export_trace(
        self,
        source: Path,
        *,
        output: Path,
        options: Mapping[str, str],
        report: Callable[[str], None],
    ) -> ConversionReport:
        """Write ``source`` (a trace) to ``output`` (a file or a new folder), whole or not at all.

        Args:
            source: a finished trace.
            output: what to write.
            options: the user's ``-O key=value`` pairs.
            report: shows one line of progress.

        Raises:
            PrismTraceError: the trace cannot be read.
            UsageError: an option makes no sense, or the trace has nothing that this format can hold.
        """
