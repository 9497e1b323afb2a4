"""The tree of errors that Prism raises on purpose, and the exit codes of ``prism``.

It does not print, log or exit: turning an error into a message on stderr is the work of ``prism_sdk.cli``.

Every error says what was wrong, where, and what to do (``hint``), and carries the facts as attributes::

    PrismError
    ├── UsageError                     the command cannot be run as it was given              (exit 2)
    │   ├── ScriptNotFoundError        script, is_module
    │   ├── SettingsError              variable, value
    │   ├── WorldSizeError             world_size, required, file
    │   ├── PortInUseError             address, port
    │   ├── UnknownFormatError         file, known                        (exit 3: the source's is unknown)
    │   └── UnknownNameError           kind, name, known
    ├── PluginError                    plugin, distribution                                   (exit 2)
    │   ├── BrokenPluginError          reason
    │   └── DuplicateNameError         kind, name, distributions
    ├── UnsupportedError               rank, operation                                        (exit 1)
    ├── RunError                       a run began and did not end well                       (exit 1)
    │   ├── RankFailedError            rank, rank_exit_code, traceback_text
    │   ├── RankKilledError            rank, signal_number, signal_name
    │   ├── DeadlockError              places
    │   ├── CollectiveMismatchError    group, seq, field, values
    │   ├── AsymmetryError             rank, representative, what
    │   ├── TraceMismatchError         rank, unit_index, expected, found, file
    │   │   └── BeyondRecordingError   step, repeated_step
    │   └── OutputError                file, reason
    │       └── OutputExistsError  nothing was started                                        (exit 2)
    ├── CalibrationError               strategy                                               (exit 1)
    └── UnreadableError                file, reason                                           (exit 3)

Errors of the trace format itself are a tree of their own, under ``prismtrace.PrismTraceError``.
All errors here survive pickling with their attributes, because ranks send them to the parent.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

__all__ = [
    "AsymmetryError",
    "BeyondRecordingError",
    "BrokenPluginError",
    "CalibrationError",
    "CollectiveMismatchError",
    "DeadlockError",
    "DuplicateNameError",
    "ExitCode",
    "OutputError",
    "OutputExistsError",
    "PluginError",
    "PortInUseError",
    "PrismError",
    "RankFailedError",
    "RankKilledError",
    "RankPlace",
    "RunError",
    "ScriptNotFoundError",
    "SettingsError",
    "TraceMismatchError",
    "UnknownFormatError",
    "UnknownNameError",
    "UnreadableError",
    "UnsupportedError",
    "UsageError",
    "WorldSizeError",
]


class ExitCode(IntEnum):
    """What the ``prism`` command returns to the shell; a launch that another signal ended returns 128 + its number."""

    OK = 0
    FINDING = 1
    USAGE = 2
    UNREADABLE = 3
    INTERRUPTED = 130


def _rebuild(cls: type[PrismError], message: str, state: dict[str, Any]) -> PrismError:
    error = cls.__new__(cls)
    Exception.__init__(error, message)
    error.__dict__.update(state)
    return error


class PrismError(Exception):
    """The root of every error that Prism raises on purpose.

    ``message`` says what was wrong and where; ``hint`` says what to do and may be absent.
    """

    exit_code: ExitCode = ExitCode.FINDING

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\n  {self.hint}" if self.hint else self.message

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.message, dict(self.__dict__))


class UsageError(PrismError):
    """The command cannot be run as it was given; nothing was started."""

    exit_code = ExitCode.USAGE


class ScriptNotFoundError(UsageError):
    """The training script or module does not exist."""

    def __init__(self, script: str, *, is_module: bool = False, hint: str | None = None) -> None:
        what = "module" if is_module else "script"
        super().__init__(f"the {what} {script!r} does not exist", hint=hint)
        self.script, self.is_module = script, is_module


class SettingsError(UsageError):
    """An environment variable has a value that Prism cannot use."""

    def __init__(self, variable: str, *, value: str, expected: str) -> None:
        super().__init__(f"{variable}={value!r} is not {expected}", hint=f"unset {variable} or give it {expected}")
        self.variable, self.value = variable, value


class WorldSizeError(UsageError):
    """The number of ranks asked for does not fit the script or the graph."""

    def __init__(
        self, message: str, *, world_size: int, required: int | None = None, file: str | None = None,
        hint: str | None = None,
    ) -> None:  # fmt: skip
        super().__init__(message, hint=hint)
        self.world_size, self.required, self.file = world_size, required, file


class PortInUseError(UsageError):
    """The rendezvous address is taken by another process."""

    def __init__(self, address: str, *, port: int) -> None:
        super().__init__(
            f"port {port} on {address} is in use by another process",
            hint="choose another with --master-port PORT, or leave the option out and a free one is taken",
        )
        self.address = address
        self.port = port


class UnknownNameError(UsageError):
    """A strategy, backend, adapter or plugin was named that nobody registered."""

    def __init__(self, name: str, *, kind: str, known: Sequence[str] = ()) -> None:
        listing = ", ".join(sorted(known)) or "none"
        super().__init__(
            f"no {kind} is called {name!r} (known: {listing})",
            hint="`prism plugins` lists what is installed; --plugin MODULE_OR_FILE loads one more",
        )
        self.name, self.kind, self.known = name, kind, tuple(sorted(known))


class UnknownFormatError(UsageError):
    """No importer or exporter fits a file, or more than one does; ``known`` names those that there are.

    ``is_unreadable``: the file is there and is of no format that anybody knows, which ends as unreadable files do.
    """

    def __init__(
        self, message: str, *, file: str, known: Sequence[str] = (), hint: str | None = None,
        is_unreadable: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(message, hint=hint)
        self.file, self.known = file, tuple(known)
        self.exit_code = ExitCode.UNREADABLE if is_unreadable else ExitCode.USAGE


class PluginError(PrismError):
    """A plugin that the user named cannot be used."""

    exit_code = ExitCode.USAGE

    def __init__(self, message: str, *, plugin: str, distribution: str | None = None, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.plugin = plugin
        self.distribution = distribution


class BrokenPluginError(PluginError):
    """A plugin failed to load or to register; ``reason`` is the one line that says why."""

    def __init__(
        self, plugin: str, *, reason: str, distribution: str | None = None, context: str = "", source: str | None = None
    ) -> None:  # fmt: skip
        origin = f" (from {distribution})" if distribution else ""
        super().__init__(
            f"{context}the plugin {plugin!r}{origin} is broken: {reason}",
            plugin=plugin,
            distribution=distribution,
            hint=f"it is what --plugin names: correct {source}, or leave the option out"
            if source is not None
            else "`prism plugins` lists broken plugins; fix or uninstall it, or set PRISM_DISABLE_PLUGINS to its name",
        )
        self.reason = reason


class DuplicateNameError(PluginError):
    """Two plugins registered the same name for the same kind of object."""

    def __init__(self, name: str, *, kind: str, distributions: Sequence[str], plugin: str) -> None:
        super().__init__(
            f"the {kind} name {name!r} is registered more than once: by {' and by '.join(distributions)}",
            plugin=plugin,
            hint="set PRISM_DISABLE_PLUGINS to the plugin that you do not want",
        )
        self.name = name
        self.kind = kind
        self.distributions = tuple(distributions)


class UnsupportedError(PrismError):
    """The program used something that Prism cannot intercept or replay."""

    def __init__(self, operation: str, *, rank: int | None = None, hint: str | None = None) -> None:
        where = "" if rank is None else f" (rank {rank})"
        super().__init__(f"not supported: {operation}{where}", hint=hint)
        self.operation = operation
        self.rank = rank


class RunError(PrismError):
    """A run began and did not end well; what it wrote until then is kept in ``file`` where known."""

    def __init__(
        self, message: str, *, rank: int | None = None, file: str | None = None, hint: str | None = None
    ) -> None:
        super().__init__(message, hint=hint)
        self.rank = rank
        self.file = file


class RankFailedError(RunError):
    """A rank's program raised or exited with a code other than 0."""

    def __init__(self, rank: int, *, exit_code: int, traceback_text: str = "", file: str | None = None) -> None:
        body = f":\n{traceback_text.rstrip()}" if traceback_text else ""
        kept = f"what was recorded until then is kept in {file}" if file else None
        super().__init__(f"rank {rank} failed with exit code {exit_code}{body}", rank=rank, file=file, hint=kept)
        self.rank_exit_code, self.traceback_text = exit_code, traceback_text


