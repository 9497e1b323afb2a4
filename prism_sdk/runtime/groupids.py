"""Ids of process groups that every member finds without asking.

Responsible for the id alone; it imports no torch, because the launcher computes ids too.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b


def stable_group_id(name: str, ranks: Sequence[int], generation: int) -> int:
    """An id equal on all members without asking: hash of name, members and how often that pair was made before."""
    text = f"{generation}:{name}:{','.join(map(str, ranks))}"
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little") or 1
