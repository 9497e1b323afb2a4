"""Lists what `validate` may find: stable codes, severities and the section of the specification each belongs to.

Does not look for anything.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

ERROR: Final = "error"
WARNING: Final = "warning"


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong with a trace. `where` names the place: rank, row, byte offset."""

    code: str
    severity: str
    message: str
    where: str
    spec_section: str


@dataclass(frozen=True)
class FindingKind:
    """What a code means."""

    severity: str
    spec_section: str
    summary: str


CODES: Final = MappingProxyType(
    {
        "PT001": FindingKind(ERROR, "2 Container", "the file cannot be read as a trace"),
        "PT002": FindingKind(ERROR, "2.5 Unfinished files", "the file has no index"),
        "PT003": FindingKind(ERROR, "3 Chunks", "a chunk cannot be read"),
        "PT004": FindingKind(ERROR, "5 Payloads", "a payload cannot be read, or is not what its digest says"),
        "PT005": FindingKind(ERROR, "3.1 Rows", "rows are missing between two chunks"),
        "PT006": FindingKind(ERROR, "3.1 Rows", "a chunk has rows outside of the steps or times that it names"),
        "PT007": FindingKind(ERROR, "2.2 Records", "a record is damaged that the index repeats"),
        "PT010": FindingKind(ERROR, "6 Process groups", "a rank is outside the world"),
        "PT011": FindingKind(ERROR, "6 Process groups", "a group has no members, or one twice"),
        "PT012": FindingKind(ERROR, "6 Process groups", "a unit refers to a group that the file does not have"),
        "PT013": FindingKind(ERROR, "6 Process groups", "a rank communicates in a group that it is not a member of"),
        "PT014": FindingKind(ERROR, "6 Process groups", "a peer or root is not a member of the group"),
        "PT015": FindingKind(ERROR, "6 Process groups", "a group has the id 0"),
        "PT020": FindingKind(ERROR, "7.2 Invariants of units", "a duration is negative"),
        "PT021": FindingKind(ERROR, "7.2 Invariants of units", "a quantity is negative"),
        "PT022": FindingKind(ERROR, "7.2 Invariants of units", "units of the host overlap or go back in time"),
        "PT023": FindingKind(ERROR, "7.2 Invariants of units", "awaits is not an earlier communication unit"),
        "PT024": FindingKind(WARNING, "7.2 Invariants of units", "a WAIT unit does not say what it waits for"),
        "PT025": FindingKind(ERROR, "7.2 Invariants of units", "the operation does not fit the kind of unit"),
        "PT026": FindingKind(WARNING, "4.4 Enumerations", "a value that this version of the format does not name"),
        "PT030": FindingKind(ERROR, "7.3 Derived edges", "two units have the same seq in their group or lane"),
        "PT031": FindingKind(ERROR, "7.3 Derived edges", "members disagree about the operation of one collective"),
        "PT032": FindingKind(WARNING, "7.3 Derived edges", "not all members have a collective"),
        "PT033": FindingKind(WARNING, "7.3 Derived edges", "a send has no receive, or a receive no send"),
        "PT034": FindingKind(ERROR, "7.3 Derived edges", "units of several ranks wait for each other in a circle"),
        "PT040": FindingKind(ERROR, "8 Steps and scalars", "steps are repeated, out of order, or of negative length"),
        "PT041": FindingKind(ERROR, "8.1 Events and tracks", "an event ends before it starts"),
        "PT042": FindingKind(ERROR, "8.1 Events and tracks", "an event lies on a track that its rank does not have"),
        "PT043": FindingKind(ERROR, "8.1 Events and tracks", "an event belongs to a unit that its rank does not have"),
        "PT050": FindingKind(WARNING, "5 Payloads", "a payload is referred to and not in the file"),
        "PT051": FindingKind(ERROR, "5 Payloads", "an attachment is named and not in the file"),
    }
)
"""Every code. A code is never reused for something else."""
