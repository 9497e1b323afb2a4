"""Where each rank of a recording stands, and what is said when none of them can go on.

It schedules nothing: coordinator.py does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from prism_sdk.errors import DeadlockError, RankPlace
from prism_sdk.runtime.matching import Matcher, describe
from prism_sdk.runtime.progress import Snapshot

MAX_PLACES = 32
"""How many ranks a report shows."""

NEW, RUNNING, WAITING, READY, LENT, DONE = "new", "running", "waiting", "ready", "lent", "done"


@dataclass(slots=True)
class RankState:
    """Where a rank stands in the schedule."""

    rank: int
    state: str = NEW
    slot: int | None = None
    waits_for: tuple[Any, ...] | None = None  # the message it is parked with
    reply: tuple[Any, ...] | None = None  # what it gets when it has a slot again
    released: list[tuple[int, int]] = field(default_factory=list)  # its arena regions that nobody needs any more
    cpu_ticks: int = -1
    cpu_since_ns: int = 0
    stack: tuple[str, ...] | None = None
    step: int = 0
    pinned: tuple[int, ...] = ()
    has_threads: bool = False  # another thread of it may do something yet
    num_yields: int = 0  # times that one of its threads made way for another since it went on
    stuck_since_ns: int = 0  # lent and idle since


def snapshot_of(states: Sequence[RankState], *, num_switches: int, num_away: int, away_bytes: int) -> Snapshot | None:
    """Where they all stand, for the progress display."""
    if not states:
        return None
    counts = Counter(state.state for state in states)
    steps = [state.step for state in states]
    return Snapshot(
        num_running=counts[RUNNING] + counts[LENT], num_parked=counts[WAITING] + counts[READY],
        num_new=counts[NEW], num_done=counts[DONE], first_step=min(steps), last_step=max(steps),
        num_switches=num_switches, num_away=num_away, away_bytes=away_bytes,
    )  # fmt: skip


def deadlock_error(waiting: Sequence[RankState], everybody: Sequence[RankState], matcher: Matcher) -> DeadlockError:
    """The error that names what each of the waiting ranks waits for, and who has ended already."""
    error = DeadlockError([_place(state, matcher) for state in waiting[:MAX_PLACES]])
    notes = [f"{len(waiting)} ranks wait, the first {MAX_PLACES} are shown"] if len(waiting) > MAX_PLACES else []
    done = [str(state.rank) for state in everybody if state.state == DONE]
    if done:
        notes.append(f"ended already: rank{'s' if len(done) > 1 else ''} {_shorten(done)}")
    error.hint = "\n  ".join([*notes, error.hint or ""])
    return error


def _place(state: RankState, matcher: Matcher) -> RankPlace:
    message = state.waits_for or ("",)
    stack = state.stack or ()
    if message[0] == "store":
        return RankPlace(state.rank, f"store {message[1]} {message[2]!r}", "store", stack=stack)
    key = message[1]
    group = matcher.group_name(key[1])
    ranks = matcher.group_ranks(key[1])
    if key[0] == "p":
        return RankPlace(state.rank, f"recv tag {key[4]}", group, key[5], (key[2],), stack)
    if key[0] == "a":
        return RankPlace(state.rank, f"recv from any source, tag {key[3]}", group, stack=stack)
    operation = matcher.operations.get(key)
    name = "collective" if operation is None else describe(operation.signature, 0)
    missing = ranks if operation is None else operation.missing(ranks)
    return RankPlace(state.rank, name, group, key[2], missing, stack)


def _shorten(names: list[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
