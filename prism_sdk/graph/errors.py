"""Names what can be wrong with a job graph: units that do not match, that contradict each other, or that lack times.

It does not describe faults of a file (``prismtrace`` does) nor of a running program (``prism_sdk.errors.RunError``).

    PrismError
    └── GraphError                  the graph of a job cannot be used
        ├── UnmatchedUnitError      an operation whose partner is not in the graph
        ├── InconsistentUnitError   members of one operation disagree (operation, dtype, counts, root)
        ├── GraphDeadlockError      the order of the units is cyclic
        └── MissingTimingError      a duration that the calculation needs is absent or negative
            └── BareGraphError      of a bare graph, whose times mean nothing
"""

from __future__ import annotations

from collections.abc import Sequence

from prism_sdk.errors import ExitCode, PrismError

__all__ = ["BareGraphError", "GraphDeadlockError", "GraphError", "InconsistentUnitError", "MissingTimingError",
           "UnmatchedUnitError"]  # fmt: skip


class GraphError(PrismError):
    """The graph of a job cannot be used; ``problems`` has one line for each fault found (the first few)."""

    def __init__(self, message: str, *, problems: Sequence[str] = (), hint: str | None = None) -> None:
        listing = "".join(f"\n  - {problem}" for problem in problems)
        super().__init__(message + listing, hint=hint)
        self.problems = tuple(problems)


class UnmatchedUnitError(GraphError):
    """A communication unit has no partner: a member of the group, the sender or the receiver lacks the operation."""


class InconsistentUnitError(GraphError):
    """The members of one operation disagree about what it is."""


class GraphDeadlockError(GraphError):
    """The units wait for each other in a circle, so that no timeline exists."""


class MissingTimingError(GraphError):
    """A duration that the calculation needs is absent or negative; it is never replaced by a guess."""


class BareGraphError(MissingTimingError):
    """A bare graph, whose times mean nothing, was given where times are needed."""

    exit_code = ExitCode.USAGE