class RankKilledError(RunError):
    """A rank was ended by a signal that Prism did not send."""

    def __init__(self, rank: int, *, signal_number: int, file: str | None = None) -> None:
        try:
            name = signal.Signals(signal_number).name
        except ValueError:
            name = f"signal {signal_number}"
        killed = "the kernel ends a process this way when memory runs out: run fewer ranks at once or a smaller model"
        hint = killed if signal_number == signal.SIGKILL else None
        super().__init__(f"rank {rank} was killed by {name}", rank=rank, file=file, hint=hint)
        self.signal_number, self.signal_name = signal_number, name


@dataclass(frozen=True)
class RankPlace:
    """Where one rank stands: the operation it waits in, who is missing, and its Python stack (innermost last)."""

    rank: int
    operation: str
    group: str
    seq: int | None = None
    missing: tuple[int, ...] = ()
    stack: tuple[str, ...] = ()

    def __str__(self) -> str:
        seq = "" if self.seq is None else f" seq {self.seq}"
        missing = f", missing ranks {', '.join(map(str, self.missing))}" if self.missing else ""
        lines = [f"rank {self.rank}: {self.operation} in group {self.group}{seq}{missing}"]
        lines += [f"    {line}" for line in self.stack]
        return "\n".join(lines)


class DeadlockError(RunError):
    """No rank can run and some have work left: a deadlock in the user's program."""

    def __init__(self, places: Sequence[RankPlace], *, file: str | None = None) -> None:
        text = "\n".join(str(place) for place in places)
        super().__init__(
            f"the program is deadlocked: {len(places)} ranks wait and none can run\n{text}",
            file=file,
            hint="every member of a group must call the same operations in the same order",
        )
        self.places = tuple(places)


