"""Says on stderr how complete the names of units are. What lowers the fidelity is found in the ranks (adapters.py)."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping, Sequence

from prism_sdk.plugins import PluginRecord
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


def report_broken(plugins: Sequence[PluginRecord]) -> None:
    """Say once on stderr which installed plugins cannot be loaded: names that they would give are missing."""
    broken = [one for one in plugins if one.status == "broken"]
    if broken:
        found = f"{broken[0].name} ({broken[0].reason})" if len(broken) == 1 else ", ".join(one.name for one in broken)
        with contextlib.suppress(OSError):
            sys.stderr.write(
                f"prism: broken and left out, with any adapters of theirs: {found}; `prism plugins` lists why, "
                "PRISM_DISABLE_PLUGINS=NAME leaves them out for good\n"
            )
