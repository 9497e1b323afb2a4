"""Says on stderr how complete the names of units are. What lowers the fidelity is found in the ranks (adapters.py)."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping, Sequence

from prism_sdk.wording import counted


def report_lowered(facts: Sequence[Mapping[str, object]]) -> None:
    """Say once on stderr why names are not complete, whatever the number of ranks that found it."""
    reasons: dict[str, int] = {}
    for one in facts:
        for reason in filter(None, str(one.get("fidelity_reasons", "")).split("; ")):
            reasons[reason] = reasons.get(reason, 0) + 1
    for reason, num_ranks in reasons.items():
        with contextlib.suppress(OSError):
            sys.stderr.write(f"prism: names are not complete ({counted(num_ranks, 'rank')}): adapter {reason}\n")
