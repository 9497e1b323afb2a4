"""Which of the last recorded steps go on beyond the recording: those of one round, after which steps repeat.

Responsible for what steps do; who repeats a round is the plan (times) and the runtime (values).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

__all__ = ["steps_per_round"]


def steps_per_round(kinds: Sequence[Hashable], *, turns: int = 1) -> int:
    """How many of the last steps stand for those beyond; 1 where nothing says that steps repeat otherwise.

    A round of n steps must be there twice, and is the one that explains the most steps at the end: steps of an
    evaluation, of several microbatches, of a balance that is looked at every n-th step.

    Args:
        kinds: what each step does, in order; equal for steps that do the same.
        turns: where the last steps do the same, after how many of them computing takes as long again (turns.py).
    """
    num_alike, best = max(
        (_num_alike(kinds, period), -period) for period in range(1, max(len(kinds) // 2, 1) + 1)
    )  # of the shortest one where several explain as many
    return turns if best == -1 and num_alike >= 2 * turns else -best


def _num_alike(kinds: Sequence[Hashable], period: int) -> int:
    """How many steps at the end are as the one `period` before each says; 0 where the round is not there twice."""
    at = len(kinds) - 1
    while at >= period and kinds[at] == kinds[at - period]:
        at -= 1
    found = len(kinds) - 1 - at + period
    return found if found >= 2 * period or period == 1 else 0