class CollectiveMismatchError(RunError):
    """The members of a group called different things at the same place; ``values`` says who called what."""

    def __init__(self, group: str, *, seq: int, field: str, values: Mapping[int, str], file: str | None = None) -> None:
        listing = "; ".join(f"rank {rank}: {value}" for rank, value in sorted(values.items()))
        super().__init__(
            f"mismatched collective in group {group}, seq {seq}: the {field} differs ({listing})",
            file=file,
            hint="every member of a group must call the same operation with matching tensors",
        )
        self.group, self.seq, self.field, self.values = group, seq, field, dict(values)


class AsymmetryError(RunError):
    """A rank does not do what the rank does that was to stand for it (`prism record --roles`)."""

    def __init__(self, rank: int, *, representative: int, what: str) -> None:
        super().__init__(
            f"rank {rank} does not do the same as rank {representative}, which stands for it: {what}",
            rank=rank,
            hint="state the roles so that these ranks have different ones: prism record --roles (docs/roles.md)",
        )
        self.representative = representative
        self.what = what


class TraceMismatchError(RunError):
    """The program does something else than the graph says: a trace of another job, or a changed script."""

    def __init__(self, rank: int, *, unit_index: int | None, expected: str, found: str, file: str) -> None:
        where = "" if unit_index is None else f", unit {unit_index}"
        super().__init__(
            f"the program does not follow the graph {file}: first difference at rank {rank}{where}: "
            f"the graph has {expected}, the program did {found}",
            rank=rank,
            file=file,
            hint="use the graph of this job, or record it again: prism record",
        )
        self.unit_index, self.expected, self.found = unit_index, expected, found


class BeyondRecordingError(TraceMismatchError):
    """Behind its recorded steps the program does something else than the last of them, which stand for all others."""

    def __init__(
        self, rank: int, *, step: int, repeated_step: int, last_step: int, num_repeated: int, unit_index: int | None,
        expected: str, found: str, file: str,
    ) -> None:  # fmt: skip
        super().__init__(rank, unit_index=unit_index, expected=expected, found=found, file=file)
        where = "" if unit_index is None else f", unit {unit_index} of the graph"
        repeated, it = ("recorded one", "it") if num_repeated == 1 else (f"{num_repeated} recorded ones", "them")
        self.message = (
            f"step {step} of rank {rank} is not in the graph {file}, which ends with step {last_step}; steps "
            f"beyond the recording repeat the last {repeated}, and here the program departs from {it}: step "
            f"{repeated_step} has {expected}{where}, the program did {found}"
        )
        self.hint = (
            "record as many steps as the program is to run (prism record, where --steps must hold them all), or, if "
            "what it does between steps comes regularly (an evaluation, a checkpoint), two rounds of it"
        )
        self.step, self.repeated_step = step, repeated_step


class OutputError(RunError):
    """The output file cannot be written (no space, no permission, no folder)."""

    def __init__(self, file: str, *, reason: str, hint: str | None = None) -> None:
        super().__init__(f"cannot write {file}: {reason}", file=file, hint=hint)
        self.reason = reason


class OutputExistsError(OutputError):
    """The output is there already and may not be replaced; nothing was started."""

    exit_code = ExitCode.USAGE

    def __init__(self, file: str, *, hint: str = "--overwrite replaces it, or give another name") -> None:
        super().__init__(file, reason="it exists already", hint=hint)


class CalibrationError(PrismError):
    """A calibration strategy cannot do its work on this graph."""

    def __init__(self, message: str, *, strategy: str, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.strategy = strategy


class UnreadableError(PrismError):
    """A file that the user named cannot be opened or read."""

    exit_code = ExitCode.UNREADABLE

    def __init__(self, file: str, *, reason: str, hint: str | None = None) -> None:
        super().__init__(f"cannot read {file}: {reason}", hint=hint)
        self.file = file
        self.reason = reason
