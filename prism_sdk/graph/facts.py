"""Says what the metadata of ranks and groups says of others that do the same, where a job is copied or cut.

It reads and writes no trace; element counts are in ``shares``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

__all__ = ["facts_of_copies"]

# what is said of what a rank does, and not of the process that did it (its counters), nor of where it is in the job
_TRUE_OF_COPIES = {
    "rank": ("adapters", "fidelity", "fidelity_reasons", "times", "device_other_bytes"),
    "group": ("purpose",),
}


def facts_of_copies(
    metadata: Mapping[str, str], *, ranks: Iterable[tuple[int, int]], groups: Iterable[tuple[int, int]]
) -> dict[str, str]:
    """The metadata of a job whose ranks and groups are copies: pairs of a new number and the old one that it copies."""
    found = {key: value for key, value in metadata.items() if not _is_numbered(key)}
    for what, pairs in (("rank", ranks), ("group", groups)):
        for new, old in pairs:
            for name in _TRUE_OF_COPIES[what]:
                if (value := metadata.get(f"{what}.{old}.{name}")) is not None:
                    found[f"{what}.{new}.{name}"] = value
    return found


def _is_numbered(key: str) -> bool:
    what, _, rest = key.partition(".")
    return what in _TRUE_OF_COPIES and rest.partition(".")[0].isdecimal()
