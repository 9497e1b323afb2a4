"""Which of the last recorded steps go on beyond the recording: those of one round, after which steps repeat.

Responsible for finding the round; who repeats it is the plan (times) and the runtime (values).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np

_MOST_BY_TIME = 16  # steps of a round that only times tell: more would be found by chance in few steps
_LEAST_DIFFERENCE = 0.02  # of a step: kinds of steps that are closer are one kind
_LEAST_RATIO = 4  # of what kinds differ by, to what steps of one kind differ by


def steps_per_round(kinds: Sequence[Hashable], times_ns: Sequence[int] = ()) -> int:
    """How many of the last steps stand for those beyond; 1 where nothing says that steps repeat otherwise.

    A round of n steps must be there twice, and is the one that explains the most steps at the end: steps of an
    evaluation, of several microbatches, of a balance that is looked at every n-th step.

    Args:
        kinds: what each step does, in order; equal for steps that do the same.
        times_ns: their lengths, if known: where all do the same, kinds of steps may still take different times.
    """
    num_alike, best = max(
        (_num_alike(kinds, period), -period) for period in range(1, max(len(kinds) // 2, 1) + 1)
    )  # of the shortest one where several explain as many
    period = -best
    if period == 1 and times_ns:
        return _by_times(times_ns[max(len(times_ns) - num_alike, 1) :])  # the first one warms up
    return period


def _num_alike(kinds: Sequence[Hashable], period: int) -> int:
    """How many steps at the end are as the one `period` before each says; 0 where the round is not there twice."""
    at = len(kinds) - 1
    while at >= period and kinds[at] == kinds[at - period]:
        at -= 1
    found = len(kinds) - 1 - at + period
    return found if found >= 2 * period or period == 1 else 0


def _by_times(times_ns: Sequence[int]) -> int:
    """The shortest round in which each place has a time of its own; 1 where there is none."""
    for period in range(2, min(len(times_ns) // 2, _MOST_BY_TIME) + 1):
        places = [np.asarray(times_ns[place::period], np.float64) for place in range(period)]
        means = [float(of_place.mean()) for of_place in places]
        difference = max(means) - min(means)
        within = max(float(np.ptp(of_place)) for of_place in places)
        if difference > max(_LEAST_RATIO * within, _LEAST_DIFFERENCE * float(np.mean(means))):
            return period
    return 1
