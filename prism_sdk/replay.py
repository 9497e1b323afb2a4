"""What a replay backend implements, and what it is given; `prism_sdk.abc` exports it with the rest.

It holds no implementation: backends are under ``prism_sdk.builtin`` and in plugins, contexts under
``prism_sdk.runtime``.
"""

from __future__ import annotations

import abc
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

__all__ = [
    "AssistContext",
    "Assistance",
    "Carriage",
    "CarriedOperation",
    "ReplayBackend",
    "ReplayContext",
    "ReplaySession",
]


class ReplayContext(Protocol):
    """What a replay backend may see when one sandbox rank starts. The runtime implements it."""

    @property
    def graph_path(self) -> Path:
        """The calibrated graph."""

    @property
    def rank(self) -> int:
        """The sandbox rank that this session serves."""

    @property
    def sandbox(self) -> Sequence[int]:
        """All sandbox ranks, ascending."""

    @property
    def world_size(self) -> int:
        """The number of ranks in the graph."""

    @property
    def options(self) -> Mapping[str, str]:
        """The user's ``-O key=value`` pairs."""

    @property
    def assistance(self) -> Assistance:
        """What the backend's :meth:`ReplayBackend.assist` made in the launcher."""


@dataclass(frozen=True)
class Assistance:
    """What a backend has started beside the sandbox ranks, for its sessions inside them."""

    facts: Mapping[str, Any] = field(default_factory=dict)
    """Values that travel by pickle to every session."""
    descriptors: tuple[int, ...] = ()
    """Open files that the sandbox ranks inherit under the same numbers; closed by whoever opened them."""


class AssistContext(Protocol):
    """What a replay backend may see in the launcher, before the sandbox ranks start. The runtime implements it."""

    @property
    def graph_path(self) -> Path:
        """The calibrated graph."""

    @property
    def sandbox(self) -> Sequence[int]:
        """All sandbox ranks, ascending."""

    @property
    def work_dir(self) -> Path:
        """A private folder, with the boundary plan (``plan``) and each sandbox rank's script (``script-RANK``)."""

    @property
    def board_fd(self) -> int:
        """The posts of the sandbox ranks; -1 unless ``ReplayBackend.needs_board`` or there are several of them."""

    @property
    def cpus(self) -> Sequence[int]:
        """CPUs that no sandbox rank uses; empty where there are none or the user asked for no binding."""

    @property
    def options(self) -> Mapping[str, str]:
        """The user's ``-O key=value`` pairs."""

    @property
    def hold_fds(self) -> Sequence[int]:
        """What each sandbox rank shares with the process that releases its streams; empty where none is to be held."""

    def report(self, message: str) -> None:
        """Show one line of progress to the user."""

    def watch(self, process: subprocess.Popen[bytes], name: str) -> None:
        """End the run with an error if this process, called ``name`` there, ends before the sandbox ranks do."""


@dataclass(frozen=True)
class CarriedOperation:
    """A communication with virtual members that a sandbox rank has issued just now."""

    call: Any
    """The call in its normal form (``prism_sdk.runtime.calls.Call``)."""
    expected: Any
    """The recorded operation that it meets (``prism_sdk.runtime.manifest.Expected``)."""
    handle: tuple[int, int]
    """Its index in the boundary plan, and by how many rounds of repeated steps it lies beyond the recorded one."""
    recorded: Callable[[], memoryview | None]
    """What this rank contributed in the recording, while the operation is under way; absent where nobody knows."""


class Carriage(Protocol):
    """The bytes of one operation under way. All of it is called by the rank's own thread."""

    def is_done(self) -> bool:
        """Whether everything has been sent and received."""

    def wait(self) -> None:
        """Block until it has. Raises what went wrong."""

    def deliver(self) -> bool:
        """Put the results into the program's tensors.

        Returns:
            False where the recorded values are to be put there: nothing differs from the recording, or the virtual
            members' contributions were not recorded.
        """


class ReplaySession(abc.ABC):
    """Stands in for the rest of the job beside one sandbox rank, from its start to its end."""

    holds_streams: bool = False
    """Whether operations on a GPU may be held there, by the runtime, in place of ``hold_until`` and ``carry``."""

    @abc.abstractmethod
    def hold_until(self, deadline_ns: int) -> int:
        """Hold the caller until ``time.monotonic_ns()`` reaches ``deadline_ns``.

        Returns:
            The lateness: how many nanoseconds after the deadline it returned, 0 when on time.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Release what the session holds. May be called more than once."""

    def carry(self, operation: CarriedOperation) -> Carriage | None:
        """Start to move the bytes of an operation; must not block.

        Returns:
            None where this backend moves nothing: values come from the recording, and the rank is held until it is due.
        """
        return None

    def open_streams(self, device: Any, script: Any) -> Any:
        """Prepare for a sandbox rank's first operation on a GPU, which the runtime holds there; its context is there.

        Args:
            device: the ``torch.device``.
            script: what the rank is expected to do (``prism_sdk.runtime.manifest.Script``).

        Returns:
            What makes calls of a library in place of waits (``prism_sdk.runtime.oncuda.joining.Joining``); None where
            streams only wait.
        """
        return None

    def summary(self) -> Mapping[str, object]:
        """Facts about the session for the trace's metadata; called before ``close``."""
        return {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class ReplayBackend(abc.ABC):
    """Makes a communication of a sandbox rank take the time that the graph says."""

    name: str
    """What the user types after ``--backend``."""
    description: str
    """One line for ``prism plugins``."""
    option_names: Sequence[str] | None = None  # keys of -O that it knows; None: nobody checks them for it
    needs_board: bool = False
    """Whether somebody outside a lone sandbox rank must see its posts."""

    def check_options(self, options: Mapping[str, str]) -> None:  # noqa: B027 - optional
        """Raise UsageError for a value of ``-O`` that has no meaning. Called before anything is read or started."""

    def assist(self, context: AssistContext) -> AbstractContextManager[Assistance]:
        """Start what runs beside the sandbox ranks, in the launcher; leaving the context ends it."""
        return nullcontext(Assistance())

    @abc.abstractmethod
    def open(self, context: ReplayContext) -> ReplaySession:
        """Start a session for one sandbox rank; called once in that rank's process."""
